"""Whether ranks applied the same: what an agreement must keep, and what the local-only mode does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atom.engine.transfer.outcome import Commit, Outcome, Round

__all__ = ["Divergence", "divergence"]


@dataclass(frozen=True, slots=True)
class Divergence:
    unequal: list[Round]
    """Rounds that ranks applied with different outcomes."""
    incomplete: list[Round]
    """Rounds that some ranks applied and others did not."""
    same_order: bool
    """Whether all ranks applied their common rounds in one order."""


def divergence(applied: Sequence[Sequence[Commit]]) -> Divergence:
    """Compare what each rank applied, by rank, each in its own order."""
    outcomes: dict[Round, set[Outcome]] = {}
    ranks: dict[Round, int] = {}
    for log in applied:
        for commit in log:
            outcomes.setdefault(commit.round, set()).add(commit.outcome)
            ranks[commit.round] = ranks.get(commit.round, 0) + 1
    common = {round_ for round_, count in ranks.items() if count == len(applied)}
    orders = {tuple(commit.round for commit in log if commit.round in common) for log in applied}
    return Divergence(
        unequal=sorted(round_ for round_, seen in outcomes.items() if len(seen) > 1),
        incomplete=sorted(set(ranks) - common),
        same_order=len(orders) <= 1,
    )
