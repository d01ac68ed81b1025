"""Agreements between real MPI ranks: right outcomes, one order, a clean close; and ranks that stop or differ."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

PROGRAM = Path(__file__).with_name("agreement_ranks.py")


@pytest.fixture(scope="module")
def mpiexec() -> str:
    pytest.importorskip("mpi4py")
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("there is no mpiexec")
    return found


@dataclass
class Job:
    """A running job of `agreement_ranks.py`."""

    process: subprocess.Popen[str]
    folder: Path
    ranks: int

    def lines(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"rank-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def await_lines(self, key: str, ranks: Sequence[int]) -> dict[int, Any]:
        """The value of `key` by rank, once all these ranks have written a line with it."""
        found: dict[int, Any] = {}
        ended = False
        while len(found) < len(ranks):
            assert not ended, (key, found, self.process.communicate())
            ended = self.process.poll() is not None
            for rank in ranks:
                for line in self.lines(rank):
                    if key in line:
                        found[rank] = line[key]
            time.sleep(0.02)
        return found

    def finish(self) -> list[dict[str, Any]]:
        """What each rank said in the end, by rank."""
        _, errors = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, errors
        return [self.lines(rank)[-1] for rank in range(self.ranks)]


@pytest.fixture
def start(mpiexec: str, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def run(ranks: int, **options: Any) -> Job:
        arguments = {"mode": "async", "seed": 7, "requests": 12, "folder": str(tmp_path), **options}
        process = subprocess.Popen(
            [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", str(PROGRAM), json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
        )
        jobs.append(Job(process, tmp_path, ranks))
        return jobs[-1]

    yield run
    for job in jobs:
        for rank in range(job.ranks):
            for line in job.lines(rank):
                if "pid" in line and job.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(line["pid"], signal.SIGKILL)
        job.process.communicate(timeout=60)


Start = Callable[..., Job]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mode", ["async", "blocking"])
def test_ranks_apply_the_same_outcomes_in_one_order_and_close_clean(start: Start, ranks: int, mode: str) -> None:
    results = start(ranks, mode=mode).finish()
    for one in results:
        assert one["outcomes"] == one["expected"]
        assert (one["abandoned"], one["pending"]) == (0, 0)
    assert len({one["digest"] for one in results}) == 1


@pytest.mark.parametrize("options", [{"slow": 1}, {"staged": True}, {"staged": True, "slow": 0}], ids=str)
def test_a_slow_rank_and_a_hierarchy_change_nothing(start: Start, options: dict[str, Any]) -> None:
    results = start(4, **options).finish()
    assert all(one["outcomes"] == one["expected"] for one in results)
    assert len({one["digest"] for one in results}) == 1


def test_ranks_that_would_run_different_modes_all_say_so(start: Start) -> None:
    errors = set(start(4, odd_mode="blocking").await_lines("error", range(4)).values())
    assert len(errors) == 1
    assert errors.pop().startswith("ModeMismatchError: ranks would not run the same agreement: ranks 0: ")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("mode", ["async", "blocking"])
@pytest.mark.parametrize("stopped", [1, 3], ids=["a follower", "the coordinator"])
def test_a_rank_that_is_stopped_trips_the_watchdog_of_all_others(start: Start, stopped: int, mode: str) -> None:
    job = start(4, silent=stopped, deadline_s=3.0, mode=mode)
    job.await_lines("plays", range(4))
    os.kill(job.await_lines("pid", [stopped])[stopped], signal.SIGSTOP)
    errors = job.await_lines("error", [rank for rank in range(4) if rank != stopped]).values()
    assert all(error.startswith("AgreementStalledError: ") for error in errors)
    if mode == "async" and stopped == 1:
        assert all("no vote from rank" in error for error in errors)


@pytest.mark.timeout(90)
def test_a_rank_that_is_stopped_at_the_start_trips_all_others_too(start: Start) -> None:
    errors = start(3, deadline_s=3.0, asleep=1).await_lines("error", [0, 2])
    assert all("did not complete within 3 s: a rank is stopped or gone" in error for error in errors.values())


@pytest.mark.timeout(90)
def test_a_rank_that_is_killed_ends_the_job(start: Start) -> None:
    job = start(4, silent=1)
    job.await_lines("plays", range(4))
    pids = job.await_lines("pid", range(4))
    os.kill(pids[2], signal.SIGKILL)
    job.process.communicate(timeout=60)
    assert job.process.returncode != 0
    until = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids.values()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]
