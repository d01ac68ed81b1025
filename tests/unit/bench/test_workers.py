"""One load by several processes: real workers against a scripted server, and the merging of what they say."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from atom.bench import workers as crew
from atom.bench.arrivals import Arrivals
from atom.bench.load import Api, Endpoint, LoadSpec, Shard
from atom.bench.random_load import RandomSource
from atom.bench.records import RequestRecord, read_records
from atom.bench.rundir import RunDirectory, read_jsonl
from atom.bench.runner import LoadOutcome, Progress, run_load
from atom.bench.static_load import StaticLoad
from atom.bench.summary import summarize
from atom.bench.worker_messages import (
    MAX_LINE,
    decode,
    encode,
    error_of,
    failure,
    merge_outcomes,
    merge_progress,
    outcome_of,
    outcome_report,
    progress_of,
    progress_report,
)
from atom.bench.workers import run_workers
from atom.recipes.errors import RunError, UsageError
from tests import waiting

ROOT = Path(__file__).resolve().parents[3]


def spec_for(url: str, workers: int, *, count: int = 24, rate: float | None = None, **options: Any) -> LoadSpec:
    source = RandomSource(num_prompts=count, api=Api.COMPLETIONS, model="m", input_len=4, output_len=3, seed=7)
    arrivals = Arrivals() if rate is None else Arrivals(request_rate=rate)
    options = {"max_concurrency": 6, "seed": 7, **options}
    return LoadSpec(
        name="random",
        endpoint=Endpoint(base_url=url, model="m"),
        workload=StaticLoad(source=source, arrivals=arrivals),
        shard=Shard(0, workers),
        **options,
    )


def records_of(run_dir: RunDirectory) -> list[RequestRecord]:
    return sorted(read_records(run_dir), key=lambda record: record.index)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(waiting.until, condition)


def echo(wire: Any) -> Callable[[int, bytes], Sequence[Any]]:
    """Answers with the digest of the request's body."""

    def script(_: int, body: bytes) -> Sequence[Any]:
        text = wire.text_chunk(hashlib.sha1(body).hexdigest(), "length")
        return [wire.SSE_HEAD, wire.http_chunk(wire.stream_of(text, wire.usage_chunk(4, 3))) + wire.END]

    return script


@pytest.mark.parametrize("rate", [None, 200.0], ids=["closed-loop", "poisson"])
async def test_same_requests_and_arrivals_whatever_the_number_of_workers(
    tmp_path: Path, serve: Any, wire: Any, rate: float | None
) -> None:
    server = serve(echo(wire))
    seen = []
    for workers in (1, 2, 3):
        run_dir = RunDirectory(tmp_path / str(workers))
        spec = spec_for(server.url, workers, rate=rate, keep_text=True, num_warmups=3)
        run = run_load if workers == 1 else run_workers
        outcome = await run(spec, run_dir, None, asyncio.Event())
        assert (outcome.completed, outcome.failed, outcome.interrupted) == (24, 0, False)
        records = records_of(run_dir)
        assert len({record.worker for record in records}) == workers
        start = run_dir.read_run_json()["measured_start_ns"]
        offsets = [None if r.scheduled_ns is None else r.scheduled_ns - start for r in records]
        seen.append([(r.index, r.text, offset) for r, offset in zip(records, offsets, strict=True)])
        assert sum(1 for _ in read_records(run_dir, "warmup")) == 3
    assert [index for index, _, _ in seen[0]] == list(range(24))
    assert seen[0] == seen[1] == seen[2]


async def test_all_begin_together_and_are_summed_up_as_one(tmp_path: Path, serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    run_dir = RunDirectory(tmp_path / "run")
    reports: list[tuple[str, int | None]] = []
    outcome = await run_workers(
        spec_for(server.url, 3),
        run_dir,
        lambda progress: reports.append((progress.phase, progress.total)),
        asyncio.Event(),
    )
    lines = {path.stem: list(read_jsonl(path)) for path in run_dir.client.glob("*.jsonl")}
    starts = {line["start_ns"] for worker in lines.values() for line in worker if line["kind"] == "measured_start"}
    assert starts == {outcome.started_ns} == {run_dir.read_run_json()["measured_start_ns"]}
    assert min(record.sent_ns or 0 for record in read_records(run_dir)) >= outcome.started_ns
    ends = [line for worker in lines.values() for line in worker if line["kind"] == "measured_end"]
    summary = summarize(run_dir)
    assert summary["figures"]["started"]["value"] == 24 == sum(end["started"] for end in ends)
    assert [worker["worker"] for worker in summary["workers"]] == ["0", "1", "2"]
    shares = [worker["cpu_share"] for worker in summary["workers"] if worker["cpu_share"] is not None]
    busiest = max(shares, default=None)  # None of a load that a fast machine is done with in under 0.1 s
    assert summary["figures"]["client_cpu_share"]["value"] == busiest
    assert run_dir.read_run_json()["load"]["workers"] == 3
    assert reports[-1] == ("done", 24)
    assert sorted({record.lane for record in read_records(run_dir)}) == list(range(6))


async def test_worker_that_is_killed_ends_the_load_and_is_named(tmp_path: Path, serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: [0.05, *wire.good_answer()])
    run_dir = RunDirectory(tmp_path / "run")
    load = asyncio.ensure_future(run_workers(spec_for(server.url, 3, count=3000), run_dir, None, asyncio.Event()))
    await until(lambda: all(list(read_jsonl(run_dir.requests / f"{w}.jsonl")) for w in range(3)))
    victim = next(pid for pid in children() if '"worker": "1"' in arguments(pid))
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RunError, match=rf"worker 1 \(pid {victim}\) died of SIGKILL.*its share of the load is lost"):
        await load
    assert children() == []
    assert {record.worker for record in read_records(run_dir)} == {"0", "1", "2"}
    summary = summarize(run_dir)
    assert summary["validity"] == "interrupted"
    assert summary["figures"]["completed"]["value"] > 0


def hanging() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


async def test_worker_that_says_no_more_and_stays_is_killed_while_others_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew, "_EXIT_S", 0.3)
    with hanging() as process:
        fate = asyncio.ensure_future(crew._Worker("3", process, -1, -1).fate())
        turns = 0
        while not fate.done():
            turns += 1
            await asyncio.sleep(0.01)
        assert turns > 3, "the event loop stood still"
        assert fate.result().startswith(f"worker 3 (pid {process.pid}) said no more")
        assert process.poll() == -signal.SIGKILL


async def test_stop_keeps_what_every_worker_recorded(tmp_path: Path, serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: [0.05, *wire.good_answer()])
    run_dir, stop = RunDirectory(tmp_path / "run"), asyncio.Event()
    load = asyncio.ensure_future(run_workers(spec_for(server.url, 2, count=3000), run_dir, None, stop))
    await until(lambda: all(list(read_jsonl(run_dir.requests / f"{w}.jsonl")) for w in range(2)))
    for pid in children():  # what a terminal or the end of a job sends to everybody is for the parent to weigh
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    stop.set()
    outcome = await load
    assert outcome.interrupted
    assert 0 < outcome.completed < 3000
    assert outcome.completed + outcome.failed + outcome.cancelled == outcome.started
    assert children() == []


async def test_stop_before_anything_was_sent(tmp_path: Path, serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    stop = asyncio.Event()
    stop.set()
    outcome = await run_workers(spec_for(server.url, 2), RunDirectory(tmp_path / "run"), None, stop)
    assert (outcome.interrupted, outcome.started) == (True, 0)


FAULTY = """
from dataclasses import dataclass
from atom.recipes.errors import RunError, UsageError

@dataclass(frozen=True)
class FaultyLoad:
    error: str
    def describe(self): return {}
    def size(self): return 4
    def driver(self, spec):
        if spec.shard.index == 1:
            raise {"usage": UsageError, "run": RunError, "fault": KeyError}[self.error]("--flag is wrong")
        from atom.bench.static_load import StaticLoad
        from atom.bench.random_load import RandomSource
        return StaticLoad(source=RandomSource(num_prompts=4, api="completions", model="m")).driver(spec)
"""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ("usage", UsageError, "^--flag is wrong$"),
        ("run", RunError, "^worker 1: --flag is wrong$"),
        ("fault", RunError, "^worker 1: KeyError: '--flag is wrong' \\(this is a fault in atom"),
    ],
)
async def test_error_of_a_worker_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, kind: type[Exception], message: str
) -> None:
    module = f"faulty_load_{error}"
    (tmp_path / f"{module}.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    load = __import__(module).FaultyLoad(error)
    spec = LoadSpec(name="x", endpoint=Endpoint(base_url="http://127.0.0.1:9"), workload=load, shard=Shard(0, 2))
    with pytest.raises(kind, match=message) as caught:
        await run_workers(spec, RunDirectory(tmp_path / "run"), None, asyncio.Event())
    assert children() == []
    notes = getattr(caught.value, "__notes__", [])
    assert ("Traceback" in "".join(notes)) == (error == "fault")


async def test_worker_ends_when_its_parent_is_gone(tmp_path: Path, serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: [wire.HANG])
    spec = f"spec_for({server.url!r}, 2)"
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys, importlib.util\n"
        f"found = importlib.util.spec_from_file_location('helpers', {__file__!r})\n"
        "helpers = importlib.util.module_from_spec(found); found.loader.exec_module(helpers)\n"
        f"run_dir = helpers.RunDirectory({str(tmp_path / 'run')!r})\n"
        f"asyncio.run(helpers.run_workers(helpers.{spec}, run_dir, None, asyncio.Event()))\n"
    )
    path = f"{ROOT / '.src'}{os.pathsep}{ROOT}"
    parent = await asyncio.create_subprocess_exec(sys.executable, str(script), env={**os.environ, "PYTHONPATH": path})
    await until(lambda: len(server.requests) >= 2)
    workers = [pid for pid in children(parent.pid) if "atom.bench.worker" in arguments(pid)]
    assert len(workers) == 2
    parent.kill()
    await parent.wait()
    await until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and arguments(pid) for pid in workers))


def test_messages_survive_the_pipe() -> None:
    progress = Progress(phase="measured", total=None, started=3, first_error="x" * 5000)
    got = progress_of(decode(encode(progress_report(progress))))
    assert (got.phase, got.total, got.started, len(got.first_error or "")) == ("measured", None, 3, 1000)
    assert outcome_of(decode(encode(outcome_report(OUTCOME)))) == OUTCOME
    fault = failure(ValueError("é" * 100_000))
    assert len(encode(fault)) <= MAX_LINE
    assert str(error_of(fault, "worker 3")).startswith("worker 3: ValueError: é")
    for line in (b"[]", b"{}", b'{"kind": 1}', b"\xff", b""):
        with pytest.raises(ValueError):
            decode(line)


OUTCOME = LoadOutcome(
    started_ns=10,
    ended_ns=50,
    started=5,
    sent=5,
    completed=4,
    failed=1,
    cancelled=0,
    interrupted=False,
    first_error="http: 500",
)


def test_outcomes_with_unequal_ends_become_one() -> None:
    late = LoadOutcome(
        started_ns=11,
        ended_ns=90,
        started=2,
        sent=1,
        completed=0,
        failed=0,
        cancelled=2,
        interrupted=True,
        first_error=None,
    )
    merged = merge_outcomes([OUTCOME, late])
    assert (merged.started_ns, merged.ended_ns, merged.started, merged.sent) == (10, 90, 7, 6)
    assert (merged.completed, merged.failed, merged.cancelled, merged.interrupted) == (4, 1, 2, True)
    assert merged.first_error == "http: 500"


def test_progress_is_that_of_the_slowest() -> None:
    merged = Progress()
    merge_progress(
        [
            Progress(phase="measured", total=5, completed=2, elapsed_s=1.0, ttft_sum_ms=10.0, ttft_count=2),
            Progress(phase="warmup", total=6, running=1, first_error="x"),
        ],
        merged,
    )
    assert (merged.phase, merged.total, merged.completed, merged.running, merged.first_error) == (
        "warmup",
        11,
        2,
        1,
        "x",
    )
    assert (merged.ttft_ms, merged.elapsed_s) == (5.0, 1.0)
    merge_progress([Progress(total=None), Progress(total=3)], merged)
    assert merged.total is None


def test_a_load_by_more_processes_than_requests_at_once_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-concurrency 2 is less than the 3 processes"):
        spec_for("http://h", 3, max_concurrency=2)


def children(of: int | None = None) -> list[int]:
    """Worker processes of this test process (or of another)."""
    found = []
    for task in Path(f"/proc/{of or os.getpid()}/task").iterdir():
        try:
            found += [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:
            continue
    return [pid for pid in found if "atom.bench.worker" in arguments(pid)]


def arguments(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
