"""The hook itself: what `passes.py` noted of each collection, taken and written by a thread.

A daemon thread takes the passes ten times a second and writes; it also writes running totals, so that `kill -9`, or
`os._exit`, loses a tenth of a second of passes and at most two seconds of totals. A pass over old objects is one
record; younger passes are counted and summed.

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
from functools import partial

from .actions import Action, freeze_count
from .forks import HOOKS, watch_forks
from .origins import Origins
from .passes import PassQueue
from .record import ACTION_FILE, OWNER_FILE, STOP_FILE, Record, Roles, command_line
from .tally import Tally

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["GcHook", "collector_kind", "old_generations"]

SCHEMA_VERSION = "1.0"
DRAIN_EVERY_S = 0.1
"""A process that does nothing pays 0.1% of a core for it; looking for files costs more, so it is done more seldom."""
ASKED_EVERY_S = 0.5
"""How often it is looked whether somebody wants the hook to go, or to act."""
TOTALS_EVERY_S = 2.0
ABANDONED_EVERY_S = 5.0
"""How often it is looked whether the directory and the owner are still there."""
QUIET_START_S = 1.0
"""A process of no known role that ends sooner, and had no pass over old objects, leaves no file."""

_PASS_LINE = '{{"type":"pass","start_ns":{},"stop_ns":{},"generation":{},"collected":{},"uncollectable":{}}}\n'


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
        # One that has not begun yet may never do so (a limit on threads, or the interpreter ends).
        if not self.done.acquire(timeout=timeout_s if self.native_id else min(timeout_s, 0.2)):
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
    `check_action`. `attached`: removes itself when `gc-hook-owner` is no longer locked. `packages`: whose modules'
    origins are recorded.
    """

    def __init__(
        self,
        directory: str,
        roles: Mapping[str, Sequence[str]],
        action: str | None = None,
        attached: bool = False,
        packages: Sequence[str] = (),
    ) -> None:
        self.roles = Roles(roles)
        self.packages = packages
        self.record = Record(directory, self.roles)
        self.action = Action(action) if action else None
        self.attached = attached
        self.kind = collector_kind()
        self._reset()
        self.callback_ns = _measure_callbacks()

    def _reset(self) -> None:
        self.installed_ns = time.monotonic_ns()
        self.origins = Origins(self.record.directory, self.packages)
        self.passes = PassQueue()
        self.tally = Tally(old_generations(self.kind)[0])
        self.overflowed = 0
        """Passes not written because the file is full."""
        self.closed = False
        self.drainer: _Drainer | None = None
        self.draining = _thread.allocate_lock()
        self.own_thread = 0
        """The drain thread's id, and the pauses that fell into it: they are not the hook's own time."""
        self.own_pauses_ns = 0
        self.ended_cpu_ns = 0
        """CPU time of drain threads that have ended."""
        self.frozen: int | None = None
        self.next_freeze_count = 0.0
        now = time.monotonic()
        self.next_asked = now + ASKED_EVERY_S
        self.next_totals = now + TOTALS_EVERY_S
        self.next_abandoned = now + ABANDONED_EVERY_S

    # ---- life ----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        self.passes.install()
        atexit.register(self.close)
        watch_forks()
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

    def before_fork(self, afterwards: list[Callable[[], object]]) -> None:
        """End the thread; what starts the next one goes into `afterwards`."""
        drainer = self.drainer
        if self.closed or drainer is None:
            return
        self.drainer = _Drainer()
        afterwards.append(partial(_thread.start_new_thread, self._drain_for_ever, (self.drainer,)))
        drainer.end(finish=False, timeout_s=1.0)

    def after_fork_in_child(self) -> None:
        """The child starts from nothing: its own counters, file and thread. The parent's file stays the parent's."""
        if self.closed or not self.passes.installed:
            return
        self.passes.remove()
        self.record.close()
        self.record = Record(self.record.directory, self.roles)
        self._reset()
        self.passes.install()
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
        if drainer.native_id:  # a fork that was interrupted before it ended this one
            return
        drainer.native_id = getattr(_thread, "get_native_id", int)()
        self.own_thread = _thread.get_ident()
        try:
            while self._step():
                if drainer.wake.acquire(timeout=DRAIN_EVERY_S):
                    if drainer.finish:
                        self._finish("exit")
                    return
        except Exception as error:  # never the server's problem
            self.record.failed = True
            with contextlib.suppress(Exception):
                sys.stderr.write(f"atom: the GC hook stopped recording: {error!r}\n")
        finally:
            self.ended_cpu_ns += time.thread_time_ns()
            self.own_thread = 0
            drainer.done.release()

    def _step(self) -> bool:
        """What is due now; False if the hook is not in the process any more."""
        now = time.monotonic()
        begins = False
        if now >= self.next_asked:
            self.next_asked = now + ASKED_EVERY_S
            if os.path.exists(os.path.join(self.record.directory, STOP_FILE)):
                self._remove("stopped")
                return False
            begins = self._act()
        if now >= self.next_abandoned:
            self.next_abandoned = now + ABANDONED_EVERY_S
            if self._abandoned():
                self._remove("abandoned")
                return False
        if begins or now >= self.next_totals:
            self.next_totals = now + TOTALS_EVERY_S
            self.drain(totals=True)
        elif self.passes.waiting:
            self.drain(totals=False)
        return True

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
        self.passes.remove()
        atexit.unregister(self.close)
        with contextlib.suppress(ValueError):
            HOOKS.remove(self)
        self._finish(reason)

    def _finish(self, reason: str) -> None:
        self.drain(totals=True, last=True)
        self.record.write_record({"type": "end", "t_ns": time.monotonic_ns(), "reason": reason})
        self.record.close()

    # ---- writing -------------------------------------------------------------------------------------------------

    def drain(self, totals: bool, last: bool = False) -> None:
        """Write the passes since the last drain and, if asked, the totals of the same moment."""
        if not self.draining.acquire(timeout=2.0):
            return  # somebody is stuck in a write: not us as well
        try:
            t_ns = time.monotonic_ns()
            lines = self._take()
            if last and not lines and self._is_nobody():
                return
            if (lines or totals) and self.record.unopened:
                self.record.open(self._header())
            for at in range(0, len(lines), 256):
                if self.record.full:
                    self.overflowed += len(lines) - at
                    break
                self.record.write("".join(lines[at : at + 256]))
            if totals:
                self.record.follow_title()
                self.record.write_record(self._totals(t_ns))
                self.origins.write(self.record.role)
        finally:
            self.draining.release()

    def _is_nobody(self) -> bool:
        """A short-lived helper that has written nothing yet."""
        short = time.monotonic_ns() - self.installed_ns < QUIET_START_S * 1e9
        return short and self.record.unopened and self.roles.role_of(command_line()) == "other"

    def _take(self) -> list[str]:
        """Count the passes that have ended; the lines of those over old objects."""
        lines = []
        for start, stop, thread, info in self.passes.take():
            if thread == self.own_thread:
                self.own_pauses_ns += stop - start
            if self.tally.add(stop - start, info):
                numbers = info["generation"], info["collected"], info["uncollectable"]
                lines.append(_PASS_LINE.format(start, stop, *numbers))
        return lines

    def _totals(self, t_ns: int) -> dict[str, object]:
        action = self.action
        return {
            "type": "totals",
            "t_ns": t_ns,
            "recorded": self.tally.old_passes - self.overflowed,
            "dropped": self.passes.lost + self.overflowed,
            **self.tally.as_dict(),
            "frozen": self._frozen(),
            "thresholds": list(gc.get_threshold()),
            "enabled": gc.isenabled(),
            "action": action.text if action is not None and action.started else None,
            "hook_cpu_ns": self._cpu_ns(),
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

    def _cpu_ns(self) -> int:
        """CPU time of the hook since it was installed: its threads, and the callbacks at their measured cost."""
        own = self.ended_cpu_ns - self.own_pauses_ns
        if _thread.get_ident() == self.own_thread:
            own += time.thread_time_ns()
        return max(own, 0) + sum(self.tally.by_generation) * self.callback_ns

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


def _measure_callbacks() -> int:
    """Nanoseconds that the calls of one collection take, with the dictionaries that CPython makes for them.

    In a scratch queue; the median of a few batches, so that being preempted in one does not count.
    """
    batches, calls = 5, 50
    callbacks = PassQueue(calls).callbacks
    taken = []
    for _ in range(batches):
        start = time.perf_counter_ns()
        for _ in range(calls):
            for phase in ("start", "stop"):
                info = {"generation": 2, "collected": 0, "uncollectable": 0}
                for callback in callbacks:
                    callback(phase, info)
        taken.append((time.perf_counter_ns() - start) // calls)
    return sorted(taken)[batches // 2]


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
