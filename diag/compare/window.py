"""The part of a run that is scored: its steady state, and of two runs at the same time the part that both were in.

Closed loop: from the moment that all slots are taken and none of the requests that took them first still waits for its
first token, until the last request is sent. After that the server empties. Open loop: from the moment that requests
have had time to end until the last is sent, without ramps. A run that is hardly ever in steady state is scored as a
whole, and says so: then the figures are those that `atom report` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from atom.bench.records import RequestRecord

__all__ = ["Window", "common_windows", "steady_window"]

LEAST_SHARE: Final = 0.2
"""Of the measured phase: a shorter window is none."""
REACHED: Final = 0.9
"""Of the load's concurrency: where requests end before the last slot is taken the first time, it is never all of it."""
LEAST_REQUESTS: Final = 8
"""Sent in the window: with fewer it is none."""


@dataclass(frozen=True, slots=True)
class Window:
    """[start, end) on the clock of the run's records."""

    start_ns: int
    end_ns: int
    steady: bool
    note: str | None = None
    """Why it is the whole measured phase, if it is."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def holds(self, moment_ns: int | None) -> bool:
        return moment_ns is not None and self.start_ns <= moment_ns < self.end_ns

    def as_dict(self) -> dict[str, Any]:
        return {"start_ns": self.start_ns, "end_ns": self.end_ns, "steady": self.steady, "note": self.note}


def steady_window(records: Sequence[RequestRecord], load: Mapping[str, Any], start_ns: int, end_ns: int) -> Window:
    """Of the measured `records` of one run. `load`: as run.json describes it; [start, end]: the measured phase."""
    whole = Window(start_ns, end_ns + 1, False)  # the last token arrives at its very end
    sent = sorted((one for one in records if one.sent_ns is not None), key=_sent_ns)
    if not sent:
        return replace(whole, note="no request was sent")
    if load.get("ramp") is not None:
        return replace(whole, note="the request rate changes throughout")
    scheduled = any(one.scheduled_ns is not None for one in sent)
    limit: int | None = load.get("concurrency") or load.get("max_concurrency")
    if scheduled:
        begin = _open_loop(sent, start_ns)
    elif limit is None:
        return replace(whole, note="all requests are sent at once")
    else:
        begin = _closed_loop(sent, limit)
    if begin is None:
        return replace(whole, note="the concurrency of the load was never reached")
    window = Window(max(begin, start_ns), min(_sent_ns(sent[-1]), end_ns), True)
    count = sum(window.holds(one.sent_ns) for one in sent)
    if window.seconds < LEAST_SHARE * whole.seconds or count < LEAST_REQUESTS:
        share = max(0.0, window.seconds) / whole.seconds
        requests = "1 request" if count == 1 else f"{count} requests"
        return replace(whole, note=f"steady in {share:.0%} of the measured phase, in which {requests} were sent")
    return window


def common_windows(steady: tuple[Window, Window], whole: tuple[Window, Window]) -> tuple[Window, Window]:
    """Of two runs at the same time, on one clock: the intersection of their steady states, for both. `whole`: their
    measured phases, which both are scored on if one of them was hardly in steady state, or not while the other was."""
    first, second = steady
    note = next((one.note for one in steady if not one.steady), None)
    if note is None:
        both = Window(max(first.start_ns, second.start_ns), min(first.end_ns, second.end_ns), True)
        if both.seconds >= LEAST_SHARE * min(first.seconds, second.seconds):
            return both, both
        note = "the two were hardly in steady state at the same time"
    return replace(whole[0], steady=False, note=note), replace(whole[1], steady=False, note=note)


def _sent_ns(record: RequestRecord) -> int:
    assert record.sent_ns is not None
    return record.sent_ns


def _closed_loop(sent: Sequence[RequestRecord], limit: int) -> int | None:
    """When all slots are taken and the requests that took them first have their first token, or have ended."""
    edges = [(_sent_ns(one), 1) for one in sent]
    edges += [(one.end_ns, -1) for one in sent if one.end_ns is not None]
    edges.sort()
    running = np.cumsum([step for _, step in edges])
    slots = int(running.max())
    if slots < REACHED * min(limit, len(sent)):
        return None
    slots = min(slots, limit)
    full = edges[int(np.argmax(running >= slots))][0]
    answered = [one.first_ns if one.first_ns is not None else one.end_ns for one in sent[:slots]]
    return max([full, *(moment for moment in answered if moment is not None)])


def _open_loop(sent: Sequence[RequestRecord], start_ns: int) -> int | None:
    """When requests have had time to end: after the median of their times in the server."""
    times = [one.end_ns - one.sent_ns for one in sent if one.end_ns is not None and one.sent_ns is not None]
    return start_ns + int(np.median(times)) if times else None
