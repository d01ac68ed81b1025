"""The asynchronous agreement: votes go up a tree, the coordinator at its root orders the commits, and they come down.

No call waits: a poll takes what has arrived, at most so many messages, and sends what can be sent. A rank reports to
one other (`topology.py`); with a flat topology this is a coordinator and its followers, with stages a hierarchy. Every
edge has two FIFO streams, so a timeout arrives before the vote that its rank casts later, and all ranks see commits in
one order. After a fault, or when a round stays open too long, every rank raises the same error: a commit is never
invented.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from atom.engine.transfer.agreement import Limits, Mode, Progress
from atom.engine.transfer.errors import (
    AgreementClosedError,
    AgreementError,
    AgreementStalledError,
    ProtocolError,
    VoteError,
)
from atom.engine.transfer.ledger import Counters, Ledger
from atom.engine.transfer.outcome import Commit, Outcome, Round
from atom.engine.transfer.reducer import VoteReducer
from atom.engine.transfer.topology import Topology
from atom.engine.transfer.transport import Clock, Message, Transport
from atom.engine.transfer.wire import Kind, Packet, Stream, pack, unpack

__all__ = ["OrderedAgreement"]

_SLACK_PER_LEVEL: Final = 0.1
"""The rank nearest to a missing voter gives up first, because it can name it."""


class OrderedAgreement:
    """One rank's end. `cancel_in_flight`: whether timeouts are published; the same on every rank (`startup.py`)."""

    mode: Mode = "async"

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        topology: Topology | None = None,
        cancel_in_flight: bool = True,
        limits: Limits | None = None,
    ) -> None:
        topology = topology or Topology.flat(transport.size)
        if topology.size != transport.size:
            raise ValueError(f"a topology of {topology.size} ranks over a transport of {transport.size}")
        self.rank, self.size = transport.rank, transport.size
        self.counters = Counters()
        self._limits = limits or Limits()
        self._transport, self._clock = transport, clock
        self._cancel_in_flight = cancel_in_flight
        self._parent = topology.parents[self.rank]
        self._children = topology.children[self.rank]
        self._is_child = frozenset(self._children).__contains__  # asked for every message, of thousands of children
        self._ledger = Ledger(self._limits.max_open_rounds, self._limits.max_finished_epochs)
        self._reducer = VoteReducer([*self._children, self.rank])
        self._most_open = self._limits.max_open_rounds * (len(self._children) + 1)
        self._outboxes: dict[int, deque[tuple[Stream, bytes]]] = {peer: deque() for peer in self._peers}
        self._unsent = 0
        """Packets in the outboxes."""
        self._commits: list[Commit] = []
        self._timed_out: list[Round] = []
        self._closed_children: set[int] = set()
        self._closing = self._close_sent = self._closed = False
        self._failure: AgreementError | None = None
        self._last_poll_ns = clock.now_ns()
        deadline_ns = self._limits.idle_deadline_s * 1e9
        self._patience_ns = deadline_ns * (1 + _SLACK_PER_LEVEL * topology.height(self.rank))
        self._own_patience_ns = deadline_ns * (1 + _SLACK_PER_LEVEL * (topology.height(topology.root) + 1))

    # What a rank does

    @property
    def open_rounds(self) -> int:
        return self._ledger.open_rounds

    @property
    def closed(self) -> bool:
        return self._closed and self.pending_sends == 0

    @property
    def pending_sends(self) -> int:
        return self._transport.pending() + self._unsent

    def digest(self) -> str:
        return self._ledger.digest()

    def publish(self, round_: Round, outcome: Outcome) -> None:
        begin_ns = self._begin()
        if self._ledger.vote(round_, outcome, begin_ns):
            self._reducer.vote(self.rank, round_, outcome, begin_ns)
            self.counters.votes += 1
            self._pass_on()
            self._flush()
        self.counters.inside_ns += self._clock.now_ns() - begin_ns

    def publish_timeout(self, round_: Round) -> bool:
        begin_ns = self._begin()
        if not self._cancel_in_flight:
            self.counters.suppressed_timeouts += 1
            return False
        if self._ledger.propose(round_):
            self._reducer.propose_timeout(self.rank, round_, begin_ns)
            self.counters.timeouts += 1
            self._pass_on()
            self._flush()
        self.counters.inside_ns += self._clock.now_ns() - begin_ns
        return True

    def poll(self) -> Progress:
        self._flush()  # also after a failure: the neighbours have to hear of it
        self._raise_failure()
        begin_ns = self._clock.now_ns()
        self.counters.polls += 1
        self.counters.longest_gap_ns = max(self.counters.longest_gap_ns, begin_ns - self._last_poll_ns)
        self._last_poll_ns = begin_ns
        try:
            for message in self._transport.poll(self._limits.max_messages_per_poll):
                self._receive(message, begin_ns)
            self._pass_on()
            self._watch(begin_ns)
            self._advance_close()
        except (ProtocolError, VoteError, AgreementStalledError) as error:
            self._fail(error)
        self._flush()
        progress = Progress(self._commits, self._timed_out)
        self._commits, self._timed_out = [], []
        self.counters.inside_ns += self._clock.now_ns() - begin_ns
        if not progress:  # what was committed before a failure is handed out first, and the failure the next time
            self._raise_failure()
        return progress

    def begin_close(self) -> None:
        self._closing = True

    # How it comes about

    @property
    def _peers(self) -> tuple[int, ...]:
        return self._children if self._parent is None else (self._parent, *self._children)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _begin(self) -> int:
        self._raise_failure()
        if self._closing:
            raise AgreementClosedError(f"rank {self.rank}: the agreement is closing, nothing more can be published")
        return self._clock.now_ns()

    def _send(self, peer: int, packet: Packet) -> None:
        stream = Stream.EVENTS if peer == self._parent else Stream.UPDATES
        self._outboxes[peer].append((stream, pack(packet)))
        self._unsent += 1

    def _fan_out(self, packet: Packet) -> None:
        update = (Stream.UPDATES, pack(packet))
        for child in self._children:
            self._outboxes[child].append(update)
        self._unsent += len(self._children)

    def _flush(self) -> None:
        """Hand packets to the transport as far as it may have more in flight, peers in turn."""
        if not self._unsent:
            return
        waiting = [outbox for outbox in self._outboxes.items() if outbox[1]]
        room = self._limits.max_pending_sends - self._transport.pending()
        while waiting and room > 0:
            for peer, outbox in waiting[:room]:
                stream, data = outbox.popleft()
                self._transport.send(peer, stream, data)
                self._unsent -= 1
                self.counters.sent += 1
                room -= 1
            waiting = [outbox for outbox in waiting if outbox[1]]

    def _pass_on(self) -> None:
        """What the votes known here amount to: the coordinator commits, others report to theirs."""
        if not self._reducer.has_ready:
            return
        ready = self._reducer.take_ready()
        for round_ in ready.timed_out:  # before the votes: no vote may overtake its rank's timeout
            if self._parent is None:
                self._learn_overdue(round_)
            else:
                self._send(self._parent, Packet(Kind.TIMEOUT, self.rank, round_))
        for round_, outcome in ready.decided:
            if self._parent is None:
                self._apply(Commit(self._ledger.next_sequence, round_, outcome))
            else:
                self._send(self._parent, Packet(Kind.VOTE, self.rank, round_, outcome))

    def _learn_overdue(self, round_: Round) -> None:
        if self._ledger.learn_overdue(round_):
            self._timed_out.append(round_)
            self._fan_out(Packet(Kind.TIMEOUT, self.rank, round_))

    def _apply(self, commit: Commit) -> None:
        self._ledger.apply(commit)
        self._commits.append(commit)
        self.counters.commits += 1
        self._fan_out(Packet(Kind.COMMIT, self.rank, commit.round, commit.outcome, commit.sequence))

    def _receive(self, message: Message, now_ns: int) -> None:
        self.counters.received += 1
        packet = unpack(message.data)
        if packet.source != message.peer:
            raise ProtocolError(f"a {packet.kind.name} of rank {packet.source} came from rank {message.peer}")
        if message.peer == self._parent and message.stream is Stream.UPDATES:
            self._receive_update(packet)
        elif self._is_child(message.peer) and message.stream is Stream.EVENTS:
            self._receive_event(packet, now_ns)
        else:
            raise ProtocolError(f"a {packet.kind.name} on stream {message.stream.name} from rank {message.peer}")

    def _receive_event(self, packet: Packet, now_ns: int) -> None:
        if packet.kind is Kind.FAIL:
            raise AgreementStalledError(packet.text)
        if packet.source in self._closed_children:
            raise ProtocolError(f"a {packet.kind.name} from rank {packet.source} after its close")
        if packet.kind is Kind.VOTE:
            assert packet.outcome is not None  # unpack sees to it
            self._reducer.vote(packet.source, packet.round, packet.outcome, now_ns)
            if len(self._reducer) > self._most_open:
                raise ProtocolError(f"more than {self._most_open} rounds are open: rank {packet.source} keeps no bound")
        elif packet.kind is Kind.TIMEOUT:
            self._reducer.propose_timeout(packet.source, packet.round, now_ns)
        elif packet.kind is Kind.CLOSE:
            self._closed_children.add(packet.source)
        else:
            raise ProtocolError(f"a {packet.kind.name} from rank {packet.source}, which coordinates nothing here")

    def _receive_update(self, packet: Packet) -> None:
        if packet.kind is Kind.FAIL:
            raise AgreementStalledError(packet.text)
        if self._closed:
            raise ProtocolError(f"a {packet.kind.name} from rank {packet.source} after its close")
        if packet.kind is Kind.COMMIT:
            assert packet.outcome is not None
            self._apply(Commit(packet.sequence, packet.round, packet.outcome))
        elif packet.kind is Kind.TIMEOUT:
            self._learn_overdue(packet.round)
        elif packet.kind is Kind.CLOSE:
            if not self._close_sent:
                raise ProtocolError(f"rank {packet.source} closed before this rank did")
            self._conclude()
        else:
            raise ProtocolError(f"a {packet.kind.name} as an update from rank {packet.source}")

    def _watch(self, now_ns: int) -> None:
        """Trip on a round that stays open: here, or for want of a decision from above."""
        oldest = self._reducer.oldest()
        if oldest is not None and now_ns - oldest[1] > self._patience_ns:
            missing = ", ".join(map(str, self._reducer.missing(oldest[0])))
            raise AgreementStalledError(
                f"{oldest[0]} is open for {(now_ns - oldest[1]) / 1e9:.1f} s: no vote from rank {missing}"
            )
        own = self._ledger.oldest_vote()
        if own is not None and now_ns - own[1] > self._own_patience_ns:
            above = self.rank if self._parent is None else self._parent
            raise AgreementStalledError(
                f"{own[0]}: rank {self.rank} voted {(now_ns - own[1]) / 1e9:.1f} s ago and has no decision from rank "
                f"{above}"
            )

    def _fail(self, error: AgreementError) -> None:
        """Fail for good, and take the neighbours along: they tell theirs."""
        text = str(error)
        self._failure = error
        for peer in self._peers:
            self._unsent -= len(self._outboxes[peer])
            self._outboxes[peer].clear()
            self._send(peer, Packet(Kind.FAIL, self.rank, text=text))

    def _advance_close(self) -> None:
        if self._closing and not self._close_sent and len(self._closed_children) == len(self._children):
            self._close_sent = True
            if self._parent is None:
                self._conclude()
            else:
                self._send(self._parent, Packet(Kind.CLOSE, self.rank))

    def _conclude(self) -> None:
        """All have closed: no vote can come any more, so what is open stays undecided."""
        self._reducer.clear()
        self.counters.abandoned = self._ledger.abandon()
        self._closed = True
        self._fan_out(Packet(Kind.CLOSE, self.rank))
