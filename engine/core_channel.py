"""The sockets between the API process and its EngineCores: one PUSH per core for inputs, one PULL for all outputs.

Unix sockets in a private directory that is removed as soon as every core is connected, so that not even a killed API
process leaves a file behind. Messages are msgpack and every queue is bounded. Who starts cores and what messages
mean: `engine/core_manager.py`.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from atom.engine.errors import EngineDeadError
from atom.engine.messages import AbortRequests, CoreInput, CoreOutput

RECEIVE_HWM: Final = 256
"""Steps that may wait in our socket. A stalled API process makes the core wait instead of growing."""
SOCKET_NAME_LIMIT: Final = 107
"""Bytes of a Unix socket's path."""


class CoreChannel:
    """`send` may be called from any thread, everything about `output` from the output thread alone."""

    def __init__(self, num_engines: int, send_hwm: int) -> None:
        self._directory: Path | None = _private_directory()
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(CoreOutput)
        self._unsent_aborts: dict[int, list[int]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.output = self._context.socket(zmq.PULL)
        self.output.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
        self.output_address = f"ipc://{self._directory}/output"
        self.output.bind(self.output_address)
        self.input_addresses = [f"ipc://{self._directory}/input-{index}" for index in range(num_engines)]
        self._inputs = []
        for address in self.input_addresses:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, send_hwm)
            socket.bind(address)
            self._inputs.append(socket)

    def send(self, engine_index: int, message: CoreInput) -> None:
        """Queue a message. Raises `zmq.Again` when the core takes none, `EngineDeadError` after `close`."""
        data = self._encoder.encode(message) if not isinstance(message, AbortRequests) else b""
        with self._lock:
            if not self._inputs:
                raise EngineDeadError("the engine is shut down")
            if isinstance(message, AbortRequests):
                self._send_aborts(engine_index, message.seq_ids)
            else:
                self._inputs[engine_index].send(data, zmq.NOBLOCK)

    def _send_aborts(self, engine_index: int, seq_ids: list[int]) -> None:
        """Aborts are never lost: what the socket does not take now is kept for `retry_aborts`."""
        pending = [*self._unsent_aborts.pop(engine_index, ()), *seq_ids]
        try:
            self._inputs[engine_index].send(self._encoder.encode(AbortRequests(pending)), zmq.NOBLOCK)
        except zmq.Again:
            self._unsent_aborts[engine_index] = pending

    def retry_aborts(self) -> None:
        """Send again what a full socket refused; to be called when the core has shown that it lives."""
        if self._unsent_aborts:
            with self._lock:
                for engine_index in list(self._unsent_aborts):
                    self._send_aborts(engine_index, [])

    def receive(self) -> CoreOutput | None:
        """The next message, or None when none waits. Raises `msgspec.MsgspecError` for bytes that are none."""
        try:
            data = self.output.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        message: Any = self._decoder.decode(data)
        return message  # type: ignore[no-any-return]

    def unlink(self) -> None:
        """Remove the sockets' names. Established connections stay."""
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Drop everything. Only when the output thread has ended."""
        with self._lock:
            for socket in self._inputs:
                socket.close(0)
            self._inputs.clear()
        self.output.close(0)
        self._context.term()
        self.unlink()


def _private_directory() -> Path:
    """A new directory of mode 0700 with a path short enough for sockets in it."""
    directory = Path(tempfile.mkdtemp(prefix="atom-"))
    if len(str(directory)) + len("/input-1000") > SOCKET_NAME_LIMIT:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="atom-", dir="/tmp"))
    return directory
