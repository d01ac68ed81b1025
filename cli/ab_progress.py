"""Live progress of a comparison on standard error: on a terminal one line that rewrites itself, with the loads of both
arms in it; elsewhere a line for each matched run that ended."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from atom.bench.rundir import RunDirectory
from atom.cli.ab_plan_tables import duration_text
from atom.cli.progress import TERMINAL_PERIOD_S, StatusLine
from atom.diag.compare.arm_process import ArmProgress
from atom.diag.compare.conductor import LATE, Event, Progress
from atom.diag.compare.model import RunResult
from atom.recipes.errors import AtomError, ExitStatus

__all__ = ["ComparisonProgress"]

PLAIN_PERIOD_S: Final = 60.0
"""Where no terminal is: a run of minutes says now and then that it goes on."""
_LONGEST_REASON: Final = 120
_STAGES: Final = {"starting": "server starts", "ready": "ready", "ending": "ends", "ended": "done"}


class ComparisonProgress:
    """`on_event` is the conductor's, `on_arm` the executor's; `say` is a line that stays. `out`: the comparison's
    directory, once there is one."""

    out: Path | None = None

    def __init__(self, *, quiet: bool, line: StatusLine | None = None) -> None:
        self._quiet = quiet
        self._line = line or StatusLine(sys.stderr)
        self._now: Progress | None = None
        self._late = False
        self._arms: dict[int, ArmProgress] = {}
        self._shown = time.monotonic()
        self._told: set[str] = set()
        """Problems that have been said in full."""

    def problem(self, arm: str, text: str) -> None:
        """What keeps an arm from being run at all."""
        self.say(f"{arm}: {text}")
        self._told.add(text.partition("\n")[0])

    @contextlib.contextmanager
    def counting(self, text: str, at_most_s: float) -> Iterator[None]:
        """Counts the time of something that has no progress of its own."""
        self.say(f"{text} …")
        begin, over = time.monotonic(), threading.Event()

        def count() -> None:
            period = 1.0 if self._line.terminal else PLAIN_PERIOD_S
            while not over.wait(period):
                passed = duration_text(time.monotonic() - begin)
                self._line.show(f"{text} … {passed}, at most {duration_text(at_most_s)}")

        thread = threading.Thread(target=count, name="atom-ab-count", daemon=True)
        if not self._quiet:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.is_alive():
                thread.join()

    def say(self, text: str) -> None:
        if self._quiet:
            return
        self._line.clear()
        self._line.show(text)
        self._line.keep()
        self._shown = time.monotonic()

    def on_event(self, progress: Progress) -> None:
        self._now = progress
        if progress.event is Event.RUN_STARTED:
            self._arms = {}
            self._draw(force=True)
        elif progress.event is Event.RUN_ENDED:
            self.say(self._ended(progress))
        elif progress.event in (Event.GIVEN_UP, Event.DECIDED):
            what = "given up" if progress.event is Event.GIVEN_UP else f"{progress.pair.load}: decided"
            text = self._shortened(progress.text)
            self.say(f"{what}: {text}" if progress.event is Event.GIVEN_UP else f"{what} {text}")
        elif progress.event is Event.SKIPPED and progress.text == LATE and not self._late:
            self._late = True
            number = _number(progress, progress.done + 1)
            self.say(f"deadline: {number} is left out, and whatever else would not end before it")
        elif progress.event is Event.COOLING and self._line.terminal and not self._quiet:
            self._line.show(f"{_where(progress)}  cooling down, {progress.text}")

    def on_arm(self, progress: ArmProgress) -> None:
        """From any thread of the executor's; returns at once."""
        before = self._arms.get(progress.side)
        self._arms[progress.side] = progress
        self._draw(force=before is None or before.stage != progress.stage)

    def close(self) -> None:
        self._line.clear()

    def _ended(self, progress: Progress) -> str:
        """One line: which run, and what became of both arms' parts."""
        assert progress.results is not None
        left = f"; about {duration_text(progress.remaining_s)} left" if progress.remaining_s else ""
        return f"{_where(progress)}: " + ", ".join(map(self._result, progress.results)) + left

    def _result(self, result: RunResult) -> str:
        if not result.has_records and result.status == ExitStatus.INTERRUPTED:
            return f"{result.arm} not run"
        if result.problem is not None:
            text = self._shortened(result.problem)
            self._told.add(result.problem)
            return f"{result.arm} {'did not start' if not result.has_records else 'failed'} ({text})"
        seconds = duration_text((result.ended_ns - result.started_ns) / 1e9)
        return f"{result.arm} {seconds}" + ("" if result.status == 0 else f" ({self._why(result)})")

    def _shortened(self, text: str) -> str:
        """Without what was said before."""
        for problem in self._told:
            text = text.replace(problem, "as above")
        return text

    def _why(self, result: RunResult) -> str:
        """Why a run that was made to its end has another exit status than 0."""
        if self.out is not None:
            with contextlib.suppress(OSError, AtomError):
                reasons = RunDirectory.open(self.out / result.directory).read_run_json().get("reasons")
                if isinstance(reasons, list) and reasons:
                    kinds = dict.fromkeys(str(reason).partition(": ")[0] for reason in reasons)
                    return "; ".join(kinds)[:_LONGEST_REASON]
        return f"status {result.status}"

    def _draw(self, *, force: bool) -> None:
        if self._now is None or self._quiet:
            return
        period = TERMINAL_PERIOD_S if self._line.terminal else PLAIN_PERIOD_S
        if (force and self._line.terminal) or time.monotonic() - self._shown >= period:
            self._shown = time.monotonic()
            arms = "   ".join(_arm(self._arms[side]) for side in sorted(self._arms))
            left = self._now.remaining_s
            tail = f"   {duration_text(left)} left" if left else ""
            self._line.show(f"{_where(self._now)}  {arms or 'starting'}{tail}")


def _where(progress: Progress) -> str:
    run = progress.run
    over = progress.event is Event.RUN_ENDED and run == progress.pair.runs[-1]
    number = _number(progress, max(1, progress.done) if over else progress.done + 1)
    control = " (A/A)" if progress.pair.purpose == "aa" else ""
    if run is None or len(progress.pair.runs) < 2:
        return number + control
    return f"{number}{control} {progress.pair.runs.index(run) + 1}/{len(progress.pair.runs)}"


def _number(progress: Progress, pair: int) -> str:
    """`pair 2/3 short`; where pairs are added until it is decided, `pair 2 (at most 3) short`."""
    if progress.at_most is None:
        return f"pair {min(pair, progress.total)}/{progress.total} {progress.pair.load}"
    return f"pair {min(pair, progress.at_most)} (at most {progress.at_most}) {progress.pair.load}"


def _arm(progress: ArmProgress) -> str:
    if progress.stage != "load":
        return f"{progress.arm}: {_STAGES.get(progress.stage, progress.stage)}"
    return f"{progress.arm}: {_load(progress.figures)}"


def _load(figures: Mapping[str, Any]) -> str:
    done, total = figures.get("done"), figures.get("total")
    if done is None:
        return "load"
    text = f"{done:,}" if total is None else f"{done:,}/{total:,}"
    return text + (f", {figures['failed']:,} failed" if figures.get("failed") else "")
