"""Whether the arrival schedule was kept: requested against achieved rate, from the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from atom.bench.records import RequestRecord

__all__ = ["Kept", "kept"]

TOLERANCE: Final = 0.005
"""Of the rate: above this, another load than the one asked for was measured."""
MIN_LATE_S: Final = 0.02
"""A short run's last request may be this late whatever its rate: timers and connections take that long."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A schedule beside what became of it. Rates in requests per second, over the time from the first to the last."""

    requested: float
    achieved: float
    late_s: float
    """How much longer the sending took than the schedule."""
    held_back: int
    """Requests that waited for a slot of `--max-concurrency`."""
    n: int

    @property
    def ok(self) -> bool:
        span = (self.n - 1) / self.requested
        return abs(self.late_s) <= max(TOLERANCE * span, MIN_LATE_S)

    def detail(self) -> str:
        text = (
            f"{self.requested:,.2f} req/s requested, {self.achieved:,.2f} achieved "
            f"({self.achieved / self.requested - 1:+.2%}) over {self.n:,} requests"
        )
        return text + (f"; --max-concurrency held {self.held_back:,} of them back" if self.held_back else "")


def kept(records: Sequence[RequestRecord]) -> Kept | None:
    """None where there was no schedule, or too little of it."""
    sent = [r for r in records if r.scheduled_ns is not None and r.sent_ns is not None]
    if len(sent) < 2:
        return None
    due = np.asarray([r.scheduled_ns for r in sent], dtype=np.int64)
    # Without the time to connect, which is the server's and the network's, and which the first requests have alone.
    went = np.asarray([(r.sent_ns or 0) - (r.connect_ns or 0) for r in sent], dtype=np.int64)
    due_s, went_s = (due - due.min()) / 1e9, (went - due.min()) / 1e9
    planned_s = float(due_s.max())
    if planned_s <= 0:
        return None
    # The slope of sent over due, by least squares: one late connection, also of the first or last request, moves it
    # little, and a client that is late by the same time throughout has sent at the rate asked for.
    stretch = float(np.polyfit(due_s, went_s, 1)[0])
    if stretch <= 0:
        return None
    return Kept(
        requested=(len(sent) - 1) / planned_s,
        achieved=(len(sent) - 1) / planned_s / stretch,
        late_s=(stretch - 1) * planned_s,
        held_back=sum(
            r.ready_ns is not None and r.scheduled_ns is not None and r.ready_ns > r.scheduled_ns for r in sent
        ),
        n=len(sent),
    )
