"""Which processes a `--pid` stands for: a Python process itself, or the server that a launcher started; never this
command's own processes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from atom.diag.python_process import is_python
from atom.recipes.errors import UsageError
from atom.recipes.listening import tree_listeners
from atom.recipes.processes import command_line, descendants, executable_of, read_stat

__all__ = ["ancestors", "refuse_own", "server_process"]


def ancestors(pid: int) -> list[int]:
    """Its parent first. Those outside this pid namespace cannot be seen."""
    found: list[int] = []
    while (stat := read_stat(pid)) is not None and stat.ppid > 0 and stat.ppid not in found:
        pid = stat.ppid
        found.append(pid)
    return found


def refuse_own(pid: int) -> None:
    """UsageError for this process, or one that it descends from: their trees hold this very command."""
    if pid == os.getpid():
        raise UsageError(f"--pid {pid} is this command itself; give the server's pid")
    if pid in ancestors(os.getpid()):
        name = command_line(pid)[:80] or "unknown"
        raise UsageError(f"--pid {pid} ({name}) is what this command itself was started from; give the server's pid")


def server_process(pid: int) -> tuple[int, str | None]:
    """The Python process to attach to, and, where that is another one than `pid`, a line that says so.

    A process that is no Python stands for the server below it if exactly one tree of Python processes there listens (a
    launcher: `bash -c`, `uv run`, `docker-init`). UsageError for every other one, with its Python descendants to choose
    from; for the init process of this machine; and for this command's own.
    """
    if read_stat(pid) is None:
        raise UsageError(f"--pid {pid}: there is no such process")
    refuse_own(pid)
    executable = executable_of(pid)
    if is_python(pid, executable) is not False:
        return pid, None  # whether it may be attached to is told by the attempt
    name = Path(executable).name if executable else command_line(pid)[:80]
    below = [one for one in descendants(pid) if is_python(one, executable_of(one))]
    problem = f"--pid {pid} ({name}) is no Python process"
    if not below:
        raise UsageError(f"{problem}, and there is none below it")
    servers = _tops_that_listen(pid, below) if pid != 1 else []
    if len(servers) == 1:
        (server,) = servers
        return server, f"pid {pid} ({name}) is no Python process: attaching to its server, {_shown([server])}"
    raise UsageError(f"{problem}; below it are {_shown(servers or below)}: give the one that is the server")


def _tops_that_listen(root: int, below: Iterable[int]) -> list[int]:
    """The topmost Python process of each line of descent from `root` to a process that listens."""
    pids = descendants(root)
    python = set(below)
    listening = {pid for one in tree_listeners(pids) for pid in one.pids}
    found: set[int] = set()
    for pid in listening:
        line = [pid, *ancestors(pid)]
        line = line[: line.index(root)] if root in line else []
        found.update([one for one in line if one in python][-1:])
    return sorted(found)


def _shown(pids: Iterable[int], at_most: int = 5) -> str:
    several = sorted(pids)
    more = f" and {len(several) - at_most} more" if len(several) > at_most else ""
    return ", ".join(f"{pid} ({command_line(pid)[:60]})" for pid in several[:at_most]) + more
