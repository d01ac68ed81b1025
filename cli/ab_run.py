"""One `atom ab-compare` from its plan to its exit status: checkouts, unit tests, pairs, and what is written. What comes
next is the conductor's (`diag/compare/conductor.py`), what it means `diag/compare/document.py`'s."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Any, Final, NoReturn

from atom.bench.provenance import command_line, provenance
from atom.bench.rundir import RunDirectory, Validity
from atom.cli.ab_plan_tables import duration_text
from atom.cli.ab_progress import ComparisonProgress
from atom.cli.ab_publish import publish_comparison
from atom.cli.outputs import complain, describe_os_error
from atom.cli.publish import Output
from atom.cli.run_place import RunPlace
from atom.diag.compare.arm_process import ProcessExecutor
from atom.diag.compare.arms import prepare_arm
from atom.diag.compare.conductor import Conductor, Ending, EndReason, Executor, SystemClock
from atom.diag.compare.container import with_image_id
from atom.diag.compare.document import TITLE, document, is_comparison, is_decided
from atom.diag.compare.journal import RUNS_FILE, Journal, read_records
from atom.diag.compare.model import Arm, ArmKind, MatchedRun, RunResult
from atom.diag.compare.origins import packages_of
from atom.diag.compare.plan import PLAN_FILE, Plan
from atom.diag.compare.source import put_back
from atom.diag.compare.source_proof import PACKAGES
from atom.diag.compare.unit_tests import DEFAULT_TIMEOUT_S, run_unit_tests
from atom.recipes.errors import AtomError, ExitStatus, RunError, UsageError
from atom.recipes.launcher import check_requirements
from atom.recipes.placeholders import resolve_variables
from atom.recipes.resolve import resolve_recipe

__all__ = ["ComparisonRun", "open_comparison", "say_interrupted"]

_DONE: Final = "done"
"""In run.json: all that was planned was made."""


@dataclass(kw_only=True, slots=True)
class ComparisonRun:
    """Use once."""

    output: Output
    plan: Plan
    resume: RunDirectory | None = None
    deadline_s: float | None = None
    _run_dir: RunDirectory = field(init=False)
    _progress: ComparisonProgress = field(init=False)
    _deadline_ns: int | None = field(default=None, init=False)
    """Builds and unit tests are within it."""
    _problems: dict[str, str] = field(default_factory=dict, init=False)
    """Arms that could not be prepared, and why."""

    def run(self) -> int:
        """Everything, to the exit status."""
        self._progress = ComparisonProgress(quiet=self.output.quiet)
        deadline_s = self.deadline_s if self.deadline_s is not None else self.plan.deadline_s
        self._deadline_ns = None if deadline_s is None else time.monotonic_ns() + int(deadline_s * 1e9)
        place = None
        if self.resume is not None:
            self._run_dir = self.resume
            if (text := self._nothing_left()) is not None:
                self._progress.say(f"nothing left to do: {text}")
                return publish_comparison(self._run_dir, self.output)
        self._refuse_missing()
        if self.resume is None:
            place = RunPlace(self.output.directory, TITLE)
            self._run_dir = place.run_dir
        self._progress.out = self._run_dir.path
        started = False
        try:
            with Journal(self._run_dir.path) as journal, contextlib.ExitStack() as hold:
                self._begin()
                self._prepare(hold)
                started = True
                self._unit_tests()
                ending = self._conduct(journal)
        except (KeyboardInterrupt, SystemExit):
            self._progress.close()
            self._interrupted(place, started=started)
            raise
        except UsageError:
            if place is not None and not started:
                place.give_back()
            raise
        except (RunError, OSError) as error:
            if place is not None and not started:
                place.give_back()  # nothing was run, and a corrected command may take it
                raise
            self._broken_off(error)
        finally:
            self._progress.close()
        return self._finish(_ended(ending), self._told(ending, deadline_s))

    # ---- before

    def _refuse_missing(self) -> None:
        """UsageError for an interpreter or module that a server lacks, before anything is built. A recipe that prepares
        its own is asked when it has."""
        for arm in self.plan.arms:
            if arm.kind not in (ArmKind.REF, ArmKind.RECIPE) or arm.image is not None:
                continue
            names = [arm.recipe] if arm.recipe is not None else [load.recipe for load in self.plan.loads]
            for recipe in (resolve_recipe(name) for name in dict.fromkeys(names) if name is not None):
                if not recipe.prepare:
                    variables = resolve_variables(recipe, arm.variables)
                    check_requirements(recipe, arm.python or variables.get("python") or sys.executable)

    def _nothing_left(self) -> str | None:
        """How the comparison that is to go on came to its end, if it did."""
        facts = self._run_dir.read_run_json()
        if facts.get("ended") != _DONE or facts.get("validity") is None:
            return None
        done = {pair.pair.key for pair in read_records(self._run_dir.path).done(self.plan)}
        if not self.plan.until_decided and any(pair.key not in done for pair in self.plan.schedule):
            return None
        return str(facts.get("ended_text") or f"{len(done)} pairs are made")

    def _begin(self) -> None:
        facts: dict[str, Any] = {"name": TITLE, "validity": None, "reasons": [], "ended": None}
        if self.resume is None:
            facts |= provenance(command_line())
        if self.resume is None:
            with contextlib.suppress(OSError):  # --resume runs what the plan says, so it is nobody else's to write
                self._run_dir.path.chmod(self._run_dir.path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        self._run_dir.write_run_json(facts)
        self.plan.write(self._run_dir.path)
        for folder in (self._run_dir.requests, self._run_dir.server, self._run_dir.client):
            with contextlib.suppress(OSError):
                folder.rmdir()  # they are the arms' runs'

    def _prepare(self, hold: contextlib.ExitStack) -> None:
        """Checkouts and builds. An arm for which that fails stays in the tables with its reason."""
        arms = []
        for arm in self.plan.arms:
            try:
                arms.append(self._prepared(arm, hold))
            except RunError as error:
                self._problems[arm.label] = str(error).partition("\n")[0]
                self._progress.problem(arm.label, str(error))
                arms.append(arm)
        # A recipe's file may be gone when a report is made.
        names = [*(arm.recipe for arm in arms), *(load.recipe for load in self.plan.loads)]
        recipes = {name for name in names if name is not None}
        packages = {name: list(packages_of(name)) for name in sorted(recipes)}
        extras = {**self.plan.extras, PACKAGES: packages}
        self.plan = replace(self.plan, arms=tuple(arms), extras=extras)
        self.plan.write(self._run_dir.path)

    def _prepared(self, arm: Arm, hold: contextlib.ExitStack) -> Arm:
        def note(text: str) -> None:
            self._progress.say(f"{arm.label}: {text}")

        recipes = [load.recipe for load in self.plan.loads if load.recipe is not None]
        return with_image_id(prepare_arm(arm, recipes=recipes, hold=hold, note=note))

    def _unit_tests(self) -> None:
        command = self.plan.extras.get("tests_command")
        if command is None:
            return
        first = self.plan.comparisons[0]
        for label in (first.base, first.head):
            if label in self._problems or (self._run_dir.path / "tests" / f"{label}.json").exists():
                continue
            seconds = DEFAULT_TIMEOUT_S
            if self._deadline_ns is not None:
                seconds = min(seconds, (self._deadline_ns - time.monotonic_ns()) / 1e9)
            if seconds <= 0:
                self._progress.say(f"{label}: unit tests: left out at the deadline")
                continue
            begin = time.monotonic()
            arm = self.plan.arm(label)
            with self._progress.counting(f"{label}: unit tests", seconds):
                suite = run_unit_tests(arm, self._run_dir.path, command=command, timeout_s=seconds)
            told = suite.problem or f"exit status {suite.exit_status}"
            self._progress.say(f"{label}: unit tests: {told}, {duration_text(time.monotonic() - begin)}")
            self._put_back(arm)

    def _put_back(self, arm: Arm) -> None:
        """What its tests changed in its checkout is not what its server is to run."""
        assert arm.checkout is not None
        changed = put_back(Path(arm.checkout))
        if changed.files:
            named = ", ".join(changed.files[:3]) + (f" and {len(changed.files) - 3} more" * (len(changed.files) > 3))
            what = "which are as before again" if changed.undone else "so its server would run other code"
            self._progress.say(f"{arm.label}: its unit tests changed {named} in its checkout, {what}")
            if not changed.undone:
                self._problems[arm.label] = f"its unit tests changed {named} in its checkout, {what}"

    # ---- pairs

    def _conduct(self, journal: Journal) -> Ending:
        plan, out = self.plan, self._run_dir.path
        executor: Executor = ProcessExecutor(
            out,
            plan.arms,
            plan.loads,
            plan.placement,
            seed=plan.seed,
            cool_down_s=plan.cool_down_s,
            on_progress=self._progress.on_arm,
        )
        if self._problems:
            executor = _WithoutSome(executor, self._problems, out)
        conductor = Conductor(
            plan,
            executor,
            SystemClock(),
            journal,
            self._progress.on_event,
            lambda stream, pairs: is_decided(out, plan, stream, pairs),
            deadline_ns=self._deadline_ns,
        )
        return conductor.run()

    # ---- after

    def _finish(self, ended: str, text: str) -> int:
        try:
            self._run_dir.write_run_json({"ended": ended, "ended_text": text})
            told = document(self._run_dir.path)
            self._run_dir.seal(told["validity"], told["reasons"])
        except (RunError, OSError) as error:
            self._broken_off(error)
        return publish_comparison(self._run_dir, self.output)

    def _broken_off(self, error: RunError | OSError) -> NoReturn:
        """By the machine: what was made stays."""
        text = describe_os_error(error) if isinstance(error, OSError) else str(error)
        with contextlib.suppress(RunError, OSError):
            self._run_dir.seal(Validity.FAILED, [text.partition("\n")[0]])
        room = " once there is room" if _lacks_room(error) else ""
        raise RunError(f"{text}; --resume {self._run_dir.path} goes on with it{room}") from error

    def _told(self, ending: Ending, deadline_s: float | None) -> str:
        """How it ended. `deadline 5 s: 1 of 3 pairs made, took 49 s`"""
        if ending.reason is not EndReason.DEADLINE or deadline_s is None or self._deadline_ns is None:
            return ending.text
        made = len(read_records(self._run_dir.path).done(self.plan))
        took = (time.monotonic_ns() - self._deadline_ns) / 1e9 + deadline_s
        told = f"{made} of {made + len(ending.left_out)} pairs made, took {duration_text(took)}"
        return ". ".join([f"deadline {duration_text(deadline_s)}: {told}", *ending.text.split(". ")[1:]])

    def _interrupted(self, place: RunPlace | None, *, started: bool) -> None:
        """What was recorded is shown; the exit status says what ended it."""
        if place is not None and not (self._run_dir.path / PLAN_FILE).exists():
            place.give_back()
            say_interrupted("nothing was run", quiet=self.output.quiet)
            return
        text = f"--resume {self._run_dir.path} goes on with it"
        try:
            self._run_dir.write_run_json({"ended": "interrupted", "ended_text": text})
            self._run_dir.seal(Validity.INTERRUPTED, ["interrupted"])
            if started:
                publish_comparison(self._run_dir, self.output)
        except (AtomError, OSError) as error:
            complain(error)
        say_interrupted(text, quiet=self.output.quiet)


def say_interrupted(text: str, *, quiet: bool) -> None:
    """The last line of a command that was ended early."""
    if not quiet:
        with contextlib.suppress(OSError):
            print(f"interrupted: {text}", file=sys.stderr)


def _lacks_room(error: BaseException) -> bool:
    """Whether it is, or tells of, a full disk or a limit that was reached."""
    causes = (error, error.__cause__, error.__context__)
    return any(isinstance(one, OSError) and one.errno in (ENOSPC, EDQUOT, EFBIG) for one in causes)


def _ended(ending: Ending) -> str:
    return _DONE if ending.reason is EndReason.COMPLETE else str(ending.reason)


@dataclass(frozen=True, slots=True)
class _WithoutSome:
    """An executor for arms of which some could not be prepared: their matched runs are over at once."""

    executor: Executor
    problems: Mapping[str, str]
    out: Path

    def execute(self, matched: MatchedRun, directories: tuple[Path, Path]) -> tuple[RunResult, RunResult]:
        if not any(run.arm in self.problems for run in matched.runs):
            return self.executor.execute(matched, directories)
        base, head = (self._result(matched, side, directories[side]) for side in (0, 1))
        return base, head

    def _result(self, matched: MatchedRun, side: int, directory: Path) -> RunResult:
        arm, now = matched.runs[side].arm, time.monotonic_ns()
        own = self.problems.get(arm)
        return RunResult(
            matched=matched.key,
            arm=arm,
            side=side,
            directory=str(directory.relative_to(self.out)),
            status=ExitStatus.FAILED if own is not None else ExitStatus.INTERRUPTED,
            started_ns=now,
            ended_ns=now,
            problem=own or "not started: there is nothing to compare it with",
            stage="prepare",
        )


def open_comparison(path: Path, given: Sequence[str]) -> tuple[RunDirectory, Plan]:
    """The comparison to go on with; UsageError if it is none, or for options that its plan has already."""
    run_dir = RunDirectory.open(path)
    if not is_comparison(run_dir):
        raise UsageError(f"--resume {path}: this is no comparison")
    if given:
        raise UsageError(
            f"--resume {path}: a comparison goes on with the plan it began with ({PLAN_FILE}); "
            f"leave out {', '.join(given)}"
        )
    _refuse_writable(path, run_dir.path)
    plan = Plan.read(run_dir.path)
    return run_dir, replace(plan, arms=tuple(_unprepared(arm) for arm in plan.arms))


def _refuse_writable(given: Path, directory: Path) -> None:
    """A plan says what is run: UsageError unless it is this user's, and nobody else can write it."""
    for place in (directory, directory / PLAN_FILE, directory / RUNS_FILE):
        try:
            info = place.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"--resume {given}: {place}: {error.strerror}") from None
        if info.st_uid != os.getuid():
            raise UsageError(f"--resume {given}: {place} is another user's, and its plan says what is run")
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(
                f"--resume {given}: others can write {place}, and its plan says what is run; `chmod go-w {place}` if "
                "all that stands there is yours"
            )


def _unprepared(arm: Arm) -> Arm:
    """Its checkout may have been removed since."""
    return replace(arm, src=None, checkout=None, cache=None) if arm.kind is ArmKind.REF else arm
