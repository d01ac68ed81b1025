"""What interrupted runs left on this machine: processes, containers and scratch directories whose owner is gone.

Found by label and owner token, never by name: a process counts only if its own environment says that it belongs to a
run, and the supervisor that answers for it no longer exists.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from atom.recipes.containers import StaleContainer, remove, stale_containers
from atom.recipes.processes import (
    LABEL_VARIABLE,
    OWNER_VARIABLE,
    OwnerState,
    all_pids,
    command_line,
    owner_state,
    read_environment,
    read_stat,
    signal_process,
)
from atom.recipes.scratch import Scratch, stale_scratch

__all__ = ["Leftovers", "StaleProcess", "find_leftovers", "sweep"]

_POLITE_S: Final = 3.0
_FORCED_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class StaleProcess:
    pid: int
    start_ticks: int
    label: str
    command: str


@dataclass(frozen=True, slots=True)
class Leftovers:
    processes: list[StaleProcess]
    scratch: list[Scratch]
    owned: int
    """Labelled processes whose supervisor lives, or is in another pid namespace: left alone."""
    containers: list[StaleContainer] = field(default_factory=list)


def find_leftovers() -> Leftovers:
    """Look, touch nothing."""
    stale: list[StaleProcess] = []
    owned = 0
    for pid in all_pids():
        env = read_environment(pid)
        stat = read_stat(pid)
        if LABEL_VARIABLE not in env or stat is None or not stat.alive or pid == os.getpid():
            continue
        if owner_state(env.get(OWNER_VARIABLE, "")) is OwnerState.GONE:
            stale.append(StaleProcess(pid, stat.start_ticks, env[LABEL_VARIABLE], command_line(pid)[:200]))
        else:
            owned += 1
    return Leftovers(stale, stale_scratch(), owned, stale_containers())


def sweep(leftovers: Leftovers) -> list[StaleProcess]:
    """End the processes (SIGTERM, then SIGKILL), remove containers and directories; returns processes that are still
    there."""
    leftovers.containers[:] = [one for one in leftovers.containers if remove(one)]
    remaining = leftovers.processes
    for number, patience in ((signal.SIGTERM, _POLITE_S), (signal.SIGKILL, _FORCED_S)):
        for process in remaining:
            signal_process(process.pid, number, start_ticks=process.start_ticks)
        _wait_until(lambda: not any(map(_lives, leftovers.processes)), patience)
        remaining = [process for process in remaining if _lives(process)]
    for scratch in leftovers.scratch:
        scratch.remove()
        if scratch.repository is not None:
            _prune_worktrees(scratch.repository)
    return remaining


def _lives(process: StaleProcess) -> bool:
    stat = read_stat(process.pid)
    return stat is not None and stat.alive and stat.start_ticks == process.start_ticks


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _prune_worktrees(repository: Path) -> None:
    """Let git forget worktrees whose directories are gone."""
    if repository.is_dir():
        command = ["git", "-C", str(repository), "worktree", "prune"]
        subprocess.run(command, check=False, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
