"""A launched server as its launcher sees it: its address, its processes, its log, its end.

`SupervisorLink` owns the pipes to `recipes/supervisor.py` and the thread that reads them; `Server` is what callers
hold. Servers are made by `recipes/launcher.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from atom.recipes.errors import ServerDiedError, UsageError
from atom.recipes.hints import describe_status, failure_hint
from atom.recipes.placeholders import Expansion
from atom.recipes.processes import descendants, labelled_processes, read_stat, signal_process
from atom.recipes.recipe import Recipe
from atom.recipes.scratch import Scratch
from atom.recipes.spawn import module_command
from atom.recipes.supervisor import SupervisorConfig

__all__ = ["Server", "StopReport", "SupervisorLink"]

_KEPT_LINES: Final = 200
_SIGNAL_SLICE_S: Final = 0.25
_MOMENT_S: Final = 1.0
"""What stopping may take without a word."""
_SUPERVISOR_EXTRA_S: Final = 20.0
"""What a supervisor may take for its sweep after the grace."""


@dataclass(frozen=True, slots=True)
class StopReport:
    """How a server ended."""

    status: int | None
    """As in `subprocess.Popen.returncode`; None if it never started, or was killed together with its supervisor."""
    swept: int
    """Processes that had to be killed: none after a clean stop."""
    seconds: float
    log_error: str | None
    """Why part of the log is missing (a full disk, say); None if it is complete."""
    killed: str | None = None
    """Why it had to be killed, in one line; None if it ended by itself."""


class SupervisorLink:
    """The supervisor process, the pipes to it, and what it has said."""

    def __init__(
        self,
        *,
        label: str,
        expansion: Expansion,
        recipe: Recipe,
        log_path: Path,
        grace_s: float,
        scratch: Scratch,
        on_log: Callable[[str], None] | None,
        cpus: Sequence[int] | None = None,
    ) -> None:
        self.label = label
        self.log_path = log_path
        self.grace_s = grace_s
        self.scratch = scratch
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.server_pid: int | None = None
        self.events: dict[str, dict[str, Any]] = {}
        """Last event of each kind other than `log`."""
        self._on_log = on_log
        self._changed = threading.Condition()
        own = read_stat(os.getpid())
        assert own is not None
        config = SupervisorConfig(
            label=label,
            prepare=expansion.prepare,
            command=expansion.command,
            stop_command=expansion.stop_command,
            env=expansion.env,
            cwd=expansion.cwd,
            log_path=str(log_path.absolute()),
            log_max_bytes=recipe.log_max_bytes,
            stop_signal=int(recipe.stop.signal),
            stop_grace_s=grace_s,
            detached=recipe.detached,
            launcher_pid=own.pid,
            launcher_start_ticks=own.start_ticks,
            scratch=str(scratch.path),
            cpus=None if cpus is None else list(cpus),
        )
        self._error_path = scratch.path / "supervisor.err"
        with self._error_path.open("wb") as errors:
            self.process = subprocess.Popen(
                module_command("atom.recipes.supervisor", isolated=True),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._say(json.dumps(asdict(config)))
        self._reader = threading.Thread(target=self._read_events, name="atom-supervisor-events", daemon=True)
        self._reader.start()

    def _say(self, line: str) -> None:
        """Straight to the pipe: a second Ctrl-C says `kill` from a signal handler, and where that interrupted the
        writing of `stop`, a buffered writer refused the call as re-entrant and the word was lost."""
        assert self.process.stdin is not None
        data = line.encode() + b"\n"
        try:
            while data:
                data = data[os.write(self.process.stdin.fileno(), data) :]
        except (BrokenPipeError, ValueError):
            pass  # it has ended: the reader sees that

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            event = json.loads(raw)
            if event["event"] == "log":
                self._take_line(event["line"])
                continue
            if event["event"] == "log_dropped":
                self._take_line(f"[{event['lines']} lines not shown; they are in the log file]")
                continue
            with self._changed:
                self.events[event["event"]] = event
                if event["event"] == "started":
                    self.server_pid = event["pid"]
                self._changed.notify_all()
        with self._changed:
            self.events.setdefault("closed", {"event": "closed"})
            self._changed.notify_all()

    def _take_line(self, line: str) -> None:
        self.lines.append(line)
        if self._on_log is not None:
            try:
                self._on_log(line)
            except OSError:  # whoever read our output has left; the server's end must still be heard of
                self._on_log = None

    @property
    def ended(self) -> bool:
        """The server is over, or its supervisor is."""
        return bool(self.events.keys() & {"exited", "exec_failed", "prepare_failed", "done", "closed"})

    def wait(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Whether `condition` came to hold within `timeout` seconds. In slices: a signal that arrives just before the
        lock is taken does not interrupt it, and its handler (a second Ctrl-C) would run only at the wait's end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not condition():
                left = _SIGNAL_SLICE_S if deadline is None else min(deadline - time.monotonic(), _SIGNAL_SLICE_S)
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def ask(self, word: str) -> None:
        """`stop` or `kill`."""
        self._say(word)

    def finish(self) -> None:
        """Wait for the supervisor's end; if it does not come, or came by force, kill what it answered for."""
        if not self.wait(lambda: "closed" in self.events, self.grace_s + _SUPERVISOR_EXTRA_S):
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        if "done" not in self.events:
            kill_labelled(self.label)

    def supervisor_error(self) -> str:
        try:
            return self._error_path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


def kill_labelled(label: str) -> int:
    """SIGKILL to every process with this label until none is left; returns how many there were."""
    killed: set[int] = set()
    for _ in range(50):
        remaining = labelled_processes(label)
        if not remaining:
            break
        for pid in remaining:
            stat = read_stat(pid)
            if stat is not None and signal_process(pid, signal.SIGKILL, start_ticks=stat.start_ticks):
                killed.add(pid)
        time.sleep(0.02)
    return len(killed)


class Server:
    """A server that a recipe started. A context manager: leaving it stops the server."""

    def __init__(
        self, *, recipe: Recipe, host: str, ports: dict[str, int], expansion: Expansion, link: SupervisorLink
    ) -> None:
        self.recipe = recipe
        self.host = host
        self.ports = ports
        self.command = expansion.command
        self.env = expansion.recipe_env
        """What the recipe and the caller added to the environment."""
        self.started_ns = time.monotonic_ns()
        self.ready_ns: int | None = None
        self._link = link
        self.on_stopping: Callable[[str], None] | None = None
        """Gets a line when stopping takes more than a moment, and when it is cut short."""
        self._report: StopReport | None = None
        self._told_to_kill = False
        self._stopping = threading.Lock()

    @property
    def label(self) -> str:
        return self._link.label

    @property
    def pid(self) -> int | None:
        """The command's own pid: the server's, or a prefix's (`docker exec`). None before it started."""
        return self._link.server_pid

    @property
    def supervisor_pid(self) -> int:
        return self._link.process.pid

    @property
    def log_path(self) -> Path:
        return self._link.log_path

    @property
    def port(self) -> int:
        return self.ports["port"]

    @property
    def base_url(self) -> str:
        return self._url("port", "")

    @property
    def metrics_url(self) -> str:
        return self._url(self.recipe.metrics.port, self.recipe.metrics.path)

    def _url(self, port: str, path: str) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.ports[port]}{path}"

    def mark_ready(self) -> None:
        self.ready_ns = time.monotonic_ns()

    def processes(self) -> list[int]:
        """Pids of the server's live processes that are visible on this machine."""
        own = {self.supervisor_pid, os.getpid()}
        return sorted({*descendants(self.supervisor_pid), *labelled_processes(self.label)} - own)

    def last_lines(self, count: int) -> list[str]:
        """The newest lines of the log."""
        lines = list(self._link.lines)
        for event in ("exited", "prepare_failed"):
            lines = lines or self._link.events.get(event, {}).get("tail", [])
        return lines[-count:]

    def last_line(self) -> str:
        lines = self.last_lines(1)
        return lines[0] if lines else ""

    def log_note(self) -> str:
        """Where the log is, if it outlives the server."""
        return "" if self.log_path.is_relative_to(self._link.scratch.path) else f" {self.log_path}"

    def wait_for_event(self, timeout: float | None, condition: Callable[[], bool] = bool) -> None:
        """Sleep, but wake at once when the server ends, or when `condition` holds at a `wake()`."""
        self._link.wait(lambda: self._link.ended or condition(), timeout)

    def wake(self) -> None:
        """Let `wait_for_event` look at its condition."""
        self._link.wake()

    def wait_for_end(self, timeout: float | None = None) -> bool:
        """Wait until the server has ended by itself (False: it still runs)."""
        return self._link.wait(lambda: self.dead, timeout)

    @property
    def dead(self) -> bool:
        """It ended without being asked to."""
        exited = self._link.events.get("exited")
        if self.recipe.detached and exited is not None and exited["status"] == 0 and "done" not in self._link.events:
            return False
        return self._link.ended

    def raise_if_dead(self, *, ready: bool = True) -> None:
        """Raise ServerDiedError (or UsageError if there is no such program) when the server is gone."""
        if not self.dead:
            return
        events = self._link.events
        title = self.recipe.title
        if "exec_failed" in events:
            event = events["exec_failed"]
            raise UsageError(f"cannot run {event['argv0']!r}: {event['message']}")
        if "exited" in events:
            if not ready and events["exited"]["status"] == 0:
                self._raise_left(events["exited"])
            self._raise_died("server", events["exited"], "" if ready else ", while it started")
        if "prepare_failed" in events:
            event = events["prepare_failed"]
            self._raise_died(f"command prepare[{event['index']}]", event)
        error = self._link.supervisor_error()
        raise ServerDiedError(f"the supervisor of {title} ended unexpectedly{': ' + error if error else ''}")

    def _raise_left(self, event: dict[str, Any]) -> None:
        """It said that all was well, and there is no server."""
        shown = "".join(f"\n    {line[:300]}" for line in event["tail"][-10:])
        cause = (
            f"{self.recipe.title} ended with exit status 0 before anything listened: a server that goes into the "
            "background must be run in the foreground, or started by hand and attached to (--pid)"
        )
        raise ServerDiedError(cause + (f"; last lines of its log{self.log_note()}:{shown}" if shown else ""), 0)

    def _raise_died(self, what: str, event: dict[str, Any], when: str = "") -> None:
        seconds = (time.monotonic_ns() - self.started_ns) / 1e9
        hint = failure_hint(event["status"], event["tail"])
        lines = event["tail"][-10:]
        shown = "".join(f"\n    {line[:300]}" for line in lines) if lines else " (it wrote nothing)"
        status = describe_status(event["status"])
        raise ServerDiedError(
            f"{what} of {self.recipe.title} died with {status} after {seconds:.1f} s{when}"
            f"{': ' + hint if hint else ''}; last lines of its log{self.log_note()}:{shown}",
            event["status"],
            cause=_cause(what, status + when, hint, event["tail"]),
        )

    def stop(self, *, kill: bool = False) -> StopReport:
        """Stop the server and everything it started; safe to call twice. `kill` skips the grace."""
        begun = time.monotonic()
        with self._stopping:
            if self._report is None:
                was_running = not self._link.ended
                self._told_to_kill |= kill
                self._link.ask("kill" if kill else "stop")
                self._finish(quietly=not was_running)
                done = self._link.events.get("done", {})
                self._report = StopReport(
                    status=done.get("status"),
                    swept=done.get("swept", 0),
                    seconds=time.monotonic() - begun,
                    log_error=done.get("log_error"),
                    killed=self._why_killed(done.get("status")) if was_running else None,
                )
                self._link.scratch.remove()
            return self._report

    def _finish(self, *, quietly: bool) -> None:
        """Wait for the end; whoever is interrupted meanwhile wants it now, and gets it before the interrupt goes on."""
        try:
            soon = self._link.wait(lambda: bool(self._link.events.keys() & {"done", "closed"}), _MOMENT_S)
            if not soon and not quietly:
                left = max(self._link.grace_s - _MOMENT_S, 0.0)
                self._say(f"waiting for the server to stop ({self._stop_signal} sent, SIGKILL after {left:.0f} s)")
            self._link.finish()
        except (KeyboardInterrupt, SystemExit):
            self._say("interrupted again: killing the server")
            self.kill_now()
            self._link.finish()
            self._link.scratch.remove()
            raise

    @property
    def _stop_signal(self) -> str:
        return signal.Signals(self.recipe.stop.signal).name

    def _say(self, line: str) -> None:
        if self.on_stopping is not None:
            self.on_stopping(line)

    def _why_killed(self, status: int | None) -> str | None:
        if status != -signal.SIGKILL:
            return None
        if self._told_to_kill:
            return "the server was killed without waiting for it to stop"
        return f"the server did not stop within {self._link.grace_s:g} s of {self._stop_signal}: it was killed"

    def kill_now(self) -> None:
        """Cut a running `stop()` short (a second Ctrl-C)."""
        self._told_to_kill = True
        self._link.ask("kill")

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _cause(what: str, status: str, hint: str | None, lines: Sequence[str]) -> str:
    """`the server died: EngineCore 0 was killed by SIGKILL (exit status 1)`; without a hint, what it wrote last."""
    last = next((line.strip()[:200] for line in reversed(lines) if line.strip()), None)
    if hint is not None:
        return f"the {what} died: {hint} ({status})"
    return f"the {what} died with {status}" + (f"; it last wrote: {last}" if last else "")
