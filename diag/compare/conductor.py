"""Carries out a plan, pair by pair: what is next, whether there is time for it, who is given up. It starts no process
itself: that is the executor's (`compare/arm_process.py`). All its waiting is on a clock that it is given.

- Only complete pairs: one that was begun is made to its end, whatever becomes of its runs.
- A matched run that failed is not made again. Its results say what happened, and its pair is done.
- A deadline begins no pair that is not expected to end in time, by what the runs of its load took so far.
- An arm whose server does not start twice in a row is given up, with its reason, and pairs without it go on.
- Interrupts (KeyboardInterrupt, SystemExit) pass through. What is in the journal stays, and the next conductor goes on.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from atom.diag.compare.journal import DonePair, Journal, Records
from atom.diag.compare.model import MatchedRun, RunResult
from atom.diag.compare.plan import Pair, Plan, Stream
from atom.recipes.errors import ExitStatus

__all__ = [
    "LATE",
    "Clock",
    "Conductor",
    "Decide",
    "EndReason",
    "Ending",
    "Event",
    "Executor",
    "Progress",
    "SystemClock",
    "given_up",
]

_START_FAILURES: Final = 2
"""In a row, until an arm is given up."""

LATE: Final = "it would not end before the deadline"
"""Why a pair is skipped for want of time."""


class Clock(Protocol):
    def now_ns(self) -> int:
        """As `time.monotonic_ns`."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The real one."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Executor(Protocol):
    def execute(self, matched: MatchedRun, directories: tuple[Path, Path]) -> tuple[RunResult, RunResult]:
        """Make a matched run, to its end. `directories`: run directories of the base's and the head's part, which do
        not exist yet. The result has them relative to the comparison's (that of a recorded arm: where it is).

        A failure of an arm is a result with a `problem`, never an exception. `stage` "prepare" or "start" says that the
        arm itself did not start; one that was well, and was ended because its counterpart did not start, has the
        status INTERRUPTED.
        """
        ...


Decide = Callable[[Stream, Sequence[DonePair]], bool]
"""Whether the pairs of a stream so far (by their number, as many as `Plan.pairs` at least) decide its question. Asked
after each of its pairs from `Plan.pairs` on: each is a look of the group-sequential boundary."""


class Event(StrEnum):
    PAIR_STARTED = "pair started"
    RUN_STARTED = "run started"
    RUN_ENDED = "run ended"
    PAIR_ENDED = "pair ended"
    COOLING = "cooling down"
    GIVEN_UP = "given up"
    DECIDED = "decided"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What just happened."""

    event: Event
    pair: Pair
    run: MatchedRun | None = None
    results: tuple[RunResult, RunResult] | None = None
    directories: tuple[Path, Path] | None = None
    """Of the run that starts: its progress can be read there."""
    done: int
    """Complete pairs."""
    total: int
    """Pairs that are planned, without those that `--until-decided` may add."""
    at_most: int | None = None
    """With those that it may add to what is not decided; None where it adds none."""
    remaining_s: float | None
    """Until the end, by what was measured; None where nothing is known yet."""
    text: str = ""
    """In words: why one is given up or skipped, how long it cools down."""


class EndReason(StrEnum):
    COMPLETE = "complete"
    """All that was planned; under `--until-decided` all that was needed, or `--max-pairs`."""
    DEADLINE = "deadline"
    GIVEN_UP = "given up"
    """Pairs were left out because an arm does not start, and none for want of time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    reason: EndReason
    text: str
    """In one line."""
    given_up: dict[str, str] = field(default_factory=dict)
    """Arm, or `arm under load`, to the reason."""
    left_out: tuple[Pair, ...] = ()
    """Planned pairs that were not made, without those that a decision made needless."""
    decided: tuple[Stream, ...] = ()


class Conductor:
    """Carries out `plan`. `deadline_ns`: on the clock; default: `plan.deadline_s` after `run` is called. `decide`: for
    plans with `until_decided`."""

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        clock: Clock,
        journal: Journal,
        on_progress: Callable[[Progress], None] = lambda _: None,
        decide: Decide | None = None,
        *,
        deadline_ns: int | None = None,
    ) -> None:
        assert not plan.until_decided or decide is not None
        self._plan = plan
        self._executor = executor
        self._clock = clock
        self._journal = journal
        self._on_progress = on_progress
        self._decide = decide
        self._deadline_ns = deadline_ns
        self._failures = _StartFailures(plan)
        self._decided: dict[Stream, None] = {}
        self._late: list[Pair] = []
        self._without: list[Pair] = []
        self._ran = False

    def run(self) -> Ending:
        """Make every pair that is not done yet. Of a comparison that is resumed, arms get their two tries again."""
        plan = self._plan
        if self._deadline_ns is None and plan.deadline_s is not None:
            self._deadline_ns = self._clock.now_ns() + round(plan.deadline_s * 1e9)
        done = {one.pair.key for one in self._journal.records.done(plan)}
        for pair in plan.schedule:
            if pair.key in done:
                self._look(pair, announce=False)
            elif pair.stream in self._decided:
                continue
            elif (reason := self._failures.reason(pair)) is not None:
                self._without.append(pair)
                self._tell(Event.SKIPPED, pair, text=reason)
            elif not self._in_time(pair):
                self._late.append(pair)
                self._tell(Event.SKIPPED, pair, text=LATE)
            else:
                self._make(pair)
                self._look(pair, announce=True)
        return self._ending()

    def _make(self, pair: Pair) -> None:
        before = self._failures.given_up
        self._tell(Event.PAIR_STARTED, pair)
        for run in pair.runs:
            self._cool_down(pair)
            directories = (
                self._journal.new_directory(run.runs[0].arm),
                self._journal.new_directory(run.runs[1].arm),
            )
            self._tell(Event.RUN_STARTED, pair, run=run, directories=directories)
            results = self._executor.execute(run, directories)
            assert all(one.matched == run.key and one.side == side for side, one in enumerate(results))
            self._journal.append(results)
            self._failures.count(run, results)
            self._ran = True
            self._tell(Event.RUN_ENDED, pair, run=run, results=results)
        self._tell(Event.PAIR_ENDED, pair)
        for who, reason in self._failures.given_up.items():
            if who not in before:
                self._tell(Event.GIVEN_UP, pair, text=f"{who}: {reason}")

    def _cool_down(self, pair: Pair) -> None:
        if self._ran and self._plan.cool_down_s > 0:
            self._tell(Event.COOLING, pair, text=f"{self._plan.cool_down_s:g} s")
            self._clock.sleep(self._plan.cool_down_s)

    def _look(self, pair: Pair, *, announce: bool) -> None:
        """Ask whether the pairs of this stream up to this one decide."""
        plan = self._plan
        number = pair.pair + 1
        is_look = plan.until_decided and number >= plan.pairs and len(plan.pairs_of(pair.stream)) > plan.pairs
        if not is_look or self._decide is None:
            return
        pairs = [one for one in self._journal.records.done_of(plan, pair.stream) if one.pair.pair <= pair.pair]
        if len(pairs) >= plan.pairs and self._decide(pair.stream, pairs):
            self._decided[pair.stream] = None
            if announce:
                self._tell(Event.DECIDED, pair, text=f"after {len(pairs)} pairs")

    # ---- time ----------------------------------------------------------------------------------------------------

    def _in_time(self, pair: Pair) -> bool:
        if self._deadline_ns is None:
            return True
        left = (self._deadline_ns - self._clock.now_ns()) / 1e9
        return left > 0 and (self._expected([pair], _Durations(self._plan, self._journal.records)) or 0.0) <= left

    def _expected(self, pairs: Iterable[Pair], durations: _Durations) -> float | None:
        total = 0.0
        for run in (run for pair in pairs for run in pair.runs):
            seconds = durations.of(run)
            if seconds is None:
                return None
            total += seconds + self._plan.cool_down_s
        return total

    def _remaining(self, done: set[str]) -> float | None:
        left = [
            pair
            for pair in self._plan.schedule
            if pair.key not in done and not self._plan.is_extra(pair) and self._failures.reason(pair) is None
        ]
        seconds = self._expected(left, _Durations(self._plan, self._journal.records))
        if seconds is not None and self._deadline_ns is not None:
            seconds = min(seconds, max(0.0, (self._deadline_ns - self._clock.now_ns()) / 1e9))
        return seconds

    # ---- words ---------------------------------------------------------------------------------------------------

    def _tell(
        self,
        event: Event,
        pair: Pair,
        *,
        run: MatchedRun | None = None,
        results: tuple[RunResult, RunResult] | None = None,
        directories: tuple[Path, Path] | None = None,
        text: str = "",
    ) -> None:
        done = {one.pair.key for one in self._journal.records.done(self._plan)}
        possible = sum(one.key in done or one.stream not in self._decided for one in self._plan.schedule)
        self._on_progress(
            Progress(
                event=event,
                pair=pair,
                run=run,
                results=results,
                directories=directories,
                done=len(done),
                total=max(len(done), sum(not self._plan.is_extra(one) for one in self._plan.schedule)),
                at_most=possible if self._plan.until_decided else None,
                remaining_s=self._remaining(done),
                text=text,
            )
        )

    def _ending(self) -> Ending:
        late = [pair for pair in self._late if pair.stream not in self._decided]
        without = [pair for pair in self._without if pair.stream not in self._decided]
        given = self._failures.given_up
        parts = []
        if late:
            parts.append(f"{_count(late)} left out at the deadline")
        if without:
            parts.append(f"{_count(without)} left out: {'; '.join(f'{who}: {why}' for who, why in given.items())}")
        reason = EndReason.DEADLINE if late else EndReason.GIVEN_UP if without else EndReason.COMPLETE
        return Ending(
            reason=reason,
            text=". ".join(parts) or "all pairs were made",
            given_up=given,
            left_out=tuple(pair for pair in self._plan.schedule if pair in late or pair in without),
            decided=tuple(self._decided),
        )


def _count(pairs: Sequence[Pair]) -> str:
    return f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}"


class _Durations:
    """How long a matched run takes: the longest one of its load so far, else what the load declares."""

    def __init__(self, plan: Plan, records: Records) -> None:
        self._plan = plan
        self._measured: dict[str, float] = {}
        for one in records.done(plan):
            for results in one.results:
                if all(result.has_records for result in results):
                    began, ended = min(one.started_ns for one in results), max(one.ended_ns for one in results)
                    self._measured[one.pair.load] = max(self._measured.get(one.pair.load, 0.0), (ended - began) / 1e9)

    def of(self, run: MatchedRun) -> float | None:
        return self._measured.get(run.load, self._plan.seconds_of(run))


class _StartFailures:
    """Whose server does not start. Loads may ask for servers of their own (recipe, arguments, environment): an arm is
    given up under those that share the one that does not start."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._in_a_row: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._why: dict[tuple[str, str], str] = {}

    def _server(self, arm: str, load: str) -> tuple[str, str]:
        asked = self._plan.load(load)
        recipe = self._plan.arm(arm).recipe or asked.recipe
        return arm, json.dumps([recipe, asked.server_args, dict(asked.env)])

    def count(self, run: MatchedRun, results: Sequence[RunResult]) -> None:
        for arm in dict.fromkeys(one.arm for one in run.runs):
            own = [result for one, result in zip(run.runs, results, strict=True) if one.arm == arm]
            blamed = [one for one in own if one.status != ExitStatus.INTERRUPTED]
            server = self._server(arm, run.load)
            if any(one.has_records for one in own):
                self._in_a_row[server] = 0
            elif blamed:
                self._in_a_row[server] += 1
                self._why[server] = next((one.problem for one in blamed if one.problem), "no reason known")

    def _reason(self, arm: str, load: str) -> str | None:
        server = self._server(arm, load)
        times = self._in_a_row.get(server, 0)
        return None if times < _START_FAILURES else f"did not start {times} times in a row: {self._why[server]}"

    @property
    def given_up(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for arm in self._plan.arms:
            reasons = {load.name: self._reason(arm.label, load.name) for load in self._plan.loads}
            given = {load: reason for load, reason in reasons.items() if reason is not None}
            if len(set(given.values())) == 1 and len(given) == len(reasons):
                found[arm.label] = next(iter(given.values()))
            else:
                found |= {f"{arm.label} under {load}": reason for load, reason in given.items()}
        return found

    def reason(self, pair: Pair) -> str | None:
        """Why this pair is left out; None if it is not."""
        for arm in sorted(pair.arms):
            if (reason := self._reason(arm, pair.load)) is not None:
                return f"{arm} {reason}"
        return None


def given_up(plan: Plan, records: Records) -> dict[str, str]:
    """Arm (or `arm under load`) → why it was given up, by what is recorded."""
    failures = _StartFailures(plan)
    runs = {run.key: run for pair in plan.schedule for run in pair.runs}
    seen: dict[str, list[RunResult]] = defaultdict(list)
    for line in records.lines:
        if line.matched in runs:
            seen[line.matched].append(line)
            both = seen[line.matched][-2:]
            if line.side == 1 and len(both) == 2:
                failures.count(runs[line.matched], both)
    return failures.given_up
