"""When bytes arrived: the kernel's receive timestamps (SO_TIMESTAMPNS) on the clock of everything else here.

The kernel stamps a packet when it arrives, however long the client takes to read it, so that neither a busy event loop
nor the order in which a thousand sockets are read shows in a latency. Its stamps are CLOCK_REALTIME; records are
CLOCK_MONOTONIC. Both run at one rate and differ by an offset that changes only when somebody sets the wall clock.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from time import monotonic_ns, time_ns
from typing import Final

__all__ = ["ANCILLARY_BYTES", "KernelClock", "request_stamps"]

SO_TIMESTAMPNS: Final[int] = getattr(socket, "SO_TIMESTAMPNS", 35)
_TIMESPEC: Final = struct.Struct("@ll")
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_TIMESPEC.size)
"""Room for one stamp beside the data of a `recvmsg`."""
MEASURE_EVERY_NS: Final = 1_000_000_000
BRACKETS: Final = 7
STEP_NS: Final = 20_000
"""A smaller change of the offset is the uncertainty of measuring it; a larger one is a step of the wall clock."""

Ancillary = Sequence[tuple[int, int, bytes]]


def request_stamps(sock: socket.socket) -> None:
    """Ask the kernel to stamp what arrives on `sock`; one that cannot (gVisor) sends no stamps, and that is seen."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


class KernelClock:
    """Turns the ancillary data of a read into `time.monotonic_ns`, and counts where its stamps came from."""

    __slots__ = ("_measured_ns", "_now", "_offset", "_since", "kernel", "read", "steps", "uncertainty_ns")

    def __init__(self) -> None:
        self.kernel = 0
        """Reads stamped by the kernel."""
        self.read = 0
        """Reads stamped here: without a stamp of the kernel's, or with one that cannot be."""
        self.steps = 0
        """Times that the wall clock was set."""
        self.uncertainty_ns = 0
        """Of the offset, in either direction."""
        self._offset = 0
        self._since = 0
        """Stamps from before the last step are on another offset."""
        self._measure()
        self._now = self._measured_ns

    @property
    def counts(self) -> dict[str, int]:
        return {"kernel": self.kernel, "read": self.read}

    def check(self) -> None:
        """Called before a batch of reads: makes sure that the offset still holds."""
        now = self._now = monotonic_ns()
        if not -STEP_NS < time_ns() - now - self._offset < STEP_NS or now - self._measured_ns > MEASURE_EVERY_NS:
            before = self._offset
            self._measure()
            if abs(self._offset - before) > STEP_NS + self.uncertainty_ns:
                self.steps += 1
                self._now = self._since = monotonic_ns()

    def stamp(self, ancillary: Ancillary, floor_ns: int) -> int:
        """When the bytes arrived that were just read with `ancillary`. Not before `floor_ns` (when they were asked for,
        or what came before them arrived) and not in the future: a stamp that says so is not believed."""
        if len(ancillary) == 1:
            _, kind, data = ancillary[0]
            if kind == SO_TIMESTAMPNS and len(data) == _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack(data)
                at: int = seconds * 1_000_000_000 + nanoseconds - self._offset
                if at >= floor_ns and at >= self._since and (at <= self._now or at <= monotonic_ns()):
                    self.kernel += 1
                    return at
        return self.stamp_now()

    def stamp_now(self) -> int:
        """The moment of the read itself."""
        self.read += 1
        return monotonic_ns()

    def _measure(self) -> None:
        """The offset from the tightest of several brackets: the wall clock read between two readings of the other."""
        best, offset = -1, 0
        for _ in range(BRACKETS):
            before = monotonic_ns()
            wall = time_ns()
            width = monotonic_ns() - before
            if best < 0 or width < best:
                best, offset = width, wall - before - width // 2
        self._offset, self.uncertainty_ns = offset, (best + 1) // 2
        self._measured_ns = monotonic_ns()
