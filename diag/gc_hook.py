"""Records what the garbage collector does in a process that knows nothing of it. Standard library only, Python 3.8 on.

Loaded by `diag/gc_inject/sitecustomize.py` into a server and each of its children when `ATOM_GC_HOOK_DIR` is set;
`diag/gc_injection.py` makes that environment. Reading the files is `diag/gc_records.py`.

The callback runs twice per collection, in whatever thread triggered it, with the collector's own lock held. So it only
stores integers into preallocated slots (a short list, faster than an array; the ring is an array, which the collector
does not walk): it makes no container that the collector tracks, and no system call but the clock. A daemon
thread drains the ring twice a second and writes; it also writes running totals, so that `kill -9` loses at most
two seconds. A pass over old objects is one record; younger passes are counted and summed.

File: `<dir>/gc-<role>-<pid>.jsonl`, opened at the first record so that short-lived helpers leave none; renamed when the
process's role becomes known (a title set after start). Lines: `hook` (what collects here, once), `pass`, `totals`.
All times are nanoseconds of CLOCK_MONOTONIC.
"""

# Runs in every interpreter of a foreign server: pathlib's import would cost more than the rest of this file.
# ruff: noqa: PTH104, PTH118

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import sys
import threading
import time
from array import array

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GcHook", "collector_kind", "install_from_environment", "old_generations"]

DIRECTORY_VARIABLE = "ATOM_GC_HOOK_DIR"
ROLES_VARIABLE = "ATOM_GC_HOOK_ROLES"

SCHEMA_VERSION = "1.0"
DRAIN_EVERY_S = 0.5
TOTALS_EVERY_S = 2.0
QUIET_START_S = 1.0
"""A process of no known role that ends sooner, and had no pass over old objects, leaves no file."""

_RING = 4096
_WIDTH = 5
"""start, stop, generation, collected, uncollectable"""

# Slots of the state array.
_START, _HEAD, _TAIL, _DROPPED = 0, 1, 2, 3
_YOUNG_COUNT, _YOUNG_NS, _YOUNG_MAX, _YOUNG_COLLECTED = 4, 5, 6, 7
_OLD_COUNT, _OLD_NS, _OLD_MAX, _OLD_COLLECTED, _OLD_UNCOLLECTABLE = 8, 9, 10, 11, 12
_BY_GENERATION = 13  # three slots
_SLOTS = 16


def collector_kind() -> str:
    """`generational`, `incremental` (CPython 3.14.0 to 3.14.4) or `free-threaded`."""
    if "free-threading" in sys.version:
        return "free-threaded"
    if (3, 14, 0) <= sys.version_info[:3] <= (3, 14, 4):
        return "incremental"
    return "generational"


def old_generations(kind: str) -> list[int]:
    """Generations whose passes look at old objects, as `gc.callbacks` numbers them.

    Incremental: 1 is a young pass plus an increment of the old generation, 2 a full pass. Free-threaded: there are no
    generations, every pass is over everything.
    """
    return {"generational": [2], "incremental": [1, 2], "free-threaded": [0, 1, 2]}[kind]


class GcHook:
    """Times the collections of this process and records them under `directory`."""

    def __init__(self, directory: str, roles: dict[str, list[str]]) -> None:
        self.directory = directory
        self.roles = {role: [re.compile(pattern) for pattern in patterns] for role, patterns in roles.items()}
        self.kind = collector_kind()
        self.old_from = old_generations(self.kind)[0]
        self._reset()
        self.callback = self._make_callback()

    def _reset(self) -> None:
        self.pid = os.getpid()
        self.installed_ns = time.monotonic_ns()
        self.state = [0] * _SLOTS
        self.ring = array("q", bytes(8 * _RING * _WIDTH))
        self.fd = -1
        self.path: str | None = None
        self.role = "other"
        self.failed = False
        self.closed = False
        self.wake = threading.Event()
        self.draining = threading.Lock()

    def _make_callback(self) -> Callable[[str, dict[str, int]], None]:
        """The function for `gc.callbacks`. Names are bound here once: a lookup on `self` would cost on every pass."""
        state, ring, now, old_from = self.state, self.ring, time.monotonic_ns, self.old_from

        def on_collection(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                state[_START] = now()
                return
            stop = now()
            start = state[_START]
            pause = stop - start
            generation = info["generation"]
            state[_BY_GENERATION + generation] += 1
            if generation < old_from:
                state[_YOUNG_COUNT] += 1
                state[_YOUNG_NS] += pause
                state[_YOUNG_COLLECTED] += info["collected"]
                if pause > state[_YOUNG_MAX]:
                    state[_YOUNG_MAX] = pause
                return
            state[_OLD_COUNT] += 1
            state[_OLD_NS] += pause
            state[_OLD_COLLECTED] += info["collected"]
            state[_OLD_UNCOLLECTABLE] += info["uncollectable"]
            if pause > state[_OLD_MAX]:
                state[_OLD_MAX] = pause
            head = state[_HEAD]
            if head - state[_TAIL] >= _RING:
                state[_DROPPED] += 1
                return
            at = (head % _RING) * _WIDTH
            ring[at] = start
            ring[at + 1] = stop
            ring[at + 2] = generation
            ring[at + 3] = info["collected"]
            ring[at + 4] = info["uncollectable"]
            state[_HEAD] = head + 1  # last, so that the drain never sees half a record

        return on_collection

    # ---- life ----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        gc.callbacks.append(self.callback)
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_fork_in_parent,
                after_in_child=self._after_fork_in_child,
            )
        self._start_thread()

    def _start_thread(self) -> None:
        self.thread = threading.Thread(target=self._drain_for_ever, name="atom-gc-hook", daemon=True)
        # While the interpreter ends no thread can start; close() still writes the totals.
        with contextlib.suppress(RuntimeError):
            self.thread.start()

    def _before_fork(self) -> None:
        """Our thread does not count as the one that makes fork unsafe (CPython 3.12 warns about threads)."""
        self.wake.set()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join()

    def _after_fork_in_parent(self) -> None:
        if not self.closed:
            self.wake.clear()
            self._start_thread()

    def _after_fork_in_child(self) -> None:
        """The child starts from nothing: its own counters, file and thread. The parent's file stays the parent's."""
        if self.callback not in gc.callbacks:
            return
        gc.callbacks.remove(self.callback)
        if self.fd >= 0:
            os.close(self.fd)
        self._reset()
        self.callback = self._make_callback()
        gc.callbacks.append(self.callback)
        self._start_thread()

    def _drain_for_ever(self) -> None:
        wake, pid = self.wake, self.pid
        next_totals = time.monotonic() + TOTALS_EVERY_S
        while not wake.wait(DRAIN_EVERY_S) and pid == os.getpid():
            due = time.monotonic() >= next_totals
            self.drain(totals=due)
            if due:
                next_totals = time.monotonic() + TOTALS_EVERY_S

    def close(self) -> None:
        """Write what is left; at exit. Runs in the process that installed the hook or was forked from it."""
        self.closed = True
        self.wake.set()
        short = time.monotonic_ns() - self.installed_ns < QUIET_START_S * 1e9
        if short and not self.state[_OLD_COUNT] and self.fd < 0 and self._role_of(_command_line()) == "other":
            return
        self.drain(totals=True)

    # ---- writing -------------------------------------------------------------------------------------------------

    def drain(self, totals: bool) -> None:
        with self.draining:
            state = self.state
            tail, head = state[_TAIL], state[_HEAD]
            if head > tail or totals:
                self._open()
            while tail < head:
                at = (tail % _RING) * _WIDTH
                start, stop, generation, collected, uncollectable = self.ring[at : at + _WIDTH]
                state[_TAIL] = tail = tail + 1
                self._write_line(
                    {
                        "type": "pass",
                        "start_ns": start,
                        "stop_ns": stop,
                        "generation": generation,
                        "collected": collected,
                        "uncollectable": uncollectable,
                    }
                )
            if totals:
                self._write_totals()

    def _write_totals(self) -> None:
        state = self.state
        self._rename_to_role()
        self._write_line(
            {
                "type": "totals",
                "t_ns": time.monotonic_ns(),
                "recorded": state[_TAIL],
                "dropped": state[_DROPPED],
                "old_passes": state[_OLD_COUNT],
                "old_ns": state[_OLD_NS],
                "old_max_ns": state[_OLD_MAX],
                "old_collected": state[_OLD_COLLECTED],
                "old_uncollectable": state[_OLD_UNCOLLECTABLE],
                "young_passes": state[_YOUNG_COUNT],
                "young_ns": state[_YOUNG_NS],
                "young_max_ns": state[_YOUNG_MAX],
                "young_collected": state[_YOUNG_COLLECTED],
                "passes_by_generation": list(state[_BY_GENERATION : _BY_GENERATION + 3]),
                "frozen": gc.get_freeze_count(),
            }
        )

    def _open(self) -> None:
        if self.fd >= 0 or self.failed:
            return
        command = _command_line()
        self.role = self._role_of(command)
        self.path = os.path.join(self.directory, f"gc-{self.role}-{self.pid}.jsonl")
        try:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError:
            self.failed = True
            return
        header = {
            "type": "hook",
            "schema_version": SCHEMA_VERSION,
            "pid": self.pid,
            "ppid": os.getppid(),
            "role": self.role,
            "command": command[:2000],
            "installed_ns": self.installed_ns,
            "boot_id": _boot_id(),
            "python": sys.version.split()[0],
            "implementation": sys.implementation.name,
            "collector": self.kind,
            "old_generations": old_generations(self.kind),
            "thresholds": list(gc.get_threshold()),
            "enabled": gc.isenabled(),
        }
        self._write_line(header)

    def _rename_to_role(self) -> None:
        role = self._role_of(_command_line())
        if role == self.role or self.path is None:
            return
        path = os.path.join(self.directory, f"gc-{role}-{self.pid}.jsonl")
        try:
            os.rename(self.path, path)
        except OSError:
            return
        self.role, self.path = role, path

    def _role_of(self, command: str) -> str:
        for role, patterns in self.roles.items():
            if any(pattern.search(command) for pattern in patterns):
                return role
        return "other"

    def _write_line(self, record: dict[str, object]) -> None:
        """One line, one write. After a failure (a full disk) nothing more is written: a torn line stays the last."""
        if self.failed or self.fd < 0:
            return
        data = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        try:
            if os.write(self.fd, data) != len(data):
                self.failed = True
        except OSError:
            self.failed = True


def _command_line() -> str:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return " ".join([sys.executable or "", *getattr(sys, "argv", [])])


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def install_from_environment() -> GcHook | None:
    """Install the hook as the environment says; None where it is not asked for or the interpreter has no callbacks.

    `ATOM_GC_HOOK_DIR`: where the files go. `ATOM_GC_HOOK_ROLES`: JSON, role to regular expressions on the command line,
    the most specific role first.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory or not hasattr(gc, "callbacks"):
        return None
    try:
        roles = json.loads(os.environ.get(ROLES_VARIABLE) or "{}")
    except ValueError:
        roles = {}
    hook = GcHook(directory, roles)
    hook.install()
    return hook
