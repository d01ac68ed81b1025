"""Puts the GC hook into a server that is running, and takes it out again.

`attach` goes through the Python processes of a pid's tree. What each of them runs is a text that carries the hook's own
source, so that a process needs to see nothing of this installation, only the directory; it starts a thread that does
the rest and tells the result in a file. Ways to have it run: `gdb` (`attach_gdb.py`) and `remote_exec`
(`sys.remote_exec`, where both sides are CPython of the same version from 3.14 on).

As long as this process lives it holds a lock on `gc-hook-owner`; hooks whose owner is gone remove themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from atom.bench.rundir import JsonlWriter
from atom.diag.attach_checks import AttachMethod, choose_method, obstacle, permission_hint
from atom.diag.attach_gdb import GdbCall, blocked_in, gdb_path, queue_text, run_text_blocked
from atom.diag.attach_target import refuse_own
from atom.diag.attach_text import attach_text
from atom.diag.elf_symbols import ElfError
from atom.diag.gc_hook import ACTION_FILE, OWNER_FILE, STOP_FILE, check_action
from atom.diag.python_process import PythonRuntime, find_runtime
from atom.recipes.errors import UsageError
from atom.recipes.processes import command_line, descendants, read_stat
from atom.recipes.recipe import Roles

__all__ = ["ATTACH_FILE", "Attached", "attach", "detach"]

ATTACH_FILE: Final = "attach.jsonl"
BLOCKED_AFTER_S: Final = 0.5
"""How long a queued text waits for the main thread before it is looked whether that is blocked."""
GIVE_UP_AFTER_S: Final = 15.0
DETACH_WITHIN_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Attached:
    """What became of one Python process."""

    pid: int
    role: str
    ok: bool
    method: str | None = None
    """`gdb` or `remote_exec`; None where it did not come to that."""
    reason: str = ""
    """Why not; or, where it is, what is worth knowing."""


@dataclass(slots=True)
class _Attempt:
    """A process that is being attached to."""

    pid: int
    role: str
    runtime: PythonRuntime
    method: str
    text: str
    confirmation: Path
    asked: float
    tried_blocked: bool = False
    last_reason: str = ""

    def result(self, ok: bool, reason: str = "") -> Attached:
        return Attached(self.pid, self.role, ok, self.method, reason)


def attach(
    pid: int, directory: Path, roles: Roles, *, method: AttachMethod = "auto", action: str | None = None
) -> list[Attached]:
    """Record the collections of a running process and of its Python descendants into `directory`.

    One result per Python process of the tree. `action`: as in `gc_injection.hook_environment`; it starts when
    `gc-action-start` appears. Blocks for up to about 20 s where a process does not answer; each process stands still
    for about 50 ms, twice that if its main thread is blocked. Raises UsageError if there is no such process, or it is
    this one or an ancestor of it (their trees hold our own processes), ValueError for an unknown action.
    """
    if action is not None:
        action = check_action(action)
    if read_stat(pid) is None:
        raise UsageError(f"--pid {pid}: there is no such process")
    refuse_own(pid)
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for left_over in (STOP_FILE, ACTION_FILE):
        (directory / left_over).unlink(missing_ok=True)
    _hold_ownership(directory)
    results: list[Attached] = []
    attempts: list[_Attempt] = []
    for one in _python_processes(pid, roles):
        started = one if isinstance(one, Attached) else _start(*one, directory, roles, method, action)
        (results if isinstance(started, Attached) else attempts).append(started)  # type: ignore[arg-type]
    results += _await(attempts)
    if not results:
        results = [Attached(pid, roles.role_of(command_line(pid)), False, None, "not a Python process, nor below it")]
    _record(directory, results)
    return sorted(results, key=lambda one: one.pid)


def detach(directory: Path) -> list[int]:
    """Have every hook that writes to `directory` undo its action and leave its process as it was.

    Waits for them for up to 3 s; returns the pids of those that have not said that they are out.
    """
    directory = directory.resolve()
    (directory / STOP_FILE).touch()
    deadline = time.monotonic() + DETACH_WITHIN_S
    while (left := list(_still_hooked(directory))) and time.monotonic() < deadline:
        time.sleep(0.05)
    _release_ownership(directory)
    return left


# ---- which processes -------------------------------------------------------------------------------------------------


def _python_processes(pid: int, roles: Roles) -> Iterator[Attached | tuple[int, str, PythonRuntime]]:
    for one in (pid, *descendants(pid)):
        role = roles.role_of(command_line(one))
        try:
            runtime = find_runtime(one)
        except PermissionError:
            yield Attached(one, role, False, None, f"/proc/{one} is not readable: {permission_hint()}")
        except ElfError as error:
            yield Attached(one, role, False, None, str(error))
        except OSError:
            continue  # it ended
        else:
            if runtime is not None:
                yield one, role, runtime


# ---- one process -----------------------------------------------------------------------------------------------------


def _start(
    pid: int,
    role: str,
    runtime: PythonRuntime,
    directory: Path,
    roles: Roles,
    wanted: AttachMethod,
    action: str | None,
) -> Attached | _Attempt:
    method, why = choose_method(
        wanted,
        runtime,
        own_version=(sys.version_info[0], sys.version_info[1]),
        remote_exec=hasattr(sys, "remote_exec"),
        gdb=gdb_path() is not None,
    )
    if method is None:
        return Attached(pid, role, False, None, why)
    if why_not := obstacle(pid, directory):
        return Attached(pid, role, False, method, why_not)
    confirmation = directory / f".gc-attach-{pid}-{secrets.token_hex(4)}.json"
    text = attach_text(str(directory), roles.as_dict(), action, str(confirmation))
    call = queue_text(pid, runtime, text) if method == "gdb" else _remote_exec(pid, text, confirmation)
    if not call.ok:
        return Attached(pid, role, False, method, _explain(call))
    return _Attempt(pid, role, runtime, method, text, confirmation, asked=time.monotonic())


def _remote_exec(pid: int, text: str, confirmation: Path) -> GdbCall:
    script = confirmation.with_suffix(".py")
    script.write_text(text)
    script.chmod(0o644)  # the process may belong to another user
    try:
        sys.remote_exec(pid, str(script))  # type: ignore[attr-defined]
    except Exception as error:  # documented: PermissionError, OSError, RuntimeError, by what it finds there
        return GdbCall(False, f"sys.remote_exec: {error}")
    return GdbCall(True)


def _explain(call: GdbCall) -> str:
    return f"{call.reason}; {permission_hint()}" if "not permitted" in call.reason else call.reason


def _await(attempts: list[_Attempt]) -> list[Attached]:
    waiting, results = list(attempts), []
    while waiting:
        for attempt in list(waiting):
            result = _look(attempt)
            if result is not None:
                waiting.remove(attempt)
                results.append(result)
                for left_over in (attempt.confirmation, attempt.confirmation.with_suffix(".py")):
                    left_over.unlink(missing_ok=True)
        time.sleep(0.02)
    return results


def _look(attempt: _Attempt) -> Attached | None:
    """Whether the process has told its result; None to look again."""
    answer = _answer(attempt.confirmation)
    if answer is not None:
        if answer.get("ok") is True:
            return attempt.result(True, "was hooked already, into this directory" if answer.get("already") else "")
        return attempt.result(False, f"the hook failed in it: {answer.get('error')}")
    waited = time.monotonic() - attempt.asked
    stat = read_stat(attempt.pid)
    if stat is None or not stat.alive:
        return attempt.result(False, "it ended")
    if waited > GIVE_UP_AFTER_S:
        return attempt.result(False, _no_answer(attempt))
    if waited > BLOCKED_AFTER_S and attempt.method == "gdb" and not attempt.tried_blocked and blocked_in(attempt.pid):
        call = run_text_blocked(attempt.pid, attempt.runtime, attempt.text)
        attempt.tried_blocked = call.ok
        attempt.last_reason = call.reason
    return None


def _no_answer(attempt: _Attempt) -> str:
    call = blocked_in(attempt.pid)
    where = f"waits in {call}" if call else "is in native code"
    more = f" ({attempt.last_reason})" if attempt.last_reason else ""
    return f"its main thread {where} and ran no Python code for {GIVE_UP_AFTER_S:.0f} s{more}; the call stays queued"


def _answer(confirmation: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(confirmation.read_text())
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


# ---- the directory ---------------------------------------------------------------------------------------------------

_owned: Final[dict[Path, int]] = {}
"""Directories whose `gc-hook-owner` this process holds locked, and the descriptors."""


def _hold_ownership(directory: Path) -> None:
    if directory in _owned:
        return
    fd = os.open(directory / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with contextlib.suppress(OSError):  # a file system without locks: then the hooks stay until they are told to go
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _owned[directory] = fd


def _release_ownership(directory: Path) -> None:
    fd = _owned.pop(directory, None)
    if fd is not None:
        os.close(fd)
        (directory / OWNER_FILE).unlink(missing_ok=True)


def _record(directory: Path, results: list[Attached]) -> None:
    with JsonlWriter(directory / ATTACH_FILE) as writer:
        for one in results:
            writer.append({"t_ns": time.monotonic_ns(), **asdict(one)})


def _still_hooked(directory: Path) -> Iterator[int]:
    """Pids of live processes whose record has no end."""
    for path in directory.glob("gc-*.jsonl"):
        try:
            with path.open("rb") as file:
                first = json.loads(file.readline(1 << 16))
                file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
                last = file.read().rstrip().rpartition(b"\n")[2]
        except (OSError, ValueError):
            continue
        if not isinstance(first, dict) or b'"type":"end"' in last:
            continue
        pid, start_ticks = first.get("pid"), first.get("start_ticks")
        stat = read_stat(pid) if isinstance(pid, int) else None
        if stat is not None and stat.alive and stat.start_ticks == start_ticks:
            yield stat.pid
