"""The ranks of one load, in one process over queues: what the launcher says, other machines, other clocks, errors."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.client_window import read_client_window
from atom.bench.clocks import ClockOffset, OffsetMeasurement, clock_notes, clock_offsets
from atom.bench.load import Api, Endpoint, LoadSpec, Shard
from atom.bench.mpi_ranks import MAX_PAYLOAD, Launch, Ranks, launched
from atom.bench.random_load import RandomSource
from atom.bench.rank_follower import RankFollower
from atom.bench.rank_leader import RankLeader, shards_of
from atom.bench.records import read_records
from atom.bench.rundir import RunDirectory
from atom.bench.runner import LoadOutcome
from atom.bench.static_load import StaticLoad
from atom.bench.summary import summarize
from atom.recipes.errors import RunError, UsageError

SLURM_JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_NPROCS": "8"}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        ({"PMI_RANK": "2", "PMI_SIZE": "8"}, Launch(2, 8)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}, Launch(1, 2)),
        (SLURM_JOB, None),  # a batch script: its job has 8 tasks, this process is none of them
        ({**SLURM_JOB, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, None),  # salloc's shell
        ({**SLURM_JOB, "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, Launch(3, 4)),
        ({"PMI_RANK": "x", "PMI_SIZE": "8"}, None),
        ({"PMI_RANK": "8", "PMI_SIZE": "8"}, None),
        ({"PMIX_RANK": "1"}, None),
    ],
)
def test_what_the_launcher_says(environ: dict[str, str], launch: Launch | None) -> None:
    assert launched(environ) == launch


def test_shares_of_ranks_are_the_whole_load_once() -> None:
    shares = [shard for rank in range(3) for shard in shards_of(rank, 3, 12)]
    assert shares == [Shard(index, 12) for index in range(12)]


class QueueLink:
    """`Link` inside one process. `rewrite` changes what this rank gets to hear."""

    def __init__(self, rank: int, boxes: list[queue.SimpleQueue[tuple[int, bytes]]]) -> None:
        self.rank, self.size = rank, len(boxes)
        self._boxes = boxes
        self.closed = False
        self.rewrite: Callable[[bytes], bytes] = lambda data: data

    def send(self, peer: int, data: bytes) -> None:
        assert len(data) <= MAX_PAYLOAD + (1 << 17)
        self._boxes[peer].put((self.rank, data))

    def poll(self) -> tuple[int, bytes] | None:
        try:
            peer, data = self._boxes[self.rank].get_nowait()
        except queue.Empty:
            return None
        return peer, self.rewrite(data)

    def close(self) -> None:
        self.closed = True

    def abort(self, status: int) -> None:
        raise AssertionError(f"aborted with {status}")


def links(count: int) -> list[QueueLink]:
    boxes: list[queue.SimpleQueue[tuple[int, bytes]]] = [queue.SimpleQueue() for _ in range(count)]
    return [QueueLink(rank, boxes) for rank in range(count)]


def spec_for(url: str, processes: int, count: int = 12) -> LoadSpec:
    source = RandomSource(num_prompts=count, api=Api.COMPLETIONS, model="m", input_len=4, output_len=3)
    endpoint = Endpoint(base_url=url, model="m")
    return LoadSpec(
        name="random",
        endpoint=endpoint,
        workload=StaticLoad(source=source),
        max_concurrency=4,
        shard=Shard(0, processes),
    )


class Job:
    """Rank 0 in this thread, one other rank in another; `status` is what the other one would exit with."""

    def __init__(self, identity: str = "this boot", host: str = "a") -> None:
        self.own, self.other = links(2)
        self.leader = RankLeader(Ranks(self.own), identity="this boot", host="a")
        self._place = {"identity": identity, "host": host}
        self._pool = ThreadPoolExecutor(1)

    def start(self, spec_of: Callable[[Mapping[str, Any]], LoadSpec], **more: Any) -> None:
        def follow() -> int:
            ranks = Ranks(self.other)
            status = RankFollower(ranks, spec_of, **self._place, **more).follow()
            return ranks.conclude(status, None)

        self._status = self._pool.submit(follow)

    def end(self, status: int) -> int:
        assert Ranks(self.own).conclude(status, None) == status
        got = self._status.result(60)
        self._pool.shutdown()
        assert self.own.closed
        assert self.other.closed
        return got


async def lead(job: Job, url: str, run_dir: RunDirectory, *, processes: int = 2, **more: Any) -> LoadOutcome:
    job.leader.await_checked()
    more = {"here_only": False, "count": 12, **more}
    spec = spec_for(url, processes, more.pop("count"))
    return await job.leader.run(spec, run_dir, None, asyncio.Event(), load={"url": url}, **more)


async def test_two_ranks_of_one_machine(tmp_path: Path, serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    job = Job()
    job.start(lambda load: spec_for(load["url"], 4))
    for number in range(2):  # a sweep has several loads
        run_dir = RunDirectory(tmp_path / str(number))
        outcome = await lead(job, server.url, run_dir, processes=4)
        assert (outcome.completed, outcome.failed, outcome.interrupted) == (12, 0, False)
        assert sorted(record.index for record in read_records(run_dir)) == list(range(12))
        run = run_dir.read_run_json()
        assert [rank["workers"] for rank in run["ranks"]] == [["0", "1"], ["2", "3"]]
        assert [rank["clock"] for rank in run["ranks"]] == [[], []]
        assert run["measured_start_ns"] == outcome.started_ns
        assert not list(run_dir.path.glob(".shared-*"))
    assert job.end(4) == 4


async def test_another_machine_measures_its_clock_and_delivers_its_records(
    tmp_path: Path, serve: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is told of a directory that it cannot see."""
    server = serve(lambda number, body: wire.good_answer())
    monkeypatch.setattr("atom.bench.rank_follower.MAX_PAYLOAD", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = Job(identity="another boot", host="b")
    job.other.rewrite = lambda data: data.replace(b".shared-", b".hidden-")
    job.start(lambda load: spec_for(load["url"], 2))
    run_dir = RunDirectory(tmp_path / "run")
    outcome = await lead(job, server.url, run_dir)
    assert (outcome.completed, outcome.interrupted) == (12, False)
    assert job.end(0) == 0
    own, other = run_dir.read_run_json()["ranks"]
    assert (own["host"], own["clock"]) == ("a", [])
    assert (other["host"], other["run_dir"], len(other["clock"])) == ("b", None, 2)
    for measured in other["clock"]:  # in truth it is the same clock
        assert abs(measured["offset_ns"]) <= measured["uncertainty_ns"]
    assert sorted(record.index for record in read_records(run_dir)) == list(range(12))
    summary = summarize(run_dir)
    assert summary["figures"]["started"]["value"] == 12
    assert any("clock" in note for note in summary["notes"])
    assert not list(tmp_path.glob("atom-rank-*"))


async def test_records_that_rank_0_cannot_take_stay_and_are_named(
    tmp_path: Path, serve: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda number, body: wire.good_answer())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = Job(host="b")
    job.other.rewrite = lambda data: data.replace(b".shared-", b".hidden-")
    job.start(lambda load: spec_for(load["url"], 2))
    run_dir = RunDirectory(tmp_path / "run")
    (run_dir.requests / "1.jsonl").mkdir()
    with pytest.raises(RunError, match=r"cannot write .*requests/1\.jsonl"):
        await lead(job, server.url, run_dir)
    assert job.end(1) == 1
    kept = Path(run_dir.read_run_json()["ranks"][1]["run_dir"])
    assert len((kept / "requests" / "1.jsonl").read_bytes()) > 0


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (UsageError("--dataset-path x: no such file"), UsageError, "^--dataset-path x: no such file$"),
        (RunError("cannot write"), RunError, "^rank 1: cannot write$"),
        (ZeroDivisionError("oops"), RunError, "^rank 1: ZeroDivisionError: oops"),
    ],
)
async def test_error_of_another_rank_ends_the_load(
    tmp_path: Path, serve: Any, wire: Any, error: Exception, kind: type[Exception], message: str
) -> None:
    server = serve(lambda number, body: wire.good_answer())
    job = Job()
    job.start(lambda load: _raise(error))
    with pytest.raises(kind, match=message):
        await lead(job, server.url, RunDirectory(tmp_path / "run"))
    assert job.end(2) == 2


async def test_error_of_rank_0_ends_the_other(tmp_path: Path, serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    job = Job()
    job.start(lambda load: spec_for(load["url"], 2))
    run_dir = RunDirectory(tmp_path / "run")
    (run_dir.requests / "0.jsonl").mkdir()
    with pytest.raises(RunError, match="worker 0: "):
        await lead(job, server.url, run_dir)
    assert job.end(1) == 1


async def test_server_of_a_recipe_is_out_of_reach_elsewhere(tmp_path: Path) -> None:
    job = Job(identity="another boot", host="b")
    job.start(lambda load: spec_for(load["url"], 2))
    with pytest.raises(UsageError, match="rank 1 on b cannot reach the server that --recipe starts on a"):
        await lead(job, "http://127.0.0.1:9", RunDirectory(tmp_path / "run"), here_only=True)
    assert job.end(2) == 2


async def test_stop_reaches_every_rank(tmp_path: Path, serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: [0.05, *wire.good_answer()])
    job = Job()
    job.start(lambda load: spec_for(load["url"], 2, 3000))
    run_dir, stop = RunDirectory(tmp_path / "run"), asyncio.Event()
    job.leader.await_checked()
    seen = asyncio.Event()
    load = asyncio.ensure_future(
        job.leader.run(
            spec_for(server.url, 2, 3000),
            run_dir,
            lambda progress: seen.set() if progress.completed > 3 else None,
            stop,
            load={"url": server.url},
            here_only=False,
        )
    )
    await asyncio.wait_for(seen.wait(), 60)
    stop.set()
    outcome = await load
    assert outcome.interrupted
    assert 0 < outcome.completed < 3000
    assert {record.worker for record in read_records(run_dir)} == {"0", "1"}
    assert job.end(130) == 130


def test_command_line_that_another_rank_has_something_against() -> None:
    own, other = links(2)
    follower = threading.Thread(target=Ranks(other).conclude, args=(2, UsageError("--input-file x: no such file")))
    follower.start()
    leader = RankLeader(Ranks(own), identity="i", host="a")
    with pytest.raises(UsageError, match="--input-file x"):
        leader.await_checked()
    Ranks(own).conclude(2, None)
    follower.join(60)
    assert not follower.is_alive()


def test_what_is_no_message_is_an_error() -> None:
    own, other = links(2)
    other.send(0, b"\x80\x04pickled\n")
    with pytest.raises(RunError, match="rank 1 sent what is no message"):
        Ranks(own).poll()


@given(
    offset=st.integers(-(10**15), 10**15),
    ways=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20),
)
def test_true_offset_lies_within_the_uncertainty(offset: int, ways: list[tuple[int, int]]) -> None:
    """`offset`: to be added to the other clock; `ways`: how long each question and its answer travelled."""
    asked = 10**15
    exchanges = [(asked, asked + there - offset, asked + there + back) for there, back in ways]
    measured = OffsetMeasurement.best_of(exchanges)
    assert abs(measured.offset_ns - offset) <= measured.uncertainty_ns
    assert measured.uncertainty_ns == (min(map(sum, ways)) + 1) // 2


def test_drift_is_a_straight_line_between_measurements() -> None:
    offset = ClockOffset((OffsetMeasurement(1_000, 50, 1), OffsetMeasurement(2_000, 150, 7)))
    assert [offset.at(moment) for moment in (0, 1_000, 1_500, 2_000, 9_000)] == [50, 50, 100, 150, 150]
    assert offset.uncertainty_ns == 7


def test_times_of_another_clock_are_read_on_that_of_rank_0(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    clock = [{"at_ns": 5_000_000, "offset_ns": -5_000_000, "uncertainty_ns": 3}]
    ranks = [{"rank": 0, "workers": ["0"], "clock": []}, {"rank": 1, "workers": ["1"], "clock": clock}]
    run_dir.write_run_json({"load": {"workers": 2}, "ranks": ranks})
    for worker, ahead in (("0", 0), ("1", 5_000_000)):
        moments = {"scheduled_ns": None, "ready_ns": 10, "sent_ns": 20, "first_ns": 30, "last_ns": 40, "end_ns": 50}
        moved = {name: None if at is None else at + ahead for name, at in moments.items()}
        record = {"index": 0, "phase": "measured", "worker": worker, "lane": 0, "outcome": "completed", **moved}
        with run_dir.requests_writer(worker) as writer:
            writer.append({**record, "connect_ns": 7, "chunk_ns": [30 + ahead, 40 + ahead]})
        end = {"sent": 1, "started": 1, "running_integral_ns": 30, "interrupted": False}
        with run_dir.client_writer(worker) as writer:
            writer.append({"kind": "measured_start", "t_ns": 6 + ahead, "start_ns": 5 + ahead})
            writer.append({"kind": "measured_end", "t_ns": 60 + ahead, **end})
    first, second = read_records(run_dir)
    assert (second.sent_ns, second.first_ns, second.connect_ns) == (first.sent_ns, first.first_ns, 7)
    assert list(second.chunk_ns) == list(first.chunk_ns) == [30, 40]
    run = run_dir.read_run_json()
    window = read_client_window(run_dir, run, Counter())
    assert (window.start_ns, window.end_ns, window.busy_ns, window.ended) == (5, 60, 60, True)
    assert clock_notes(run) == [
        "times of worker 1 are of another machine's clock, put on that of rank 0 to within ±0.000 ms"
    ]


@pytest.mark.parametrize(
    "ranks",
    [
        [{"clock": [{}], "workers": []}],
        [{"clock": [{"at_ns": -1, "offset_ns": 0, "uncertainty_ns": 0}], "workers": []}],
        [3],
    ],
)
def test_clocks_that_are_none_are_named(ranks: Any) -> None:
    with pytest.raises(UsageError, match="ranks must be objects"):
        clock_offsets({"ranks": ranks})
