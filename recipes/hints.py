"""What the last lines of a dead server's log, or its exit status, usually mean, and what to do about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Final

__all__ = ["address_in_use", "describe_status", "failure_hint"]

_ADDRESS_IN_USE: Final = re.compile(
    r"address already in use|EADDRINUSE|\[Errno 98\]|only one usage of each socket", re.I
)

_HINTS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (_ADDRESS_IN_USE, "its port is taken; choose another --port, or --port 0 for a free one"),
    (
        re.compile(r"out of memory|OutOfMemoryError|cannot allocate memory|bad_alloc", re.I),
        "it ran out of memory; use fewer or shorter sequences, a smaller KV cache, or a smaller model",
    ),
    (re.compile(r"No module named '?([\w.]+)'?"), "the module {0} is missing in the interpreter that ran it"),
    (
        re.compile(r"unrecognized arguments?:? (.+)|no such option:? (\S+)", re.I),
        "it does not know {0}; see its --help",
    ),
    (
        re.compile(
            r"(EngineCore \d+ \(pid \d+\) (?:was killed by \w+|exited with status \d+))"
            r"|(Engine ?core (?:proc(?:ess)? )?\S* ?died unexpectedly)",
            re.I,
        ),
        "{0}",
    ),
    (re.compile(r"No space left on device"), "a disk is full"),
    (re.compile(r"Too many open files"), "its limit of open files is too low; raise it with `ulimit -n`"),
    (
        re.compile(r"no kernel image is available|CUDA driver version is insufficient", re.I),
        "its GPU build does not fit this GPU or driver",
    ),
    (re.compile(r"Permission denied", re.I), "it may not read or execute something it needs"),
)


def address_in_use(lines: Sequence[str]) -> bool:
    """Whether a server died because its port was taken."""
    return any(_ADDRESS_IN_USE.search(line) for line in lines)


def describe_status(status: int | None) -> str:
    """`exit status 1`, `signal SIGSEGV`, … for a status as in `subprocess.Popen.returncode`."""
    if status is None:
        return "an unknown status"
    if status < 0:
        try:
            return f"signal {signal.Signals(-status).name}"
        except ValueError:
            return f"signal {-status}"
    return f"exit status {status}"


def failure_hint(status: int | None, lines: Sequence[str]) -> str | None:
    """One sentence on the likely cause, or None if nothing is recognised. The last matching line decides."""
    for line in reversed(lines):
        for pattern, hint in _HINTS:
            if match := pattern.search(line):
                return hint.format(next((group for group in match.groups() if group), ""))
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "something killed it; often the kernel for lack of memory (see `dmesg`, or the container's memory limit)"
    if status in (-signal.SIGILL, 128 + signal.SIGILL):
        return "it used an instruction this CPU does not have"
    return None
