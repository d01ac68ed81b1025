"""The arms of `atom trace-consensus run` as real MPI jobs: what they record, and ranks that are killed or stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from atom.bench.rundir import RunDirectory
from atom.diag.consensus.arms import ARMS, ArmsPlan, run_arms
from atom.diag.consensus.launcher import Launcher, find_launcher
from atom.recipes.errors import RunError, UsageError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    pytest.importorskip("mpi4py")
    try:
        return find_launcher()
    except UsageError as error:
        pytest.skip(str(error))


def plan(**changes: Any) -> ArmsPlan:
    fields: dict[str, Any] = {
        "arms": list(ARMS),
        "pp": 4,
        "tp": 1,
        "requests": 24,
        "stage_ms": [4.0, 4.0, 4.0, 8.0],
        "jitter": 0.1,
        "transfer_ms": 20.0,
        "failures": 0.0,
        "timeouts": 0.0,
        "timeout_ms": 150.0,
        "micro_batches": 4,
        "depth": 8,
        "blocks": 10,
        "seed": 3,
        "repeats": 1,
        "deadline_s": 30.0,
    }
    return ArmsPlan(**{**fields, **changes})


def trace(run_dir: RunDirectory, arm: str, rank: int) -> list[dict[str, Any]]:
    path = run_dir.path / "arms" / arm / "run-1" / "trace" / f"rank-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def outcomes(run_dir: RunDirectory, arm: str, rank: int) -> dict[tuple[int, int], str]:
    return {(one["r"], one["p"]): one["o"] for one in trace(run_dir, arm, rank) if one.get("e") == "commit"}


def silent(_: str) -> None:
    pass


def test_arms_with_faults_record_what_they_did(launcher: Launcher, tmp_path: Path) -> None:
    """Agreements end every request alike on all ranks; without one, ranks see different ends."""
    run_dir = RunDirectory(tmp_path / "run")
    run_arms(plan(failures=0.1, timeouts=0.05), run_dir, launcher, silent)
    assert run_dir.read_run_json()["validity"] == "valid"
    agreed = []
    for arm, mode in ARMS.items():
        ranks = [trace(run_dir, arm, rank) for rank in range(4)]
        assert [one[0]["mode"] for one in ranks] == [mode] * 4
        ends = [one[-1] for one in ranks]
        assert all(one["e"] == "end" and one["error"] is None for one in ends)
        assert all((one["abandoned"], one["pending_sends"]) == (0, 0) for one in ends)
        held = [[one["b"] for one in events if one["e"] == "held"] for events in (one[1:] for one in ranks)]
        assert all(blocks[-1] == 0 and max(blocks) > 0 for blocks in held)
        ended = [outcomes(run_dir, arm, rank) for rank in range(4)]
        assert all(len(one) == 24 for one in ended)
        if mode in ("async", "blocking"):
            assert len({one["digest"] for one in ends}) == 1
            assert all(one["released_before_commit"] == 0 for one in ends)
            assert ended.count(ended[0]) == 4
            agreed.append(ended[0])
        else:
            assert all(one["released_before_commit"] == 24 for one in ends)
            assert ended.count(ended[0]) < 4
    assert agreed[0] == agreed[1]
    assert set(agreed[0].values()) == {"completed", "failed"}


def test_the_blocking_wait_falls_from_the_first_rank_to_the_last(launcher: Launcher, tmp_path: Path) -> None:
    """The offsets are 3, 2 and 1 of the slept times, so a loaded machine does not turn them around."""
    run_dir = RunDirectory(tmp_path / "run")
    run_arms(plan(arms=["blocking"], stage_ms=[30.0] * 4, requests=12), run_dir, launcher, silent)
    ranks = [trace(run_dir, "blocking", rank) for rank in range(4)]
    waits = [one[-1]["wait_s"]["pp"] for one in ranks]
    assert waits[0] > waits[1] > waits[2] > waits[3]
    calls = [[one["q"] for one in events if one.get("e") == "agree_exit"] for events in ranks]
    assert calls.count(calls[0]) == 4
    assert calls[0] == list(range(len(calls[0])))


@pytest.mark.parametrize("arm", ["blocking", "async"])
def test_shards_and_stages_agree(launcher: Launcher, tmp_path: Path, arm: str) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    faults = plan(arms=[arm], pp=2, tp=2, stage_ms=[4.0, 8.0], failures=0.1, timeouts=0.05)
    run_arms(faults, run_dir, launcher, silent)
    ends = [trace(run_dir, arm, rank)[-1] for rank in range(4)]
    assert len({one["digest"] for one in ends}) == 1
    ended = [outcomes(run_dir, arm, rank) for rank in range(4)]
    assert ended.count(ended[0]) == 4
    assert set(ended[0].values()) == {"completed", "failed"}
    groups = {one["g"] for one in trace(run_dir, arm, 0) if one.get("e") == "agree_enter"}
    assert groups == ({"pp", "tp"} if arm == "blocking" else {"pp"})


def meddle(run_dir: RunDirectory, arm: str, act: Callable[[dict[int, int]], None]) -> threading.Thread:
    """Wait until every rank of an arm has forwarded something, and then do something to their pids."""

    def watch() -> None:
        pids: dict[int, int] = {}
        until = time.monotonic() + 60
        while len(pids) < 4 and time.monotonic() < until:
            for rank in range(4):
                try:
                    events = trace(run_dir, arm, rank)
                except OSError:
                    continue
                if any(one.get("e") == "forward_end" for one in events):
                    pids[rank] = events[0]["pid"]
            time.sleep(0.02)
        act(pids)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def await_gone(pids: dict[int, int]) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until and any(psutil.pid_exists(pid) for pid in pids.values()):
        time.sleep(0.05)
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]


@pytest.mark.parametrize("arm", ["blocking", "async"])
def test_a_rank_that_is_killed_is_named_and_traces_stay_readable(launcher: Launcher, tmp_path: Path, arm: str) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    pids: dict[int, int] = {}

    def kill(found: dict[int, int]) -> None:
        pids.update(found)
        os.kill(found[2], signal.SIGKILL)

    thread = meddle(run_dir, arm, kill)
    with pytest.raises(RunError, match=f"^arm {arm}, run 1: rank 2 was killed by SIGKILL; the traces in "):
        run_arms(plan(arms=[arm], requests=5000), run_dir, launcher, silent)
    thread.join()
    assert run_dir.read_run_json()["validity"] == "failed"
    await_gone(pids)
    for rank in range(4):
        events = trace(run_dir, arm, rank)
        assert any(one.get("e") == "forward_end" for one in events)
        assert events[-1]["e"] != "end"


@pytest.mark.parametrize("arm", ["blocking", "async"])
def test_a_rank_that_is_stopped_fails_all_others_within_the_deadline(
    launcher: Launcher, tmp_path: Path, arm: str
) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    pids: dict[int, int] = {}

    def stop(found: dict[int, int]) -> None:
        pids.update(found)
        os.kill(found[1], signal.SIGSTOP)

    thread = meddle(run_dir, arm, stop)
    with pytest.raises(RunError, match=f"^arm {arm}, run 1: rank .*AgreementStalledError: "):
        run_arms(plan(arms=[arm], requests=5000, deadline_s=4.0), run_dir, launcher, silent)
    thread.join()
    await_gone(pids)
    said = [trace(run_dir, arm, rank)[-1].get("error") for rank in (0, 2, 3)]
    assert all(one is not None and one.startswith("AgreementStalledError: ") for one in said)


def test_an_interrupted_run_leaves_no_process(launcher: Launcher, tmp_path: Path) -> None:
    pids: dict[int, int] = {}
    code = "from atom.cli.dispatch import main; import sys; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *("trace-consensus", "run", "--arms", "async", "--requests", "5000")]
    command += ["--output-dir", str(tmp_path / "run"), "--quiet"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        place = tmp_path / "run" / "arms" / "async" / "run-1" / "trace"
        until = time.monotonic() + 60
        while len(pids) < 4 and time.monotonic() < until and process.poll() is None:
            for path in place.glob("rank-?.jsonl"):
                line = path.read_text().partition("\n")
                if line[1]:
                    pids[int(path.stem[-1])] = json.loads(line[0])["pid"]
            time.sleep(0.05)
        assert len(pids) == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    await_gone(pids)
    assert RunDirectory.open(tmp_path / "run").read_run_json()["validity"] == "interrupted"
