"""Every request that was started has to end in one of three ways, and be recorded: completed, failed or cancelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atom.bench.records import Outcome

__all__ = ["Counts"]


@dataclass(frozen=True, slots=True)
class Counts:
    """The measured requests of a run: as the clients counted those they started, as the records say how they ended."""

    started: int
    sent: int
    completed: int
    failed: int
    cancelled: int

    @classmethod
    def of(cls, outcomes: Mapping[str, int], *, started: int, sent: int | None = None) -> Counts:
        """`outcomes`: records by `Outcome`. `sent`: of those started, the ones whose bytes went out; None: all."""
        return cls(
            started=started,
            sent=started if sent is None else sent,
            completed=outcomes.get(Outcome.COMPLETED, 0),
            failed=outcomes.get(Outcome.FAILED, 0),
            cancelled=outcomes.get(Outcome.CANCELLED, 0),
        )

    @property
    def recorded(self) -> int:
        return self.completed + self.failed + self.cancelled

    @property
    def adds_up(self) -> bool:
        """completed + failed + cancelled = started. Nothing is to be concluded from it in a run that did not end."""
        return self.recorded == self.started

    @property
    def sum(self) -> str:
        """The left side, in words."""
        return f"{self.completed} completed + {self.failed} failed + {self.cancelled} cancelled = {self.recorded}"

    @property
    def equation(self) -> str:
        return f"{self.sum}, started {self.started}"
