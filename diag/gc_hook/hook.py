"""The hook itself: a function in `gc.callbacks` and a thread that writes what it saw.

The callback runs twice per collection, in whatever thread triggered it, with the collector's own lock held. So it only
stores integers into preallocated slots (a short list, faster than an array; the ring is an array, which the collector
does not walk): it makes no container that the collector tracks, and no system call but the clock. A daemon
thread drains the ring twice a second and writes; it also writes running totals, so that `kill -9` loses at most
two seconds. A pass over old objects is one record; younger passes are counted and summed.

The thread is a raw one and nothing here takes a lock of `threading`: the hook may be installed while the server's main
thread holds any of them.
"""

# Runs in every interpreter of a foreign server: pathlib's import would cost more than the rest of the hook.
# ruff: noqa: PTH110, PTH112, PTH118

from __future__ import annotations

import _thread
import atexit
import contextlib
import gc
import os
import sys
import time
from array import array

from .actions import Action, freeze_count
from .record import ACTION_FILE, OWNER_FILE, STOP_FILE, Record, Roles, command_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["HOOKS", "GcHook", "collector_kind", "old_generations"]

SCHEMA_VERSION = "1.0"
DRAIN_EVERY_S = 0.5
TOTALS_EVERY_S = 2.0
LOOK_AROUND_EVERY_S = 5.0
"""How often it is looked whether the directory and the owner are still there."""
QUIET_START_S = 1.0
"""A process of no known role that ends sooner, and had no pass over old objects, leaves no file."""

_RING = 4096
_WIDTH = 5
"""start, stop, generation, collected, uncollectable"""
_PASS_LINE = '{{"type":"pass","start_ns":{},"stop_ns":{},"generation":{},"collected":{},"uncollectable":{}}}\n'

# Slots of the state array.
_START, _HEAD, _TAIL, _DROPPED = 0, 1, 2, 3  # _START: 0 between collections
_YOUNG_COUNT, _YOUNG_NS, _YOUNG_MAX, _YOUNG_COLLECTED = 4, 5, 6, 7
_OLD_COUNT, _OLD_NS, _OLD_MAX, _OLD_COLLECTED, _OLD_UNCOLLECTABLE = 8, 9, 10, 11, 12
_BY_GENERATION = 13  # three slots
_DRAINER, _DRAINER_NS = 16, 17  # the drain thread's id, and the pauses that fell into it: not the hook's own time
_SLOTS = 18

HOOKS: list[GcHook] = []
"""Those installed in this process: more than one if it is recorded into several directories."""


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


class _Drainer:
    """One life of the drain thread: from the start, or a fork, to the next fork or the end."""

    def __init__(self) -> None:
        self.wake = _thread.allocate_lock()
        self.wake.acquire()
        self.done = _thread.allocate_lock()
        self.done.acquire()
        self.native_id = 0
        self.finish = False
        """Whether to write the last totals on waking."""

    def end(self, finish: bool, timeout_s: float) -> bool:
        """Ask the thread to end; False if it did not (a file system that hangs). Never called by the thread itself."""
        self.finish = finish
        self.wake.release()
        if not self.done.acquire(timeout=timeout_s):
            return False
        # It still has to leave the kernel: CPython 3.12 counts threads in /proc when it warns about a fork.
        task = f"/proc/self/task/{self.native_id}"
        deadline = time.monotonic() + 0.02
        while os.path.exists(task) and time.monotonic() < deadline:
            time.sleep(0.0001)
        return True


class GcHook:
    """Times the collections of this process and records them under `directory`.

    `roles`: role to regular expressions on the command line, the most specific role first. `action`: see
    `check_action`. `attached`: removes itself when `gc-hook-owner` is no longer locked.
    """

    def __init__(
        self,
        directory: str,
        roles: Mapping[str, Sequence[str]],
        action: str | None = None,
        attached: bool = False,
    ) -> None:
        self.roles = Roles(roles)
        self.record = Record(directory, self.roles)
        self.action = Action(action) if action else None
        self.attached = attached
        self.kind = collector_kind()
        self.old_from = old_generations(self.kind)[0]
        self._reset()
        self.callback = self._make_callback(self.state, self.ring)
        self.callback_ns = self._measure_callback()

    def _reset(self) -> None:
        self.installed_ns = time.monotonic_ns()
        self.state = [0] * _SLOTS
        self.ring = array("q", bytes(8 * _RING * _WIDTH))
        self.overflowed = 0
        """Passes not written because the file is full."""
        self.closed = False
        self.drainer: _Drainer | None = None
        self.draining = _thread.allocate_lock()
        self.ended_cpu_ns = 0
        """CPU time of drain threads that have ended."""
        self.frozen: int | None = None
        self.next_freeze_count = 0.0

    def _make_callback(self, state: list[int], ring: array[int]) -> Callable[[str, dict[str, int]], None]:
        """The function for `gc.callbacks`. Names are bound here once: a lookup on `self` would cost on every pass."""
        now, thread, old_from = time.monotonic_ns, _thread.get_ident, self.old_from

        def on_collection(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                state[_START] = now()
                return
            stop = now()
            start = state[_START]
            if not start:  # installed while this collection ran
                return
            pause = stop - start
            generation = info["generation"]
            state[_BY_GENERATION + generation] += 1
            if thread() == state[_DRAINER]:
                state[_DRAINER_NS] += pause
            if generation < old_from:
                state[_YOUNG_COUNT] += 1
                state[_YOUNG_NS] += pause
                state[_YOUNG_COLLECTED] += info["collected"]
                if pause > state[_YOUNG_MAX]:
                    state[_YOUNG_MAX] = pause
                state[_START] = 0
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
                state[_START] = 0
                return
            at = (head % _RING) * _WIDTH
            ring[at] = start
            ring[at + 1] = stop
            ring[at + 2] = generation
            ring[at + 3] = info["collected"]
            ring[at + 4] = info["uncollectable"]
            state[_HEAD] = head + 1  # after the record, so that the drain never sees half of one
            state[_START] = 0  # last: a copy of the state that has 0 here is of one moment

        return on_collection

    def _measure_callback(self) -> int:
        """Nanoseconds that both calls of one collection take, with the dictionaries that CPython makes for them.

        On scratch slots; the median of a few batches, so that being preempted in one does not count.
        """
        batches, calls = 5, 50
        ring = array("q", bytes(8 * batches * calls * _WIDTH))
        callback = self._make_callback([0] * _SLOTS, ring)
        taken = []
        for _ in range(batches):
            start = time.perf_counter_ns()
            for _ in range(calls):
                callback("start", {"generation": 2, "collected": 0, "uncollectable": 0})
                callback("stop", {"generation": 2, "collected": 1, "uncollectable": 0})
            taken.append((time.perf_counter_ns() - start) // calls)
        return sorted(taken)[batches // 2]

    # ---- life ----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        gc.callbacks.append(self.callback)
        atexit.register(self.close)
        _watch_forks()
        HOOKS.append(self)
        self._start_thread()

    def begin(self) -> None:
        """Write the first line now, so that whoever attached sees that this process is hooked."""
        with self.draining:
            if self.record.unopened:
                self.record.open(self._header())

    def _start_thread(self) -> None:
        drainer = _Drainer()
        # Where no thread can start (a limit, or the interpreter ends), close() still writes the totals.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(self._drain_for_ever, (drainer,))
            self.drainer = drainer

    def before_fork(self) -> None:
        """Our thread does not count as the one that makes fork unsafe (CPython 3.12 warns about threads)."""
        drainer, self.drainer = self.drainer, None
        if drainer is not None:
            drainer.end(finish=False, timeout_s=1.0)

    def after_fork_in_parent(self) -> None:
        if not self.closed and self.drainer is None:
            self._start_thread()

    def after_fork_in_child(self) -> None:
        """The child starts from nothing: its own counters, file and thread. The parent's file stays the parent's."""
        if self.closed or self.callback not in gc.callbacks:
            return
        gc.callbacks.remove(self.callback)
        self.record.close()
        self.record = Record(self.record.directory, self.roles)
        self._reset()
        self.callback = self._make_callback(self.state, self.ring)
        gc.callbacks.append(self.callback)
        self._start_thread()

    def close(self) -> None:
        """Write what is left; at exit. Runs in the process that installed the hook or was forked from it."""
        if self.closed:
            return
        self.closed = True
        drainer, self.drainer = self.drainer, None
        if drainer is None:
            self._finish("exit")
        else:
            drainer.end(finish=True, timeout_s=2.0)

    def _drain_for_ever(self, drainer: _Drainer) -> None:
        state, wake = self.state, drainer.wake
        drainer.native_id = getattr(_thread, "get_native_id", int)()
        state[_DRAINER] = _thread.get_ident()
        next_totals = time.monotonic() + TOTALS_EVERY_S
        next_look = time.monotonic() + LOOK_AROUND_EVERY_S
        try:
            while not wake.acquire(timeout=DRAIN_EVERY_S):
                now = time.monotonic()
                if os.path.exists(os.path.join(self.record.directory, STOP_FILE)):
                    self._remove("stopped")
                    return
                if now >= next_look:
                    next_look = now + LOOK_AROUND_EVERY_S
                    if self._abandoned():
                        self._remove("abandoned")
                        return
                due = self._act() or now >= next_totals
                self.drain(totals=due)
                if due:
                    next_totals = now + TOTALS_EVERY_S
            if drainer.finish:
                self._finish("exit")
        except Exception as error:  # never the server's problem
            self.record.failed = True
            with contextlib.suppress(Exception):
                sys.stderr.write(f"atom: the GC hook stopped recording: {error!r}\n")
        finally:
            self.ended_cpu_ns += time.thread_time_ns()
            state[_DRAINER] = 0
            drainer.done.release()

    def _act(self) -> bool:
        """Go on with the what-if action; whether it began just now."""
        action = self.action
        if action is None:
            return False
        begins = not action.started and os.path.exists(os.path.join(self.record.directory, ACTION_FILE))
        if begins:
            action.start()
        if action.started:
            action.step()
        return begins

    def _abandoned(self) -> bool:
        """Nobody will read this: the directory was deleted, or whoever attached is gone without detaching."""
        if not os.path.isdir(self.record.directory):
            return True
        if not self.attached:
            return False
        import fcntl

        try:
            fd = os.open(os.path.join(self.record.directory, OWNER_FILE), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # locked by its owner, or a file system without locks
            return False
        finally:
            os.close(fd)
        return True

    def _remove(self, reason: str) -> None:
        """Leave the process as it was. Runs in the drain thread."""
        self.closed = True
        self.drainer = None
        if self.action is not None:
            self.action.undo()
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self.callback)
        atexit.unregister(self.close)
        with contextlib.suppress(ValueError):
            HOOKS.remove(self)
        self._finish(reason)

    def _finish(self, reason: str) -> None:
        state = self.state
        short = time.monotonic_ns() - self.installed_ns < QUIET_START_S * 1e9
        if short and not state[_OLD_COUNT] and self.record.fd < 0 and self.roles.role_of(command_line()) == "other":
            return
        self.drain(totals=True, last=True)
        self.record.write_record({"type": "end", "t_ns": time.monotonic_ns(), "reason": reason})
        self.record.close()

    # ---- writing -------------------------------------------------------------------------------------------------

    def drain(self, totals: bool, last: bool = False) -> None:
        """Write the passes since the last drain and, if asked, the totals of the same moment."""
        if not self.draining.acquire(timeout=2.0):
            return  # somebody is stuck in a write: not us as well
        try:
            t_ns, snapshot = self._snapshot(whatever=last)
            if snapshot is None:  # a collection is under way: half of its numbers would not add up with the rest
                return
            if (snapshot[_HEAD] > snapshot[_TAIL] or totals) and self.record.unopened:
                self.record.open(self._header())
            self._write_passes(snapshot[_TAIL], snapshot[_HEAD])
            if totals:
                self.record.follow_title()
                self.record.write_record(self._totals(t_ns, snapshot))
        finally:
            self.draining.release()

    def _snapshot(self, whatever: bool) -> tuple[int, list[int] | None]:
        """A copy of the slots of one moment, and the time just before it."""
        t_ns = 0
        for _ in range(1 if whatever else 50):
            t_ns = time.monotonic_ns()
            snapshot = self.state[:]
            if whatever or not snapshot[_START]:
                return t_ns, snapshot
            time.sleep(0.001)
        return t_ns, None

    def _write_passes(self, tail: int, head: int) -> None:
        lines = []
        while tail < head:
            at = (tail % _RING) * _WIDTH
            lines.append(_PASS_LINE.format(*self.ring[at : at + _WIDTH]))
            tail += 1
            if len(lines) == 256 or tail == head:
                if self.record.full:
                    self.overflowed += len(lines)
                else:
                    self.record.write("".join(lines))
                lines.clear()
                self.state[_TAIL] = tail

    def _totals(self, t_ns: int, state: list[int]) -> dict[str, object]:
        action = self.action
        return {
            "type": "totals",
            "t_ns": t_ns,
            "recorded": state[_HEAD] - self.overflowed,
            "dropped": state[_DROPPED] + self.overflowed,
            "old_passes": state[_OLD_COUNT],
            "old_ns": state[_OLD_NS],
            "old_max_ns": state[_OLD_MAX],
            "old_collected": state[_OLD_COLLECTED],
            "old_uncollectable": state[_OLD_UNCOLLECTABLE],
            "young_passes": state[_YOUNG_COUNT],
            "young_ns": state[_YOUNG_NS],
            "young_max_ns": state[_YOUNG_MAX],
            "young_collected": state[_YOUNG_COLLECTED],
            "passes_by_generation": state[_BY_GENERATION : _BY_GENERATION + 3],
            "frozen": self._frozen(),
            "thresholds": list(gc.get_threshold()),
            "enabled": gc.isenabled(),
            "action": action.text if action is not None and action.started else None,
            "hook_cpu_ns": self._cpu_ns(state),
        }

    def _frozen(self) -> int | None:
        """Counting walks all frozen objects with the interpreter stopped (14 ms for a million): at most 0.05% of the
        time goes into it."""
        now = time.monotonic()
        if now >= self.next_freeze_count:
            start = time.perf_counter()
            self.frozen = freeze_count()
            self.next_freeze_count = now + 2000.0 * (time.perf_counter() - start)
        return self.frozen

    def _cpu_ns(self, state: list[int]) -> int:
        """CPU time of the hook since it was installed: its threads, and the callbacks at their measured cost."""
        own = self.ended_cpu_ns - state[_DRAINER_NS]
        if _thread.get_ident() == state[_DRAINER]:
            own += time.thread_time_ns()
        return max(own, 0) + sum(state[_BY_GENERATION : _BY_GENERATION + 3]) * self.callback_ns

    def _header(self) -> dict[str, object]:
        return {
            "schema_version": SCHEMA_VERSION,
            "installed_ns": self.installed_ns,
            "boot_id": _boot_id(),
            "python": sys.version.split()[0],
            "implementation": sys.implementation.name,
            "collector": self.kind,
            "old_generations": old_generations(self.kind),
            "thresholds": list(gc.get_threshold()),
            "enabled": gc.isenabled(),
            "attached": self.attached,
            "callback_ns": self.callback_ns,
            "command": command_line()[:2000],
        }


_watching_forks = False


def _watch_forks() -> None:
    """Once for all hooks, because CPython cannot unregister it."""
    global _watching_forks
    if not _watching_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lambda: _tell_hooks(GcHook.before_fork),
            after_in_parent=lambda: _tell_hooks(GcHook.after_fork_in_parent),
            after_in_child=lambda: _tell_hooks(GcHook.after_fork_in_child),
        )
    _watching_forks = True


def _tell_hooks(what: Callable[[GcHook], None]) -> None:
    for hook in list(HOOKS):
        what(hook)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
