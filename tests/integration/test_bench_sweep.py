"""`atom bench sweep` as CI uses it: real processes and an emitter whose one chunk a tick makes the truth known."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.bench.rundir import RunDirectory, read_jsonl
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
EMITTER = ROOT / "tests" / "benchmarks" / "emitter.py"
LOAD = "--random-input-len 8 --random-output-len 4 --num-prompts 20 --cooldown 0 --quiet"

SLOW = "--random-input-len 8 --random-output-len 6 --num-prompts 120 --cooldown 0"
"""A second at C4, four seconds at C1."""


@contextlib.contextmanager
def emitter(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Its process and its port."""
    file = folder / "port"
    process = subprocess.Popen([sys.executable, str(EMITTER), "--port-file", str(file), "--tick-ms", "5"])
    try:
        until(lambda: file.exists() and file.read_text() != "")
        yield process, file.read_text()
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an emitter."""
    with emitter(tmp_path_factory.mktemp("emitter")) as (_, where):
        yield where


def start(folder: Path, port: str, arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "140"}
    env.pop("GITHUB_STEP_SUMMARY", None)
    where = () if "--base-url" in arguments else ("--port", port)
    return subprocess.Popen(
        [sys.executable, "-m", "atom.cli.main", "bench", "sweep", *where, *arguments.split()],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, port: str, arguments: str) -> tuple[int, str, str]:
    process = start(folder, port, arguments)
    output, errors = process.communicate(timeout=150)
    assert "Traceback" not in errors
    assert "fault in atom" not in errors
    return process.returncode, output, errors


def index_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "sweep.json").read_text())
    return content


def test_list_until_an_objective_breaks_with_everything_it_writes(tmp_path: Path, port: str) -> None:
    """Four tokens at 5 ms: every request takes about 20 ms, so throughput grows with concurrency, and it is what breaks
    an objective here at a point that is known beforehand: above 150 req/s from C4 (4 ÷ 20 ms) on."""
    outputs = "--label x --metadata k=v --json out.json --markdown out.md --junit out.xml --output-dir run"
    arguments = f"--max-concurrency 1,2,16,64 --slo request_throughput<150 --failed-request-threshold 0.5 {outputs}"
    status, _, errors = run(tmp_path, port, f"{arguments} {LOAD.replace('20', '120')}")
    result = json.loads((tmp_path / "out.json").read_text())
    states = {point["value"]: point["state"] for point in result["points"]}
    assert 64 not in states
    if status == 0:
        assert states == {1: "met", 2: "met", 16: "broken"}
        assert result["knee"]["value"] == 2
    else:  # a machine too busy for evidence says so
        assert status == 4, errors
        assert "not known" in {point["state"] for point in result["points"]}
    assert (result["label"], result["k"]) == ("x", "v")
    seeds = [point["seed"] for point in result["points"]]
    assert len(set(seeds)) == len(seeds)
    for point in result["points"]:
        directory = RunDirectory.open(tmp_path / "run" / point["directory"])
        assert directory.sealed
        assert directory.read_summary()["figures"]["completed"]["value"] == 120
        assert directory.read_run_json()["load"]["seed"] == point["seed"]
        assert (directory.server / "process.jsonl").samefile(tmp_path / "run" / "server" / "process.jsonl")
        assert directory.report_html.is_file()
    assert "| C2" in (tmp_path / "out.md").read_text()
    assert 'name="C16"' in (tmp_path / "out.xml").read_text()
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg ") == 4
    assert "<script" not in page


def test_exit_status_when_the_lowest_point_breaks_and_below_a_gate(tmp_path: Path, port: str) -> None:
    status, _, errors = run(tmp_path, port, f"--max-concurrency 1,2 --slo mean_e2el_ms<1 --output-dir low {LOAD}")
    if status == 4:  # a machine too busy for evidence says so
        assert "C1 is no valid evidence" in errors
    else:
        assert status == 3, errors
        assert "C1, the lowest point" in errors
    assert {point["value"] for point in index_of(tmp_path / "low")["points"]} == {1}  # twice if the client was busy
    gate = f"--max-concurrency 1 --slo error_rate<=1% --fail-below 2 --output-dir gate {LOAD}"
    status, _, errors = run(tmp_path, port, gate)
    if status == 4:
        assert "--fail-below 2 cannot be answered" in errors
    else:
        assert status == 3, errors
        assert "below --fail-below 2" in errors


def test_no_secret_is_in_any_file_of_a_sweep(tmp_path: Path, port: str) -> None:
    secrets = f"--base-url http://user:s3cret@127.0.0.1:{port} --api-key s3cret --header X-Mine=s3cret"
    body = '--extra-body {"auth_token":"s3cret"}'
    run(tmp_path, port, f"--max-concurrency 1 --slo error_rate<=1% --output-dir run {secrets} {body} {LOAD}")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"run.json", "sweep.json", "report.html", "summary.json"} <= {path.name for path in files}
    assert [path for path in files if b"s3cret" in path.read_bytes()] == []


def test_killed_sweep_is_resumed_where_it_was(tmp_path: Path, port: str) -> None:
    """The point that was half done is measured again beside what there is of it, with other prompts."""
    options = f"--max-concurrency 4,1 --slo error_rate<=1% {SLOW} --quiet"
    process = start(tmp_path, port, f"{options} --output-dir run")
    half = tmp_path / "run" / "arms" / "concurrency-1" / "run-1"
    until_records(process, half)
    process.kill()
    process.communicate(timeout=60)
    before = index_of(tmp_path / "run")
    assert {point["value"] for point in before["points"]} == {4}
    assert before["ended"] is None
    status, _, errors = run(tmp_path, port, f"{options.replace('120', '100')} --resume run")
    assert status == 2
    assert "--num-prompts was 120, now it is 100" in errors
    status, _, errors = run(tmp_path, port, f"{options} --resume run")
    after = index_of(tmp_path / "run")
    done = len(before["points"])
    assert after["points"][:done] == before["points"]
    assert after["points"][done]["directory"] == "arms/concurrency-1/run-2"
    assert after["points"][done]["seed"] != RunDirectory.open(half).read_run_json()["load"]["seed"]
    assert after["ended"] == "done"
    assert not RunDirectory.open(half).sealed
    assert status == {"valid": 0, "not valid": 4}[after["validity"]], errors


def until_records(process: subprocess.Popen[str], run_dir: Path) -> None:
    deadline = time.monotonic() + 90
    while not list(read_jsonl(run_dir / "requests" / "0.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_sweep_shows_the_points_it_has(tmp_path: Path, port: str, number: int, status: int) -> None:
    process = start(tmp_path, port, f"--max-concurrency 4,1 {SLOW} --output-dir run")
    half = tmp_path / "run" / "arms" / "concurrency-1" / "run-1"
    until_records(process, half)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert "C4" in output
    assert "INTERRUPTED" in output
    assert {point["value"] for point in index_of(tmp_path / "run")["points"]} == {4}
    assert RunDirectory.open(tmp_path / "run").read_run_json()["validity"] == "interrupted"
    assert RunDirectory.open(half).read_summary()["validity"] == "interrupted"


def test_server_that_is_gone_ends_the_sweep_as_failed_with_what_was_measured(tmp_path: Path) -> None:
    with emitter(tmp_path) as (server, where):
        process = start(tmp_path, where, f"--max-concurrency 4,1,2 --continue {SLOW} --output-dir run")
        half = tmp_path / "run" / "arms" / "concurrency-1" / "run-1"
        until_records(process, half)
        server.kill()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "C4" in output
    index = index_of(tmp_path / "run")
    assert "the server is gone" in index["ended"]
    assert {point["value"] for point in index["points"]} == {4}
    assert not (tmp_path / "run" / "arms" / "concurrency-2").exists()
    run_json = RunDirectory.open(tmp_path / "run").read_run_json()
    assert run_json["validity"] == "failed"
    assert "the server is gone" in run_json["reasons"][0]
    assert RunDirectory.open(half).read_summary()["validity"] == "failed"


IMPOSSIBLE_LATER = """
import sys
from pathlib import Path
from atom.cli import bench_sweep, main
from atom.recipes.errors import UsageError

options_of = bench_sweep._point_options

def options(given, swept, value, *rest):
    if Path("run/arms/concurrency-4/run-1/summary.json").exists() and value == 1:
        raise UsageError("this load cannot be")
    return options_of(given, swept, value, *rest)

bench_sweep._point_options = options
sys.exit(main.main())
"""


def test_point_that_cannot_be_leaves_the_tables_of_those_before(tmp_path: Path, port: str) -> None:
    arguments = f"--port {port} --max-concurrency 4,1 --output-dir run --json out.json {LOAD.replace('--quiet', '')}"
    done = subprocess.run(
        [sys.executable, "-c", IMPOSSIBLE_LATER, "bench", "sweep", *arguments.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "140"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "this load cannot be" in done.stderr
    assert "Traceback" not in done.stderr
    assert "C4" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert {point["value"] for point in result["points"]} == {4}
    assert index_of(tmp_path / "run")["ended"] == "this load cannot be"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "say what is to grow"),
        ("--max-concurrency 1,2 --request-rate 1,2", "both a list"),
        ("--max-concurrency 1,2 --slo p99_tfft_ms<=5", "did you mean"),
        ("--max-concurrency 1,64 --num-prompts 20", "cannot fill --max-concurrency 64"),
        ("--max-concurrency auto:1-64 --num-prompts 60", "cannot fill --max-concurrency 64"),
        ("--max-concurrency 1,2 --resume nowhere", "no run directory"),
        ("--max-concurrency auto --continue", "--continue is for a list"),
        ("--max-concurrency 1,2 --percentile-metrics ttft", "every point of a sweep has all"),
    ],
)
def test_wrong_usage_is_one_line_before_anything_runs(tmp_path: Path, port: str, arguments: str, message: str) -> None:
    status, _, errors = run(tmp_path, port, arguments)
    assert status == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_open_search_ends_with_its_tables_where_the_requests_do_not_reach(tmp_path: Path, port: str) -> None:
    load = LOAD.replace("20", "6")
    arguments = f"--max-concurrency auto:2 --slo error_rate<=1% --json out.json --junit out.xml --output-dir run {load}"
    status, _, errors = run(tmp_path, port, arguments)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["ended"] == "done"
    assert (tmp_path / "out.xml").is_file()
    assert (tmp_path / "run" / "summary.json").is_file()
    if status == 4:  # a machine too busy for evidence says so
        return
    assert status == 0, errors
    assert result["knee"]["value"] == 4
    assert "the search ends at C4: --num-prompts 6 cannot fill --max-concurrency 8" in result["notes"]
    status, _, errors = run(tmp_path, port, f"{arguments.replace('--output-dir', '--resume')}")
    assert status == 0, errors
    assert index_of(tmp_path / "run")["points"] == result["points"]


def test_rate_of_which_too_few_requests_tell_nothing_is_no_knee(tmp_path: Path, port: str) -> None:
    """Requests take 0.3 s, a schedule of 150 at 2,000 a second 75 ms."""
    load = "--random-input-len 8 --random-output-len 60 --num-prompts 150 --cooldown 0"
    arguments = f"--request-rate 2000 --slo p50_e2el_ms<=60s --fail-below 900 --json out.json --output-dir run {load}"
    status, _, errors = run(tmp_path, port, arguments)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["knee"] is None
    assert status in (3, 4), errors
    assert {point["state"] for point in result["points"]} <= {"not known", "broken"}
