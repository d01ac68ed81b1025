"""One rank's own books: what it voted, which rounds it knows to be overdue, which epochs are over, and the order in
which it applied commits."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from atom.engine.transfer.errors import AgreementFullError, ProtocolError, VoteError
from atom.engine.transfer.outcome import Commit, Outcome, Round

__all__ = ["Counters", "Ledger"]

_APPLIED: Final = struct.Struct("<QQQB")


@dataclass(slots=True)
class Counters:
    """What an agreement did on this rank."""

    votes: int = 0
    timeouts: int = 0
    suppressed_timeouts: int = 0
    """Proposals that were not published, because transfers in flight cannot be cancelled."""
    commits: int = 0
    sent: int = 0
    received: int = 0
    polls: int = 0
    inside_ns: int = 0
    """Time inside publish and poll; with `blocking.py` the wait for the others is in it."""
    longest_gap_ns: int = 0
    """Longest time between two polls."""
    abandoned: int = 0
    """Own votes that were never committed, at the close."""


class Ledger:
    """Enforces what a rank may publish and apply. Votes are immutable for an epoch, epochs of a request only grow."""

    def __init__(self, max_open_rounds: int, max_finished_epochs: int) -> None:
        self._max_open = max_open_rounds
        self._max_finished = max_finished_epochs
        self._votes: dict[Round, tuple[Outcome, int]] = {}
        self._proposed: set[Round] = set()
        self._overdue: dict[Round, None] = {}
        self._finished: OrderedDict[int, tuple[int, Outcome]] = OrderedDict()
        self._next_sequence = 0
        self._digest = hashlib.sha256()

    @property
    def open_rounds(self) -> int:
        return len(self._votes)

    @property
    def next_sequence(self) -> int:
        return self._next_sequence

    def vote(self, round_: Round, outcome: Outcome, now_ns: int) -> bool:
        """Whether the vote is a new one. VoteError for a changed one or an epoch that is over."""
        earlier = self._votes.get(round_)
        if earlier is not None:
            if earlier[0] is not outcome:
                raise VoteError(f"{round_}: voted {earlier[0].name} before, and now {outcome.name}")
            return False
        last = self._finished.get(round_.request)
        if last is not None and round_.epoch <= last[0]:
            if round_.epoch == last[0] and outcome is last[1]:
                return False
            raise VoteError(f"{round_} is over: a reused request id needs an epoch after {last[0]}")
        if len(self._votes) >= self._max_open:
            raise AgreementFullError(f"{len(self._votes)} rounds are open; {round_} has to wait for a commit")
        self._votes[round_] = (outcome, now_ns)
        return True

    def take_back(self, round_: Round) -> None:
        """The vote was not sent after all."""
        del self._votes[round_]

    def propose(self, round_: Round) -> bool:
        """Whether this timeout is a new one. VoteError after the own vote."""
        if round_ in self._votes:
            raise VoteError(
                f"{round_}: a timeout must come before the own vote, which was {self._votes[round_][0].name}"
            )
        last = self._finished.get(round_.request)
        if last is not None and round_.epoch <= last[0]:
            raise VoteError(f"{round_} is over: no timeout can be proposed for it")
        if round_ in self._proposed:
            return False
        if len(self._proposed) >= self._max_open:
            raise AgreementFullError(f"{len(self._proposed)} timeouts are open; {round_} has to wait for a commit")
        self._proposed.add(round_)
        return True

    def learn_overdue(self, round_: Round) -> bool:
        """A timeout that all are told of; whether it is news."""
        if round_ in self._overdue:
            return False
        self._overdue[round_] = None
        return True

    def apply(self, commit: Commit) -> None:
        """The next commit. ProtocolError if it is not the next one, or if this rank never voted."""
        if commit.sequence != self._next_sequence:
            raise ProtocolError(f"commit {commit.sequence} of {commit.round} where {self._next_sequence} is the next")
        own = self._votes.pop(commit.round, None)
        if own is None:
            raise ProtocolError(f"commit of {commit.round}, in which this rank has not voted")
        self._next_sequence += 1
        self._proposed.discard(commit.round)
        self._overdue.pop(commit.round, None)
        self._finished[commit.round.request] = (commit.round.epoch, own[0])
        self._finished.move_to_end(commit.round.request)
        if len(self._finished) > self._max_finished:
            self._finished.popitem(last=False)
        self._digest.update(_APPLIED.pack(commit.sequence, *commit.round, commit.outcome))

    def oldest_vote(self) -> tuple[Round, int] | None:
        """The own vote that waits longest for its commit, and when it was made."""
        for round_, (_, voted_ns) in self._votes.items():
            return round_, voted_ns
        return None

    def abandon(self) -> int:
        """Forget what is open, at the close; returns how many votes that were."""
        abandoned = len(self._votes)
        self._votes.clear()
        self._proposed.clear()
        self._overdue.clear()
        return abandoned

    def digest(self) -> str:
        return self._digest.hexdigest()
