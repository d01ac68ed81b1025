"""Which MPI is used: a wheel's, the system's, Slurm's; and machines where a part is missing."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest

from atom.diag import environment, mpi_used
from atom.diag.consensus.launcher import Launcher
from atom.diag.environment import State
from atom.recipes.errors import UsageError

MPICH = {"library": "MPICH Version:      5.0.2\nMPICH Release date: …\0", "path": f"{sys.prefix}/lib/libmpi.so.12"}
OPEN_MPI = {"library": "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", "path": "/usr/lib/libmpi.so.40.30.4"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_used, "find_launcher", lambda: Launcher(("/opt/bin/mpiexec", "--oversubscribe"), "MPI"))
    monkeypatch.setattr(mpi_used, "find_mpicc", lambda: ("/opt/bin/mpicc",))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)


@pytest.mark.usefixtures("launched")
def test_the_wheels_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"mpich": "5.0.2"}[name])
    found = mpi_used.mpi_used(lambda *_: MPICH, {})
    assert found.describe() == (
        f"MPICH Version: 5.0.2 (wheel mpich 5.0.2: {sys.prefix}/lib/libmpi.so.12), "
        "ranks start with /opt/bin/mpiexec --oversubscribe"
    )
    assert (found.mpicc, found.problem) == ("/opt/bin/mpicc", None)


@pytest.mark.usefixtures("launched")
def test_the_systems_library() -> None:
    found = mpi_used.mpi_used(lambda *_: OPEN_MPI, {"SLURM_JOB_ID": "17"})  # of which srun is not there
    assert found.describe().startswith("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4 (system: /usr/lib/")
    assert found.slurm_job is None


@pytest.mark.usefixtures("launched")
def test_an_allocation_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    found = mpi_used.mpi_used(lambda *_: OPEN_MPI, {"SLURM_JOB_ID": "17"})
    assert "srun starts ranks in Slurm job 17" in found.describe()


@pytest.mark.usefixtures("launched")
def test_a_library_of_an_environment_that_is_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert mpi_used.mpi_used(lambda *_: MPICH, {}).origin == "this environment"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_fits() -> Launcher:
        raise UsageError("there is no mpiexec")

    monkeypatch.setattr(mpi_used, "find_launcher", none_fits)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.1.2")
    for said, value in (
        (None, "no MPI library"),
        ({"library": 3}, "no MPI library"),
        (OPEN_MPI, "no mpiexec that fits"),
    ):
        monkeypatch.setattr(environment, "_ask", lambda *_, said=said: said)
        finding = environment._mpi()
        assert value in finding.value
        assert finding.state is State.MISSING
        assert "pip install" in (finding.consequence or "")


def test_the_mpi_that_is_here_is_found() -> None:
    pytest.importorskip("mpi4py")
    found = mpi_used.mpi_used(environment._ask)
    assert found.library is not None
    assert found.path is not None
    assert Path(found.path).is_file()
