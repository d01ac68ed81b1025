"""The votes of open rounds, without any input or output: who has voted, who proposed a timeout, what is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atom.engine.transfer.errors import VoteError
from atom.engine.transfer.outcome import Outcome, Round, dominant

__all__ = ["Ready", "VoteReducer"]


@dataclass(slots=True)
class _Open:
    opened_ns: int
    votes: dict[int, Outcome] = field(default_factory=dict)
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """What can be said now: timeouts that were not reported yet, and rounds that everybody voted in, in the order in
    which their last vote came."""

    timed_out: list[Round]
    decided: list[tuple[Round, Outcome]]


class VoteReducer:
    """Reduces the votes of `participants` (rank numbers). Rounds open with their first vote or timeout."""

    def __init__(self, participants: Sequence[int]) -> None:
        if not participants or len(set(participants)) != len(participants):
            raise ValueError("an agreement needs participants, each once")
        self.participants = frozenset(participants)
        self._open: dict[Round, _Open] = {}
        self._timeouts: list[Round] = []
        self._complete: list[Round] = []

    def __len__(self) -> int:
        return len(self._open)

    def vote(self, rank: int, round_: Round, outcome: Outcome, now_ns: int = 0) -> None:
        """Record a terminal vote. The same one again is ignored; VoteError for another one, or an unknown rank."""
        one = self._of(rank, round_, now_ns)
        earlier = one.votes.get(rank)
        if earlier is outcome:
            return
        if earlier is not None:
            raise VoteError(f"rank {rank} voted {earlier.name} for {round_} and now {outcome.name}")
        one.votes[rank] = outcome
        if len(one.votes) == len(self.participants):
            self._complete.append(round_)

    def propose_timeout(self, rank: int, round_: Round, now_ns: int = 0) -> None:
        """Record that `rank` sees the round as overdue: sticky, and reported once. VoteError after its own vote."""
        one = self._of(rank, round_, now_ns)
        if rank in one.votes:
            raise VoteError(f"rank {rank} proposes a timeout for {round_} after its vote {one.votes[rank].name}")
        if not one.timed_out:
            one.timed_out = True
            self._timeouts.append(round_)

    @property
    def has_ready(self) -> bool:
        return bool(self._complete or self._timeouts)

    def take_ready(self) -> Ready:
        """What can be said since the last time. Decided rounds are forgotten here."""
        timed_out, self._timeouts = self._timeouts, []
        complete, self._complete = self._complete, []
        decided = []
        for round_ in complete:
            one = self._open.pop(round_)
            decided.append((round_, dominant(one.votes.values(), timed_out=one.timed_out)))
        return Ready(timed_out, decided)

    def missing(self, round_: Round) -> list[int]:
        """Participants that have not voted in a round; none if it is not open."""
        one = self._open.get(round_)
        return [] if one is None else sorted(self.participants - one.votes.keys())

    def oldest(self) -> tuple[Round, int] | None:
        """The open round that waits longest, and when it opened."""
        for round_, one in self._open.items():  # dicts keep insertion order, and rounds open in order of time
            return round_, one.opened_ns
        return None

    def clear(self) -> int:
        """Forget all open rounds; returns how many there were."""
        abandoned = len(self._open)
        self._open.clear()
        self._timeouts.clear()
        self._complete.clear()
        return abandoned

    def _of(self, rank: int, round_: Round, now_ns: int) -> _Open:
        if rank not in self.participants:
            raise VoteError(f"rank {rank} is no participant: {', '.join(map(str, sorted(self.participants)))}")
        one = self._open.get(round_)
        if one is None:
            one = self._open[round_] = _Open(now_ns)
        return one
