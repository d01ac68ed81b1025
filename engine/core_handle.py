"""One EngineCore process as the API process holds it: start, exit status, log tail, termination.

Knows nothing of messages; sockets and threads are `engine/core_manager.py`'s.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from atom.engine import envs

CORE_COMMAND: Final = (sys.executable, "-P", "-m", "atom.engine.core_process")
LOG_TAIL_LINES: Final = 20
LOG_LINE_BYTES: Final = 2000


class CoreHandle:
    """A running core. Its stdout and stderr pass through to our stderr; the last lines are kept for the error message
    of a core that dies."""

    def __init__(self, command: Sequence[str], index: int, config_json: str) -> None:
        self.index = index
        self.info: dict[str, Any] = {}
        """From `EngineReady`."""
        self.ready = threading.Event()
        self._tail: deque[bytes] = deque(maxlen=LOG_TAIL_LINES)
        self._process = subprocess.Popen(
            command,
            env=_environment(config_json),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.pid = self._process.pid
        try:
            self.exit_fd: int | None = os.pidfd_open(self.pid)
            """Readable once the process has exited; None where the kernel has no pidfd."""
        except OSError:
            self.exit_fd = None
        self._log_thread = threading.Thread(target=self._forward_log, name=f"EngineCoreLog-{index}", daemon=True)
        self._log_thread.start()

    def _forward_log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while line := stream.readline(LOG_LINE_BYTES):
                self._tail.append(line)
                try:
                    os.write(2, line)
                except OSError:
                    continue  # our stderr is gone: keep draining, or the core would block on a full pipe

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def describe_exit(self) -> str:
        """One line on how it ended, then the last lines it wrote. Only after it has exited."""
        self._log_thread.join(timeout=1.0)
        code = self._process.poll()
        if code is None:
            how = "is still running"
        elif code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
        else:
            how = f"exited with status {code}"
        return f"EngineCore {self.index} (pid {self.pid}) {how}{self.log_tail()}"

    def log_tail(self) -> str:
        """The last lines it wrote, ready to append to a message; empty when it wrote none."""
        lines = b"".join(self._tail).decode("utf-8", "replace").rstrip()
        return f"; its last lines:\n{lines}" if lines else ""

    def wait(self, timeout: float | None) -> bool:
        """Whether it exited within `timeout` seconds; None: as long as it takes."""
        try:
            self._process.wait(None if timeout is None else max(0.0, timeout))
        except subprocess.TimeoutExpired:
            return False
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing once it has exited."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Give back what a process that has exited still holds."""
        self._log_thread.join(timeout=1.0)
        if self.exit_fd is not None:
            os.close(self.exit_fd)
            self.exit_fd = None


def _environment(config_json: str) -> dict[str, str]:
    """Ours, plus the config, and first on the path the source that this process itself runs: with several checkouts
    on a machine the core must not come from another one."""
    root = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = root if not inherited else f"{root}{os.pathsep}{inherited}"
    return {**os.environ, envs.ENGINE_CONFIG.name: config_json, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def terminate_all(cores: Sequence[CoreHandle], grace: float = 2.0) -> None:
    """SIGTERM to those that still run, SIGKILL to those that do after `grace` seconds together. Returns once all are
    reaped."""
    deadline = time.monotonic() + grace
    for core in cores:
        core.send_signal(signal.SIGTERM)
    for core in cores:
        if not core.wait(deadline - time.monotonic()):
            core.send_signal(signal.SIGKILL)
    for core in cores:
        core.wait(None)
