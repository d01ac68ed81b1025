"""`atom bench aiperf-agentic` on a simulated server: its own client, a stand-in for AIPerf, and AIPerf itself where
ATOM_TEST_AIPERF names its executable (and ATOM_TEST_AIPERF_TOKENIZER a tokenizer's directory)."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from atom.bench.agentic.chat_overhead import ask_overhead
from atom.bench.load import Endpoint
from atom.bench.records import MEASURED, RequestRecord, read_records
from atom.bench.rundir import RunDirectory, read_jsonl
from atom.cli import main as cli
from atom.recipes.errors import ExitStatus
from tests.server_process import FAST, RunningServer, running_server
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
AIPERF = os.environ.get("ATOM_TEST_AIPERF", "")
TOKENIZER = os.environ.get("ATOM_TEST_AIPERF_TOKENIZER", "")
needs_aiperf = pytest.mark.skipif(
    not (AIPERF and TOKENIZER),
    reason="ATOM_TEST_AIPERF and ATOM_TEST_AIPERF_TOKENIZER name no installed AIPerf and tokenizer",
)
SMALL = (
    *("--generate", "--generate-sessions", "12", "--generate-turns", "6", "--generate-input-len", "500"),
    *("--generate-output-len", "4", "--generate-block-size", "16", "--generate-subagents", "0.4"),
    *("--trace-idle-gap-cap-seconds", "0.05", "--unsafe-override", "--seed", "5"),
)
QUICK = (*SMALL, "--concurrency", "3", "--num-sessions", "8", "--duration", "60")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(*FAST, "--max-model-len", "16384") as running:
        yield running


@pytest.fixture(autouse=True)
def no_step_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def bench(server: RunningServer, folder: Path, *arguments: str) -> RunDirectory:
    more = ("--port", str(server.port), "--output-dir", str(folder), "--quiet")
    status = cli.main(["bench", "aiperf-agentic", *arguments, *more])
    assert status in (ExitStatus.OK, ExitStatus.INVALID), "measured; on a busy machine the client may be saturated"
    return RunDirectory.open(folder)


def by_place(run_dir: RunDirectory) -> dict[tuple[str, str, int], RequestRecord]:
    """(recording, agent, turn) → the first record of it."""
    found: dict[tuple[str, str, int], RequestRecord] = {}
    for record in read_records(run_dir, None):
        tags = record.tags or {}
        if tags:
            found.setdefault((tags["trace"], tags["agent"], record.turn or 0), record)
    return found


def test_sessions_are_replayed_to_their_end(server: RunningServer, tmp_path: Path) -> None:
    run_dir = bench(server, tmp_path / "run", *QUICK, "--endpoint-type", "completions")
    records = list(read_records(run_dir))
    assert {record.outcome for record in records} == {"completed"}
    assert all(record.prompt_tokens == record.input_len for record in records)
    summary = run_dir.read_summary()
    agentic, figures = summary["agentic"], summary["figures"]
    assert figures["sessions_started"]["value"] == figures["sessions_finished"]["value"] == 8
    assert figures["sessions_recycled"]["value"] == 5
    assert [row["depth"] for row in agentic["by_depth"]] == [0, 1]
    assert agentic["scenario"]["valid"] is False
    assert agentic["scenario"]["reasons"][0].startswith("unsafe_override: --benchmark-duration 60")
    # The server's blocks have 16 tokens, as the recording's; a marker of 8 tokens moves what comes after it.
    assert 0 < agentic["all"]["realised_cached_share"] <= agentic["all"]["theoretical_cached_share"] + 0.01
    lines = list(read_jsonl(run_dir.path / "aiperf" / "profile_export.jsonl"))
    assert sum(line["metadata"]["benchmark_phase"] == "profiling" for line in lines) == len(records)
    assert 'class="timeline lanes"' in run_dir.report_html.read_text()


def test_the_same_command_again_does_not_measure_the_cache(server: RunningServer, tmp_path: Path) -> None:
    arguments = (*QUICK, "--endpoint-type", "completions", "--save-detailed")
    runs = [bench(server, tmp_path / str(number), *arguments) for number in range(2)]
    runs.append(bench(server, tmp_path / "again", *arguments, "--cache-bust-nonce", nonce_of(runs[0])))
    assert len({nonce_of(run) for run in runs}) == 2
    summaries = [run.read_summary() for run in runs]
    for summary in summaries[:2]:
        row = summary["agentic"]["all"]
        assert row["realised_cached_share"] <= row["theoretical_cached_share"] + 0.01
    assert summaries[2]["agentic"]["all"]["realised_cached_share"] > 0.9, "the nonce of before: the prompts of before"
    assert any("the server had seen them before" in note for note in summaries[2]["notes"])
    assert not any("the server had seen them before" in note for note in summaries[1]["notes"])
    told = f"--cache-bust-nonce {nonce_of(runs[1])} gives the same prompts again"
    assert [any(told in note for note in summary["notes"]) for summary in summaries] == [False, True, False]


def nonce_of(run_dir: RunDirectory) -> str:
    nonce = run_dir.read_run_json()["load"]["nonce"]
    assert isinstance(nonce, str)
    assert nonce
    return nonce


def test_turns_of_an_agent_come_one_after_the_other_and_sub_agents_after_their_turn(
    server: RunningServer, tmp_path: Path
) -> None:
    run_dir = bench(
        server, tmp_path / "run", *QUICK, "--endpoint-type", "completions", "--warmup-requests-per-lane", "1"
    )
    turns: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in read_records(run_dir, None):
        assert record.session is not None
        turns[record.session].append(record)
    for of in turns.values():
        of.sort(key=lambda record: (record.turn, record.sent_ns))
        for before, after in pairwise(of):
            assert before.turn is not None
            assert after.turn == before.turn + 1
            assert before.end_ns is not None
            assert after.sent_ns is not None
            assert before.end_ns <= after.sent_ns
    assert any(record.output_len == 1 and record.phase == "warmup" for of in turns.values() for record in of)


def test_a_server_is_asked_what_its_template_adds(server: RunningServer) -> None:
    def counted(*roles: str) -> int:
        messages = [{"role": role, "content": "a"} for role in roles]  # a byte is a token here
        answer = server.client().chat.completions.create(model=server.model, messages=messages, max_tokens=1)
        assert answer.usage is not None
        return answer.usage.prompt_tokens - len(roles)

    found = ask_overhead(Endpoint(base_url=server.url, model=server.model), "a", {})
    assert found is not None
    assert found.first("user") == counted("user") > 0
    assert found.first("system") == counted("system", "user")
    assert found.first("user") + found.further("assistant") + found.further("user") == counted(
        "user", "assistant", "user"
    )
    for elsewhere in (f"{server.url}/none", "http://127.0.0.1:1"):
        assert ask_overhead(Endpoint(base_url=elsewhere, model=server.model), "a", {}) is None


def test_a_server_that_is_started_shows_the_context_of_each_request(tmp_path: Path) -> None:
    arguments = ("--recipe", "simulated", "--num-sessions", "1", "--duration", "60", "--endpoint-type", "completions")
    folder = tmp_path / "run"
    status = cli.main(["bench", "aiperf-agentic", *SMALL, *arguments, "--output-dir", str(folder), "--quiet"])
    assert status in (ExitStatus.OK, ExitStatus.INVALID)
    assert RunDirectory.open(folder).read_run_json()["server"]["env"]["ATOM_METRICS_PER_REQUEST_CONTEXT"] == "1"


def start(folder: Path, server: RunningServer, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "120"}
    env.pop("GITHUB_STEP_SUMMARY", None)
    port = ("--port", str(server.port), "--output-dir", "run")
    return subprocess.Popen(
        [sys.executable, "-m", "atom.cli.main", "bench", "aiperf-agentic", *arguments, *port],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def measured(folder: Path, worker: str) -> int:
    lines = read_jsonl(folder / "requests" / f"{worker}.jsonl")
    return sum(line.get("phase") == MEASURED for line in lines)


def test_interrupted_it_keeps_what_it_has(server: RunningServer, tmp_path: Path) -> None:
    process = start(
        tmp_path, server, *SMALL, "--concurrency", "2", "--duration", "600", "--endpoint-type", "completions"
    )
    until(lambda: process.poll() is not None or measured(tmp_path / "run", "0") >= 5)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "by depth of the agent" in output
    run_dir = RunDirectory.open(tmp_path / "run")
    assert run_dir.read_run_json()["validity"] == "interrupted"
    reasons = run_dir.read_summary()["agentic"]["scenario"]["reasons"]
    assert any(reason.startswith("run_cancelled") for reason in reasons)
    assert json.loads((run_dir.path / "aiperf" / "profile_export_aiperf.json").read_text())["was_cancelled"] is True


STAND_IN = """
import json, os, pathlib, subprocess, sys, time
if "--version" in sys.argv:
    print("9.9"); sys.exit()
if "--help" in sys.argv:
    print("--endpoint-type --benchmark-grace-period --cache-bust")
    print("--trace-idle-gap-cap-seconds --system-idle-gap-cap-seconds")
    sys.exit()
def option(name): return sys.argv[sys.argv.index(name) + 1]
folder = pathlib.Path(option("--output-artifact-dir"))
traces = sorted(pathlib.Path(option("--input-file")).iterdir())
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "child.pid").write_text(str(child.pid))
(folder / "main.pid").write_text(str(os.getpid()))
def line(turn):
    trace, now = json.loads(traces[0].read_text())["id"], time.time_ns()
    meta = dict(session_num=0, x_correlation_id="r", root_correlation_id="r", conversation_id=trace, turn_index=turn,
                source_trace_id=trace, credit_issued_ns=now, request_start_ns=now, request_end_ns=now + 6 * 10**6,
                benchmark_phase="profiling", was_cancelled=False, agent_depth=0)
    values = dict(time_to_first_token=1.0, request_latency=5.0, inter_chunk_latency=[4.0], output_sequence_length=2,
                  usage_completion_tokens=2, usage_prompt_tokens=9)
    return dict(metadata=meta, metrics={k: dict(value=v, unit="x") for k, v in values.items()}, error=None)
if MODE == "fails":
    print("Error: no such dataset"); sys.exit(1)
with (folder / "profile_export.jsonl").open("a", buffering=1) as file:
    for turn in range(3):
        file.write(json.dumps(line(turn), separators=(",", ":")) + "\\n")
if MODE == "hangs":
    import signal
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    time.sleep(600)
child.kill()
"""


def stand_in(folder: Path, mode: str) -> str:
    """An `aiperf` that writes three requests, and has a process of its own."""
    path = folder / "aiperf"
    path.write_text(f"#!{sys.executable}\nMODE = {mode!r}\n{STAND_IN}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (folder / "tokenizer").mkdir()
    return str(path)


def by_aiperf(folder: Path, mode: str) -> tuple[str, ...]:
    executable, tokenizer = stand_in(folder, mode), str(folder / "tokenizer")
    return (
        *SMALL,
        "--client",
        "aiperf",
        "--aiperf-executable",
        executable,
        "--tokenizer",
        tokenizer,
        "--duration",
        "60",
    )


def test_what_aiperf_measured_is_a_run_like_any_other(server: RunningServer, tmp_path: Path) -> None:
    run_dir = bench(server, tmp_path / "run", *by_aiperf(tmp_path, "ends"))
    records = list(read_records(run_dir))
    assert [record.turn for record in records] == [0, 1, 2]
    assert all((record.tags or {})["depth"] == 0 for record in records)
    assert run_dir.read_run_json()["aiperf"]["version"] == "9.9"
    assert run_dir.read_run_json()["validity"] == "valid"
    assert run_dir.read_summary()["figures"]["mean_ttft_ms"]["value"] == pytest.approx(1.0)
    assert cli.main(["report", str(run_dir.path), "--quiet"]) == ExitStatus.OK


def test_an_aiperf_that_fails_is_a_failed_run_with_its_words(
    server: RunningServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--port", str(server.port), "--output-dir", str(tmp_path / "run"), "--quiet")
    status = cli.main(["bench", "aiperf-agentic", *by_aiperf(tmp_path, "fails"), *arguments])
    assert status == ExitStatus.FAILED
    assert "aiperf ended with status 1: Error: no such dataset" in capfd.readouterr().err
    assert RunDirectory.open(tmp_path / "run").read_run_json()["validity"] == "failed"


def test_interrupted_no_process_of_aiperf_is_left(server: RunningServer, tmp_path: Path) -> None:
    process = start(tmp_path, server, *by_aiperf(tmp_path, "hangs"))
    exported = tmp_path / "run" / "aiperf" / "profile_export.jsonl"
    until(lambda: process.poll() is not None or (exported.exists() and exported.read_bytes().count(b"\n") == 3))
    child = int((tmp_path / "run" / "aiperf" / "child.pid").read_text())
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    run_dir = RunDirectory.open(tmp_path / "run")
    assert run_dir.read_run_json()["validity"] == "interrupted"
    assert len(list(read_records(run_dir))) == 3


def test_killed_it_leaves_no_aiperf_behind(server: RunningServer, tmp_path: Path) -> None:
    """AIPerf loaded the server for the rest of its half hour."""
    process = start(tmp_path, server, *by_aiperf(tmp_path, "hangs"))
    exported = tmp_path / "run" / "aiperf" / "profile_export.jsonl"
    until(lambda: process.poll() is not None or (exported.exists() and exported.read_bytes().count(b"\n") == 3))
    main, child = (int((tmp_path / "run" / "aiperf" / f"{name}.pid").read_text()) for name in ("main", "child"))
    process.kill()
    process.communicate(timeout=60)
    run_dir = RunDirectory.open(tmp_path / "run")
    for _ in range(2):  # the second time from the beginning too: AIPerf may have written more
        assert cli.main(["report", str(run_dir.path), "--quiet"]) == ExitStatus.INVALID
        summary = run_dir.read_summary()
        assert summary["validity"] == "interrupted"
        assert summary["figures"]["completed"]["value"] == 3
        assert summary["figures"]["sessions_started"]["value"] == 1
        assert summary["figures"]["theoretical_cached_share"]["value"] is not None
        assert len(list(read_records(run_dir))) == 3
    for pid in (main, child):
        until(lambda pid=pid: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


# AIPerf itself

CHECK = """
import pathlib, sys
from aiperf.common.models.export_models import JsonExportData
from aiperf.common.models.record_models import MetricRecordInfo
from aiperf.plot.core.data_loader import DataLoader
folder = pathlib.Path(sys.argv[1])
lines = (folder / "profile_export.jsonl").read_text().splitlines()
for line in lines:
    MetricRecordInfo.model_validate_json(line)
data = JsonExportData.model_validate_json((folder / "profile_export_aiperf.json").read_text())
run = DataLoader().load_run(folder)
print(len(lines), len(run.requests), int(data.request_count.avg), run.metadata.model)
"""


@needs_aiperf
@pytest.mark.timeout(300)
def test_aiperf_reads_what_we_export(server: RunningServer, tmp_path: Path) -> None:
    run_dir = bench(server, tmp_path / "run", *QUICK, "--endpoint-type", "completions")
    python = Path(AIPERF).parent / "python"
    done = subprocess.run(
        [python, "-c", CHECK, run_dir.path / "aiperf"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.split()
    everything, completed = list(read_records(run_dir, None)), list(read_records(run_dir))
    assert told == [str(len(everything)), str(len(everything)), str(len(completed)), server.model]


@needs_aiperf
@pytest.mark.timeout(400)
def test_both_clients_replay_the_same(tmp_path: Path) -> None:
    """The same recorded length and the same theoretical hits of every turn, and AIPerf's own sum of them."""
    common = (*SMALL, "--concurrency", "2", "--duration", "8", "--tokenizer", TOKENIZER)
    with running_server("--executor", "simulated", *FAST, "--max-model-len", "8192", simulated=False) as real:
        native = bench(real, tmp_path / "native", *common)
        other = bench(real, tmp_path / "aiperf", *common, "--client", "aiperf", "--aiperf-executable", AIPERF)
    ours, theirs = by_place(native), by_place(other)
    both = ours.keys() & theirs.keys()
    assert len(both) > 10
    for place in both:
        told = [{**(record.tags or {})} for record in (ours[place], theirs[place])]
        for name in ("trace_input_len", "theoretical_cached_blocks", "theoretical_blocks", "depth"):
            assert told[0][name] == told[1][name], (place, name)
    printed: dict[str, Any] = other.read_run_json()["aiperf"]["theoretical_prefix_cache_hit"]
    figure = other.read_summary()["figures"]["theoretical_cached_share"]
    assert (figure["value"], figure["n"]) == (pytest.approx(printed["avg"] / 100), printed["count"])
