"""Has a running CPython run a text, through gdb.

The text is not run at whatever point the process happens to be stopped: gdb copies it into fresh memory and calls
`Py_AddPendingCall(PyRun_SimpleString, text)`, which only sets a flag; the main thread runs it at its next bytecode.
A main thread that stays blocked in a system call never gets there. Then, and only while it is in such a call (so not
inside malloc, and without the GIL), the text is run in that thread with the GIL taken for it.

gdb is given addresses from the files' own symbol tables (`python_process.py`), so it reads no symbols while the server
stands still: with torch's libraries in it, about 50 ms, not a second.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atom.diag.python_process import PythonRuntime, libc_function
from atom.recipes.processes import read_stat

__all__ = ["GdbCall", "blocked_in", "gdb_path", "queue_text", "run_text_blocked"]

TIMEOUT_S: Final = 20.0
GRACE_S: Final = 3.0

_X86_64: Final = {
    0: "read", 7: "poll", 23: "select", 34: "pause", 35: "nanosleep", 43: "accept", 45: "recvfrom", 47: "recvmsg",
    61: "wait4", 128: "rt_sigtimedwait", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid",
    270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4", 426: "io_uring_enter", 441: "epoll_pwait2",
}  # fmt: skip
_AARCH64: Final = {
    22: "epoll_pwait", 63: "read", 72: "pselect6", 73: "ppoll", 95: "waitid", 98: "futex", 101: "nanosleep",
    115: "clock_nanosleep", 137: "rt_sigtimedwait", 202: "accept", 207: "recvfrom", 212: "recvmsg", 242: "accept4",
    260: "wait4", 426: "io_uring_enter", 441: "epoll_pwait2",
}  # fmt: skip
_CALLS: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}
"""System calls in which a thread waits, by number: it holds no lock of malloc there."""
_NUMBER_REGISTER: Final = {"x86_64": "$orig_rax", "aarch64": "$x8"}

_NOWHERE: Final = "/proc/self/nowhere"
_EARLY: Final = (
    "set auto-load no",
    "set auto-solib-add off",
    "set debuginfod enabled off",
    # With the libraries in view gdb opens each of them while the server stands still: 0.6 to 1.4 s with torch's.
    f"set sysroot {_NOWHERE}",
    f"set libthread-db-search-path {_NOWHERE}",
)

_HEAD: Final = """\
set pagination off
set confirm off
set height 0
set width 0
set language c
set unwindonsignal on
set print thread-events off
handle SIGTERM SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGVTALRM SIGPROF SIGPIPE SIGCHLD SIGWINCH nostop noprint pass
attach {pid}
thread 1
if ((int(*)(void)){Py_IsInitialized})() == 0
  echo ATOM-ANSWER not-initialized\\n
else
{body}
end
detach
"""
_COPY: Final = """\
set $at = ((unsigned long(*)(unsigned long,unsigned long,int,int,int,long)){mmap})(0, {size}, 3, 34, -1, 0)
if $at > 0xfffffffffffff000
  echo ATOM-ANSWER no-memory\\n
else
  restore text binary $at
{call}
end
"""
_QUEUE: Final = """\
  set $result = ((int(*)(void*,void*)){Py_AddPendingCall})((void*){PyRun_SimpleString}, (void*)$at)
  printf "ATOM-ANSWER queued %d\\n", $result
"""
_RUN: Final = """\
  set $state = ((int(*)(void)){PyGILState_Ensure})()
  set $result = ((int(*)(void*)){PyRun_SimpleString})((void*)$at)
  call ((void(*)(int)){PyGILState_Release})($state)
  printf "ATOM-ANSWER ran %d\\n", $result
"""
_ONLY_BLOCKED: Final = """\
if !({blocked})
  echo ATOM-ANSWER not-blocked\\n
else
{body}
end
"""


@dataclass(frozen=True, slots=True)
class GdbCall:
    """What became of one call of gdb."""

    ok: bool
    reason: str = ""


def gdb_path() -> str | None:
    return shutil.which("gdb")


def blocked_in(pid: int) -> str | None:
    """The system call in which the process's main thread waits; None if it runs, or this cannot be told."""
    try:
        word = (Path("/proc") / str(pid) / "task" / str(pid) / "syscall").read_text().split()[0]
    except (OSError, IndexError):
        return None
    calls = _CALLS.get(platform.machine(), {})
    return calls.get(int(word)) if word.lstrip("-").isdigit() else None


def queue_text(pid: int, runtime: PythonRuntime, text: str) -> GdbCall:
    """Have the main thread run this Python text (ASCII) when it next can. It must not fail."""
    return _call(pid, runtime, text, _QUEUE)


def run_text_blocked(pid: int, runtime: PythonRuntime, text: str) -> GdbCall:
    """Run this Python text (ASCII) in the main thread while it waits in a system call; refuses if it does not."""
    machine = platform.machine()
    if machine not in _CALLS:
        return GdbCall(False, f"a blocked thread cannot be recognised on {machine}")
    register = _NUMBER_REGISTER[machine]
    blocked = " || ".join(f"(long){register} == {number}" for number in _CALLS[machine])
    if machine == "aarch64":  # the register keeps its value after the call: the thread must stand behind `svc #0`
        blocked = f"*(unsigned int*)($pc-4) == 0xd4000001 && ({blocked})"
    return _call(pid, runtime, text, _RUN, blocked)


def _call(pid: int, runtime: PythonRuntime, text: str, call: str, blocked: str | None = None) -> GdbCall:
    gdb = gdb_path()
    if gdb is None:
        return GdbCall(False, "gdb is not installed")
    mmap = libc_function(pid, "mmap")
    if mmap is None:
        return GdbCall(False, "its C library was not found among its mapped files")
    data = text.encode("ascii") + b"\0"
    addresses = {name: hex(address) for name, address in runtime.functions.items()}
    copy = _COPY.format(call=call.format(**addresses), mmap=hex(mmap), size=len(data))
    if blocked is not None:
        copy = _ONLY_BLOCKED.format(blocked=blocked, body=copy)
    with tempfile.TemporaryDirectory(prefix="atom-gdb-") as folder:
        (Path(folder) / "text").write_bytes(data)
        (Path(folder) / "script").write_text(_HEAD.format(pid=pid, body=copy, **addresses))
        return _run_gdb(gdb, pid, folder)


def _run_gdb(gdb: str, pid: int, folder: str) -> GdbCall:
    options = [word for setting in _EARLY for word in ("-iex", setting)]
    process = subprocess.Popen(
        [gdb, "-nx", "-batch", *options, f"/proc/{pid}/exe", "-x", "script"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LC_ALL": "C"},
        cwd=folder,  # its `restore` takes no file name with blanks
        start_new_session=True,  # an interrupt of ours must not leave the server half way through a call
    )
    try:
        output = _output(process)
    finally:
        _let_run(pid)
    return _answer(output)


def _output(process: subprocess.Popen[bytes]) -> str | None:
    """What gdb printed; None if it had to be stopped. An interrupted gdb takes the call back and lets go."""
    for limit, number in ((TIMEOUT_S, signal.SIGINT), (GRACE_S, signal.SIGTERM), (GRACE_S, signal.SIGKILL)):
        try:
            output, _ = process.communicate(timeout=limit)
            return output.decode("utf-8", "replace") if limit == TIMEOUT_S else None
        except subprocess.TimeoutExpired:
            process.send_signal(number)
    process.wait()
    return None


def _let_run(pid: int) -> None:
    """The kernel lets a process go when its debugger ends; one that stays stopped is started again."""
    stat = read_stat(pid)
    if stat is not None and stat.state in "Tt":
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def _answer(output: str | None) -> GdbCall:
    if output is None:
        return GdbCall(False, f"gdb did not finish within {TIMEOUT_S:.0f} s and was stopped")
    match = re.search(r"ATOM-ANSWER (\S+) ?(-?\d*)", output)
    if match is None:
        return GdbCall(False, _complaint(output))
    word, result = match.groups()
    if word in ("queued", "ran"):
        return GdbCall(result == "0", "" if result == "0" else f"the interpreter refused the call ({word} {result})")
    reasons = {
        "not-initialized": "its interpreter is not running (starting, or ending)",
        "no-memory": "it can map no more memory",
        "not-blocked": "its main thread went on meanwhile",
    }
    return GdbCall(False, reasons.get(word, word))


def _complaint(output: str) -> str:
    for pattern in (r"ptrace: (.*)", r"(Could not attach.*)", r".*script:\d+: (Error.*\n?.*)"):
        if match := re.search(pattern, output):
            return "gdb: " + " ".join(match[1].split())
    lines = [line for line in output.splitlines() if line.strip()]
    return f"gdb: {lines[-1]}" if lines else "gdb said nothing"
