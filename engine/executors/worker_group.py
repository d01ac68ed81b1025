"""The worker processes of one EngineCore: starts them, carries messages, and ends all when one ends.

What the messages mean: `parallel.py`. Nothing is left behind whoever is killed: a worker ends with its socket, the
ranks find each other over a file in memory, and the processes are the core's children.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from atom.engine import envs
from atom.engine.config import EngineConfig
from atom.engine.errors import AtomEngineError, ConfigError, EngineDeadError
from atom.engine.executors.ranks import LOOPBACK_VARIABLE
from atom.engine.executors.worker_messages import CoreMessage, Failed, MessageSocket, WorkerMessage
from atom.engine.models.shard import Shard

__all__ = ["WorkerGroup"]

WORKER_COMMAND: Final = (sys.executable, "-P", "-m", "atom.engine.worker")
SETTLE_S: Final = 0.5
"""After the first worker's end, until the others have said why they end: only then is the cause among the effects."""

GRACE_S: Final = 2.5
"""For an orderly end, in which recordings are completed; then they are killed."""

logger = logging.getLogger(__name__)


class _Worker:
    def __init__(self, shard: Shard, process: subprocess.Popen[bytes], endpoint: socket.socket) -> None:
        self.shard = shard
        self.process = process
        self.socket: MessageSocket[WorkerMessage] = MessageSocket(endpoint, WorkerMessage)
        self.failure: Failed | None = None


class WorkerGroup:
    """`on_message(rank, message)` and, at most once, `on_failure(error)` are called from threads of this class."""

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[int, WorkerMessage], None],
        on_failure: Callable[[AtomEngineError], None],
    ) -> None:
        self._on_message = on_message
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._ending = False
        self._workers: list[_Worker] = []
        parallel = config.parallel
        store = os.memfd_create("atom-ranks")
        try:
            for rank in range(parallel.num_ranks):
                stage, place = divmod(rank, parallel.tensor_parallel_size)
                shard = Shard(place, parallel.tensor_parallel_size, stage, parallel.pipeline_parallel_size)
                self._workers.append(_start(config, shard, store))
        except BaseException:
            self.shutdown()
            raise
        finally:
            os.close(store)
        self._threads = [
            threading.Thread(target=self._receive, args=(worker,), name=f"Worker-{worker.shard.rank}", daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def broadcast(self, message: CoreMessage) -> None:
        """To every worker. What a worker that is gone does not get is `on_failure`'s matter."""
        frame = self._workers[0].socket.encode(message)
        for worker in self._workers:
            try:
                worker.socket.send_frame(frame)
            except OSError:
                continue

    def shutdown(self) -> None:
        """End all workers. Safe to call twice, and from any thread but this class's own."""
        with self._lock:
            self._ending = True
        self._end_all()

    def _receive(self, worker: _Worker) -> None:
        try:
            while (message := worker.socket.receive()) is not None:
                if isinstance(message, Failed):
                    worker.failure = message
                else:
                    self._on_message(worker.shard.rank, message)
        except Exception as error:
            logger.exception("what %s sent cannot be taken in", worker.shard.name)
            worker.failure = Failed("error", f"{type(error).__name__}: {error}")
        with self._lock:
            if self._ending:
                return
            self._ending = True
        time.sleep(SETTLE_S)
        cause = self._cause()
        self._end_all()
        self._on_failure(cause)

    def _cause(self) -> AtomEngineError:
        """Of what has ended by now, the one that is not for another's sake."""
        failures = [(worker, worker.failure) for worker in self._workers if worker.failure is not None]
        for _, failure in failures:
            if failure.kind == "config":
                return ConfigError(failure.error)
        for worker, failure in failures:
            if failure.kind == "error":
                return EngineDeadError(f"{_name(worker)} failed: {failure.error}")
        for worker in self._workers:
            if worker.failure is None and (code := worker.process.poll()) is not None:
                return EngineDeadError(f"{_name(worker)} {_describe(code)}")
        for worker, failure in failures:
            return EngineDeadError(f"{_name(worker)} failed: {failure.error}")
        return EngineDeadError("a worker closed its socket to the EngineCore")

    def _end_all(self) -> None:
        for worker in self._workers:
            worker.socket.close()
        deadline = time.monotonic() + GRACE_S
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
        for worker in self._workers:
            worker.process.wait()


def _start(config: EngineConfig, shard: Shard, store: int) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [*WORKER_COMMAND, "--rank", str(shard.rank), "--control", str(theirs.fileno()), "--store", str(store)]
        try:
            process = subprocess.Popen(
                command, env=_environment(config), stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), store)
            )
        except BaseException:
            ours.close()
            raise
    return _Worker(shard, process, ours)


def _environment(config: EngineConfig) -> dict[str, Any]:
    """Ours, the configuration, and first on the path the source that this process runs."""
    root = str(Path(__file__).parents[3])
    inherited = os.environ.get("PYTHONPATH")
    name, loopback = LOOPBACK_VARIABLE
    return {
        **os.environ,
        envs.ENGINE_CONFIG.name: config.to_json(),
        "PYTHONPATH": root if not inherited else f"{root}{os.pathsep}{inherited}",
        "PYTHONUNBUFFERED": "1",
        name: loopback,
    }


def _name(worker: _Worker) -> str:
    return f"{worker.shard.name}, pid {worker.process.pid},"


def _describe(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
