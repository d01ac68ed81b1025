"""What travels between an EngineCore and its workers: msgpack frames over a socket pair that no other process has.

A worker inherits its end and the core keeps the other, so the end of either process is an end of file for the other
one. Who starts workers: `worker_group.py`; what a worker does: `engine/worker.py`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from atom.engine.executors.base import SchedulerOutput, StepResult

__all__ = [
    "Allocate",
    "CoreMessage",
    "Failed",
    "Loaded",
    "MessageSocket",
    "MicroBatch",
    "Profile",
    "Profiled",
    "Ready",
    "Sampled",
    "WorkerMessage",
]

MAX_FRAME_BYTES: Final = 1 << 30
_LENGTH: Final = struct.Struct("<I")


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    """All workers hold their weights: make the cache."""

    num_blocks: int


class MicroBatch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """Some sequences of a step, see `micro_batches.py`."""

    output: SchedulerOutput


class Profile(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    directory: str | None
    """None ends the recording."""


CoreMessage = Allocate | MicroBatch | Profile


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    pass


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    info: dict[str, Any]
    """Threads, kernels and bytes of weights of this worker."""


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag="sampled"):
    """From the first rank of the last stage, one per micro-batch in their order."""

    result: StepResult


class Profiled(msgspec.Struct, frozen=True, array_like=True, tag="profiled"):
    path: str | None
    error: str | None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The worker's last message."""

    kind: Literal["config", "error", "peer"]
    """What the user gave is wrong; something broke; another worker is gone, whose end is the reason."""
    error: str


WorkerMessage = Loaded | Ready | Sampled | Profiled | Failed

In = TypeVar("In")


class MessageSocket(Generic[In]):
    """Frames of a length and a message. One thread receives; any thread sends."""

    def __init__(self, endpoint: socket.socket, incoming: Any) -> None:
        self._socket = endpoint
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._lock = threading.Lock()

    def encode(self, message: CoreMessage | WorkerMessage) -> bytes:
        data = self._encoder.encode(message)
        return _LENGTH.pack(len(data)) + data

    def send(self, message: CoreMessage | WorkerMessage) -> None:
        """Raises `OSError` when the other end is gone."""
        self.send_frame(self.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """What `encode` made: one encoding serves several workers."""
        with self._lock:
            self._socket.sendall(frame)

    def receive(self) -> In | None:
        """The next message; None when the other end is gone."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        assert length <= MAX_FRAME_BYTES, length
        data = self._read(length)
        return None if data is None else self._decoder.decode(data)

    def close(self) -> None:
        """Both directions: a thread that waits in `receive` on this end or the other gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, length: int) -> bytearray | None:
        data = bytearray(length)
        view, have = memoryview(data), 0
        while have < length:
            try:
                count = self._socket.recv_into(view[have:])
            except OSError:
                return None
            if not count:
                return None
            have += count
        return data
