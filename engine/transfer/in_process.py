"""Transports and collectives between ranks of one process, for tests and simulation: messages wait until they are let
through, in any order that keeps each (sender, receiver, stream) in its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from atom.engine.transfer.transport import Message
from atom.engine.transfer.wire import Stream

__all__ = ["InProcessCollective", "InProcessNetwork", "InProcessTransport", "ManualClock"]

_Lane = tuple[int, int, Stream]


class ManualClock:
    """Time that is moved by hand."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        self._now_ns += int(seconds * 1e9)


class InProcessNetwork:
    """Lanes of messages between `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.transports = [InProcessTransport(self, rank) for rank in range(size)]
        self._under_way: dict[_Lane, deque[bytes]] = {}

    def put(self, lane: _Lane, data: bytes) -> None:
        self._under_way.setdefault(lane, deque()).append(data)

    def under_way(self, sender: int | None = None) -> list[_Lane]:
        """Lanes with messages that were not let through, of one sender or of all."""
        return [lane for lane, waiting in self._under_way.items() if waiting and sender in (None, lane[0])]

    def count(self, sender: int) -> int:
        return sum(len(waiting) for lane, waiting in self._under_way.items() if lane[0] == sender)

    def let_through(self, lane: _Lane) -> None:
        """Deliver the first message of a lane."""
        sender, receiver, stream = lane
        self.transports[receiver].arrived[sender].append(Message(sender, stream, self._under_way[lane].popleft()))

    def let_all_through(self) -> int:
        """Deliver everything; returns how many messages that were."""
        count = 0
        while lanes := self.under_way():
            for lane in lanes:
                self.let_through(lane)
                count += 1
        return count


class InProcessTransport:
    """One rank's end of the network."""

    def __init__(self, network: InProcessNetwork, rank: int) -> None:
        self._network = network
        self.rank, self.size = rank, network.size
        self.arrived: list[deque[Message]] = [deque() for _ in range(network.size)]
        self._next = 0
        self.is_closed = False

    def send(self, peer: int, stream: Stream, data: bytes) -> None:
        self._network.put((self.rank, peer, stream), data)

    def poll(self, max_messages: int) -> Sequence[Message]:
        messages: list[Message] = []
        while len(messages) < max_messages and any(self.arrived):
            if self.arrived[self._next]:
                messages.append(self.arrived[self._next].popleft())
            self._next = (self._next + 1) % self.size
        return messages

    def pending(self) -> int:
        return self._network.count(self.rank)

    def close(self) -> None:
        self.is_closed = True


class InProcessCollective:
    """An all-gather between threads, one per rank. `make(size)` gives every rank its own."""

    def __init__(self, rank: int, slots: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    @classmethod
    def make(cls, size: int, timeout_s: float = 30.0) -> list[InProcessCollective]:
        slots, barrier = [b""] * size, threading.Barrier(size, timeout=timeout_s)
        return [cls(rank, slots, barrier) for rank in range(size)]

    def allgather(self, data: bytes) -> list[bytes]:
        self._slots[self.rank] = data
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()  # nobody writes the next one before all have read this one
        return gathered
