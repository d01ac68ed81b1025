"""Which command starts MPI ranks here: the one that belongs to the MPI library that mpi4py loads. Another one starts
ranks that do not find each other."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atom.recipes.errors import UsageError

__all__ = ["Launcher", "find_launcher"]

_MISSING: Final = "trace-consensus run needs MPI: pip install 'atom-serving[mpi]', or an MPI of the system and mpi4py"
_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "MPICH": ("mpich", "hydra", "intel(r) mpi", "mvapich"),
    "Open MPI": ("open mpi", "open-mpi", "openrte", "prrte", "prte"),
}
"""Family → what libraries and launchers of it say of themselves."""
_LIBRARY: Final = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Launcher:
    """How ranks are started."""

    command: tuple[str, ...]
    """Without the number of ranks."""
    library: str
    """What the MPI library says of itself."""

    def ranks(self, count: int, program: Sequence[str]) -> list[str]:
        """A command line that starts `count` ranks of `program`."""
        return [*self.command, "-n", str(count), *program]

    def describe(self) -> str:
        return f"{shlex.join(self.command)} ({self.library})"


def find_launcher(wanted: str | None = None) -> Launcher:
    """`wanted`: a command that takes `-n RANKS PROGRAM…`, such as `srun --mpi=pmi2`. UsageError if there is none."""
    library = _library(sys.executable)
    if wanted is not None:
        command = shlex.split(wanted)
        if not command or shutil.which(command[0]) is None:
            raise UsageError(f"--mpiexec {wanted!r}: there is no such command")
        return Launcher(tuple(command), library)
    family = _family(library)
    candidates = _candidates()
    for path in candidates:
        if family is None or _family(_said([path, "--version"])) == family:
            return Launcher((path, *_needed(family)), library)
    found = f"of those found, none belongs to it: {', '.join(candidates)}" if candidates else "there is no mpiexec"
    raise UsageError(f"mpi4py uses {library}, and {found}; name its launcher with --mpiexec")


def _candidates() -> list[str]:
    """Every mpiexec, the one beside this Python first: a wheel brings its launcher along."""
    folders = [_beside(), *os.environ.get("PATH", "").split(os.pathsep)]
    found = (shutil.which("mpiexec", path=folder) for folder in folders if folder)
    return list(dict.fromkeys(path for path in found if path is not None))


def _beside() -> str:
    return str(Path(sys.executable).parent)


def _family(said: str) -> str | None:
    text = said.lower()
    return next((family for family, words in _FAMILIES.items() if any(word in text for word in words)), None)


def _needed(family: str | None) -> list[str]:
    """Open MPI refuses more ranks than cores, and root, unless it is told."""
    if family != "Open MPI":
        return []
    return ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


@functools.lru_cache(maxsize=1)
def _library(python: str) -> str:
    """The first line that the MPI library says of itself, in a process of its own: loading it cannot be undone."""
    said = _said([python, "-c", _LIBRARY]).strip(" \0\n")
    if not said:
        raise UsageError(_MISSING)
    return " ".join(said.splitlines()[0].strip(" \0,").split())


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
