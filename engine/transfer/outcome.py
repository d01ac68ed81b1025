"""How a transfer ended, and which end wins when ranks differ."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Commit", "Outcome", "Round", "dominant"]


class Outcome(IntEnum):
    """A terminal vote. Larger dominates: one cancelled part makes the whole cancelled."""

    COMPLETED = 1
    FAILED = 2
    CANCELLED = 3


class Round(NamedTuple):
    """What is agreed on: one use of a request id. The epoch tells a reused id from its past."""

    request: int
    epoch: int

    def __str__(self) -> str:
        return f"request {self.request} epoch {self.epoch}"


class Commit(NamedTuple):
    """The authoritative end of a round. Every rank applies commits in the order of `sequence`, which has no gaps."""

    sequence: int
    round: Round
    outcome: Outcome


def dominant(votes: Iterable[Outcome], *, timed_out: bool = False) -> Outcome:
    """The outcome of a round in which everybody voted: cancelled > failed > completed. A recorded timeout makes failed
    of what all completed."""
    outcome = max(votes)
    return Outcome.FAILED if timed_out and outcome is Outcome.COMPLETED else outcome
