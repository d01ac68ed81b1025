"""An agreement whose calls are timed and written to a trace: the same interface around any implementation."""

from __future__ import annotations

import time
from typing import Literal

from atom.engine.transfer.agreement import Agreement, Mode, Progress
from atom.engine.transfer.ledger import Counters
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.trace import Trace

__all__ = ["TracedAgreement"]


class TracedAgreement:
    """Writes the calls of `inner` as those of `group`, and, as asked, the rank's votes and the commits it got.

    A blocking call is written as it begins, so that the file of a rank that hangs ends with where it hangs. Other calls
    are written when they did something; `wait_ns` counts them all.
    """

    def __init__(
        self,
        inner: Agreement,
        trace: Trace,
        *,
        group: Literal["pp", "tp"] = "pp",
        label: Literal["outcome", "readiness"] = "outcome",
        votes: bool = True,
        commits: bool = True,
    ) -> None:
        self._inner, self._trace = inner, trace
        self._group, self._label = group, label
        self._votes, self._commits = votes, commits
        self._blocking = inner.mode == "blocking"
        self._calls = 0
        self._unsaid = 0
        self.wait_ns = 0
        """Time inside the agreement's calls: in blocking mode mostly the wait for others."""

    @property
    def mode(self) -> Mode:
        return self._inner.mode

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def counters(self) -> Counters:
        return self._inner.counters

    @property
    def open_rounds(self) -> int:
        return self._inner.open_rounds

    @property
    def closed(self) -> bool:
        return self._inner.closed

    def digest(self) -> str:
        return self._inner.digest()

    def begin_close(self) -> None:
        self._inner.begin_close()

    def publish(self, round_: Round, outcome: Outcome) -> None:
        before = self.counters.votes
        begin_ns = time.monotonic_ns()
        self._inner.publish(round_, outcome)
        end_ns = time.monotonic_ns()
        if self.counters.votes == before:  # the same vote again
            self._pass(begin_ns, end_ns, said=0)
            return
        if self._votes:
            self._trace.emit_at(begin_ns, "vote", *round_, outcome)
        self._pass(begin_ns, end_ns, said=1)

    def publish_timeout(self, round_: Round) -> bool:
        before = self.counters.timeouts
        begin_ns = time.monotonic_ns()
        published = self._inner.publish_timeout(round_)
        end_ns = time.monotonic_ns()
        said = self.counters.timeouts - before
        if said and self._votes:
            self._trace.emit_at(begin_ns, "timeout", *round_)
        self._pass(begin_ns, end_ns, said)
        return published

    def poll(self) -> Progress:
        begin_ns = time.monotonic_ns()
        entered = self._blocking and not self._inner.closed
        if entered:
            self._trace.emit_at(begin_ns, "agree_enter", self._group, self._label, self._calls)
        progress = self._inner.poll()
        end_ns = time.monotonic_ns()
        if entered:
            self._exit(end_ns, self._unsaid, len(progress.commits))
            self._unsaid = 0
            self.wait_ns += end_ns - begin_ns
            self._calls += 1
        elif not self._blocking:
            self._call(begin_ns, end_ns, 0, len(progress.commits), write=bool(progress))
        if self._commits:
            for sequence, round_, outcome in progress.commits:
                self._trace.emit_at(end_ns, "commit", *round_, sequence, outcome)
        return progress

    def _pass(self, begin_ns: int, end_ns: int, said: int) -> None:
        """A publication: a call of its own, or something to say in the next collective."""
        if self._blocking:
            self._unsaid += said
        else:
            self._call(begin_ns, end_ns, said, 0, write=bool(said))

    def _call(self, begin_ns: int, end_ns: int, said: int, got: int, *, write: bool) -> None:
        self.wait_ns += end_ns - begin_ns
        if write:
            self._trace.emit_at(begin_ns, "agree_enter", self._group, self._label, self._calls)
            self._exit(end_ns, said, got)
        self._calls += 1

    def _exit(self, t_ns: int, said: int, got: int) -> None:
        self._trace.emit_at(t_ns, "agree_exit", self._group, self._label, self._calls, said, got)
