"""A process between the launcher and a rank, which writes down how the rank ended: launchers kill the other ranks when
one dies, and then name the first in their list."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Final

__all__ = ["exit_path", "guard_rank"]

_RANK_VARIABLES: Final = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_PR_SET_PDEATHSIG: Final = 1


def exit_path(directory: Path, rank: int) -> Path:
    """Where it is written that a rank ended before its time."""
    return directory / f"rank-{rank}.exit.json"


def guard_rank(directory: Path) -> None:
    """Go on as a child of this process, which stays and writes `exit_path` if the child fails. Before MPI is loaded:
    afterwards no process may be divided. The child ends with its guard."""
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it was killed before the line above
            os._exit(1)
        return
    try:
        _, status = os.waitpid(child, 0)
    except BaseException:  # told to end, and the child with it
        os._exit(1)
    if status != 0:
        _write(directory, child, status)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _write(directory: Path, pid: int, status: int) -> None:
    rank = next((int(os.environ[name]) for name in _RANK_VARIABLES if os.environ.get(name, "").isdecimal()), 0)
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    end = {
        "rank": rank,
        "pid": pid,
        "signal": None if killed is None else _name(killed),
        "status": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "t": time.monotonic_ns(),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        exit_path(directory, rank).write_text(json.dumps(end) + "\n")
    except OSError:
        return  # nobody will read it
