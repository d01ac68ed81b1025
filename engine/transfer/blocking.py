"""The blocking agreement: every poll is a collective that all ranks enter, also with nothing to say.

It is right, and it is slow where ranks come to their polls at different times: each call lasts until the last rank has
entered, and the wait of the early ones is lost. It is what runs outside the scope that `scope.py` qualifies.
"""

from __future__ import annotations

from atom.engine.transfer.agreement import Limits, Mode, Progress
from atom.engine.transfer.errors import AgreementClosedError, AgreementError, AgreementStalledError, ProtocolError
from atom.engine.transfer.ledger import Counters, Ledger
from atom.engine.transfer.outcome import Commit, Outcome, Round
from atom.engine.transfer.reducer import VoteReducer
from atom.engine.transfer.transport import Clock, Collective
from atom.engine.transfer.wire import HEAD_BYTES, Kind, Packet, pack, unpack

__all__ = ["BlockingAgreement"]


class BlockingAgreement:
    """Every rank holds the same votes and reduces them alike, so there is no coordinator."""

    mode: Mode = "blocking"

    def __init__(
        self,
        collective: Collective,
        clock: Clock,
        *,
        cancel_in_flight: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self.rank, self.size = collective.rank, collective.size
        self.counters = Counters()
        self._limits = limits or Limits()
        self._collective, self._clock = collective, clock
        self._cancel_in_flight = cancel_in_flight
        self._ledger = Ledger(self._limits.max_open_rounds, self._limits.max_finished_epochs)
        self._reducer = VoteReducer(range(self.size))
        self._unsaid: list[Packet] = []
        self._closing = self._closed = False
        self._failure: AgreementError | None = None
        self._last_poll_ns = clock.now_ns()

    @property
    def open_rounds(self) -> int:
        return self._ledger.open_rounds

    @property
    def closed(self) -> bool:
        return self._closed

    def digest(self) -> str:
        return self._ledger.digest()

    def publish(self, round_: Round, outcome: Outcome) -> None:
        now_ns = self._begin()
        if self._ledger.vote(round_, outcome, now_ns):
            self.counters.votes += 1
            self._unsaid.append(Packet(Kind.VOTE, self.rank, round_, outcome))

    def publish_timeout(self, round_: Round) -> bool:
        self._begin()
        if not self._cancel_in_flight:
            self.counters.suppressed_timeouts += 1
            return False
        if self._ledger.propose(round_):
            self.counters.timeouts += 1
            self._unsaid.append(Packet(Kind.TIMEOUT, self.rank, round_))
        return True

    def poll(self) -> Progress:
        """Enter the collective, wait for everyone, and reduce what all said."""
        self._raise_failure()
        if self._closed:
            return Progress()
        begin_ns = self._clock.now_ns()
        self.counters.polls += 1
        self.counters.longest_gap_ns = max(self.counters.longest_gap_ns, begin_ns - self._last_poll_ns)
        self._last_poll_ns = begin_ns
        said, self._unsaid = self._unsaid, []
        if self._closing:
            said.append(Packet(Kind.CLOSE, self.rank))
        if (stalled := self._stalled(begin_ns)) is not None:
            said.append(Packet(Kind.FAIL, self.rank, stalled))
        gathered = self._collective.allgather(b"".join(map(pack, said)))
        self.counters.sent += 1
        self.counters.received += self.size
        try:
            closing = self._record(gathered, begin_ns)
            progress = self._apply()
        except AgreementError as error:  # all ranks have gathered the same, so all of them come here
            self._failure = error
            raise
        if closing == self.size:
            self._reducer.clear()
            self.counters.abandoned = self._ledger.abandon()
            self._closed = True
        self.counters.inside_ns += self._clock.now_ns() - begin_ns
        return progress

    def begin_close(self) -> None:
        self._closing = True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _begin(self) -> int:
        self._raise_failure()
        if self._closing:
            raise AgreementClosedError(f"rank {self.rank}: the agreement is closing, nothing more can be published")
        return self._clock.now_ns()

    def _record(self, gathered: list[bytes], now_ns: int) -> int:
        """Put down what every rank said, by rank; returns how many of them are closing."""
        closing = 0
        for rank, data in enumerate(gathered):
            if len(data) % HEAD_BYTES:
                raise ProtocolError(f"rank {rank} said {len(data)} bytes, which are no packets")
            for start in range(0, len(data), HEAD_BYTES):
                packet = unpack(data[start : start + HEAD_BYTES])
                if packet.source != rank:
                    raise ProtocolError(f"rank {rank} spoke as rank {packet.source}")
                if packet.kind is Kind.VOTE:
                    assert packet.outcome is not None
                    self._reducer.vote(rank, packet.round, packet.outcome, now_ns)
                elif packet.kind is Kind.TIMEOUT:
                    self._reducer.propose_timeout(rank, packet.round, now_ns)
                elif packet.kind is Kind.CLOSE:
                    closing += 1
                elif packet.kind is Kind.FAIL:
                    raise self._stall(packet.round, rank)
                else:
                    raise ProtocolError(f"rank {rank} said a {packet.kind.name}")
        return closing

    def _apply(self) -> Progress:
        ready = self._reducer.take_ready()
        timed_out = [round_ for round_ in ready.timed_out if self._ledger.learn_overdue(round_)]
        commits = []
        for round_, outcome in ready.decided:
            commit = Commit(self._ledger.next_sequence, round_, outcome)
            self._ledger.apply(commit)
            self.counters.commits += 1
            commits.append(commit)
        return Progress(commits, timed_out)

    def _stalled(self, now_ns: int) -> Round | None:
        """A round that is open for too long by this rank's clock. All hear of it in the same collective, and fail there
        together: a rank that left alone would leave the others waiting in the next one."""
        oldest = self._reducer.oldest()
        overdue = oldest is not None and now_ns - oldest[1] > self._limits.idle_deadline_s * 1e9
        return oldest[0] if oldest is not None and overdue else None

    def _stall(self, round_: Round, rank: int) -> AgreementStalledError:
        missing = ", ".join(map(str, self._reducer.missing(round_)))
        return AgreementStalledError(
            f"{round_} is open for over {self._limits.idle_deadline_s:g} s by the clock of rank {rank}: no vote from "
            f"rank {missing}"
        )
