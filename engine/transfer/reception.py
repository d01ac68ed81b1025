"""The receiver's handle: which senders of a round have said that they touch its blocks no more, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from atom.engine.transfer.data_messages import Revoke
from atom.engine.transfer.data_path import IN_FLIGHT, Progress, TransferState
from atom.engine.transfer.outcome import Outcome, Round, dominant
from atom.engine.transfer.push_state import Link, terminal

__all__ = ["Reception"]


class Reception:
    """A `data_path.Handle`. One failed part makes the whole failed, and the other senders are told to stop."""

    def __init__(
        self,
        round_: Round,
        blocks: Sequence[int],
        links: Mapping[str, Link],
        sources: Sequence[str],
        *,
        deadline_s: float,
        now_s: float,
        poll: Callable[[], None],
        forbid: Callable[[Sequence[int]], None],
    ) -> None:
        """`links`: the senders that were let in, kept up by the path. `forbid` takes the round's marks off the blocks;
        what starts to write after it writes nothing."""
        self.round = round_
        self.blocks = blocks
        self.state = IN_FLIGHT
        self.quiescent = False
        self._links = links
        self._ends: dict[str, Outcome | None] = dict.fromkeys(sources)
        self._reason = ""
        self._allowed_s = deadline_s
        self._deadline = now_s + deadline_s
        self._poll = poll
        self._forbid = forbid
        self._ending: Outcome | None = None

    def poll(self) -> TransferState:
        self._poll()
        return self.state

    def cancel(self) -> bool:
        return self._stop(Outcome.CANCELLED, "cancelled")

    def source_ended(self, source: str, outcome: Outcome, reason: str) -> bool:
        """A sender's word. False when it is none of the round's, or has said so before."""
        if self._ends.get(source, Outcome.FAILED) is not None or self.quiescent:
            return False
        self._ends[source] = outcome
        if outcome is not Outcome.COMPLETED:
            self._stop(outcome, reason)
        return True

    def advance(self, now_s: float) -> None:
        """Called at every poll until quiescent."""
        if self.quiescent:
            return
        unreachable = self._look_for_lost()
        expired = now_s >= self._deadline
        waiting = self._waiting()
        if waiting and expired:
            silent = ", ".join(name[:8] for name in waiting)
            self._stop(Outcome.FAILED, f"{self.round}: no word from {silent} within {self._allowed_s:g} s")
        if not self._waiting():
            self._conclude()
        elif self._ending is not None and (expired or unreachable) and self.state.progress is Progress.IN_FLIGHT:
            self.state = terminal(self._ending, self._reason)

    def _waiting(self) -> list[str]:
        return [name for name, outcome in self._ends.items() if outcome is None]

    def _look_for_lost(self) -> bool:
        """Whether a sender is lost that may still write."""
        unreachable = False
        for name in self._waiting():
            link = self._links.get(name)
            if link is None or link.lost is None:
                continue
            if link.silent:
                self._ends[name] = Outcome.FAILED
            else:
                unreachable = True
            self._stop(Outcome.FAILED, link.lost)
        return unreachable

    def _stop(self, outcome: Outcome, reason: str) -> bool:
        if self.quiescent or self.state.progress is not Progress.IN_FLIGHT:
            return False
        if self._ending is None:
            self._ending, self._reason = outcome, reason
            self._forbid(self.blocks)
            for name in self._waiting():
                link = self._links.get(name)
                if link is None:  # was never let in, so it has not begun, and its marks are gone
                    self._ends[name] = outcome
                elif link.lost is None:
                    link.send(Revoke(*self.round))
        return True

    def _conclude(self) -> None:
        self._forbid(self.blocks)
        if self.state.progress is Progress.IN_FLIGHT:
            outcome = dominant(end for end in self._ends.values() if end is not None)
            if (
                self._ending is not None and outcome is not Outcome.COMPLETED
            ):  # all may have completed before they heard
                outcome = max(outcome, self._ending)
            self.state = terminal(outcome, "" if outcome is Outcome.COMPLETED else self._reason)
        self.quiescent = True
