"""The scheduler loop of one rank of a context pipeline: run requests stage by stage, look after their transfers, agree
on how these ended, and keep a request's blocks until then."""

from __future__ import annotations

import heapq
import time
from collections import deque
from typing import Final

from atom.engine.probes.micro_batches import EMPTY, MicroBatches
from atom.engine.probes.stage_model import ArmConfig
from atom.engine.transfer.agreement import Agreement
from atom.engine.transfer.back_off import BackOff
from atom.engine.transfer.errors import AgreementStalledError
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.trace import Trace, TraceMode

__all__ = ["ContextRank"]

_SHORTEST_IDLE_S: Final = 0.0002
_LONGEST_IDLE_S: Final = 0.004
_IDLE_SHARE: Final = 0.2
"""Longest pause between two looks at what has arrived, and between two steps that have no request: this share of the
slowest stage's time, but no longer than that. More looks would only cost."""


class ContextRank:
    """What never waits is done while the device runs, as host work is. A blocking agreement is a collective, entered
    after the forward, and every rank takes the same steps: one with nothing to run is passed on empty. Otherwise a rank
    that has nothing to run polls until it has."""

    def __init__(
        self,
        config: ArmConfig,
        rank: int,
        mode: TraceMode,
        flow: MicroBatches,
        agreement: Agreement | None,
        trace: Trace,
    ) -> None:
        self._config, self._rank, self._stage = config, rank, rank // config.tp
        self._flow, self._agreement, self._trace = flow, agreement, trace
        self._idle_s = max(_SHORTEST_IDLE_S, min(_LONGEST_IDLE_S, _IDLE_SHARE * max(config.stage_ms) / 1e3))
        self._micro_batches = config.micro_batches or config.pp
        self._lockstep = mode == "blocking"
        self._authoritative = mode in ("async", "blocking")
        self._taken = 0
        """Requests that came to this rank; they come in the order of their numbers."""
        self._held = 0
        self._ending: list[tuple[int, int]] = []
        """Heap of (when it ends, number) of the transfers under way; ones that are stuck are only in `_open`."""
        self._open: dict[Round, int] = {}
        """Transfers under way → number."""
        self._deadlines: deque[tuple[int, Round]] = deque()
        self._cancelling: dict[Round, int] = {}
        """Transfers that are being cancelled → when they are quiet."""
        self._overdue: set[Round] = set()
        """Rounds that are known to be overdue and not concluded."""
        self._begin_ns = self._progress_ns = time.monotonic_ns()
        self.concluded = 0
        self.completed = 0
        self.released_before_commit = 0

    def run(self) -> None:
        """Until every request is concluded. AgreementError if that cannot be."""
        self._begin_ns = self._progress_ns = time.monotonic_ns()
        while self.concluded < self._config.requests:
            number = self._next_in_lockstep() if self._lockstep else self._next()
            if number == EMPTY:
                self._flow.send(EMPTY)
            elif number is not None:
                self._forward(number)
            if self._lockstep:
                self._look_after_transfers()

    # Requests

    def _arrived(self) -> int | None:
        """A request to run, or the empty step of a stage before."""
        if self._flow.is_first:
            room = self._taken - self.concluded < self._config.depth
            admitted = room and self._taken < self._config.requests and self._flow.on_their_way < self._micro_batches
            return self._taken if admitted else None
        return self._flow.take() if self._lockstep or self._taken < self._config.requests else None

    def _next(self) -> int | None:
        """The next request; None when all are concluded. Polls meanwhile."""
        if (number := self._arrived()) is not None:
            return number
        what = "transfer_wait" if self._flow.is_first or self._taken == self._config.requests else "receive"
        back_off = BackOff(self._idle_s)
        self._trace.emit("work_start", what)
        while number is None and self.concluded < self._config.requests:
            if self._look_after_transfers():
                back_off.reset()
            else:
                back_off.pause()
            number = self._arrived()
        self._trace.emit("work_end", what)
        return number

    def _next_in_lockstep(self) -> int:
        """The next request, or an empty step."""
        if (number := self._arrived()) is not None:
            return number
        what = "transfer_wait" if self._flow.is_first else "receive"
        self._trace.emit("work_start", what)
        if self._flow.is_first:
            time.sleep(self._idle_s)
            number = EMPTY
        else:
            back_off = BackOff()
            while (number := self._arrived()) is None:
                back_off.pause()
        self._trace.emit("work_end", what)
        return number

    def _forward(self, number: int) -> None:
        trace, round_ = self._trace, self._config.round(number)
        self._taken += 1
        now_ns = time.monotonic_ns()
        trace.emit_at(self._begin_ns if self._flow.is_first else now_ns, "enqueue", *round_)
        trace.emit_at(now_ns, "activate", *round_)
        self._hold(self._config.blocks)
        trace.emit("work_start", "forward")
        trace.emit("forward_start", *round_)
        until_s = time.monotonic() + self._config.forward_s(number, self._stage)
        if not self._lockstep:
            self._look_after_transfers()
        time.sleep(max(0.0, until_s - time.monotonic()))
        trace.emit("forward_end", *round_)
        trace.emit("work_end", "forward")
        self._flow.send(number)
        self._submit(number, round_)

    def _hold(self, blocks: int) -> None:
        self._held += blocks
        self._trace.emit("held", self._held)

    # Transfers

    def _submit(self, number: int, round_: Round) -> None:
        now_ns = time.monotonic_ns()
        self._trace.emit_at(now_ns, "send_submit", *round_)
        self._open[round_] = number
        seconds = self._config.transfer(number, self._rank).seconds
        if seconds != float("inf"):
            heapq.heappush(self._ending, (now_ns + int(seconds * 1e9), number))
        self._deadlines.append((now_ns + int(self._config.timeout_ms * 1e6), round_))
        if round_ in self._overdue:
            self._cancel(round_)

    def _look_after_transfers(self) -> bool:
        """See how transfers ended and say so; conclude what all have agreed on. Whether there was anything."""
        before = self.concluded
        now_ns = time.monotonic_ns()
        self._see_ends(now_ns)
        self._see_overdue(now_ns)
        if self._agreement is not None:
            progress = self._agreement.poll()
            for round_ in progress.timed_out:
                self._overdue.add(round_)
                self._cancel(round_)
            for _, round_, outcome in progress.commits:
                self._conclude(round_, outcome)
        if self.concluded > before:
            self._progress_ns = now_ns
        elif now_ns - self._progress_ns > self._config.deadline_s * 1e9:
            raise AgreementStalledError(
                f"rank {self._rank} concluded no request for {self._config.deadline_s:g} s; "
                f"{self.concluded} of {self._config.requests} are concluded"
            )
        return self.concluded > before

    def _see_ends(self, now_ns: int) -> None:
        ending = self._ending
        while ending and ending[0][0] <= now_ns:
            end_ns, number = heapq.heappop(ending)
            round_ = self._config.round(number)
            if self._open.get(round_) == number and round_ not in self._cancelling:
                self._ended(round_, end_ns, self._config.transfer(number, self._rank).outcome)
        for round_, quiet_ns in list(self._cancelling.items()):
            if quiet_ns <= now_ns:
                del self._cancelling[round_]
                self._ended(round_, quiet_ns, Outcome.FAILED)

    def _see_overdue(self, now_ns: int) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now_ns:
            _, round_ = deadlines.popleft()
            if round_ not in self._open or round_ in self._cancelling:
                continue
            if self._agreement is not None:
                self._agreement.publish_timeout(round_)  # all cancel when all know
            else:
                self._trace.emit("timeout", *round_)
                self._cancel(round_)

    def _cancel(self, round_: Round) -> None:
        """Begin to cancel a transfer. It still reads the blocks until it is quiet."""
        if round_ in self._open and round_ not in self._cancelling:
            self._cancelling[round_] = time.monotonic_ns() + int(self._config.quiesce_ms * 1e6)

    def _ended(self, round_: Round, end_ns: int, outcome: Outcome) -> None:
        self._trace.emit_at(end_ns, "transfer_done", *round_)
        del self._open[round_]
        if self._agreement is not None:
            self._agreement.publish(round_, outcome)
        else:
            self._trace.emit("commit", *round_, self.concluded, outcome)
            self._conclude(round_, outcome)

    def _conclude(self, round_: Round, outcome: Outcome) -> None:
        """Change the request's state and give its blocks back."""
        self._trace.emit("apply", *round_)
        self._trace.emit("release", *round_, self._config.blocks)
        self.released_before_commit += not self._authoritative
        self._hold(-self._config.blocks)
        self._trace.emit("cleanup", *round_)
        self._overdue.discard(round_)
        self.concluded += 1
        self.completed += outcome is Outcome.COMPLETED
