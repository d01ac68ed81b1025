"""The EngineCore process: `python -m atom.engine.core_process --input ADDR --output ADDR --index N`.

The parent (`engine/core_manager.py`) binds both addresses and puts the `EngineConfig` as JSON into the environment
variable ATOM_ENGINE_CONFIG. Inputs and outputs are the messages of `engine/messages.py`. The engine itself is
`engine/engine_core.py`; this file is its sockets, its signals and its end:

    SIGINT          ignored, the parent coordinates
    SIGTERM         finish what was accepted, then exit 0; a second one aborts it
    parent's death  exit at once, with whatever was running
    any exception   one line as `EngineFailed`, a traceback on stderr where it is unexpected, exit 1
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Final

import msgspec
import zmq

from atom.engine import envs
from atom.engine.config import EngineConfig
from atom.engine.engine_core import EngineCore
from atom.engine.errors import AtomEngineError, ConfigError, EngineDeadError
from atom.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreInput,
    CoreOutput,
    EngineFailed,
    EngineReady,
    Shutdown,
    UtilityCall,
    UtilityResult,
)

MAX_INPUTS_PER_STEP: Final = 256
"""A burst of requests is taken in over several steps, so that it does not hold up the sequences that run."""
MAX_MESSAGE_BYTES: Final = 1 << 28
LINGER_MS: Final = 2000
"""How long the last messages may take to leave when the process ends."""
PARENT_POLL_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1

logger = logging.getLogger("atom.engine.core_process")


class CoreProcess:
    """Sockets around one `EngineCore`."""

    def __init__(self, input_address: str, output_address: str, index: int) -> None:
        self._index = index
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[CoreInput] = msgspec.msgpack.Decoder(CoreInput)
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._input.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._input.connect(input_address)
        self._output = self._context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.LINGER, LINGER_MS)
        self._output.connect(output_address)
        # A signal must end a wait for input. Python writes one byte per signal here, and the poller watches it.
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._input, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._terminations = 0
        self._stopping = False

    def run(self, config: EngineConfig) -> None:
        """Load, report readiness, serve until told to stop."""
        core = EngineCore(config, engine_index=self._index)
        try:
            self._install_sigterm()
            core.executor.on_failure = self._wake
            # What exists now lives as long as the process: the collector need never look at it again.
            gc.collect()
            gc.freeze()
            self._send(EngineReady(self._index, os.getpid(), core.info))
            self._serve(core)
        finally:
            core.shutdown()

    def _serve(self, core: EngineCore) -> None:
        while True:
            if not core.has_work:
                if self._stopping:
                    return
                if core.executor.failure is not None:
                    raise core.executor.failure
                self._wait()
            self._take_inputs(core)
            outputs = core.step()
            if outputs is not None:
                self._send(outputs)

    def _wait(self) -> None:
        self._poller.poll()
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)

    def _wake(self) -> None:
        """End `_wait`, from any thread."""
        with contextlib.suppress(OSError):  # full: it will end anyway
            self._wake_write.send(b"\0")

    def _take_inputs(self, core: EngineCore) -> None:
        if self._terminations:
            self._stopping = True
            core.stop_admission(abort=self._terminations > 1)
        for _ in range(MAX_INPUTS_PER_STEP):
            try:
                data = self._input.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(core, self._decoder.decode(data))

    def _handle(self, core: EngineCore, message: CoreInput) -> None:
        match message:
            case AddRequest():
                core.add_request(message)
            case AbortRequests(seq_ids=seq_ids):
                core.abort(seq_ids)
            case UtilityCall():
                self._call(core, message)
            case Shutdown(drain=drain):
                self._stopping = True
                core.stop_admission(abort=not drain)

    def _call(self, core: EngineCore, message: UtilityCall) -> None:
        try:
            value, error = core.call(message.method, message.args), None
        except AtomEngineError as exc:
            value, error = None, str(exc)
        self._send(UtilityResult(message.call_id, value, error))

    def _send(self, message: CoreOutput) -> None:
        """Blocks while the parent reads nothing: a stalled reader slows the engine down instead of filling memory."""
        self._output.send(self._encoder.encode(message))

    def fail(self, error: str) -> None:
        """The last message. Never waits: a parent that has stopped reading will notice the exit."""
        with contextlib.suppress(zmq.ZMQError):
            self._output.send(self._encoder.encode(EngineFailed(self._index, error)), zmq.NOBLOCK)

    def _install_sigterm(self) -> None:
        """Only now: until there is something to drain, SIGTERM ends the process as usual."""
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._terminations += 1

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._input.close(linger=0)
        self._output.close()
        self._context.term()
        self._wake_read.close()
        self._wake_write.close()


def _die_with_parent(parent: int) -> None:
    """End this process when `parent` ends, even while a step computes or a send waits.

    The kernel's parent-death signal is sent when the *thread* that started us ends, so it is only a hint: its handler
    looks whether the parent is really gone. A thread that waits for the parent covers a main thread that is busy in
    native code, where no handler runs.
    """

    def check(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGHUP, check)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    try:
        fd = os.pidfd_open(parent)
    except OSError:
        fd = -1
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch_parent, args=(parent, fd), name="ParentWatch", daemon=True).start()


def _watch_parent(parent: int, fd: int) -> None:
    if fd >= 0:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll()
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def _describe(exc: BaseException) -> str:
    """One line. What was raised on purpose says it all; anything else needs its type."""
    text = " ".join(str(exc).split()) or "no message"
    return text if isinstance(exc, AtomEngineError) else f"{type(exc).__name__}: {text}"


def _read_config() -> EngineConfig:
    text = envs.ENGINE_CONFIG.read()
    if text is None:
        raise ConfigError(f"{envs.ENGINE_CONFIG.name} is not set: this process is started by an engine, not by hand")
    try:
        return EngineConfig.from_json(text)
    except (KeyError, TypeError, ValueError) as exc:
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError(f"{envs.ENGINE_CONFIG.name} is not an engine configuration: {exc}") from exc


def main(argv: list[str] | None = None) -> int:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="atom.engine.core_process", description="One EngineCore process.")
    parser.add_argument("--input", required=True, help="address to connect to for requests")
    parser.add_argument("--output", required=True, help="address to connect to for results")
    parser.add_argument("--index", type=int, default=0, help="number of this engine")
    args = parser.parse_args(argv)
    _die_with_parent(parent)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(levelname)s core-{args.index} %(asctime)s %(message)s"
    )
    process = CoreProcess(args.input, args.output, args.index)
    try:
        process.run(_read_config())
    except Exception as exc:
        if not isinstance(exc, (ConfigError, EngineDeadError)):
            traceback.print_exc()
        logger.error("engine failed: %s", _describe(exc))
        process.fail(_describe(exc))
        return 1
    finally:
        process.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
