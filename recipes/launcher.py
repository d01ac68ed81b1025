"""Starting a recipe's server, waiting until it is ready, stopping it; never leaving an orphan.

`launch(recipe, options)` returns a `Server` that is ready, or raises: UsageError (something asked for is wrong),
ServerDiedError (it ended before it was ready; exit status and last log lines are in the message), RunError (it never
became ready). The process that keeps the promise about orphans is `recipes/supervisor.py`; `recipes/server.py` is this
side's handle on it; `recipes/health.py` asks whether a server is ready.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from atom.recipes.errors import RunError, ServerDiedError, UsageError
from atom.recipes.health import probe_health
from atom.recipes.hints import address_in_use
from atom.recipes.listening import PortFinder, tree_listeners
from atom.recipes.placeholders import Expansion, expand, resolve_variables, uses
from atom.recipes.ports import free_port, read_port_file, refuse_taken_port
from atom.recipes.processes import command_line, listening_processes
from atom.recipes.recipe import Listens, Recipe
from atom.recipes.scratch import Scratch, make_scratch
from atom.recipes.server import Server, SupervisorLink
from atom.recipes.spawn import import_root

__all__ = ["PREPARED_VARIABLE", "LaunchOptions", "LaunchProgress", "check_requirements", "launch", "takes_devices"]

_T = TypeVar("_T")

PREPARED_VARIABLE: Final = "ATOM_PREPARED_SOURCE"
"""Its value is the `{src}` for which the recipe's `prepare` has been run: it is not run again."""
_PORT_ATTEMPTS: Final = 3
_FIRST_PROBE_S: Final = 0.05
_PROBE_EVERY_S: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """What is asked of a recipe."""

    model: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    """None or 0: a free one."""
    devices: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """`--set NAME=VALUE`, `python` and `src` included."""
    extra_args: Sequence[str] = ()
    """Appended to the command."""
    env: Mapping[str, str] = field(default_factory=dict)
    python_path: Sequence[Path] = ()
    """Put first on the server's PYTHONPATH."""
    log_dir: Path | None = None
    """Where `server.log` goes; None: a scratch directory that disappears with the server."""
    ready_timeout_s: float | None = None
    """None: the recipe's."""
    stop_grace_s: float | None = None
    cpus: tuple[int, ...] | None = None
    """CPUs the server may use; None: those of this process."""


def takes_devices(recipe: Recipe) -> bool:
    """Whether it says how the devices that are chosen reach its server."""
    return bool(recipe.devices_env) or uses(recipe, "devices")


@dataclass(frozen=True, slots=True)
class LaunchProgress:
    """How far a start is."""

    elapsed_s: float
    timeout_s: float
    waiting_for: str
    last_log_line: str


def launch(
    recipe: Recipe,
    options: LaunchOptions,
    *,
    on_progress: Callable[[LaunchProgress], None] | None = None,
    on_log: Callable[[str], None] | None = None,
    on_start: Callable[[Server], None] | None = None,
) -> Server:
    """Start the server and wait until it is healthy.

    `on_log` gets each line of its output, on another thread that also hears of the server's end; `on_start` gets the
    server as soon as its process starts.

    If the port this function picked was taken in the meantime, it tries again with another one.
    """
    if recipe.disaggregated:
        raise UsageError(
            f"recipe {recipe.source}: it has a `context` or `generation` part; disaggregated recipes are not supported "
            "in this version: give a recipe with one `command`"
        )
    if options.devices is not None and not takes_devices(recipe):
        raise UsageError(
            f"--devices: recipe {recipe.name} says in no field how to choose devices; give it `devices.env`"
        )
    variables = resolve_variables(recipe, options.variables)
    python = variables.get("python", sys.executable)
    check_requirements(recipe, python)
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        scratch = make_scratch()
        try:
            start = _prepare_start(recipe, options, {**variables, "python": python}, scratch)
            server = _start(recipe, options, start, scratch, on_log)
        except BaseException:
            scratch.remove()
            raise
        if on_start is not None:
            on_start(server)
        try:
            _wait_until_ready(server, start, options.ready_timeout_s or recipe.ready_timeout_s, on_progress)
            return server
        except ServerDiedError:
            server.stop()
            if options.port or attempt == _PORT_ATTEMPTS or not address_in_use(server.last_lines(40)):
                raise
        except BaseException:
            server.stop()
            raise
    raise AssertionError("unreachable: the last attempt returns or raises")


@dataclass(frozen=True, slots=True)
class _Start:
    """One attempt, made concrete."""

    label: str
    expansion: Expansion
    ports: dict[str, int]
    """By placeholder; `port` is 0 when the server chooses."""
    port_file: Path
    finder: PortFinder | None
    """For a server whose port must be found."""


def _prepare_start(recipe: Recipe, options: LaunchOptions, variables: Mapping[str, str], scratch: Scratch) -> _Start:
    label = str(uuid.uuid4())
    ports = {name: port or free_port(options.host) for name, port in recipe.ports.items()}
    ports["port"] = _choose_port(recipe, options)
    port_file = scratch.path / "port"
    values: dict[str, str | None] = {
        "src": str(import_root()),
        "devices": options.devices,
        **variables,
        **{name: str(port) for name, port in ports.items()},
        "model": options.model or recipe.model,
        "host": options.host,
        "port_file": str(port_file),
        "label": label,
        "scratch": str(scratch.path),
    }
    # SPT_NOENV keeps libraries that set the process title from wiping /proc/PID/environ, where the label is.
    # Unbuffered, or the log's last lines are lost when the server is killed.
    defaults = {name: value for name, value in _SERVER_DEFAULTS.items() if name not in recipe.env}
    expansion = expand(
        recipe,
        values,
        extra_args=options.extra_args,
        env={**defaults, **options.env},
        python_path=options.python_path,
        devices=options.devices,
    )
    if expansion.env.get(PREPARED_VARIABLE) == values["src"]:
        expansion = replace(expansion, prepare=[])
    finder = None
    if recipe.listens is not None and not ports["port"]:
        finder = PortFinder(recipe.roles, any_http=recipe.metrics.dialect == "auto")
    return _Start(label, expansion, ports, port_file, finder)


def _choose_port(recipe: Recipe, options: LaunchOptions) -> int:
    """The server's port; 0 if it will tell, or be seen."""
    listens = recipe.listens
    named = listens.port if listens is not None and not uses(recipe, "port") else None
    if named and options.port and options.port != named:
        raise UsageError(f"--port {options.port}: the command itself names port {named}; give one of them")
    port = options.port or named
    if port:
        if not recipe.exec and not (listens is not None and listens.elsewhere):
            refuse_taken_port(options.host, port)
        return port
    if uses(recipe, "port_file") or (listens is not None and not uses(recipe, "port")):
        return 0
    return free_port(options.host)


_SERVER_DEFAULTS: Final = {"SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}


def _start(
    recipe: Recipe,
    options: LaunchOptions,
    start: _Start,
    scratch: Scratch,
    on_log: Callable[[str], None] | None,
) -> Server:
    log_dir = options.log_dir or scratch.path
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{log_dir}: cannot put the server's log there: {error.strerror}") from None
    link = SupervisorLink(
        label=start.label,
        expansion=start.expansion,
        recipe=recipe,
        log_path=log_dir / "server.log",
        grace_s=recipe.stop.grace_s if options.stop_grace_s is None else options.stop_grace_s,
        scratch=scratch,
        on_log=on_log,
        cpus=options.cpus,
    )
    return Server(recipe=recipe, host=options.host, ports=start.ports, expansion=start.expansion, link=link)


def _wait_until_ready(
    server: Server,
    start: _Start,
    timeout_s: float,
    on_progress: Callable[[LaunchProgress], None] | None,
) -> None:
    begun = time.monotonic()
    waiting_for = "its process"
    pause = _FIRST_PROBE_S
    while True:
        server.raise_if_dead(ready=False)
        if server.pid is not None:
            problem = _readiness_problem(server, start)
            if problem is None:
                server.mark_ready()
                return
            waiting_for = problem
        elapsed = time.monotonic() - begun
        if on_progress is not None:
            on_progress(LaunchProgress(elapsed, timeout_s, waiting_for, server.last_line()))
        if elapsed >= timeout_s:
            lines = "".join(f"\n    {line}" for line in server.last_lines(10))
            raise RunError(
                f"server of {server.recipe.title} was not ready after {timeout_s:g} s: still waiting for "
                f"{waiting_for}; raise --ready-timeout, or see its log{server.log_note()}{lines}"
            )
        server.wait_for_event(min(pause, max(timeout_s - elapsed, 0.0)))
        pause = min(pause * 1.5, _PROBE_EVERY_S)


def _readiness_problem(server: Server, start: _Start) -> str | None:
    """What the server is not ready for yet; None when it is ready."""
    recipe, listens = server.recipe, server.recipe.listens
    if listens is not None:
        _unless_dead(server, lambda: _locate(server, listens, start.finder))
        if server.ports["port"] == 0:
            return "one of its sockets to answer HTTP"
    elif server.ports["port"] == 0:
        port = read_port_file(start.port_file)
        if port is None:
            return "it to write its port"
        server.ports["port"] = port
    health = recipe.health
    port = server.ports[health.port]
    answer = _unless_dead(server, lambda: [probe_health(server.host, port, health.path, health.status)])
    if answer is None:
        return "it to answer"
    elsewhere = recipe.exec or recipe.detached or (listens is not None and listens.elsewhere)
    if answer[0] is None and not elsewhere:
        _refuse_stranger(server)
    return answer[0]


def _locate(server: Server, listens: Listens, finder: PortFinder | None) -> None:
    """Set the address of a server that decides itself where it listens, as far as it can be seen."""
    port = server.ports["port"]
    if finder is not None and port == 0:
        found = finder.look(server.processes())
        if found is not None:
            server.host, server.ports["port"] = found.host, found.port
    elif listens.host is not None:
        server.host = listens.host
    elif not listens.elsewhere:
        seen = [one for one in tree_listeners(server.processes()) if one.port == port]
        if seen and all(one.host != "127.0.0.1" for one in seen):
            server.host = seen[0].host


def _unless_dead(server: Server, ask: Callable[[], _T]) -> _T | None:
    """What `ask` returns; None if the server dies meanwhile, which is noticed at once although it does not answer."""
    asked: Future[_T] = Future()

    def probe() -> None:
        try:
            asked.set_result(ask())
        except BaseException as error:
            asked.set_exception(error)
        server.wake()

    threading.Thread(target=probe, name="atom-health-probe", daemon=True).start()
    server.wait_for_event(None, asked.done)
    return asked.result() if asked.done() else None


def _refuse_stranger(server: Server) -> None:
    """Somebody else's server may answer on the port while ours is still starting, or about to fail on it."""
    port = server.ports[server.recipe.health.port]
    holders = listening_processes(port)
    if holders is not None and not set(holders) & set(server.processes()):
        raise RunError(
            f"port {port} is answered by pid {holders[0]} ({command_line(holders[0])[:80]}), which is not the server "
            f"of {server.recipe.title}; choose another --port"
        )


def check_requirements(recipe: Recipe, python: str) -> None:
    """Raise UsageError if {python} or a module it must have is missing, before anything starts. What is started
    somewhere else (`exec`) cannot be seen from here."""
    if recipe.exec or not uses(recipe, "python"):
        return
    if shutil.which(python) is None:
        raise UsageError(f"recipe {recipe.name}: no interpreter at {python!r}; give --set python=PATH")
    if recipe.requires is None:
        return
    missing = _missing_modules(python, recipe.requires.modules)
    if missing:
        how = f": {recipe.requires.install}" if recipe.requires.install else ""
        raise UsageError(f"recipe {recipe.name} needs {', '.join(missing)}, missing in {python}{how}")


def _missing_modules(python: str, modules: Sequence[str]) -> list[str]:
    if Path(python).absolute() == Path(sys.executable).absolute():
        return [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None]
    code = (
        "import importlib.util,sys;"
        "print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n.partition('.')[0]) is None],sep='\\n')"
    )
    try:
        done = subprocess.run(
            [python, "-c", code, *modules],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": ""},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{python} does not run as a Python interpreter: {error}") from None
    if done.returncode != 0:
        raise UsageError(f"{python} does not run as a Python interpreter: {done.stderr.strip()[-200:]}")
    return done.stdout.split()
