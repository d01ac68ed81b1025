"""One `atom bench sweep` from choices to exit status: one session with the server, one load after the other in it, each
with a run directory of its own. Which point comes next is `bench/sweep.py`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from atom.bench.backlog import backlog
from atom.bench.provenance import command_line, provenance
from atom.bench.records import read_records
from atom.bench.report.page import write_report
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.runner import LoadOutcome
from atom.bench.sweep import (
    SECONDS_OF_ARRIVALS,
    Conclusion,
    Point,
    State,
    arrival_seconds,
    calm_seconds,
    conclude,
    judge_point,
    point_label,
    point_seed,
)
from atom.bench.sweep_index import SweepIndex
from atom.bench.worker_messages import merge_outcomes
from atom.cli.load_run import LoadFactory, LoadRunner, ServerChoice
from atom.cli.outputs import complain
from atom.cli.progress import StatusLine, launch_progress
from atom.cli.publish import Output
from atom.cli.rank_run import follow, follows
from atom.cli.render import number
from atom.cli.run_place import RunPlace
from atom.cli.server_side import summed_up
from atom.cli.signals import status_of
from atom.cli.sweep_publish import publish_sweep
from atom.diag.session import MeasuredSession, ServerUnderTest, UrlTarget
from atom.recipes.errors import ExitStatus, RunError, UsageError
from atom.recipes.resolve import resolve_recipe

__all__ = ["SweepRun"]

_LATENCIES: Final = ("ttft", "ttft_scheduled", "tpot", "itl", "e2el")
_FIGURES: Final = frozenset(
    (
        *("request_throughput", "output_throughput", "total_token_throughput", "request_goodput", "completed"),
        *("failed", "cancelled", "started", "duration", "mean_concurrency", "requested_rate", "achieved_rate"),
        *("cached_share", *(f"{how}_{name}_ms" for name in _LATENCIES for how in ("mean", "median", "p99"))),
    )
)
"""What sweep.json keeps of each point, besides the figures of the objectives."""


@dataclass(kw_only=True, slots=True)
class SweepRun:
    """Use once."""

    server: ServerChoice
    load: Callable[[float, int, float], LoadFactory]
    """The load of a point, by its value, its seed and, for a rate, the seconds of arrivals."""
    wanted: Sequence[float]
    """Values that must be possible, or nothing starts."""
    index: SweepIndex
    output: Output
    seed: int
    cooldown_s: float
    resume: Path | None
    _line: StatusLine = field(default_factory=lambda: StatusLine(sys.stderr), init=False)
    _run_dir: RunDirectory = field(init=False)
    _session_dir: RunDirectory = field(init=False)
    _facts: dict[str, Any] = field(default_factory=dict, init=False)
    _ended_by: int | None = field(default=None, init=False)
    """The signal that ended a point early."""
    _server_died: bool = field(default=False, init=False)
    _server_gone: str | None = field(default=None, init=False)
    """Why a point gave up on a server that is only an address."""
    _started: bool = field(default=False, init=False)

    def run(self) -> int:
        """Everything, to the exit status."""
        self._check_loads()
        if follows():
            return follow(lambda load: self._runner(**load["variant"]).spec_of(load))
        recipe = resolve_recipe(self.server.recipe) if self.server.recipe is not None else None
        place = self._open()
        if self._next() is None:  # nothing is left of a sweep that is resumed
            return self._finish("done")
        try:
            self._begin()
            with launch_progress(self._line, quiet=self.output.quiet) as on_launch:
                session = MeasuredSession(
                    recipe or UrlTarget(base_url=self.server.base_url),
                    self._session_dir,
                    options=self.server.launch,
                    health_probe=False,
                    extra_metrics=self.server.extra_metrics,
                    gpu_telemetry=self.server.gpu_telemetry,
                    on_progress=on_launch,
                )
                result = session.run(self._points, judge=self._judge)
        except UsageError as error:
            if self._started:  # a later point cannot be: what was measured stands
                self._break_off(str(error).partition("\n")[0])
            elif place is not None:
                place.give_back()
            raise
        except (RunError, OSError) as error:
            if not self._started and recipe is None and place is not None:
                place.give_back()
            elif self._started:
                self._break_off(str(error).partition("\n")[0])
            if self._ended_by is None:
                raise
            complain(error)
            return status_of(self._ended_by)
        except (KeyboardInterrupt, SystemExit):
            self._break_off("interrupted")
            raise
        self._server_died = result.server_died
        return self._finish(self._ending())

    def _check_loads(self) -> None:
        """UsageError for a load that cannot be, before any server starts."""
        plan = self.index.plan
        for value in self.wanted:
            self._runner(value, point_seed(self.seed, plan.swept, value, 1), SECONDS_OF_ARRIVALS).check()

    def _open(self) -> RunPlace | None:
        """A new directory, or the one that is resumed."""
        if self.resume is None:
            place = RunPlace(self.output.directory, "sweep")
            self._run_dir = place.run_dir
            return place
        self._run_dir = RunDirectory.open(self.resume)
        before = SweepIndex.read(self._run_dir)
        if (difference := before.difference(self.index.options)) is not None:
            raise UsageError(f"--resume {self.resume}: {difference}; a sweep goes on with the options it began with")
        self.index.points = [point for point in before.points if self._is_sealed(point)]
        self.index.plan, self.index.sessions = before.plan, before.sessions
        return None

    def _is_sealed(self, point: Point) -> bool:
        path = self._run_dir.path / point.directory
        return (path / "run.json").is_file() and RunDirectory.open(path).sealed

    def _begin(self) -> None:
        run_dir, sessions = self._run_dir, self.index.sessions + 1
        self._facts = provenance(command_line())
        facts: dict[str, Any] = {"name": "bench sweep", "validity": None, "reasons": []}
        run_dir.write_run_json(facts if sessions > 1 else facts | self._facts)
        # Times of two sessions may be of two boots, so their captures do not share files.
        self._session_dir = run_dir if sessions == 1 else RunDirectory(run_dir.path / f"session-{sessions}")
        if sessions > 1:
            self._session_dir.write_run_json({"name": "bench sweep", **self._facts})
        self.index.sessions, self.index.ended = sessions, None
        self.index.write(run_dir)

    def _points(self, server: ServerUnderTest) -> LoadOutcome:
        """One load after the other, until the plan has no more, or the sweep is ended."""
        outcomes: list[LoadOutcome] = []
        while (value := self._next()) is not None:
            if outcomes:
                time.sleep(self.cooldown_s)
            outcomes.append(self._measure(server, value))
            if self._ended_by is not None or self._server_gone is not None or server.dead:
                break
        return merge_outcomes(outcomes)

    def _next(self) -> float | None:
        """The value to measure. An open search that comes to a load that cannot be ends at the highest one so far."""
        index = self.index
        value = index.plan.next(index.points)
        highest = max((point.value for point in index.points), default=math.inf)
        if value is None or value <= highest:
            return value
        try:
            self._runner(value, 0, arrival_seconds(index.points))
        except UsageError as error:
            index.plan = replace(index.plan, most=highest, most_why=str(error))
        return index.plan.next(index.points)

    def _measure(self, server: ServerUnderTest, value: float) -> LoadOutcome:
        """One point, to its entry in sweep.json. One that is broken off gets none, nor one whose
        server is gone: that is no limit of the server."""
        swept, run_dir = self.index.plan.swept, self._run_dir
        label = point_label(swept, value)
        attempt = 1
        while (run_dir.arms / label / f"run-{attempt}").exists():
            attempt += 1
        seed = point_seed(self.seed, swept, value, attempt)
        runner = self._runner(value, seed, arrival_seconds(self.index.points))
        point_dir = self._point_directory(label, attempt)
        try:
            outcome = runner.run(server, point_dir)
        except BaseException as error:
            point_dir.seal(Validity.FAILED if isinstance(error, Exception) else Validity.INTERRUPTED, [str(error)])
            raise
        finally:
            self._started = self._started or runner.started
        summary = self._summarize(point_dir)
        broken_off = runner.ended_by is not None or server.dead
        self._server_gone = None if broken_off else summary["server_gone"]
        validity = Validity.INTERRUPTED if broken_off else Validity(summary["validity"])
        if self._server_gone is not None:
            validity = Validity.FAILED
        point_dir.seal(validity, summary["reasons"])
        summary |= {"validity": str(validity)}
        point_dir.write_summary(summary)
        write_report(point_dir, summary)
        self._take_facts(point_dir)
        self._ended_by = runner.ended_by
        if validity is not Validity.INTERRUPTED and self._server_gone is None:
            self._add(point_dir, summary, value, attempt, seed)
        return outcome

    def _runner(self, value: float, seed: int, arrivals_s: float) -> LoadRunner:
        return LoadRunner(
            name="sweep",
            server=self.server,
            load=self.load(value, seed, arrivals_s),
            line=self._line,
            quiet=self.output.quiet,
            variant={"value": value, "seed": seed, "arrivals_s": arrivals_s},
        )

    def _point_directory(self, label: str, attempt: int) -> RunDirectory:
        """What is captured at the server is the session's, of all its points: each has a link to it, and finds its own
        time there."""
        point_dir = self._run_dir.arm(label, attempt)
        point_dir.write_run_json({"name": f"bench sweep, {label}", **self._facts})
        with contextlib.suppress(OSError):  # a file system without links: its figures are the client's alone
            point_dir.server.rmdir()
            point_dir.server.symlink_to(os.path.relpath(self._session_dir.server, point_dir.path))
        return point_dir

    def _summarize(self, point_dir: RunDirectory) -> dict[str, Any]:
        return summed_up(point_dir, self.output.percentiles)

    def _take_facts(self, point_dir: RunDirectory) -> None:
        """The server and what all loads have in common, for the sweep's own tables."""
        run, own = point_dir.read_run_json(), self._run_dir.read_run_json()
        facts: dict[str, Any] = {name: run[name] for name in ("target", "backend") if name in run}
        load = {k: v for k, v in run.get("load", {}).items() if k not in ("num_prompts", "seed")}
        self._run_dir.write_run_json({**facts, "load": {**load, str(self.index.plan.swept): None}})
        for name in ("recipe", "server"):
            if name in own:
                point_dir.write_run_json({name: own[name]})

    def _add(self, point_dir: RunDirectory, summary: dict[str, Any], value: float, attempt: int, seed: int) -> None:
        index = self.index
        pressure = backlog(list(read_records(point_dir)), calm_s=calm_seconds(index.points))
        state, why, results = judge_point(summary, index.objectives, pressure)
        kept = _FIGURES | {one.figure for one in index.objectives}
        fields = ("value", "unit", "n", "definition", "supported")
        point = Point(
            value=value,
            attempt=attempt,
            directory=str(point_dir.path.relative_to(self._run_dir.path)),
            seed=seed,
            validity=Validity(summary["validity"]),
            reasons=list(summary["reasons"]),
            figures={
                name: {key: figure[key] for key in fields}
                for name, figure in summary["figures"].items()
                if name in kept
            },
            objectives=results,
            keeps_up=None if pressure is None else pressure.keeps_up,
            backlog=None if pressure is None else pressure.detail,
            state=state,
            why=why,
        )
        index.points.append(point)
        index.write(self._run_dir)
        if not self.output.quiet:
            self._say(point)

    def _say(self, point: Point) -> None:
        text = (
            f"{self.index.plan.swept.show(point.value)}: {number(point.figure('request_throughput'))} req/s, "
            f"{number(point.figure('output_throughput'))} tok/s, TTFT p99 {number(point.figure('p99_ttft_ms'))} ms: "
        )
        self._line.show(text + ("too much: " if point.state is State.BROKEN else "") + (point.why or "met"))
        self._line.keep()

    def _conclude(self) -> Conclusion:
        return conclude(self.index.plan, self.index.points, self.index.objectives, self.index.fail_below)

    def _judge(self, outcome: LoadOutcome) -> tuple[Validity, Sequence[str]]:
        del outcome
        conclusion = self._conclude()
        if self._ended_by is not None:
            return Validity.INTERRUPTED, ["interrupted"]
        if self._server_gone is not None:
            return Validity.FAILED, [self._server_gone]
        return conclusion.validity, conclusion.reasons

    def _ending(self) -> str:
        if self._ended_by is not None:
            return f"interrupted by {signal.Signals(self._ended_by).name}"
        if self._server_died:
            return "the server died"
        return self._server_gone or "done"

    def _break_off(self, why: str) -> None:
        """Keep and show what there is; the error that caused it comes after it."""
        with contextlib.suppress(RunError, OSError, UsageError):
            self._finish(why)

    def _finish(self, ended: str) -> int:
        """Write and show everything; the exit status."""
        index, run_dir = self.index, self._run_dir
        failed = self._server_died or self._server_gone is not None
        index.ended = ended
        conclusion = self._conclude()
        index.write(run_dir, conclusion)
        if ended == "done" and (not run_dir.sealed or self.resume is not None):
            run_dir.seal(conclusion.validity, conclusion.reasons)
        elif not run_dir.sealed:
            run_dir.seal(Validity.FAILED if failed else Validity.INTERRUPTED, [ended])
        try:
            publish_sweep(run_dir, index, conclusion, self.output)
        except RunError as error:
            if self._ended_by is None:
                raise
            complain(error)
        if self._ended_by is not None:
            return status_of(self._ended_by)
        return ExitStatus.FAILED if failed else conclusion.status
