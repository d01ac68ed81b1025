"""What `/metrics` scrapes say of an engine in a window of time: gauges, how much totals grew, how long its steps took,
how many tokens a verification of drafts accepts. The figures of a run (`diag/engine_figures.py`) and its timeline
(`bench/report/series.py`) are both made from this, so they cannot disagree.

Values that only grow count from the last scrape before the window to the last one in it; a server that started again in
between counts from zero. Which words there are is `diag/dialects.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Acceptance", "EngineWindow", "Growth", "StepTimes", "acceptance", "step_times"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Growth:
    steps: FloatArray
    """By how much it grew from each scrape to the next that has it."""
    seconds_between: FloatArray
    rows: IntArray
    """The scrapes from which, and to which, it grew: one more than `steps`."""

    @property
    def amount(self) -> float:
        return float(self.steps.sum())

    @property
    def seconds(self) -> float:
        return float(self.seconds_between.sum())


@dataclass(frozen=True, slots=True)
class EngineWindow:
    """[start_ns, end_ns) of the scrapes of one endpoint."""

    sent_ns: IntArray
    """[scrapes] ascending."""
    values: Mapping[str, FloatArray]
    """Word → [scrapes], NaN where a scrape does not say it."""
    start_ns: int
    end_ns: int

    @property
    def rows(self) -> slice:
        """The scrapes in the window."""
        first, last = np.searchsorted(self.sent_ns, [self.start_ns, self.end_ns])
        return slice(int(first), int(last))

    def gauge(self, word: str) -> FloatArray:
        """Its known values in the window."""
        values = self.values.get(word)
        if values is None:
            return np.array([])
        part = values[self.rows]
        return part[~np.isnan(part)]

    def growth(self, *words: str) -> Growth | None:
        """Of the first word, between scrapes that have all of them; None for fewer than two such scrapes."""
        columns = [self.values.get(word) for word in words]
        known = [column for column in columns if column is not None]
        if len(known) < len(words):
            return None
        part = self.rows
        sums: FloatArray = np.stack(known)[:, : part.stop].sum(axis=0)
        rows = np.flatnonzero(~np.isnan(sums))
        rows = rows[max(0, int(np.searchsorted(rows, part.start)) - 1) :]
        if len(rows) < 2:
            return None
        values, times = known[0][rows], self.sent_ns[rows]
        steps = np.diff(values)
        return Growth(np.where(steps < 0, values[1:], steps), np.diff(times) / 1e9, rows)


@dataclass(frozen=True, slots=True)
class StepTimes:
    each_s: FloatArray
    """Of each interval between scrapes that has one."""
    rows: IntArray
    """The scrape at which that interval ends."""
    n: int
    """Steps in them."""
    measured: bool
    """By the server; else from scrape to scrape."""


def step_times(window: EngineWindow) -> StepTimes:
    """Seconds of an engine step, per interval between scrapes."""
    seconds, timed = window.growth("step_sum_s", "timed_steps"), window.growth("timed_steps", "step_sum_s")
    if seconds is not None and timed is not None:
        some = timed.steps > 0
        return StepTimes(seconds.steps[some] / timed.steps[some], timed.rows[1:][some], int(timed.amount), True)
    steps = window.growth("steps", "running")
    if steps is None:
        return StepTimes(np.array([]), np.array([], dtype=np.int64), 0, False)
    busy = window.values["running"][steps.rows] > 0
    some = (steps.steps > 0) & busy[:-1] & busy[1:]
    each: FloatArray = steps.seconds_between[some] / steps.steps[some]
    return StepTimes(each, steps.rows[1:][some], int(steps.steps[some].sum()), False)


@dataclass(frozen=True, slots=True)
class Acceptance:
    length: float | None
    """Tokens per verification of drafts, over the window."""
    n: int
    """What it rests on."""
    definition: str
    each: FloatArray
    """The same of each interval between scrapes, or of each scrape."""
    rows: IntArray
    """The scrape of each, at the end of an interval."""


def acceptance(window: EngineWindow) -> Acceptance:
    """Tokens that a verification of drafts gives, from the best that this server tells."""
    accepted, drafts = window.growth("accepted_tokens", "drafts"), window.growth("drafts", "accepted_tokens")
    if accepted is not None and drafts is not None and drafts.amount > 0:
        definition = "1 + accepted draft tokens ÷ drafts (verifications, one per sequence and step); n: drafts"
        each, rows = _per(accepted, drafts)
        return Acceptance(1 + accepted.amount / drafts.amount, int(drafts.amount), definition, 1 + each, rows)
    made, calls = window.growth("generation_tokens", "drafts"), window.growth("drafts", "generation_tokens")
    if made is not None and calls is not None:
        definition = "generated tokens ÷ verifications of drafts: this server does not count accepted tokens; n: those"
        length = made.amount / calls.amount if calls.amount > 0 else None
        return Acceptance(length, int(calls.amount), definition, *_per(made, calls))
    definition = "mean over scrapes of the server's own running average (a gauge); n: scrapes"
    part, values = window.rows, window.values.get("acceptance_length")
    if values is None:
        return Acceptance(None, 0, definition, np.array([]), np.array([], dtype=np.int64))
    rows = part.start + np.flatnonzero(values[part] > 0)
    gauge = values[rows]
    return Acceptance(float(gauge.mean()) if len(gauge) else None, len(gauge), definition, gauge, rows)


def _per(part: Growth, whole: Growth) -> tuple[FloatArray, IntArray]:
    """Their ratio in each interval that has any of the whole."""
    some = whole.steps > 0
    return part.steps[some] / whole.steps[some], whole.rows[1:][some]
