"""Which launcher starts the ranks: the one of mpi4py's MPI, whatever else is on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atom.diag.consensus import launcher as module
from atom.diag.consensus.launcher import find_launcher
from atom.recipes.errors import UsageError


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with two launchers on its path, the first of Open MPI, and none beside this Python."""
    for name, said in (("open", "mpirun (Open MPI) 5.0.11"), ("mpich", "HYDRA build details:\n    Version: 5.0.2")):
        path = tmp_path / name / "mpiexec"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\necho '{said}'\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/open:{tmp_path}/mpich:/usr/bin:/bin")
    monkeypatch.setattr(module, "_beside", lambda: str(tmp_path / "nothing"))
    return tmp_path


@pytest.mark.parametrize(
    ("library", "folder"),
    [
        ("Open MPI v5.0.11, package: Open MPI", "open"),
        ("MPICH Version:      5.0.2", "mpich"),
        ("Intel(R) MPI", "mpich"),
    ],
)
def test_it_belongs_to_the_library(mpi: Path, monkeypatch: pytest.MonkeyPatch, library: str, folder: str) -> None:
    monkeypatch.setattr(module, "_library", lambda python: library)
    found = find_launcher()
    assert found.command[0] == str(mpi / folder / "mpiexec")
    assert ("--oversubscribe" in found.command) == (folder == "open")
    assert found.ranks(4, ["program", "x"])[-4:] == ["-n", "4", "program", "x"]


def test_a_library_without_its_launcher_is_no_usage(mpi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_library", lambda python: "MPICH Version: 5.0.2")
    (mpi / "mpich" / "mpiexec").unlink()
    with pytest.raises(UsageError, match=r"mpi4py uses MPICH .*, and of those found, none belongs to it: .*--mpiexec"):
        find_launcher()
    (mpi / "open" / "mpiexec").unlink()
    with pytest.raises(UsageError, match="there is no mpiexec"):
        find_launcher()


def test_a_command_that_is_asked_for_is_taken(mpi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_library", lambda python: "MPICH Version: 5.0.2")
    assert find_launcher("sh -c 'a b'").ranks(2, ["p"]) == ["sh", "-c", "a b", "-n", "2", "p"]
    for wrong in ("", "no-such-launcher --mpi=pmi2"):
        with pytest.raises(UsageError, match=r"--mpiexec .*: there is no such command"):
            find_launcher(wrong)


def test_without_mpi_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UsageError, match=r"pip install 'atom-serving\[mpi\]'"):
        find_launcher()
