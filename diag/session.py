"""One measured session: start a recipe's server (or take a running one by its URL), capture, run a load, stop, seal.

`MeasuredSession(target, run_dir).run(load)` does all of it, in this order, and undoes what it started whatever happens.
The load is any callable that takes a `ServerUnderTest` and returns what `bench/runner.py` returns. What the captures
mean is `diag/server_figures.py`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

from atom.bench.rundir import RunDirectory, Validity
from atom.bench.runner import LoadOutcome
from atom.diag.capture import CaptureConfig, CaptureProcess, MetricsTarget
from atom.diag.gc_injection import hook_environment, hook_python_path
from atom.diag.gc_records import read_gc_records
from atom.diag.redact import redact_arguments, redact_environment
from atom.diag.server_figures import server_self_checks
from atom.diag.server_info import server_info
from atom.recipes.errors import RunError, ServerDiedError, UsageError
from atom.recipes.health import probe_health
from atom.recipes.launcher import LaunchOptions, LaunchProgress, launch
from atom.recipes.processes import listening_processes
from atom.recipes.recipe import Metrics, MetricsDialect, Recipe, Roles
from atom.recipes.server import Server, StopReport

__all__ = ["MeasuredSession", "ServerUnderTest", "SessionResult", "UrlTarget"]

DYING_S: Final = 10.0
"""What a server that fails its health check may take to end."""
KNOWN_ROLES: Final = Roles(
    api=(r"atom\.engine\.server", r"vllm\.entrypoints", r"vllm serve", "VLLM::APIServer", r"sglang\.launch_server"),
    core=(r"atom\.engine\.core_process", "VLLM::EngineCore", "sglang::scheduler"),
    worker=("VLLM::Worker", r"atom\.engine\.worker"),
)
"""For servers that were not started from a recipe."""

Judge = Callable[[LoadOutcome], tuple[Validity, Sequence[str]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class UrlTarget:
    """A server that runs already."""

    base_url: str
    metrics: Metrics = field(default_factory=Metrics)
    metrics_url: str | None = None
    """None: `metrics.path` of `base_url`."""


@dataclass(slots=True)
class ServerUnderTest:
    """What a load gets: where the server is, and word of its death."""

    base_url: str
    metrics_url: str
    dialect: MetricsDialect
    recipe: Recipe | None
    server: Server | None
    """None for a server that was running already."""
    _on_death: list[Callable[[], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call_when_dead(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, on another thread, if the server dies during the load."""
        with self._lock:
            self._on_death.append(callback)
        if self.server is not None and self.server.dead:
            self.tell_death()

    def forget_callbacks(self) -> None:
        """The load is over: the server's end is no news any more."""
        with self._lock:
            self._on_death.clear()

    def tell_death(self) -> None:
        with self._lock:
            callbacks, self._on_death = self._on_death, []
        for callback in callbacks:
            callback()


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionResult:
    outcome: LoadOutcome
    server: ServerUnderTest
    stop: StopReport | None
    """None for a server that was running already."""
    reasons: list[str]
    """What is wrong with the captures or the server; empty for a clean session."""
    server_died: bool


class MeasuredSession:
    """One server, one load, one run directory. Use once."""

    def __init__(
        self,
        target: Recipe | UrlTarget,
        run_dir: RunDirectory,
        *,
        options: LaunchOptions | None = None,
        gc_hook: bool = True,
        on_progress: Callable[[LaunchProgress], None] | None = None,
        on_log: Callable[[str], None] | None = None,
        on_start: Callable[[Server], None] | None = None,
    ) -> None:
        self.target = target
        self.run_dir = run_dir
        self.options = options or LaunchOptions()
        self.gc_hook = gc_hook and isinstance(target, Recipe)
        self._on_progress = on_progress
        self._on_log = on_log
        self._on_start = on_start

    def run(self, load: Callable[[ServerUnderTest], LoadOutcome], judge: Judge | None = None) -> SessionResult:
        """Run the whole session. `judge` says what the load is worth as evidence; the session adds its own reasons.

        The directory is sealed in every case, also when this raises: RunError if the server could not be started or
        died during the load, whatever the load raised otherwise.
        """
        try:
            with contextlib.ExitStack() as stack:
                result = self._run(load, stack)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
            reason = "interrupted" if interrupted else str(error).partition("\n")[0] or type(error).__name__
            self.run_dir.seal(Validity.INTERRUPTED if interrupted else Validity.FAILED, [reason])
            raise
        validity, reasons = self._verdict(result, judge)
        self.run_dir.seal(validity, reasons)
        return result

    def _run(self, load: Callable[[ServerUnderTest], LoadOutcome], stack: contextlib.ExitStack) -> SessionResult:
        server = self._start(stack)
        capture = CaptureProcess(self._capture_config(server))
        captured: dict[str, Any] = {}

        def end_capture() -> None:
            captured["files"], captured["reasons"] = capture.stop()

        stack.callback(end_capture)
        if server.server is not None:
            watcher = threading.Thread(target=_watch, args=(server,), name="atom-server-watch", daemon=True)
            watcher.start()
        try:
            outcome = load(server)
        finally:
            server.forget_callbacks()
        death = _death_notice(server, suspected=outcome.failed > 0)
        stack.close()  # ends the capture, then the server
        stop = server.server.stop() if server.server is not None else None
        reasons = [*captured["reasons"], *self._server_reasons(stop), *server_self_checks(self.run_dir.server)]
        if death is not None:
            reasons.insert(0, death)
        self._record_end(captured, stop)
        return SessionResult(outcome=outcome, server=server, stop=stop, reasons=reasons, server_died=death is not None)

    def _start(self, stack: contextlib.ExitStack) -> ServerUnderTest:
        if isinstance(self.target, UrlTarget):
            under_test = _attach(self.target)
            self.run_dir.write_run_json({"recipe": None, "server": {"base_url": under_test.base_url}})
            return under_test
        directory = self.run_dir.server
        options = replace(self.options, log_dir=directory)
        if self.gc_hook:
            options = replace(
                options,
                env={**options.env, **hook_environment(directory, self.target.roles)},
                python_path=[hook_python_path(), *options.python_path],
            )
        server = stack.enter_context(
            launch(
                self.target,
                options,
                on_progress=self._on_progress,
                on_log=self._on_log,
                on_start=self._on_start,
            )
        )
        self.run_dir.write_run_json({"recipe": _recipe_facts(self.target), "server": _server_facts(server)})
        return ServerUnderTest(
            base_url=server.base_url,
            metrics_url=server.metrics_url,
            dialect=self.target.metrics.dialect,
            recipe=self.target,
            server=server,
        )

    def _capture_config(self, under_test: ServerUnderTest) -> CaptureConfig:
        server = under_test.server
        roles = KNOWN_ROLES if under_test.recipe is None else under_test.recipe.roles
        return CaptureConfig(
            directory=str(self.run_dir.server.absolute()),
            metrics=[MetricsTarget(url=under_test.metrics_url, dialect=under_test.dialect)],
            label=None if server is None else server.label,
            roots=[] if server is None else [server.supervisor_pid],
            listeners=_local_listeners(under_test.base_url) if server is None else [],
            roles=roles.as_dict(),
        )

    def _server_reasons(self, stop: StopReport | None) -> list[str]:
        if stop is None:
            return []
        reasons = [f"server log incomplete: {stop.log_error}"] if stop.log_error else []
        hooked = {process.role for process in read_gc_records(self.run_dir.server)}
        if self.gc_hook and "api" not in hooked:
            reasons.append("the GC hook did not load in the API process: no GC figures")
        return reasons

    def _record_end(self, captured: dict[str, Any], stop: StopReport | None) -> None:
        facts: dict[str, Any] = {"capture": captured["files"]}
        if stop is not None:
            facts["server_stop"] = {"status": stop.status, "swept": stop.swept, "seconds": round(stop.seconds, 3)}
        self.run_dir.write_run_json(facts)

    def _verdict(self, result: SessionResult, judge: Judge | None) -> tuple[Validity, list[str]]:
        outcome = result.outcome
        if judge is not None:
            validity, reasons = judge(outcome)
        elif outcome.interrupted and not result.server_died:
            validity, reasons = Validity.INTERRUPTED, ["interrupted"]
        elif outcome.completed == 0 and outcome.sent:
            validity, reasons = Validity.FAILED, [f"all requests failed: {outcome.first_error}"]
        else:
            validity, reasons = Validity.VALID, []
        if result.server_died:
            return Validity.FAILED, [*result.reasons, *reasons]  # the cause before its consequences
        return validity, [*reasons, *result.reasons]


def _watch(under_test: ServerUnderTest) -> None:
    """Tell the load when its server dies. Ends with the server, which the session stops."""
    server = under_test.server
    assert server is not None
    server.wait_for_end()
    under_test.tell_death()


def _death_notice(under_test: ServerUnderTest, *, suspected: bool) -> str | None:
    """How the server died, in one line; None if it lives. A server whose engine died answers with errors for a moment
    before it ends, so when requests failed (`suspected`) one that fails its health check is given time to do so."""
    server = under_test.server
    if server is None:
        return None
    health = server.recipe.health
    deadline = time.monotonic() + DYING_S
    trouble: str | None = None
    while suspected and not server.dead:
        trouble = probe_health(server.host, server.ports[health.port], health.path, health.status)
        if trouble is None or time.monotonic() > deadline:
            break
        server.wait_for_end(0.2)
    if not server.dead:
        return None if trouble is None else f"the server has stopped working: waited in vain for {trouble}"
    try:
        server.raise_if_dead()
    except ServerDiedError as error:
        return error.cause
    except RunError as error:
        return str(error).partition("\n")[0]
    return None


def _attach(target: UrlTarget) -> ServerUnderTest:
    parts = urlsplit(target.base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--base-url must look like http://host:port, got {target.base_url!r}")
    base = target.base_url.rstrip("/")
    return ServerUnderTest(
        base_url=base,
        metrics_url=target.metrics_url or f"{parts.scheme}://{parts.netloc}{target.metrics.path}",
        dialect=target.metrics.dialect,
        recipe=None,
        server=None,
    )


def _local_listeners(base_url: str) -> list[int]:
    """The process behind a URL of this machine, so that its memory is seen too."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return (listening_processes(port) or []) if local else []


def _recipe_facts(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "source": recipe.source,
        "metrics_dialect": recipe.metrics.dialect,
        "roles": recipe.roles.as_dict(),
    }


def _server_facts(server: Server) -> dict[str, Any]:
    return {
        "base_url": server.base_url,
        "metrics_url": server.metrics_url,
        "command": redact_arguments(server.command),
        "env": redact_environment(server.env),
        "label": server.label,
        "pid": server.pid,
        "started_ns": server.started_ns,
        "ready_ns": server.ready_ns,
        "info": server_info(server.base_url).raw,
    }
