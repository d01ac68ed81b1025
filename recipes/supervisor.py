"""The small process between a launcher and the server it started: it outlives the launcher just long enough to leave
nothing behind.

It runs in a session of its own (a terminal's Ctrl-C or a `kill -9` of the launcher's process group does not reach it),
holds a pidfd of the launcher and reads a control pipe; when the launcher is gone, however it went, the server is
stopped. It is a child subreaper, so a grandchild that daemonizes or calls setsid stays its descendant; what escapes
even that (a process inside a container, say) is found by its label. If the supervisor itself is killed, the server's
first process dies with it (PR_SET_PDEATHSIG), the launcher sweeps the rest, and `atom clean` what is left.

Standard library and `recipes/{processes,log_file}.py` only: it starts in milliseconds and holds few MB for the life of
a server. The other end of its pipes is `recipes/launcher.py`.

Wire: the launcher writes one JSON line (`SupervisorConfig`), then lines `stop` or `kill`; the supervisor writes JSON
lines {"event": …}: `started {pid}`, `log {line}`, `log_dropped {lines}`, `exec_failed {argv0, message}`,
`prepare_failed {index, status, tail}`, `exited {status, tail}`, `done {…}`. `status` is as in
`subprocess.Popen.returncode`.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from atom.recipes.log_file import BoundedLog, LineSplitter
from atom.recipes.processes import (
    LABEL_VARIABLE,
    OWNER_VARIABLE,
    descendants,
    labelled_processes,
    process_token,
    read_stat,
    signal_process,
)

__all__ = ["SupervisorConfig", "main"]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_TAIL_LINES: Final = 40
_EVENT_BUFFER_LINES: Final = 2000
"""Log lines that wait for a launcher that does not read; more are dropped from the events, not from the file."""
_LINGER_S: Final = 1.0
"""What is left of a server whose main process ended may take this long to end by itself."""
_KILL_ROUNDS: Final = 50

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """What to run. Sent as JSON, because arguments would be visible to everyone and are limited in length."""

    label: str
    prepare: list[list[str]]
    command: list[str]
    stop_command: list[str] | None
    env: dict[str, str]
    cwd: str | None
    log_path: str | None
    log_max_bytes: int
    stop_signal: int
    stop_grace_s: float
    detached: bool
    """The command returns at once and the server lives on elsewhere; exit status 0 is not a death."""
    launcher_pid: int
    launcher_start_ticks: int
    scratch: str | None
    """Directory to remove at the end if the launcher is gone by then."""
    cpus: list[int] | None = None
    """What everything of the server is started on; None: where the launcher was when it started this process."""


@dataclass
class _Events:
    """Lines to the launcher, never waiting for it."""

    fd: int
    pending: deque[bytes] = field(default_factory=deque)
    dropped: int = 0
    broken: bool = False
    _partial: bytes = b""

    def send(self, event: str, **fields: Any) -> None:
        if self.dropped:
            dropped, self.dropped = self.dropped, 0
            self.pending.append(json.dumps({"event": "log_dropped", "lines": dropped}).encode() + b"\n")
        self.pending.append(json.dumps({"event": event, **fields}).encode() + b"\n")
        self.flush()

    def log(self, line: str) -> None:
        if len(self.pending) >= _EVENT_BUFFER_LINES:
            self.dropped += 1
        else:
            self.send("log", line=line)

    @property
    def waiting(self) -> bool:
        return not self.broken and bool(self._partial or self.pending)

    def flush(self) -> None:
        while self.waiting:
            data = self._partial or self.pending.popleft()
            try:
                written = os.write(self.fd, data)
            except BlockingIOError:
                self._partial = data
                return
            except OSError:
                self.broken = True
                self.pending.clear()
                return
            self._partial = data[written:]


class Supervisor:
    def __init__(self, config: SupervisorConfig, control_fd: int, events_fd: int, early_control: bytes = b"") -> None:
        self.config = config
        self.events = _Events(events_fd)
        self.log = BoundedLog(Path(config.log_path) if config.log_path else None, config.log_max_bytes)
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.stop_requested = False
        self.kill_requested = False
        self.launcher_gone = False
        self.statuses: dict[int, int] = {}
        """Exit statuses of our own commands, by pid."""
        self._running: set[int] = set()
        self._selector = selectors.DefaultSelector()
        if config.cpus is not None:
            os.sched_setaffinity(0, config.cpus)  # children inherit it; for this process itself a slice of them will do
        self._watched_output: dict[int, LineSplitter] = {}
        self._control_fd = control_fd
        self._control_rest = b""
        self._events_watched = False
        self._watch_signals()
        self._watch_launcher()
        os.set_blocking(control_fd, False)
        os.set_blocking(events_fd, False)
        self._selector.register(control_fd, selectors.EVENT_READ, self._on_control)
        if early_control:
            self._obey(early_control)

    # ---- what wakes the loop -------------------------------------------------------------------------------------

    def _watch_signals(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop_signal)
        self._selector.register(wake_read, selectors.EVENT_READ, self._on_wakeup)

    def _on_stop_signal(self, *_: object) -> None:
        self.stop_requested = True

    def _on_wakeup(self, fd: int) -> None:
        os.read(fd, 4096)
        self._reap()

    def _watch_launcher(self) -> None:
        pid = self.config.launcher_pid
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._lose_launcher()
            return
        except (OSError, AttributeError):
            return  # no pidfds here: the control pipe's end still tells
        stat = read_stat(pid)
        if stat is None or stat.start_ticks != self.config.launcher_start_ticks:
            self._lose_launcher()
            return
        self._selector.register(fd, selectors.EVENT_READ, self._on_launcher_end)

    def _on_launcher_end(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        self._lose_launcher()

    def _lose_launcher(self) -> None:
        self.launcher_gone = self.stop_requested = True

    def _on_control(self, fd: int) -> None:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            return
        if data:
            self._obey(data)
        else:
            self._selector.unregister(fd)
            self._lose_launcher()

    def _obey(self, data: bytes) -> None:
        *lines, self._control_rest = (self._control_rest + data).split(b"\n")
        for line in lines:
            self.stop_requested |= line in (b"stop", b"kill")
            self.kill_requested |= line == b"kill"

    def _on_output(self, fd: int) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        splitter = self._watched_output[fd]
        for line in splitter.feed(data) if data else splitter.flush():
            self.log.write(line)
            text = line.decode("utf-8", "replace")
            self.tail.append(text)
            self.events.log(text)
        if not data:
            self._selector.unregister(fd)
            del self._watched_output[fd]
            os.close(fd)

    def _pump(self, timeout: float | None) -> None:
        """Wait for something to happen, at most `timeout` seconds, and handle it."""
        if self.events.waiting != self._events_watched:
            self._events_watched = not self._events_watched
            if self._events_watched:
                self._selector.register(self.events.fd, selectors.EVENT_WRITE, lambda _: self.events.flush())
            else:
                self._selector.unregister(self.events.fd)
        for key, _ in self._selector.select(timeout):
            key.data(key.fd)

    def _pump_until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not condition():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._pump(left)
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:
                self._running.discard(pid)
                self.statuses[pid] = os.waitstatus_to_exitcode(raw)

    # ---- the server's life ---------------------------------------------------------------------------------------

    def run(self) -> None:
        main_pid = self._prepare_and_start()
        if main_pid is not None:
            self._pump_until(partial(self._stopping_or_ended, main_pid))
            if main_pid in self.statuses:
                self._drain_output()
                self.events.send("exited", status=self.statuses[main_pid], tail=list(self.tail))
                if self.config.detached and self.statuses[main_pid] == 0:
                    self._pump_until(lambda: self.stop_requested)
            if self.stop_requested:
                self._stop(main_pid)
        swept = self._sweep()
        self._pump_until(lambda: not self._running, 2.0)  # dead by now, but perhaps not reaped
        self._drain_output()
        status = None if main_pid is None else self.statuses.get(main_pid)
        self.log.close()
        self.events.send(
            "done", status=status, swept=swept, log_error=self.log.error, log_lost_bytes=self.log.lost_bytes
        )
        if self.launcher_gone and self.config.scratch:
            shutil.rmtree(self.config.scratch, ignore_errors=True)
        self._pump_until(lambda: not self.events.waiting, 2.0)

    def _stopping_or_ended(self, pid: int) -> bool:
        return self.stop_requested or pid in self.statuses

    def _prepare_and_start(self) -> int | None:
        for index, command in enumerate(self.config.prepare):
            pid = self._spawn(command)
            if pid is None:
                return None
            self._pump_until(partial(self._stopping_or_ended, pid))
            if self.stop_requested:
                return None
            if self.statuses[pid] != 0:
                self._drain_output()
                self.events.send("prepare_failed", index=index, status=self.statuses[pid], tail=list(self.tail))
                return None
        if self.stop_requested:
            return None
        pid = self._spawn(self.config.command)
        if pid is not None:
            self.events.send("started", pid=pid)
        return pid

    def _spawn(self, argv: list[str]) -> int | None:
        """Start a command in a session of its own with its output piped here; None if it cannot be started."""
        own_pid = os.getpid()

        def die_with_supervisor() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != own_pid:
                os._exit(1)

        env = {**self.config.env, LABEL_VARIABLE: self.config.label, OWNER_VARIABLE: process_token()}
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=env,
                cwd=self.config.cwd,
                start_new_session=True,
                preexec_fn=die_with_supervisor,
            )
        except (OSError, ValueError) as error:
            os.close(read_end)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.events.send("exec_failed", argv0=argv[0], message=reason)
            return None
        finally:
            os.close(write_end)
        process.returncode = 0  # reaped by _reap(), which is the only one that waits
        self._running.add(process.pid)
        os.set_blocking(read_end, False)
        self._watched_output[read_end] = LineSplitter()
        self._selector.register(read_end, selectors.EVENT_READ, self._on_output)
        return process.pid

    def _stop(self, main_pid: int) -> None:
        """The polite part: the recipe's stop command, its signal, its grace."""
        deadline = time.monotonic() + self.config.stop_grace_s

        def left() -> float:
            return max(deadline - time.monotonic(), 0.0)

        if self.config.stop_command is not None and not self.kill_requested:
            pid = self._spawn(self.config.stop_command)
            if pid is not None:
                self._pump_until(lambda: self.kill_requested or pid in self.statuses, left())
        if not self.kill_requested:
            self._signal_servers(main_pid)
            self._pump_until(lambda: self.kill_requested or main_pid in self.statuses, left())
            while not self.kill_requested and left() > 0 and self._escaped():
                self._pump(min(left(), 0.1))

    def _signal_servers(self, main_pid: int) -> None:
        """The stop signal goes to the command itself, and to the top of each labelled tree that is not below us: what
        a prefix such as `docker exec` started there does not hear of a signal to its client."""
        escaped = set(self._escaped())
        tops = [pid for pid in escaped if (stat := read_stat(pid)) is not None and stat.ppid not in escaped]
        for pid in [main_pid, *tops]:
            if pid not in self.statuses and (stat := read_stat(pid)) is not None:
                signal_process(pid, self.config.stop_signal, start_ticks=stat.start_ticks)

    def _escaped(self) -> list[int]:
        below = set(descendants(os.getpid()))
        return [pid for pid in labelled_processes(self.config.label) if pid not in below and pid != os.getpid()]

    def _remaining(self) -> list[int]:
        return [*descendants(os.getpid()), *self._escaped()]

    def _sweep(self) -> int:
        """Kill whatever is left of the server; returns how many processes that were."""
        linger = 0.0 if self.kill_requested else _LINGER_S
        deadline = time.monotonic() + linger
        while (remaining := self._remaining()) and time.monotonic() < deadline and not self.kill_requested:
            if any(pid in self._running for pid in remaining):
                break  # the grace has passed already
            self._pump(0.05)
        killed: set[int] = set()
        for round_number in range(_KILL_ROUNDS):
            if not remaining:
                break
            for pid in remaining:
                stat = read_stat(pid)
                if stat is not None and signal_process(pid, signal.SIGKILL, start_ticks=stat.start_ticks):
                    killed.add(pid)
            self._pump(min(0.01 * (round_number + 1), 0.2))
            self._reap()
            remaining = self._remaining()
        return len(killed)

    def _drain_output(self) -> None:
        """Take what is in the pipes now, without waiting for their ends (a grandchild may hold them open, or write on
        and on: hence the bound)."""
        for _ in range(1000):
            if not any(key.data == self._on_output for key, _ in self._selector.select(0)):
                return
            self._pump(0)


def main() -> None:
    """Read the configuration from standard input, supervise, exit 0."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    data = b""
    while b"\n" not in data:
        chunk = os.read(0, 65536)
        if not chunk:
            sys.exit(0)  # the launcher died before it said anything
        data += chunk
    line, _, early_control = data.partition(b"\n")
    Supervisor(SupervisorConfig(**json.loads(line)), 0, 1, early_control).run()


if __name__ == "__main__":
    main()
