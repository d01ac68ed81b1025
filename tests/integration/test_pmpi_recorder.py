"""The PMPI recorder, built with the mpicc at hand and preloaded into programs that know nothing of it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from atom.diag.consensus.launcher import Launcher, find_launcher
from atom.diag.consensus.pmpi_build import build_recorder, find_mpicc
from atom.diag.consensus.pmpi_file import KINDS
from atom.diag.consensus.sources import find_recordings
from atom.diag.consensus.waits import group_waits
from atom.recipes.errors import AtomError, RunError, UsageError

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    pytest.importorskip("mpi4py")
    try:
        find_mpicc()
        return find_launcher()
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def recorder(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_recorder(tmp_path_factory.mktemp("recorder")).library


Record = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def record(launcher: Launcher, recorder: Path, tmp_path: Path) -> Record:
    """Run four ranks of a program with the recorder; the records are in `tmp_path / "trace"`."""

    def run(program: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        given = {"LD_PRELOAD": str(recorder), "ATOM_PMPI_DIR": str(tmp_path / "trace"), **environment}
        preload = ["env", *(f"{name}={value}" for name, value in given.items())]
        return subprocess.run(
            launcher.ranks(4, [*preload, *program]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )

    return run


def test_waits_of_a_foreign_program_are_what_its_sleeps_make_them(record: Record, tmp_path: Path) -> None:
    program = tmp_path / "program"
    source = HERE / "pmpi_program.c"
    subprocess.run([*find_mpicc(), "-O1", str(source), "-o", str(program)], check=True)
    done = record([str(program), str(tmp_path / "said-"), "60"])
    assert done.returncode == 0, done.stderr
    [recording] = find_recordings([tmp_path / "trace"])
    assert [len(one.calls) for one in recording.ranks] == [61] * 4
    said_rct = np.array([np.loadtxt(tmp_path / f"said-{rank}", dtype=np.int64) for rank in range(4)])
    seen_rct = np.array([[(call.enter, call.exit) for call in one.calls[1:]] for one in recording.ranks])
    # Sleeps grow longer, and exits come late, on a machine that is busy: so against what the program itself saw.
    said_rc, seen_rc = (np.diff(one, axis=2)[:, :, 0] / 1e6 for one in (said_rct, seen_rct))
    assert np.median(seen_rc, axis=1) == pytest.approx(np.median(said_rc, axis=1), rel=0.05, abs=0.1)
    said_late_r, seen_late_r = (
        np.median(one[:, :, 0].max(axis=0) - one[:, :, 0], axis=1) / 1e6 for one in (said_rct, seen_rct)
    )
    assert seen_late_r == pytest.approx(said_late_r, rel=0.05, abs=0.1)
    waits = group_waits(recording)["world"]
    assert (waits.late_rank, waits.matched) == (3, 61)


def test_every_kind_of_collective_is_recorded_in_its_communicator(record: Record, tmp_path: Path) -> None:
    done = record([sys.executable, "-m", "mpi4py", str(HERE / "pmpi_calls.py")])
    assert done.returncode == 0, done.stderr
    [recording] = find_recordings([tmp_path / "trace"])
    for one in recording.ranks:
        calls = [(call.group, call.kind) for call in one.calls]
        assert calls[: len(KINDS)] == [("world", kind) for kind in KINDS]
        assert calls[len(KINDS) :] == [
            *(("tp", "barrier"), ("communicators of 2", "allreduce"), ("tp", "barrier")),
        ]
        assert "1 non-blocking collectives are not in the record, nor waits for them" in one.notes
        assert (one.dropped, one.damaged) == (0, 0)
        assert one.end is not None
        assert one.end.cpu_s is not None
    assert recording.one_clock
    waits = group_waits(recording)
    assert (waits["world"].matched, waits["tp"].matched, waits["tp"].unmatched) == (len(KINDS), 4, 0)
    domains = [{call.domain for call in one.calls if call.group == "tp"} for one in recording.ranks]
    assert domains[0] == domains[2] != domains[1] == domains[3]


def test_a_record_is_there_after_a_kill_with_the_call_that_hangs(record: Record, tmp_path: Path) -> None:
    done = record([sys.executable, "-m", "mpi4py", str(HERE / "pmpi_calls.py"), "kill"])
    assert done.returncode != 0
    [recording] = find_recordings([tmp_path / "trace"])
    assert all(one.end is None for one in recording.ranks)
    [stuck] = group_waits(recording)["world"].open
    assert (stuck.kind, stuck.number, stuck.inside, stuck.missing) == ("barrier", 1, (0, 2, 3), (1,))


def test_a_record_that_may_not_grow_counts_what_it_leaves_out(record: Record, tmp_path: Path) -> None:
    many = "from mpi4py import MPI\nfor _ in range(70_000): MPI.COMM_SELF.Barrier()"
    done = record([sys.executable, "-c", many], ATOM_PMPI_MAX_MB="1")
    assert done.returncode == 0, done.stderr
    [recording] = find_recordings([tmp_path / "trace"])
    for one in recording.ranks:
        assert one.dropped > 0
        assert len(one.calls) + one.dropped == 70_000


def test_without_a_directory_or_with_an_old_record_the_program_runs_all_the_same(
    record: Record, tmp_path: Path
) -> None:
    program = [sys.executable, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"]
    done = record(program, ATOM_PMPI_DIR="")
    assert done.returncode == 0
    assert done.stderr.count("ATOM_PMPI_DIR is not set: nothing is recorded") == 1
    assert record(program).returncode == 0
    before = (tmp_path / "trace" / "rank-2.pmpi").read_bytes()
    done = record(program)
    assert done.returncode == 0
    assert "File exists: rank 2 is not recorded" in done.stderr
    assert (tmp_path / "trace" / "rank-2.pmpi").read_bytes() == before


def test_a_compiler_that_fails_or_is_not_there(launcher: Launcher, tmp_path: Path) -> None:
    failing: list[tuple[str, type[AtomError], str]] = [
        (shlex.join([*find_mpicc(), "-include", "no-such-header.h"]), RunError, "no-such-header.h"),
        ("no-such-mpicc", UsageError, "no such command"),
        ("", UsageError, "needs a command"),
    ]
    for command, error, said in failing:
        with pytest.raises(error, match=said):
            build_recorder(tmp_path / "recorder", command)
    assert not list(tmp_path.glob("recorder/.*"))
