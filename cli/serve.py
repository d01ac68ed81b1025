"""`atom serve`: start a server from a model or a recipe and supervise it. Starting is `recipes/launcher.py`; recording
a run directory on the way is `diag/session.py`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.status import Status

from atom.bench.provenance import command_line
from atom.bench.redact import redact_arguments
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.runner import LoadOutcome
from atom.cli.options import QuietOption, check_writable, given_cpus
from atom.cli.signals import ending_signals
from atom.diag.server_info import server_info
from atom.diag.session import MeasuredSession, ServerUnderTest
from atom.recipes.cpus import check_pinnable
from atom.recipes.errors import ExitStatus, ServerDiedError, UsageError
from atom.recipes.launcher import LaunchOptions, LaunchProgress, launch
from atom.recipes.recipe import Recipe
from atom.recipes.resolve import builtin_recipes, resolve_recipe
from atom.recipes.server import Server, StopReport
from atom.recipes.spawn import module_command

__all__ = ["CONTEXT_SETTINGS", "app", "serve"]

app = typer.Typer(add_completion=False)

CONTEXT_SETTINGS: Final[dict[str, Any]] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""For `app.command`: what is not known here goes to the server; `--help` also shows the engine's own flags."""

DEFAULT_PORT: Final = 8000
_OWN_ENGINE: Final = "embedded"
_OWN_RECIPES: Final = (_OWN_ENGINE, "simulated")
_READY_LINE: Final = '{"event": "ready"'
_PLAIN_PROGRESS_EVERY_S: Final = 10.0
_AFTER_DRAIN_S: Final = 15.0


_HELP: Final = (
    "Start a server and supervise it.\n\n"
    "MODEL_OR_RECIPE is a Hugging Face directory, a .gguf file or `embedded` for ATOM's own engine, or the name or "
    "file of a recipe for any other server. Options that are not listed here go to the server as they are. Ctrl-C or "
    "SIGTERM stops it, and everything it started."
)
_EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom serve\n\n"
    "  atom serve ./Llama-3.2-1B --max-num-seqs 64\n\n"
    "  atom serve simulated --port 0 --json - --quiet\n\n"
    "  atom serve --recipe vllm-cpu ./model --set python=/venv/bin/python"
)


@app.command(
    "serve",
    context_settings=CONTEXT_SETTINGS,
    help=_HELP,
    epilog=_EXAMPLES,
    options_metavar="[MODEL_OR_RECIPE] [OPTIONS] [SERVER FLAGS]",
)
def serve(
    ctx: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", metavar="NAME|FILE", help="how to start the server; the argument is then its model"),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="the model, as a flag")] = None,
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="port to listen on; 0 takes a free one")
    ] = DEFAULT_PORT,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="0,1", help="accelerators the server may use")
    ] = None,
    server_cpus: Annotated[
        str | None, typer.Option("--server-cpus", metavar="0-3", help="CPUs the server may use")
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="a variable of the recipe, such as python=PATH"),
    ] = None,
    ready_timeout: Annotated[
        float | None, typer.Option("--ready-timeout", metavar="S", min=0.1, help="seconds until it must be ready")
    ] = None,
    stop_grace: Annotated[
        float | None, typer.Option("--stop-grace", metavar="S", min=0, help="seconds to stop before it is killed")
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", help="record log, /metrics, processes and GC as a run directory there"),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="PATH", help="one JSON line when ready; - for stdout, and nothing else there"),
    ] = None,
    quiet: QuietOption = False,
    help_: Annotated[bool, typer.Option("--help", help="show this and the engine's flags, and exit")] = False,
) -> None:
    """The command; `_HELP` and `_EXAMPLES` are its help."""
    if help_:
        _print_help(ctx)
        return
    check_writable("--json", json_path)
    plan = _plan(ctx.args, recipe, model)
    _check_address(plan.extra)
    options = LaunchOptions(
        model=plan.model,
        host=host,
        port=port,
        devices=devices,
        variables=_variables(variables or []),
        extra_args=plan.extra,
        ready_timeout_s=ready_timeout,
        stop_grace_s=_stop_grace(stop_grace, plan.extra),
        cpus=None if server_cpus is None else given_cpus("--server-cpus", server_cpus),
    )
    view = _View(quiet=quiet, json_path=json_path)
    resolved = resolve_recipe(plan.recipe)
    if server_cpus is not None:
        check_pinnable("--server-cpus", resolved)
    with _signals() as signals:
        status = _run(resolved, options, output_dir, view, signals)
    if status != ExitStatus.OK:
        raise typer.Exit(int(status))


# ---- what is asked for -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    recipe: str
    model: str | None
    extra: list[str]


def _plan(arguments: Sequence[str], recipe: str | None, model: str | None) -> _Plan:
    """Tell the target from the flags for the server. Only a first argument can be the target: behind an unknown option
    it could be that option's value."""
    extra = list(arguments)
    target = extra.pop(0) if extra and not extra[0].startswith("-") else None
    if recipe is None and target is not None and _names_recipe(target):
        recipe, target = target, extra.pop(0) if extra and not extra[0].startswith("-") else None
    if target is not None and model is not None:
        raise UsageError(f"two models: {target!r} and --model {model!r}; give one")
    model = model or target
    if model is not None and recipe in (None, *_OWN_RECIPES):
        _check_model(model)
    return _Plan(recipe or _OWN_ENGINE, model, extra)


def _names_recipe(target: str) -> bool:
    if target in builtin_recipes() and not Path(target).exists():
        return True
    return target.endswith((".yaml", ".yml"))


def _check_model(model: str) -> None:
    """A mistyped path or name is found here, with everything it could have been, instead of by the engine."""
    if model == _OWN_ENGINE or model.startswith("preset:") or Path(model).exists():
        return
    raise UsageError(
        f"{model!r} is neither a model directory, a .gguf file, nor a recipe; recipes: {', '.join(builtin_recipes())}"
    )


def _variables(assignments: Sequence[str]) -> dict[str, str]:
    values = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise UsageError(f"--set {assignment!r} must look like name=value")
        values[name] = value
    return values


def _check_address(extra: Sequence[str]) -> None:
    """Where the server listens is said to atom, which waits for it there; behind `--` it would not know."""
    for word in extra:
        flag = word.partition("=")[0]
        if flag in ("--port", "--host"):
            raise UsageError(f"{flag} stands behind `--`, where only the server sees it; give it before")


def _stop_grace(given: float | None, extra: Sequence[str]) -> float | None:
    """A server that was told how long its requests may finish is not killed while they do."""
    for index, word in enumerate(extra):
        name, equals, value = word.partition("=")
        if name == "--shutdown-timeout" and given is None:
            value = value if equals else "".join(extra[index + 1 : index + 2])
            if re.fullmatch(r"\d+(\.\d+)?", value):
                return float(value) + _AFTER_DRAIN_S
    return given


# ---- signals -----------------------------------------------------------------------------------------------------


class _Stopped(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def status(self) -> ExitStatus:
        """A server asked to end by SIGTERM, and ended, did what it should."""
        return ExitStatus.INTERRUPTED if self.number == signal.SIGINT else ExitStatus.OK

    @property
    def status_before_ready(self) -> ExitStatus:
        """One that never served did not."""
        return ExitStatus.INTERRUPTED if self.number == signal.SIGINT else ExitStatus.TERMINATED


@dataclass(slots=True)
class _Signals:
    """The first signal interrupts whatever runs; a further one cuts the stop short."""

    stopping: bool = False
    server: Server | None = None

    def watch(self, server: Server) -> None:
        self.server = server

    def handle(self, number: int, _frame: object) -> None:
        if not self.stopping:
            self.stopping = True
            raise _Stopped(number)
        if self.server is not None:
            self.server.kill_now()


@contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    before = {number: signal.signal(number, signals.handle) for number in ending_signals()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the run -----------------------------------------------------------------------------------------------------


def _run(recipe: Recipe, options: LaunchOptions, output_dir: Path | None, view: _View, signals: _Signals) -> ExitStatus:
    try:
        if output_dir is None:
            with (
                view.loading(),
                launch(recipe, options, on_progress=view.progress, on_log=view.log, on_start=signals.watch) as server,
            ):
                stopped = _supervise(server, view, None)
                view.stopping(stopped)
            view.stopped(server.stop())
            return stopped.status
        return _run_recorded(recipe, options, output_dir, view, signals)
    except _Stopped as stopped:
        view.stopped_early(stopped)
        return stopped.status_before_ready
    except ServerDiedError as error:
        if error.server_status == ExitStatus.USAGE:  # argparse and its like: a flag the server does not know
            raise UsageError(_usage_message(str(error))) from None
        raise


def _supervise(server: Server, view: _View, run_dir: Path | None) -> _Stopped:
    """Announce the server and wait: returns when a signal says stop, raises ServerDiedError when it ends by itself."""
    try:
        view.ready(server, run_dir)  # whoever reads it may send a signal before it returns
        server.wait_for_end()
    except _Stopped as stopped:
        return stopped
    server.raise_if_dead()
    raise AssertionError("unreachable: a server that ended is dead")


def _run_recorded(
    recipe: Recipe, options: LaunchOptions, output_dir: Path, view: _View, signals: _Signals
) -> ExitStatus:
    run_dir = RunDirectory(output_dir)
    run_dir.write_run_json(
        {"command": redact_arguments(command_line()), "kind": "serve", "start_ns": time.monotonic_ns()}
    )
    session = MeasuredSession(
        recipe,
        run_dir,
        options=options,
        health_probe=False,
        on_progress=view.progress,
        on_log=view.log,
        on_start=signals.watch,
    )
    how: list[_Stopped] = []

    def wait(under_test: ServerUnderTest) -> LoadOutcome:
        assert under_test.server is not None
        started = time.monotonic_ns()
        how.append(_supervise(under_test.server, view, run_dir.path))
        view.stopping(how[0])
        return LoadOutcome(
            started_ns=started,
            ended_ns=time.monotonic_ns(),
            started=0,
            sent=0,
            completed=0,
            failed=0,
            cancelled=0,
            interrupted=False,
            first_error=None,
        )

    with view.loading():
        result = session.run(wait, lambda _: (Validity.VALID, []))
    assert result.stop is not None
    view.stopped(result.stop)
    return how[0].status


def _usage_message(text: str) -> str:
    """The server's own complaint: the last line of its log that says `error:`, or all of it."""
    complaints = [line.strip() for line in text.splitlines() if "error:" in line.lower()]
    return re.sub(r"^.*?error:\s*", "", complaints[-1], flags=re.I) if complaints else text


# ---- what is shown -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _View:
    """What a person or a script sees of a run: progress and log on standard error, the banner on standard output."""

    quiet: bool
    json_path: str | None
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))
    _status: Status | None = None
    _next_plain: float = _PLAIN_PROGRESS_EVERY_S

    @contextmanager
    def loading(self) -> Iterator[None]:
        if self.console.is_terminal and not self.quiet:
            self._status = self.console.status("starting …")
            self._status.start()
        try:
            yield
        finally:
            self._end_status()

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def progress(self, progress: LaunchProgress) -> None:
        times = f"{progress.elapsed_s:.0f} of at most {progress.timeout_s:.0f} s"
        text = f"starting, {times}: waiting for {progress.waiting_for}"
        if self._status is not None:
            self._status.update(text)
        elif not self.quiet and progress.elapsed_s >= self._next_plain:
            self._next_plain = progress.elapsed_s + _PLAIN_PROGRESS_EVERY_S
            print(text, file=sys.stderr, flush=True)

    def log(self, line: str) -> None:
        # Our engine's line for machines says what the banner says.
        if not self.quiet and not line.startswith(_READY_LINE):
            self.console.print(line, markup=False, emoji=False)

    def ready(self, server: Server, run_dir: Path | None) -> None:
        self._end_status()
        facts = _facts(server, run_dir)
        if self.json_path == "-":
            print(json.dumps(facts), flush=True)
            return
        if self.json_path is not None:
            Path(self.json_path).write_text(json.dumps(facts) + "\n", encoding="utf-8")
        print(_banner(facts), flush=True)

    def stopping(self, stopped: _Stopped) -> None:
        if not self.quiet:
            print(f"{stopped}: stopping the server (again to kill it)", file=sys.stderr, flush=True)

    def stopped_early(self, stopped: _Stopped) -> None:
        print(f"{stopped}: stopped before the server was ready", file=sys.stderr, flush=True)

    def stopped(self, report: StopReport) -> None:
        if report.swept:
            print(
                f"the server did not stop within its grace: {report.swept} processes were killed",
                file=sys.stderr,
                flush=True,
            )


def _facts(server: Server, run_dir: Path | None) -> dict[str, Any]:
    info = server_info(server.base_url)
    ready_s = (server.ready_ns or server.started_ns) - server.started_ns
    return {
        "event": "ready",
        "base_url": server.base_url,
        "model": info.model,
        "max_model_len": info.max_model_len,
        "executor": info.executor,
        "data_parallel_size": info.data_parallel_size,
        "tensor_parallel_size": info.tensor_parallel_size,
        "pipeline_parallel_size": info.pipeline_parallel_size,
        "recipe": server.recipe.name,
        "pid": server.pid,
        "supervisor_pid": server.supervisor_pid,
        "label": server.label,
        "ready_s": round(ready_s / 1e9, 3),
        "log": None if run_dir is None else str(server.log_path),
        "run_dir": None if run_dir is None else str(run_dir),
    }


def _banner(facts: dict[str, Any]) -> str:
    model = facts["model"] or "(unknown)"
    rows = {
        "url": facts["base_url"],
        "model": model,
        "context": f"{facts['max_model_len']:,} tokens" if facts["max_model_len"] else None,
        "executor": _executor_words(facts),
        "recipe": facts["recipe"],
        "ready after": f"{facts['ready_s']:.1f} s",
        "recording to": facts["run_dir"],
    }
    messages = json.dumps([{"role": "user", "content": "Hello"}])
    key = " -H 'Authorization: Bearer …'" if os.environ.get("ATOM_API_KEY") else ""
    lines = [f"  {name:<13}{value}" for name, value in rows.items() if value]
    return "\n".join(
        [
            "",
            *lines,
            "",
            f"  curl {facts['base_url']}/v1/chat/completions{key} \\",
            "    -H 'Content-Type: application/json' \\",
            # In two lines, so that a terminal of 80 columns does not cut through a word of what will be copied.
            f'    -d \'{{"model": {json.dumps(model)}, "max_tokens": 32,',
            f'         "messages": {messages}}}\'',
            "",
        ]
    )


def _executor_words(facts: dict[str, Any]) -> str | None:
    executor: str | None = facts["executor"]
    words = "simulated (a step-time model, no tensor work)" if executor == "simulated" else executor
    for kind, things in (("data", "engines"), ("tensor", "workers"), ("pipeline", "stages")):
        size = facts[f"{kind}_parallel_size"] or 1
        if size > 1:
            words = f"{words}, {kind} parallel: {size} {things}"
    return words


def _print_help(ctx: typer.Context) -> None:
    text = ctx.get_help()
    if text:
        print(text)
    command = [*module_command("atom.engine.server"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        print("ATOM's engine is not installed here: pip install 'atom-serving[engine]'")
        return
    options = done.stdout.partition("\n\n")[2]
    print("The engine's own flags (other servers have theirs):\n")
    print(options.partition("\nexamples:")[0])
