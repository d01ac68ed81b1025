"""Servers under observation, from choices to exit status: one server (`ProfileRun`), or several arms one after the
other (`ArmsRun`: the two of `--what-if`, those of `atom gc-profile replay`)."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from atom.bench.provenance import command_line, provenance
from atom.bench.rundir import RunDirectory, Validity
from atom.cli.gc_profile_watch import Work, WorkFactory
from atom.cli.gc_publish import ProfileOutput, make_profiles, publish_profiles
from atom.cli.outputs import complain
from atom.cli.progress import StatusLine, launch_progress
from atom.cli.run_place import RunPlace
from atom.cli.signals import status_of
from atom.diag.gc_injection import print_env
from atom.diag.gc_profile.arms import Arm, ArmEnd, RecordedRun, recorded_runs, run_arms
from atom.diag.server_under_test import PidTarget, UrlTarget
from atom.diag.session import MeasuredSession
from atom.recipes.errors import ExitStatus, RunError, UsageError
from atom.recipes.launcher import LaunchOptions
from atom.recipes.recipe import Recipe

__all__ = ["ArmsRun", "Measurement", "ProfileRun", "print_environment"]

PREPARED: Final = "gc-profile --print-env"
"""What run.json calls a directory that `--print-env` made for the hook, until a measurement joins it."""


@dataclass(kw_only=True, slots=True)
class Measurement:
    """How one server is run and recorded, whichever arm it is."""

    target: Recipe | UrlTarget | PidTarget
    launch: LaunchOptions
    work: WorkFactory
    quiet: bool
    line: StatusLine = field(default_factory=lambda: StatusLine(sys.stderr), init=False)
    started: bool = field(default=False, init=False)
    """Whether some server's traffic began: only then is there something to keep."""
    ended_by: int | None = field(default=None, init=False)
    """The signal that ended it early."""
    failed: bool = field(default=False, init=False)
    """A server died, or a load failed as a whole."""
    not_valid: list[str] = field(default_factory=list, init=False)
    """Why what was measured is no evidence."""
    _work: Work | None = field(default=None, init=False)

    @property
    def starts_server(self) -> bool:
        return isinstance(self.target, Recipe)

    def check(self) -> None:
        """UsageError for a load that cannot be, before any server starts."""
        self.work(self.line).check()

    def run(self, run_dir: RunDirectory, facts: Mapping[str, Any], arm: Arm | None = None) -> ArmEnd:
        """One server, one run directory. `facts` go into its run.json."""
        work = self._work = self.work(self.line)
        run_dir.write_run_json({**facts, **provenance(command_line())})
        launch = self.launch if arm is None else replace(self.launch, env={**self.launch.env, **arm.env})
        if isinstance(self.target, PidTarget):
            self.say(f"attaching to pid {self.target.pid}; a busy interpreter takes some seconds to take the hook in")
        try:
            with launch_progress(self.line, quiet=self.quiet) as on_launch:
                session = MeasuredSession(
                    self.target,
                    run_dir,
                    options=launch,
                    gc_action=None if arm is None else arm.gc_action,
                    on_progress=on_launch,
                    on_stopping=self.say,
                )
                result = session.run(
                    lambda server: work.run(server, run_dir), judge=lambda outcome: work.judge(run_dir, outcome)
                )
        except (KeyboardInterrupt, SystemExit):
            # A session seals what it was in; this is for the moments before it and after.
            with contextlib.suppress(UsageError, OSError):
                if not run_dir.sealed:
                    run_dir.seal(Validity.INTERRUPTED, ["interrupted before it began"])
            raise
        finally:
            self.started = self.started or work.started
            self.ended_by = self.ended_by or work.ended_by
        run = run_dir.read_run_json()
        end = ArmEnd(validity=Validity(run["validity"]), reasons=run["reasons"], stop=work.ended_by is not None)
        self.failed = self.failed or result.server_died or end.validity == Validity.FAILED
        if end.validity == Validity.NOT_VALID:
            self.not_valid += end.reasons
        return end

    def say(self, line: str) -> None:
        """A line for whoever watches."""
        if not self.quiet:
            self.line.clear()
            with contextlib.suppress(OSError):
                print(line, file=sys.stderr, flush=True)

    def status(self, gates: ExitStatus) -> int:
        """The exit status of a measurement that was reported."""
        if self.ended_by is not None:
            return status_of(self.ended_by)
        if self.failed:
            return ExitStatus.FAILED
        if self.not_valid:
            if self.quiet:
                print(f"not valid: {'; '.join(self.not_valid)}", file=sys.stderr)
            return ExitStatus.INVALID
        return gates


@dataclass(kw_only=True, slots=True)
class ProfileRun:
    """One server, its profile, and the exit status."""

    name: str
    facts: Mapping[str, Any]
    measurement: Measurement
    directory: Path | None
    output: ProfileOutput

    def run(self) -> int:
        measurement = self.measurement
        measurement.check()
        prepared = PREPARED if isinstance(measurement.target, UrlTarget) else None
        place = RunPlace(self.directory, self.name, prepared=prepared)
        run_dir = place.run_dir
        recorded = [RecordedRun(run_dir.path, self.facts.get("label"))]

        def report() -> ExitStatus:
            return publish_profiles(make_profiles(recorded, self.output), self.output, home=run_dir.path)

        return _reported(measurement, place, lambda: measurement.run(run_dir, self.facts), report)


@dataclass(kw_only=True, slots=True)
class ArmsRun:
    """Several arms under the same load, their profiles side by side, and the exit status."""

    name: str
    facts: Mapping[str, Any]
    measurement: Measurement
    arms: Sequence[Arm]
    directory: Path | None
    output: ProfileOutput
    arm_seconds: float | None = None
    """What an arm will last, where that is known."""
    compare: str | None = None
    """What the second arm does: the tables then say what that changed."""
    begun: int = field(default=0, init=False)
    """How many arms were started."""

    def run(self) -> int:
        self.measurement.check()
        place = RunPlace(self.directory, self.name)
        run_dir = place.run_dir
        facts = {**self.facts, **provenance(command_line())}

        def report() -> ExitStatus:
            runs = [run for run in recorded_runs(run_dir.path) if _was_measured(run)]
            if not runs:
                raise RunError("no arm was measured")
            return publish_profiles(
                make_profiles(runs, self.output), self.output, home=run_dir.path, compare=self.compare
            )

        def measure() -> None:
            try:
                run_arms(self.arms, run_dir, facts, self._one)
            finally:
                if left := [arm.label for arm in self.arms[self.begun :]]:
                    self.measurement.say(f"arms not run: {', '.join(left)}")

        return _reported(self.measurement, place, measure, report)

    def _one(self, arm: Arm, run_dir: RunDirectory) -> ArmEnd:
        self.begun = number = self.arms.index(arm) + 1
        if not self.measurement.quiet:
            lasts = "" if self.arm_seconds is None else f", about {minutes(self.arm_seconds)}"
            with contextlib.suppress(OSError):
                print(f"arm {number} of {len(self.arms)}, {arm.label}: {arm.description}{lasts}", file=sys.stderr)
        return self.measurement.run(run_dir, {**self.facts, "label": arm.label, "arm": arm.as_dict()}, arm)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _reported(
    measurement: Measurement, place: RunPlace, measure: Callable[[], object], report: Callable[[], ExitStatus]
) -> int:
    """Measure and report, whatever ends it: what was recorded is shown, then the reason says why there is no more."""
    try:
        measure()
    except UsageError:
        if not measurement.started:
            place.give_back()
        raise
    except (RunError, OSError) as error:
        if not measurement.started and not measurement.starts_server:  # what was started left its log, which says why
            place.give_back()
        _report_in_passing(measurement, report)
        if measurement.ended_by is None:
            raise
        complain(error)
        return status_of(measurement.ended_by)
    except (KeyboardInterrupt, SystemExit):
        _report_in_passing(measurement, report)
        raise
    try:
        gates = report()
    except (RunError, UsageError) as error:
        if measurement.ended_by is None and not measurement.failed:
            raise
        complain(error)
        gates = ExitStatus.OK
    return measurement.status(gates)


def _report_in_passing(measurement: Measurement, report: Callable[[], ExitStatus]) -> None:
    if measurement.started:
        with contextlib.suppress(RunError, OSError, UsageError):
            report()


def _was_measured(run: RecordedRun) -> bool:
    """Whether an arm got as far as its load. One that did not has nothing to show."""
    return RunDirectory.open(run.path).read_run_json().get("measured_start_ns") is not None


def print_environment(directory: Path | None) -> int:
    """`--print-env`: a run directory that is waiting for a hook's record, and how to bring the hook to a server."""
    place = RunPlace(directory, "gc-profile")
    path = place.run_dir.path.absolute()
    place.run_dir.write_run_json({"name": PREPARED, **provenance(command_line())})
    print(print_env(place.run_dir.server).rstrip())
    print("\n# While the server runs, also record it from outside, into the same directory:")
    print(f"#   atom gc-profile --url http://HOST:PORT --output-dir {shlex.quote(str(path))}")
    print(f"# or only read what the hook has recorded: atom gc-profile {shlex.quote(str(path))}")
    return ExitStatus.OK
