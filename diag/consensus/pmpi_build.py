"""Builds the PMPI recorder (`pmpi/recorder.c`) with the mpicc of the program that it is to record: MPI libraries differ
in what a communicator is, so a recorder fits the library it was built with alone."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atom.recipes.errors import RunError, UsageError

__all__ = ["LIBRARY", "SOURCE", "BuiltRecorder", "build_recorder", "find_mpicc"]

SOURCE: Final = Path(__file__).with_name("pmpi") / "recorder.c"
LIBRARY: Final = "libatom_pmpi.so"
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class BuiltRecorder:
    library: Path
    mpicc: tuple[str, ...]


def find_mpicc(wanted: str | None = None) -> tuple[str, ...]:
    """`wanted`, or the first of PATH, or the one that an MPI wheel put beside this Python. UsageError without one."""
    command = shlex.split(wanted) if wanted is not None else ["mpicc"]
    if not command:
        raise UsageError("--mpicc needs a command")
    beside = None if wanted is not None else str(Path(sys.executable).parent)
    found = shutil.which(command[0]) or (beside and shutil.which(command[0], path=beside))
    if not found:
        hint = "name the one of the program's MPI with --mpicc" if wanted is None else "there is no such command"
        raise UsageError(f"{'no mpicc is on PATH' if wanted is None else f'--mpicc {wanted!r}'}: {hint}")
    return (found, *command[1:])


def build_recorder(folder: Path, mpicc: str | None = None) -> BuiltRecorder:
    """`LIBRARY` in `folder`, which is made. RunError with what the compiler said if it fails."""
    command = find_mpicc(mpicc)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--build {folder}: {error.strerror}") from None
    library = folder.resolve() / LIBRARY
    fresh = library.with_name(f".{LIBRARY}.{os.getpid()}")  # a program may have the old one loaded
    options = ["-O2", "-fPIC", "-shared", "-pthread", str(SOURCE), "-o", str(fresh)]
    try:
        done = subprocess.run(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip() or f"it ended with status {done.returncode}"
            raise RunError(f"{shlex.join(command)} cannot build the recorder: {said[-2000:]}")
        fresh.replace(library)
    except subprocess.TimeoutExpired:
        raise RunError(f"{shlex.join(command)} did not end within {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise RunError(f"{shlex.join(command)}: {error.strerror}") from None
    finally:
        fresh.unlink(missing_ok=True)
    return BuiltRecorder(library, command)
