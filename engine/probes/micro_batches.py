"""Micro-batches between the stages of a pipeline, over MPI point to point: a number passes from stage to stage, and
from the last back to the first as the sampled token does, so that the first knows how many are on their way."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Final

from atom.engine.transfer.back_off import wait_for
from atom.engine.transfer.errors import AgreementStalledError
from atom.engine.transfer.mpi_transport import duplicate

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["EMPTY", "MicroBatches"]

EMPTY: Final = -1
"""A step without a request."""
_NUMBER: Final = struct.Struct("<q")
_TAG: Final = 7
_BACK_TAG: Final = 8


class MicroBatches:
    """One rank's end: from the rank `stage_stride` before to the one as far behind. No call waits."""

    def __init__(self, world: MPI.Intracomm, *, stage_stride: int, deadline_s: float) -> None:
        from mpi4py import MPI

        self._byte = MPI.BYTE
        self._comm = duplicate(world, deadline_s)
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        self._before = rank - stage_stride
        self._behind = rank + stage_stride if rank + stage_stride < size else None
        self._first, self._last = rank % stage_stride, size - stage_stride + rank % stage_stride
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._buffer = bytearray(_NUMBER.size)
        self._deadline_s = deadline_s
        self._heard_s = time.monotonic()
        self._on_their_way = 0

    @property
    def is_first(self) -> bool:
        return self._before < 0

    @property
    def on_their_way(self) -> int:
        """Of the first stage: requests that it has sent and the last has not finished."""
        while self._on_their_way and self._comm.Iprobe(self._last, _BACK_TAG):
            self._comm.Recv([self._buffer, self._byte], source=self._last, tag=_BACK_TAG)
            self._on_their_way -= 1
        return self._on_their_way

    def send(self, number: int) -> None:
        """To the next stage; a request that the last one has finished goes back to the first."""
        self._sends = [send for send in self._sends if not send[0].Test()]
        if self._behind is not None:
            self._start(number, self._behind, _TAG)
            self._on_their_way += self.is_first and number != EMPTY
        elif number != EMPTY and not self.is_first:
            self._start(number, self._first, _BACK_TAG)

    def _start(self, number: int, rank: int, tag: int) -> None:
        data = _NUMBER.pack(number)
        self._sends.append((self._comm.Isend([data, self._byte], dest=rank, tag=tag), data))

    def take(self) -> int | None:
        """The next number from the stage before, if it is here. AgreementStalledError after a long silence."""
        if not self._comm.Iprobe(self._before, _TAG):
            if time.monotonic() - self._heard_s > self._deadline_s:
                raise AgreementStalledError(
                    f"rank {self._before} passed nothing on for {self._deadline_s:g} s: it is stopped or gone"
                )
            return None
        self._comm.Recv([self._buffer, self._byte], source=self._before, tag=_TAG)
        self._heard_s = time.monotonic()
        return int(_NUMBER.unpack(self._buffer)[0])

    def close(self) -> None:
        """Every rank closes, when all have sent what they will."""
        if self.is_first:
            wait_for(lambda: self.on_their_way == 0, self._deadline_s, "the end of the pipeline")
        for request, _ in self._sends:
            request.Wait()
        self._comm.Free()
