"""The interface of an agreement, and what its three implementations share the words for.

A rank publishes how its part of a round ended, polls at every scheduler step, and changes a request's state or frees a
retained block only for a commit that a poll returned. Nothing here waits, but the poll of `blocking.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from atom.engine.transfer.errors import AgreementStalledError
from atom.engine.transfer.ledger import Counters
from atom.engine.transfer.outcome import Commit, Outcome, Round

__all__ = ["MODES", "Agreement", "Limits", "Mode", "Progress", "close"]

Mode = Literal["async", "blocking", "local-only"]
MODES: Final[tuple[Mode, ...]] = ("async", "blocking", "local-only")
_FIRST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What bounds an agreement on one rank."""

    max_open_rounds: int = 65_536
    """Rounds this rank voted in that are not committed; more raise AgreementFullError. At least as many as requests are
    admitted at a time: ranks that fill up with different rounds wait for each other."""
    max_pending_sends: int = 4_096
    """Sends that the transport may have in flight; further packets wait here, in order."""
    max_messages_per_poll: int = 256
    max_finished_epochs: int = 65_536
    """Request ids whose last epoch is remembered."""
    idle_deadline_s: float = 600.0
    """How long a round may stay open before every rank fails together."""
    close_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a poll learned."""

    commits: list[Commit] = field(default_factory=list)
    """To be applied in this order."""
    timed_out: list[Round] = field(default_factory=list)
    """Overdue rounds, each once: retry the local cancellation on every poll until the commit. They free nothing."""

    def __bool__(self) -> bool:
        return bool(self.commits or self.timed_out)


class Agreement(Protocol):
    """One rank's end of an agreement. Not for several threads at once."""

    @property
    def mode(self) -> Mode: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def counters(self) -> Counters: ...

    @property
    def open_rounds(self) -> int:
        """Rounds this rank voted in that are not committed."""

    def publish(self, round_: Round, outcome: Outcome) -> None:
        """This rank's terminal vote. The same one again is ignored. VoteError for another one or a finished epoch,
        AgreementFullError beyond the bound, AgreementClosedError once the close began."""

    def publish_timeout(self, round_: Round) -> bool:
        """Propose that the round is overdue, before the own vote. False, and nothing sent, where transfers in flight
        cannot be cancelled."""

    def poll(self) -> Progress: ...

    def begin_close(self) -> None:
        """Publish no more. Poll on until `closed`."""

    @property
    def closed(self) -> bool: ...

    def digest(self) -> str:
        """SHA-256 of the applied commits, in their order: equal on all ranks that applied the same."""


def close(
    agreement: Agreement,
    deadline_s: float,
    *,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Progress:
    """Close and wait until all have. Returns what was still decided; AgreementStalledError after `deadline_s`."""
    agreement.begin_close()
    commits: list[Commit] = []
    timed_out: list[Round] = []
    until, pause = now_s() + deadline_s, _FIRST_PAUSE_S
    while True:
        progress = agreement.poll()
        commits += progress.commits
        timed_out += progress.timed_out
        if agreement.closed:
            return Progress(commits, timed_out)
        if now_s() >= until:
            raise AgreementStalledError(
                f"rank {agreement.rank}: the agreement did not close within {deadline_s:g} s; "
                f"{agreement.open_rounds} rounds are open here"
            )
        sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE_S)
