"""The transport and the collective over MPI, each on a communicator of its own so that no other traffic meets theirs.

Sends are non-blocking and own their bytes until they are complete. Nothing here waits inside MPI, which would spin.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from atom.engine.transfer.back_off import wait_for
from atom.engine.transfer.errors import ProtocolError
from atom.engine.transfer.transport import Message
from atom.engine.transfer.wire import MAX_PACKET, Stream

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiCollective", "MpiTransport", "duplicate"]

DEADLINE_S: Final = 600.0
_MAX_SAID: Final = 1 << 26
"""Bytes that one rank may say in one all-gather."""
_FIRST: Final = 256
"""Of these, how many go along with their number: eight votes, which is more than a step mostly has. A second collective
doubles what the last rank waits: the others have to notice the end of the first one."""
_HEAD: Final = struct.Struct(f"<q{_FIRST}s")


class MpiTransport:
    """Packets between the ranks of `communicator`, which is duplicated: every rank makes its transport at the same
    place in the program, and AgreementStalledError tells those that are there of one that does not come."""

    def __init__(self, communicator: MPI.Intracomm, *, deadline_s: float = DEADLINE_S) -> None:
        from mpi4py import MPI

        self._comm = duplicate(communicator, deadline_s)
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._buffer = bytearray(MAX_PACKET)
        self._status = MPI.Status()
        self._any = MPI.ANY_SOURCE
        self._any_tag = MPI.ANY_TAG
        self._byte = MPI.BYTE
        self._next = 0

    def send(self, peer: int, stream: Stream, data: bytes) -> None:
        self._sends.append((self._comm.Isend([data, self._byte], dest=peer, tag=int(stream)), data))

    def poll(self, max_messages: int) -> Sequence[Message]:
        """One message of each rank in turn, so that a chatty one is not heard alone."""
        messages: list[Message] = []
        if not self._comm.Iprobe(self._any, self._any_tag):  # mostly nothing: one question instead of one per rank
            return messages
        silent = 0
        while silent < self.size and len(messages) < max_messages:
            peer = self._next
            self._next = (peer + 1) % self.size
            if self._comm.Iprobe(peer, self._any_tag, self._status):
                messages.append(self._receive(peer))
                silent = 0
                if not self._comm.Iprobe(self._any, self._any_tag):
                    break
            else:
                silent += 1
        return messages

    def pending(self) -> int:
        if self._sends:
            self._sends = [send for send in self._sends if not send[0].Test()]
        return len(self._sends)

    def close(self) -> None:
        """Every rank closes, when nothing is pending: freeing a communicator is a collective."""
        if self._comm:
            self._comm.Free()

    def _receive(self, peer: int) -> Message:
        tag, count = self._status.Get_tag(), self._status.Get_count(self._byte)
        if not 0 <= count <= MAX_PACKET:
            raise ProtocolError(f"a message of {count} bytes from rank {peer}; packets have at most {MAX_PACKET}")
        self._comm.Recv([self._buffer, count, self._byte], source=peer, tag=tag)
        try:
            stream = Stream(tag)
        except ValueError:
            raise ProtocolError(f"a message on unknown stream {tag} from rank {peer}") from None
        return Message(peer, stream, bytes(self._buffer[:count]))


class MpiCollective:
    """All-gather of bytes of different lengths: everybody's length and first bytes, and what is longer in a second one.
    Sleeps while it waits, and raises AgreementStalledError after `deadline_s`: the rank can then only end."""

    def __init__(self, communicator: MPI.Intracomm, *, deadline_s: float = DEADLINE_S) -> None:
        self._comm = duplicate(communicator, deadline_s)
        self._deadline_s = deadline_s
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def allgather(self, data: bytes) -> list[bytes]:
        from mpi4py import MPI

        heads = bytearray(_HEAD.size * self.size)
        mine = _HEAD.pack(len(data), data[:_FIRST])
        wait_for(self._comm.Iallgather([mine, MPI.BYTE], [heads, MPI.BYTE]).Test, self._deadline_s, "an all-gather")
        said = list(_HEAD.iter_unpack(heads))
        lengths = [length for length, _ in said]
        if max(lengths) > _MAX_SAID:
            raise ProtocolError(f"rank {lengths.index(max(lengths))} says {max(lengths)} bytes at once")
        first = [text[:length] for length, text in said]
        more = [max(0, length - _FIRST) for length in lengths]
        if not any(more):
            return first
        starts = [0, *itertools.accumulate(more)]
        gathered = bytearray(starts[-1])
        target = [gathered, (more, starts[:-1]), MPI.BYTE]
        rest = self._comm.Iallgatherv([data[_FIRST:], MPI.BYTE], target)
        wait_for(rest.Test, self._deadline_s, "an all-gather")
        return [one + gathered[starts[rank] : starts[rank + 1]] for rank, one in enumerate(first)]

    def close(self) -> None:
        """Every rank closes."""
        if self._comm:
            self._comm.Free()


def duplicate(communicator: MPI.Intracomm, deadline_s: float) -> MPI.Intracomm:
    """A communicator of the same ranks, for traffic of its own. Every rank comes here."""
    copy, request = communicator.Idup()  # Dup would wait by spinning, and for ever
    wait_for(request.Test, deadline_s, "duplicating the communicator")
    return copy
