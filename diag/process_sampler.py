"""Samples every process of a server once a second: memory, CPU time, threads, open files. Reads /proc.

Whose a process is: those with the run's label, the descendants of the supervisor, and, for a server that was not
started here, the process that listens on its port and its descendants. One line per process and sample in
`server/process.jsonl`; the first one of a process, and of each program that it becomes by exec, also has its command
and why the GC hook's environment cannot have worked in it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from atom.diag.python_process import hook_obstacle
from atom.recipes.processes import (
    LABEL_VARIABLE,
    ProcessStat,
    all_pids,
    command_line,
    descendants,
    executable_of,
    read_environment,
    read_stat,
)
from atom.recipes.recipe import Roles

__all__ = ["ProcessSampler"]

PERIOD_S: Final = 1.0
_LOOKS: Final = 3
"""A process is asked for its label this many times: it may have been seen between fork and exec."""
_MAX_COMMAND: Final = 1000


class ProcessSampler:
    def __init__(
        self,
        *,
        label: str | None,
        roots: Sequence[int],
        listeners: Sequence[int],
        roles: Roles,
        trees: Sequence[int] = (),
    ) -> None:
        self._label = label
        self._roots = tuple(roots)
        """Supervisors: their descendants count, they do not."""
        self._listeners = tuple(listeners)
        """Processes that count, with their descendants; `api` unless the roles say otherwise."""
        self._trees = tuple(trees)
        """Processes that count, with their descendants."""
        self._roles = roles
        self._looked: dict[tuple[int, int], int] = {}
        self._labelled: set[tuple[int, int]] = set()
        self._known: dict[tuple[int, int], str | None] = {}
        """Process → program it was last seen running: it may be seen before its exec."""

    def run(self, record: Callable[[Mapping[str, Any]], None], stop: threading.Event) -> None:
        due = time.monotonic()
        while not stop.wait(max(due - time.monotonic(), 0.0)):
            for line in self.sample():
                record(line)
            due = max(due + PERIOD_S, time.monotonic())

    def sample(self) -> Iterator[dict[str, Any]]:
        """One line per live process of the server."""
        now = time.monotonic_ns()
        for stat in self._members():
            identity = (stat.pid, stat.start_ticks)
            command = command_line(stat.pid)
            line: dict[str, Any] = {
                "t_ns": now,
                "pid": stat.pid,
                "ppid": stat.ppid,
                "role": self._role(stat.pid, command),
                "name": stat.comm,
                "rss_bytes": stat.rss_bytes,
                "cpu_s": round(stat.cpu_seconds, 3),
                "threads": stat.threads,
                "fds": _open_files(stat.pid),
            }
            exe = executable_of(stat.pid)
            if identity not in self._known or self._known[identity] != exe:
                self._known[identity] = exe
                line |= {"start_ticks": stat.start_ticks, "command": command[:_MAX_COMMAND], "exe": exe}
                line["hook_obstacle"] = hook_obstacle(stat.pid, exe)
            yield line
        self._forget_the_dead()

    def _role(self, pid: int, command: str) -> str:
        role = self._roles.role_of(command)
        return "api" if role == "other" and pid in self._listeners else role

    def _members(self) -> list[ProcessStat]:
        pids = {pid for root in self._roots for pid in descendants(root)}
        for top in (*self._listeners, *self._trees):
            if top not in pids:
                pids |= {top, *descendants(top)}
        if self._label is not None:
            pids |= self._labelled_pids(self._label)
        pids -= {*self._roots, os.getpid()}
        stats = (read_stat(pid) for pid in sorted(pids))
        return [stat for stat in stats if stat is not None and stat.alive]

    def _labelled_pids(self, label: str) -> set[int]:
        """As `processes.labelled_processes`, but asks each process only a few times: this runs every second on hosts
        with thousands of processes."""
        found: set[int] = set()
        self._seen: set[tuple[int, int]] = set()
        for pid in all_pids():
            stat = read_stat(pid)
            if stat is None:
                continue
            identity = (pid, stat.start_ticks)
            self._seen.add(identity)
            if identity not in self._labelled and self._looked.get(identity, 0) < _LOOKS:
                self._looked[identity] = self._looked.get(identity, 0) + 1
                if read_environment(pid).get(LABEL_VARIABLE) == label:
                    self._labelled.add(identity)
            if identity in self._labelled:
                found.add(pid)
        return found

    def _forget_the_dead(self) -> None:
        if self._label is None:
            return
        self._looked = {identity: count for identity, count in self._looked.items() if identity in self._seen}
        self._labelled &= self._seen


def _open_files(pid: int) -> int | None:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 (a list of names is all that is needed)
    except OSError:
        return None
