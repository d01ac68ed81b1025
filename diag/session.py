"""One measured session: start a recipe's server (or take a running one by its URL or pid), capture, run a load, stop,
seal.

`MeasuredSession(target, run_dir).run(load)` does all of it, in this order, and undoes what it started whatever happens.
The load is any callable that takes a `ServerUnderTest` and returns what `bench/runner.py` returns; `diag/observe.py` is
the one that sends nothing. What the captures mean is `diag/server_figures.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from atom.bench.redact import redact_arguments, redact_environment
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.runner import LoadOutcome
from atom.diag.capture import CaptureConfig, CaptureProcess
from atom.diag.gc_hook import ACTION_FILE, check_action
from atom.diag.gc_injection import hook_environment, hook_python_path
from atom.diag.gpu_choice import check_telemetry, gpus_to_sample, is_this_host
from atom.diag.hook_report import HookReport
from atom.diag.metrics_path import find_metrics, metrics_paths
from atom.diag.metrics_target import MAIN_ROLE, MetricsTarget
from atom.diag.server_figures import server_self_checks
from atom.diag.server_info import server_info
from atom.diag.server_under_test import PidTarget, ServerUnderTest, UrlTarget, death_notice, refuse_absent, watch
from atom.recipes.errors import AtomError, UsageError
from atom.recipes.known_servers import KNOWN_ROLES
from atom.recipes.launcher import LaunchOptions, LaunchProgress, launch
from atom.recipes.listening import PortFinder, tree_listeners
from atom.recipes.processes import arguments_of, descendants, listening_processes
from atom.recipes.recipe import Metrics, Recipe
from atom.recipes.server import Server, StopReport

__all__ = ["MeasuredSession", "PidTarget", "ServerUnderTest", "SessionResult", "UrlTarget"]

Judge = Callable[[LoadOutcome], tuple[Validity, Sequence[str]]]


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
    """One server, one load, one run directory. Use once.

    `gc_hook`: record collections inside the server (a `UrlTarget` is only seen from outside). `gc_action`: what the
    hook does to its collector when the load starts (`freeze`, `disable`, `threshold:…`). `health_probe`: ask `/health`
    ten times a second. `extra_metrics`: further endpoints to scrape, such as the instances behind a router.
    `gpu_telemetry`: sample the GPUs of this host; None: if the server runs here and a library for that is installed.
    """

    def __init__(
        self,
        target: Recipe | UrlTarget | PidTarget,
        run_dir: RunDirectory,
        *,
        options: LaunchOptions | None = None,
        gc_hook: bool = True,
        gc_action: str | None = None,
        health_probe: bool = True,
        extra_metrics: Sequence[MetricsTarget] = (),
        gpu_telemetry: bool | None = None,
        on_progress: Callable[[LaunchProgress], None] | None = None,
        on_log: Callable[[str], None] | None = None,
        on_start: Callable[[Server], None] | None = None,
        on_stopping: Callable[[str], None] | None = None,
    ) -> None:
        self.target = target
        self.run_dir = run_dir
        self.options = options or LaunchOptions()
        self.gc_hook = gc_hook and not isinstance(target, UrlTarget)
        self.gc_action = None if gc_action is None else _checked_action(gc_action)
        self.health_probe = health_probe
        self.extra_metrics = tuple(extra_metrics)
        self.gpu_telemetry = gpu_telemetry
        check_telemetry(gpu_telemetry)
        self._on_progress = on_progress
        self._on_log = on_log
        self._on_start = on_start
        self._on_stopping = on_stopping
        if gc_action is not None and not self.gc_hook:
            raise UsageError(f"the what-if action {gc_action!r} needs the GC hook, which is not in this server")

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
        outside = isinstance(self.target, UrlTarget)
        self._hook = HookReport(self.run_dir, wanted=self.gc_hook, action=self.gc_action, outside=outside)
        server = self._start(stack)
        capture = CaptureProcess(self._capture_config(server))
        captured: dict[str, Any] = {}
        over = threading.Event()

        def end_capture() -> None:
            over.set()
            captured["files"], captured["reasons"] = capture.stop()

        stack.callback(end_capture)
        if isinstance(self.target, PidTarget) and self.gc_hook:
            self._attach(self.target, stack)
        if server.server is not None or server.pid is not None:
            watcher = threading.Thread(target=watch, args=(server, over), name="atom-server-watch", daemon=True)
            watcher.start()
        if self.gc_action is not None:
            (self.run_dir.server / ACTION_FILE).touch()
        try:
            outcome = load(server)
        finally:
            server.forget_callbacks()
        death = death_notice(server, suspected=outcome.failed > 0)
        stack.close()  # takes the hook out where it was put in, ends the capture, then the server
        stop = server.server.stop() if server.server is not None else None
        reasons = [*captured["reasons"], *_stop_reasons(stop), *self._hook.conclude(server.listeners)]
        reasons += server_self_checks(self.run_dir.server)
        if death is not None:
            reasons.insert(0, death)
        self._record_end(captured, stop)
        return SessionResult(outcome=outcome, server=server, stop=stop, reasons=reasons, server_died=death is not None)

    def _start(self, stack: contextlib.ExitStack) -> ServerUnderTest:
        if isinstance(self.target, Recipe):
            return self._launch(self.target, stack)
        under_test = _by_url(self.target) if isinstance(self.target, UrlTarget) else _by_pid(self.target)
        tried = _locate_metrics(under_test, self.target.metrics)
        if self.target.base_url is not None and tried and all(one["status"] is None for one in tried):
            refuse_absent(self.target.base_url)  # only then: a connection that says nothing is a strange thing to get
            if any(one["error"] == "connection refused" for one in tried):  # it has come up meanwhile
                under_test.metrics_url = None
                tried = _locate_metrics(under_test, self.target.metrics)
        facts = {
            "base_url": under_test.address,
            "metrics_url": under_test.metrics_url,
            "metrics_tried": tried,
            "pid": under_test.pid,
            "command": None if under_test.pid is None else redact_arguments(arguments_of(under_test.pid)),
            "listeners": under_test.listeners,
            "info": {} if under_test.address is None else server_info(under_test.address).raw,
        }
        self.run_dir.write_run_json({"recipe": None, "server": facts})
        return under_test

    def _launch(self, recipe: Recipe, stack: contextlib.ExitStack) -> ServerUnderTest:
        directory = self.run_dir.server
        options = replace(self.options, log_dir=directory)
        if self.gc_hook:
            hook = hook_environment(directory, recipe.roles, self.gc_action, recipe.source_tree.packages)
            options = replace(
                options,
                env={**options.env, **hook},
                python_path=[hook_python_path(), *options.python_path],
            )
        server = stack.enter_context(
            launch(recipe, options, on_progress=self._on_progress, on_log=self._on_log, on_start=self._started)
        )
        listeners = [pid for one in tree_listeners(server.processes()) if one.port == server.port for pid in one.pids]
        under_test = ServerUnderTest(
            address=server.base_url,
            metrics_url=None if recipe.metrics.port == "port" else server.metrics_url,
            dialect=recipe.metrics.dialect,
            recipe=recipe,
            server=server,
            listeners=listeners,
        )
        tried = _locate_metrics(under_test, recipe.metrics)
        facts = _server_facts(server)
        facts |= {"metrics_url": under_test.metrics_url, "metrics_tried": tried, "listeners": listeners}
        facts |= {"cpus": None if options.cpus is None else list(options.cpus)}
        self.run_dir.write_run_json({"recipe": _recipe_facts(recipe), "server": facts})
        return under_test

    def _started(self, server: Server) -> None:
        server.on_stopping = self._on_stopping
        if self._on_start is not None:
            self._on_start(server)

    def _attach(self, target: PidTarget, stack: contextlib.ExitStack) -> None:
        """Put the hook into the running processes, and see to it that it is taken out again."""
        from atom.diag.attach import attach, detach  # brings in what only attaching needs

        directory = self.run_dir.server

        def take_out() -> None:
            try:
                left = detach(directory)
            except (AtomError, OSError) as error:
                self._hook.left_behind(str(error).partition("\n")[0])
            else:
                if left:
                    self._hook.left_behind(f"no word of that from pid {', '.join(map(str, left))}")

        stack.callback(take_out)
        try:
            attached = attach(target.pid, directory, KNOWN_ROLES, method=target.method, action=self.gc_action)
        except UsageError:
            raise
        except (AtomError, OSError) as error:
            self._hook.failed(str(error).partition("\n")[0])
        else:
            self._hook.attached(attached)

    def _capture_config(self, under_test: ServerUnderTest) -> CaptureConfig:
        server = under_test.server
        roles = KNOWN_ROLES if under_test.recipe is None else under_test.recipe.roles
        return CaptureConfig(
            directory=str(self.run_dir.server.absolute()),
            metrics=self._metrics_targets(under_test),
            health_url=f"{under_test.address}{_health_path(under_test)}"
            if self.health_probe and under_test.address is not None
            else None,
            label=None if server is None else server.label,
            roots=[] if server is None else [server.supervisor_pid],
            listeners=under_test.listeners,
            trees=[] if under_test.pid is None else [under_test.pid],
            roles=roles.as_dict(),
            gpus=gpus_to_sample(under_test, self.gpu_telemetry, self.options.devices),
            gpus_required=self.gpu_telemetry is True,
        )

    def _metrics_targets(self, under_test: ServerUnderTest) -> list[MetricsTarget]:
        """The server's own and the others. UsageError for its own once more: scraped twice, it would count twice."""
        url = under_test.metrics_url
        own = [] if url is None else [MetricsTarget(url=url, dialect=under_test.dialect)]
        for one in self.extra_metrics:
            if one.url == url:
                raise UsageError(
                    f"--server-metrics {one.role}={one.url}: that is the loaded server's own, which is scraped in any "
                    f"case (role {MAIN_ROLE}); leave it out"
                )
        targets = [*own, *self.extra_metrics]
        if self.extra_metrics:
            self.run_dir.write_run_json({"server_metrics": {one.role: one.url for one in targets}})
        return targets

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


def _checked_action(text: str) -> str:
    try:
        return check_action(text)
    except ValueError as error:
        raise UsageError(f"what the collector is to do: {error}") from None


def _by_url(target: UrlTarget) -> ServerUnderTest:
    parts = urlsplit(target.base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--base-url must look like http://host:port, got {target.base_url!r}")
    return ServerUnderTest(
        address=target.base_url.rstrip("/"),
        metrics_url=target.metrics_url,
        dialect=target.metrics.dialect,
        recipe=None,
        server=None,
        listeners=_local_listeners(target.base_url),
    )


def _by_pid(target: PidTarget) -> ServerUnderTest:
    tree = [target.pid, *descendants(target.pid)]
    address, listeners = target.base_url, list[int]()
    if address is not None:
        checked = _by_url(UrlTarget(base_url=address, metrics=target.metrics))
        address = checked.address
        listeners = [pid for pid in checked.listeners if pid in tree]
    elif (found := PortFinder(KNOWN_ROLES, patience_s=0).look(tree)) is not None:
        host = f"[{found.host}]" if ":" in found.host else found.host
        address, listeners = f"http://{host}:{found.port}", list(found.pids)
    return ServerUnderTest(
        address=address,
        metrics_url=target.metrics_url,
        dialect=target.metrics.dialect,
        recipe=None,
        server=None,
        pid=target.pid,
        listeners=listeners or [target.pid],
    )


def _locate_metrics(under_test: ServerUnderTest, metrics: Metrics) -> list[dict[str, Any]]:
    """Set where the metrics are, if that is not given; returns what was tried."""
    if under_test.metrics_url is not None or under_test.address is None:
        return []
    parts = urlsplit(under_test.address)
    place = find_metrics(f"{parts.scheme}://{parts.netloc}", metrics_paths(metrics))
    under_test.metrics_url = place.url
    return place.tried


def _local_listeners(base_url: str) -> list[int]:
    """The process behind a URL of this machine, so that its memory is seen too."""
    parts = urlsplit(base_url)
    local = is_this_host(parts.hostname or "")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return (listening_processes(port) or []) if local else []


def _health_path(under_test: ServerUnderTest) -> str:
    recipe = under_test.recipe
    return recipe.health.path if recipe is not None and recipe.health.port == "port" else "/health"


def _stop_reasons(stop: StopReport | None) -> list[str]:
    if stop is None:
        return []
    log = [f"server log incomplete: {stop.log_error}"] if stop.log_error else []
    return [*log, *([stop.killed] if stop.killed else [])]


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
        "command": redact_arguments(server.command),
        "env": redact_environment(server.env),
        "label": server.label,
        "pid": server.pid,
        "started_ns": server.started_ns,
        "ready_ns": server.ready_ns,
        "info": server_info(server.base_url).raw,
    }
