"""The sender's handle: when a push starts, stops, ends and is quiescent. The bytes are moved by a `Job` of the path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from atom.engine.transfer.data_messages import Message, ended
from atom.engine.transfer.data_path import IN_FLIGHT, Progress, TransferState
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.pool_layout import Slice

__all__ = ["Job", "Link", "Plan", "Push", "terminal"]


class Plan(NamedTuple):
    """What to copy."""

    tag: int
    """Found at every destination block's mark, or nothing is written."""
    slices: Sequence[Slice]
    source_blocks: Sequence[int]
    destination_blocks: Sequence[int]
    completion: Message
    """For the receiver, when every byte is there."""

    @property
    def num_bytes(self) -> int:
        return len(self.source_blocks) * sum(part.length for part in self.slices)


class Job(Protocol):
    """A copy under way."""

    @property
    def complete(self) -> bool:
        """Every byte is there and the completion is said. Implies quiescent; never turns true after `stop`."""

    @property
    def error(self) -> str | None: ...

    @property
    def quiescent(self) -> bool: ...

    def advance(self) -> None:
        """Move on, without waiting."""

    def stop(self) -> None:
        """Begin no further chunk."""


class Link(Protocol):
    """A way to one peer."""

    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> bool:
        """A job may start."""

    @property
    def lost(self) -> str | None:
        """Why the peer cannot be reached any more."""

    @property
    def silent(self) -> bool:
        """The peer is lost and cannot write either: its process is gone."""

    def send(self, message: Message) -> None:
        """Queue a message. Never waits; a peer that reads nothing becomes lost."""

    def start(self, plan: Plan) -> Job: ...


def terminal(outcome: Outcome, reason: str) -> TransferState:
    return TransferState(Progress.DONE if outcome is Outcome.COMPLETED else Progress.FAILED, reason, outcome)


class Push:
    """A `data_path.Handle`."""

    def __init__(
        self, round_: Round, link: Link, plan: Plan, *, deadline_s: float, now_s: float, poll: Callable[[], None]
    ) -> None:
        self.round = round_
        self.link = link
        self.plan = plan
        self.state = IN_FLIGHT
        self.quiescent = False
        self._allowed_s = deadline_s
        self._deadline = now_s + deadline_s
        self._poll = poll
        self._job: Job | None = None
        self._ending: tuple[Outcome, str] | None = None
        """How it ends once it is quiescent, unless all bytes are there before it could be stopped."""

    def poll(self) -> TransferState:
        self._poll()
        return self.state

    def cancel(self) -> bool:
        return self.stop(Outcome.CANCELLED, "cancelled")

    def stop(self, outcome: Outcome, reason: str) -> bool:
        """Begin to end so; what was said first stays."""
        if self.quiescent or self.state.progress is not Progress.IN_FLIGHT:
            return False
        if self._ending is None:
            self._ending = (outcome, reason)
            if self._job is not None:
                self._job.stop()
                if self._job.complete:
                    self._conclude(Outcome.COMPLETED, "")
                    return False
        return True

    def advance(self, now_s: float) -> None:
        """Called at every poll until quiescent."""
        if self.quiescent:
            return
        self._begin()
        if self._job is not None:
            self._job.advance()
        if self._job is not None and self._job.complete:
            self._conclude(Outcome.COMPLETED, "")
            return
        expired = now_s >= self._deadline
        self._stop_if_broken(expired)
        if self._ending is None or self.quiescent:
            return
        if self._job is None or self._job.quiescent:
            self._conclude(*self._ending)
        elif (expired or self.link.lost is not None) and self.state.progress is Progress.IN_FLIGHT:
            self.state = terminal(*self._ending)  # known to have failed, but bytes may still move

    def _begin(self) -> None:
        if self._job is None and self._ending is None and self.link.ready and self.link.lost is None:
            self._job = self.link.start(self.plan)

    def _stop_if_broken(self, expired: bool) -> None:
        if self._job is not None and self._job.error is not None:
            self.stop(Outcome.FAILED, self._job.error)
        elif self.link.lost is not None:
            self.stop(Outcome.FAILED, self.link.lost)
        elif expired:
            what = "the copy did not end" if self._job is not None else "the receiver did not answer"
            self.stop(Outcome.FAILED, f"{self.round}: {what} within {self._allowed_s:g} s")

    def _conclude(self, outcome: Outcome, reason: str) -> None:
        if self.state.progress is Progress.IN_FLIGHT:
            self.state = terminal(outcome, reason)
        self.quiescent = True
        said = self.state.outcome
        if said is not None and said is not Outcome.COMPLETED and self.link.lost is None:
            self.link.send(ended(self.round, said, self.state.reason))
