"""What an agreement needs of the world: a way to send packets, and a clock. MPI in production (`mpi_transport.py`), in
one process for tests and simulation (`in_process.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from atom.engine.transfer.wire import Stream

__all__ = ["Clock", "Collective", "Message", "Transport"]


class Message(NamedTuple):
    peer: int
    stream: Stream
    data: bytes


class Transport(Protocol):
    """Packets between ranks, in order within (peer, stream). Nothing here waits."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, peer: int, stream: Stream, data: bytes) -> None:
        """Start to send; the transport owns a copy until it is gone. Only called while `pending()` is within the
        agreement's bound."""

    def poll(self, max_messages: int) -> Sequence[Message]:
        """What has arrived, at most so many, peers taken in turn so that no rank can shut out another."""

    def pending(self) -> int:
        """Sends that are not complete yet."""

    def close(self) -> None:
        """Free what belongs to the transport. Called when nothing is pending, or when the agreement failed."""


class Collective(Protocol):
    """What the blocking agreement needs: an all-gather that waits for every rank."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's data, by rank."""


class Clock(Protocol):
    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
