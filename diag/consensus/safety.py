"""Whether ranks applied the same, in the same order, and freed nothing before they might."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from atom.diag.consensus.lifecycle import rounds_of
from atom.diag.consensus.model import RankTrace, Recording, Round

__all__ = ["Safety", "check_safety"]

_APPLIED: Final = struct.Struct("<QQQB")
MOST_NAMED: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Safety:
    """Of one recording."""

    decided: int
    """Rounds that any rank committed."""
    divergent: tuple[Round, ...]
    """Rounds that ranks committed with different outcomes."""
    incomplete: tuple[Round, ...]
    """Rounds that some ranks committed and others, which came to their end, did not."""
    same_order: bool | None
    """Whether all ranks committed their common rounds in one order; None with fewer than two ranks that recorded
    commits."""
    digests: dict[int, str]
    """Rank → SHA-256 of what it applied, as it said, or of what was recorded."""
    released_before_commit: int | None
    """Requests whose blocks a rank gave back before the authoritative commit: without one on that rank, or, where the
    clocks are shared, before every rank had voted. Most of what was recorded and what the ranks said. None: neither
    releases were recorded nor anything said; 0 where nothing is agreed on."""
    abandoned: int | None
    pending_sends: int | None
    """At the close, over all ranks; None: not said."""

    @property
    def diverged(self) -> bool:
        return bool(self.divergent)


def check_safety(recording: Recording) -> Safety:
    logs = {trace.rank: _log(trace) for trace in recording.ranks}
    outcomes: dict[Round, set[str]] = {}
    ranks: dict[Round, set[int]] = {}
    for rank, log in logs.items():
        for _, round_, outcome in log:
            outcomes.setdefault(round_, set()).add(outcome)
            ranks.setdefault(round_, set()).add(rank)
    ended = {trace.rank for trace in recording.ranks if trace.end is not None and not trace.dropped}
    committing = {rank for rank, log in logs.items() if log}
    common = {round_ for round_, some in ranks.items() if some >= committing}
    orders = {tuple(round_ for _, round_, _ in logs[rank] if round_ in common) for rank in committing}
    return Safety(
        decided=len(ranks),
        divergent=tuple(sorted((round_ for round_, some in outcomes.items() if len(some) > 1), key=str)),
        incomplete=tuple(sorted((round_ for round_, some in ranks.items() if ended & committing - some), key=str)),
        same_order=len(orders) <= 1 if len(committing) > 1 else None,
        digests={
            trace.rank: digest for trace in recording.ranks if (digest := _digest(trace, logs[trace.rank])) is not None
        },
        released_before_commit=_released_early(recording),
        abandoned=_sum(recording, "abandoned"),
        pending_sends=_sum(recording, "pending_sends"),
    )


Log = Sequence[tuple[int, Round, str]]


def _log(trace: RankTrace) -> Log:
    """(sequence, round, outcome) of the commits, in the order in which they were seen."""
    return [
        (event.value, event.round, event.outcome)
        for event in trace.requests
        if event.name == "commit" and event.outcome is not None and event.value is not None
    ]


def _digest(trace: RankTrace, log: Log) -> str | None:
    if trace.end is not None and trace.end.digest:
        return trace.end.digest
    codes = {"completed": 1, "failed": 2, "cancelled": 3}
    sha = hashlib.sha256()
    for sequence, round_, outcome in log:
        if not isinstance(round_.request, int):
            return None
        sha.update(_APPLIED.pack(sequence, round_.request, round_.epoch, codes[outcome]))
    return sha.hexdigest() if log else None


def _released_early(recording: Recording) -> int | None:
    times = {trace.rank: rounds_of(trace) for trace in recording.ranks}
    last_vote: dict[Round, int] = {}
    if recording.one_clock:
        for rounds in times.values():
            for round_, one in rounds.items():
                if (t := one.get("vote")) is not None:
                    last_vote[round_] = max(last_vote.get(round_, t), t)
    early, released = set(), False
    for trace in recording.ranks:
        if trace.mode in ("none", "collectives"):
            continue
        for round_, one in times[trace.rank].items():
            release, commit = one.get("release"), one.get("commit")
            released = released or release is not None
            if release is None or (commit is None and trace.dropped):  # a commit that was not recorded is not missing
                continue
            if commit is None or release < commit or release < last_vote.get(round_, release):
                early.add(round_)
    ends = [trace.end for trace in recording.ranks if trace.end is not None]
    said = [one.released_before_commit for one in ends if one.released_before_commit is not None]
    if not released and not said and recording.mode != "none":
        return None
    return max([len(early), *said])


def _sum(recording: Recording, name: str) -> int | None:
    said = [getattr(trace.end, name) for trace in recording.ranks if trace.end is not None]
    known = [one for one in said if one is not None]
    return sum(known) if known else None
