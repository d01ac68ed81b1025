"""Whether a server kept up with an arrival schedule, from the records: does what has arrived and not ended grow?

That the client kept to the schedule is another question (`bench/schedule.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from atom.bench.records import Outcome, RequestRecord

__all__ = ["Backlog", "backlog"]

MAX_GROWTH: Final = 0.05
"""Of the requests that arrived meanwhile: a server that finishes less than 95% of what arrives does not keep up."""
SIGMAS: Final = 3.0
"""In a queue that is in balance the number in it is about Poisson distributed; so the difference between two moments
has at most the variance of their sum. Growth below three standard deviations may be chance."""
MIN_REQUESTS: Final = 20
SETTLED: Final = 2.0
"""The first half has to last this many times as long as a request takes, or the queue was still filling up."""
RISING: Final = 3.0
"""Unless requests of the last quarter took this many times as long as those of the first: where nothing keeps up they
take seven times as long, where a queue only fills up they take the same. Or than requests took at a rate that the
server kept up with."""
LEAST_SERVED: Final = 0.5
"""Completed requests per second ÷ arrived ones. Less is no keeping up, whatever the queue looks like."""
MOST: Final = 0.9
"""Of the completed requests: a few that take very long are no reason to call all of them slow."""

Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Backlog:
    """The second half of an arrival schedule. Rates in requests per second."""

    keeps_up: bool | None
    """None: cannot be told."""
    arrived: float
    finished: float
    growth: int
    """Requests that arrived and had not ended: at the last arrival − in the middle of the schedule."""
    detail: str


def backlog(records: Sequence[RequestRecord], *, calm_s: float | None = None) -> Backlog | None:
    """None where there was no schedule. Counts from when the schedule wanted a request sent, so that what waits in the
    client for a slot of `--max-concurrency` is part of the backlog, and failed requests have left it.

    `calm_s`: what a request takes at a rate that the server kept up with. A schedule that is short beside its requests
    never shows that a server keeps up; that it does not, if they take far longer than such a one."""
    ended = [r for r in records if r.scheduled_ns is not None and r.end_ns is not None]
    if not ended:
        return None
    due = np.sort(np.array([r.scheduled_ns for r in ended], dtype=np.int64))
    ends = np.sort(np.array([r.end_ns for r in ended], dtype=np.int64))
    start, last = int(due[0]), int(due[-1])
    middle = (start + last) // 2
    half_s = (last - middle) / 1e9
    arrivals = len(due) - _until(due, middle)
    if arrivals < MIN_REQUESTS or half_s <= 0:
        return Backlog(
            None, 0.0, 0.0, 0, f"too few requests to tell: {arrivals} in the second half (more: --num-prompts)"
        )
    before, after = (_until(due, t) - _until(ends, t) for t in (middle, last))
    growth = after - before
    arrived, finished = arrivals / half_s, (arrivals - growth) / half_s
    detail = (
        f"in the second half {arrived:,.2f} req/s arrived and {finished:,.2f} ended; {before} were open in the middle, "
        f"{after} at the last arrival"
    )
    served = _served(ended, start, last)
    slow = served is not None and served < LEAST_SERVED
    if slow:
        detail = f"{detail}; {served:.0%} of the rate was completed"
    takes_s, later_s = _quarter_s(ended, start, last, 0), _quarter_s(ended, start, last, 3)
    limit = max(MAX_GROWTH * arrivals, SIGMAS * math.sqrt(max(0, before) + max(0, after)))
    behind = slow or growth > limit
    short = half_s < SETTLED * takes_s
    rising = later_s >= RISING * (takes_s if calm_s is None else min(takes_s, calm_s))
    if short and not (behind and rising):
        why = f"requests take {takes_s:.3g} s, half of the schedule {half_s:.3g} s: too short to tell"
        why += f", --num-prompts {math.ceil(len(ended) * SETTLED * takes_s / half_s)} may do"
        return Backlog(None, arrived, finished, growth, f"{detail}; {why}")
    return Backlog(not behind, arrived, finished, growth, detail)


def _served(ended: Sequence[RequestRecord], start: int, last: int) -> float | None:
    """Rate of completion ÷ rate of arrival, from the first arrival to the end of nearly all that was completed."""
    ends = sorted(r.end_ns for r in ended if r.outcome == Outcome.COMPLETED and r.end_ns is not None)
    if not ends:
        return None
    count = max(1, int(MOST * len(ends)))
    return count / max(1, ends[count - 1] - start) * (last - start) / len(ended)


def _until(times: Times, moment: int) -> int:
    return int(np.searchsorted(times, moment, side="right"))


def _quarter_s(ended: Sequence[RequestRecord], start: int, last: int, quarter: int) -> float:
    """Median time from due to ended of the requests that were due in one quarter of the schedule; 0 if none was."""
    begin, end = start + quarter * (last - start) // 4, start + (quarter + 1) * (last - start) // 4
    times = [
        r.end_ns - r.scheduled_ns
        for r in ended
        if r.scheduled_ns is not None and r.end_ns is not None and begin <= r.scheduled_ns <= end
    ]
    return float(np.median(times)) / 1e9 if times else 0.0
