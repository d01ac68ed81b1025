"""Finding and signalling processes on this machine: by label, by descent, by identity. Reads /proc;
standard library only.

A *label* is a value of `ATOM_RUN_LABEL` in a process's initial environment: every process of a launched server
inherits it, whatever it calls itself and whoever its parent is by now. A *token* names one process for good
(pid, start time, pid namespace, boot), so a reused pid is never mistaken for it. Starting and stopping servers is
`recipes/launcher.py` and `recipes/supervisor.py`; this file starts nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

__all__ = [
    "LABEL_VARIABLE",
    "OWNER_VARIABLE",
    "ListeningSocket",
    "OwnerState",
    "ProcessStat",
    "arguments_of",
    "boot_id",
    "command_line",
    "descendants",
    "executable_of",
    "held_sockets",
    "labelled_processes",
    "listening_processes",
    "listening_sockets",
    "owner_state",
    "process_token",
    "read_environment",
    "read_stat",
    "signal_process",
]

LABEL_VARIABLE: Final = "ATOM_RUN_LABEL"
OWNER_VARIABLE: Final = "ATOM_RUN_OWNER"
"""Token of the supervisor that answers for the process."""

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One line of /proc/PID/stat."""

    pid: int
    comm: str
    state: str
    ppid: int
    start_ticks: int
    """Start time in clock ticks since boot: with the pid, an identity."""
    cpu_seconds: float
    """User and system time of the process itself."""
    threads: int
    rss_bytes: int

    @property
    def alive(self) -> bool:
        """A zombie has ended; it only waits for its parent."""
        return self.state not in "ZX"


_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def read_stat(pid: int) -> ProcessStat | None:
    """The process's state, or None if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    # The name may hold spaces and brackets; the fields after its last bracket are numbers (proc(5)).
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if len(fields) < 22:
        return None  # it ended while it was read
    return ProcessStat(
        pid=pid,
        comm=head.partition("(")[2],
        state=fields[0],
        ppid=int(fields[1]),
        start_ticks=int(fields[19]),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
        threads=int(fields[17]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 (3x faster than Path.iterdir)


def read_environment(pid: int) -> dict[str, str]:
    """The environment the process was started with; empty where it cannot be read (gone, or another user's)."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def arguments_of(pid: int) -> list[str]:
    """Its arguments, or one word with the title the process gave itself; empty if it is gone or a kernel thread."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode("utf-8", "replace") for part in raw.rstrip(b"\0").split(b"\0")] if raw else []


def command_line(pid: int) -> str:
    """Arguments joined by spaces, or the title the process gave itself; empty if it is gone or a kernel thread."""
    return " ".join(arguments_of(pid))


def executable_of(pid: int) -> str | None:
    """The program it runs; None where that is not readable (gone, or another user's)."""
    try:
        return os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115 (a deleted file's name is no path)
    except OSError:
        return None


def labelled_processes(label: str) -> list[int]:
    """Pids of live processes whose initial environment carries this label."""
    needle = f"{LABEL_VARIABLE}={label}".encode()
    found = []
    for pid in all_pids():
        try:
            raw = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        if needle in raw and needle in raw.split(b"\0"):
            found.append(pid)
    return _alive(found)


def descendants(root: int) -> list[int]:
    """Pids of live processes descended from `root`, without it. Complete when `root` is a child subreaper."""
    children: dict[int, list[int]] = {}
    alive: set[int] = set()
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is not None:
            children.setdefault(stat.ppid, []).append(pid)
            if stat.alive:
                alive.add(pid)
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        frontier.extend(below)
        found.extend(pid for pid in below if pid in alive)
    return found


def _alive(pids: Iterable[int]) -> list[int]:
    stats = (read_stat(pid) for pid in pids)
    return [stat.pid for stat in stats if stat is not None and stat.alive]


def signal_process(pid: int, number: int, *, start_ticks: int) -> bool:
    """Send a signal to exactly this process; False if it is gone. A reused pid is never hit where pidfds exist."""
    fd = -1
    with contextlib.suppress(OSError, AttributeError):
        fd = os.pidfd_open(pid)
    try:
        stat = read_stat(pid)
        if stat is None or stat.start_ticks != start_ticks:
            return False
        try:
            if fd >= 0:
                signal.pidfd_send_signal(fd, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True
    finally:
        if fd >= 0:
            os.close(fd)


def boot_id() -> str:
    """Identity of this boot: within it, CLOCK_MONOTONIC is one clock. Empty where the kernel does not say."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return str((_PROC / "self/ns/pid").readlink()).removeprefix("pid:")
    except OSError:
        return ""


def process_token(pid: int | None = None) -> str:
    """`pid:start:namespace:boot` of a process (default: this one)."""
    pid = os.getpid() if pid is None else pid
    stat = read_stat(pid)
    return f"{pid}:{stat.start_ticks if stat else 0}:{_pid_namespace()}:{boot_id()}"


class OwnerState(StrEnum):
    """What is known about the process a token names."""

    ALIVE = "alive"
    GONE = "gone"
    ELSEWHERE = "elsewhere"
    """In another pid namespace (a container): not visible from here, so not to be judged from here."""


def owner_state(token: str) -> OwnerState:
    """A malformed token counts as ELSEWHERE: nothing is killed on the strength of garbage."""
    parts = token.split(":")
    if len(parts) != 4 or not parts[0].isdigit() or not parts[1].isdigit():
        return OwnerState.ELSEWHERE
    if parts[3] != boot_id():
        return OwnerState.GONE
    if parts[2] != _pid_namespace():
        return OwnerState.ELSEWHERE
    stat = read_stat(int(parts[0]))
    alive = stat is not None and stat.alive and stat.start_ticks == int(parts[1])
    return OwnerState.ALIVE if alive else OwnerState.GONE


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A TCP socket that takes connections, in this process's network namespace."""

    host: str
    """The address it is bound to: `0.0.0.0` and `::` are all of them."""
    port: int
    inode: str


def listening_sockets() -> list[ListeningSocket]:
    """All of this network namespace, IPv4 and IPv6."""
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) < 10 or fields[3] != "0A":
                continue
            address, _, port = fields[1].rpartition(":")
            # The kernel prints each 32-bit word of the address as this machine's number.
            words = (int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8))
            found.append(ListeningSocket(socket.inet_ntop(family, b"".join(words)), int(port, 16), fields[9]))
    return found


def held_sockets(pid: int) -> set[str]:
    """Inodes of the sockets a process holds; empty where its descriptors are not readable, or it is gone."""
    try:
        entries = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        return set()
    inodes = set()
    for entry in entries:
        with contextlib.suppress(OSError):
            link = str(entry.readlink())
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    return inodes


def listening_processes(port: int) -> list[int] | None:
    """Pids that hold a listening TCP socket on `port`; None where this cannot be told (no such socket visible in this
    network namespace, or its holder's descriptors are not readable)."""
    inodes = {one.inode for one in listening_sockets() if one.port == port}
    if not inodes:
        return None
    return [pid for pid in all_pids() if held_sockets(pid) & inodes] or None
