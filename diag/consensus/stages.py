"""What of a pipeline's waits is its structure: stages finish one after the other, so in any meeting the early ones wait
for the late ones by as much as these come later. What is above that came with the arm.

A stage's own offset is what a batch needs to come through: the forward times of the stages between, in the control. It
needs no joined clocks, and has no queue in it. Without a control, an arm's own meetings tell what is in each of them
from what varies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atom.diag.consensus.model import Recording
from atom.diag.consensus.waits import GroupWaits, work_between_calls

__all__ = ["Offsets", "Structure", "own_offsets", "stage_offsets", "structure"]


@dataclass(frozen=True, slots=True)
class Offsets:
    """[waiter][late rank] seconds by which the second one comes later."""

    seconds: dict[tuple[int, int], float]
    basis: str
    """Where they are from, in words."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Of one group's skew, by rank."""

    structural_s: list[float]
    changed_s: list[float]
    basis: str
    controlled: bool
    """Whether the offsets are a control's; else `changed_s` is what varies from meeting to meeting."""


def stage_offsets(control: Recording) -> Offsets | None:
    """From what a control recorded of its forwards; None without any."""
    stage = {trace.rank: trace.stage for trace in control.ranks}
    pieces: dict[int, list[float]] = {}
    for trace in control.ranks:
        for work in work_between_calls(trace):
            if work.what == "forward":
                pieces.setdefault(trace.stage, []).append((work.end - work.start) / 1e9)
    if not pieces:
        return None
    forward = {at: float(np.median(some)) for at, some in pieces.items()}
    sums = {
        (waiter, late): sum(one for at, one in forward.items() if stage[waiter] < at <= stage[late])
        for waiter in stage
        for late in stage
        if waiter != late
    }
    return Offsets(sums, f"forward times of the stages between, in {control.label}")


def own_offsets(waits: GroupWaits) -> Offsets | None:
    """The median skew of each pair of waiter and late rank over the meetings themselves."""
    gaps: dict[tuple[int, int], list[float]] = {}
    for meeting in waits.meetings:
        least = min(meeting.waits_s)
        for rank, wait in zip(meeting.members, meeting.waits_s, strict=True):
            if rank != meeting.culprit:
                gaps.setdefault((rank, meeting.culprit), []).append(wait - least)
    if not gaps:
        return None
    medians = {pair: float(np.median(some)) for pair, some in gaps.items()}
    return Offsets(medians, "the median of this run's own calls")


def structure(waits: GroupWaits, offsets: Offsets, *, controlled: bool) -> Structure:
    """The part of every meeting's skew that `offsets` explains, and the rest."""
    size = len(waits.late)
    structural, changed = [0.0] * size, [0.0] * size
    for meeting in waits.meetings:
        least = min(meeting.waits_s)
        for rank, wait in zip(meeting.members, meeting.waits_s, strict=True):
            if rank == meeting.culprit:
                continue
            skew = wait - least
            explained = min(skew, offsets.seconds.get((rank, meeting.culprit), 0.0))
            structural[rank] += explained
            changed[rank] += skew - explained
    return Structure(structural, changed, offsets.basis, controlled)
