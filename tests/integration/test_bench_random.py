"""`atom bench random` as CI uses it: real processes, and the truth from an emitter that wrote down when it sent what.
Counts and order are exact; times are compared with recorded stamps, never with a speed. Exit statuses are in
test_bench_exit_statuses.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.bench.records import RequestRecord, read_records
from atom.bench.rundir import RunDirectory, read_jsonl

ROOT = Path(__file__).resolve().parents[2]
EMITTER = ROOT / "tests" / "benchmarks" / "emitter.py"
ATOM = f"'{sys.executable}' -m atom.cli.main"


class Emitter:
    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        self.log = folder / "log.jsonl"
        port_file = folder / "port"
        self.process = subprocess.Popen(
            [sys.executable, str(EMITTER), "--port-file", str(port_file), "--log", str(self.log), *options]
        )
        deadline = time.monotonic() + 30
        while not (port_file.exists() and port_file.read_text()):
            assert self.process.poll() is None, "the emitter ended"
            assert time.monotonic() < deadline, "the emitter did not start"
            time.sleep(0.02)
        self.port = port_file.read_text()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture
def emitter(tmp_path: Path) -> Iterator[Any]:
    started: list[Emitter] = []

    def start(*options: str) -> Emitter:
        started.append(Emitter(tmp_path / f"emitter-{len(started)}", *options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def environment(**more: str) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "120", **more}
    env.pop("GITHUB_STEP_SUMMARY", None)
    return env | more


def shell(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-uc", f'atom() {{ {ATOM} "$@"; }}\n{script}'],
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=150,
    )


def records_of(path: Path) -> list[RequestRecord]:
    return sorted(read_records(RunDirectory.open(path)), key=lambda record: record.index)


def test_truth_counts_order_and_causality(tmp_path: Path, emitter: Any) -> None:
    """One request at a time, so that the n-th record is the emitter's n-th request."""
    server = emitter("--tick-ms", "5")
    done = shell(
        f"atom bench random --port {server.port} --random-input-len 16 --random-output-len 12 --random-range-ratio 0.5 "
        "--num-prompts 10 --max-concurrency 1 --num-warmups 2 --output-dir run --quiet",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    truth = list(read_jsonl(server.log))[2:]
    records = records_of(tmp_path / "run")
    assert len(truth) == len(records) == 10
    for record, sent in zip(records, truth, strict=True):
        assert len(record.chunk_ns) == len(sent["sent_ns"]) == record.output_tokens == record.output_len
        assert record.prompt_tokens == record.input_len
        assert record.sent_ns is not None
        assert record.sent_ns <= sent["received_ns"]
        assert list(record.chunk_ns) == sorted(record.chunk_ns)
        late = [seen - emitted for seen, emitted in zip(record.chunk_ns, sent["sent_ns"], strict=True)]
        assert min(late) >= 0, "a chunk was stamped before it was sent"
        assert max(late) < 20e9


def test_table_json_markdown_junit_and_report(tmp_path: Path, emitter: Any) -> None:
    server = emitter("--tick-ms", "2")
    done = shell(
        f"atom bench random --port {server.port} --random-input-len 16 --random-output-len 8 --num-prompts 40 "
        "--max-concurrency 8 --seed 3 --output-dir run --json out.json --markdown out.md --junit out.xml "
        "--goodput ttft:60000 tpot:60000 --metric-percentiles 90,99 --metadata rack=7 --label base",
        tmp_path,
        GITHUB_STEP_SUMMARY=str(tmp_path / "step.md"),
    )
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stdout
    assert "run/report.html" in done.stdout
    assert "40/40" in done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (40, 0, 320)
    assert (result["rack"], result["label"], result["model_id"], result["backend"]) == (
        "7",
        "base",
        "emitter",
        "openai",
    )
    assert "p90_ttft_ms" in result
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["atom"]["validity"] == "valid"
    assert (tmp_path / "step.md").read_text().strip() == (tmp_path / "out.md").read_text().strip()
    assert "| TTFT |" in (tmp_path / "out.md").read_text()
    assert (tmp_path / "out.xml").read_text().startswith("<?xml")
    run = RunDirectory.open(tmp_path / "run").read_run_json()
    assert (run["validity"], run["reasons"]) == ("valid", [])
    assert run["command"][:3] == ["atom", "bench", "random"]
    assert run["host"]["boot_id"]
    assert run["load"]["seed"] == 3


def test_json_to_stdout_is_json_alone_and_get_reads_a_figure(tmp_path: Path, emitter: Any) -> None:
    server = emitter("--tick-ms", "2")
    done = shell(
        f"atom bench random --port {server.port} --random-input-len 16 --random-output-len 4 --num-prompts 5 "
        "--output-dir run --json -",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 5
    got = shell(
        "atom get run completed; atom get run failed --unit; atom get run ttft_p99; atom get run validity", tmp_path
    )
    completed, failed, ttft, validity = got.stdout.split("\n")[:4]
    assert (completed, failed, validity) == ("5", "0 requests", "valid")
    assert float(ttft) == pytest.approx(json.loads(done.stdout)["p99_ttft_ms"])


def test_same_seed_same_bodies(tmp_path: Path) -> None:
    """What goes over the wire, not only what the source says: two runs, order of arrival included."""
    import socket
    import threading

    def capture() -> tuple[str, list[bytes]]:
        listener = socket.create_server(("127.0.0.1", 0))
        bodies: list[bytes] = []

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    data = b""
                    while b"\r\n\r\n" not in data:
                        data += sock.recv(65536)
                    head, _, body = data.partition(b"\r\n\r\n")
                    length = int((head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]) or 0)
                    while len(body) < length:
                        body += sock.recv(65536)
                    if head.startswith(b"POST"):
                        bodies.append(body)
                    sock.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        done = shell(
            f"atom bench random --port {listener.getsockname()[1]} --model m --random-input-len 16 --num-prompts 6 "
            "--random-range-ratio 0.3 --max-concurrency 1 --seed 5 --quiet",
            tmp_path,
        )
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        assert done.returncode == 1
        return done.stderr, bodies

    (_, one), (_, two) = capture(), capture()
    assert len(one) == 6
    assert one == two


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_keeps_partial_results(tmp_path: Path, emitter: Any, number: int, status: int) -> None:
    server = emitter("--tick-ms", "20")
    process = start_long_run(tmp_path, server)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    run = RunDirectory.open(tmp_path / "run")
    assert run.read_run_json()["validity"] == "interrupted"
    reason = run.read_run_json()["reasons"][0]
    figures = run.read_summary()["figures"]
    assert reason == f"the load ended early: {figures['started']['value']} of 5000 requests were started"
    assert figures["completed"]["value"] >= 4
    assert figures["cancelled"]["value"] == 4
    assert run.report_html.is_file()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("size", ["--num-prompts 10000000 --input-len 8", "--num-prompts 39000 --input-len 100000"])
def test_interrupted_while_it_prepares(tmp_path: Path, emitter: Any, size: str, number: int, status: int) -> None:
    """Many minutes of preparation; the timeout is what fails if a signal does not end it."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    process = start(tmp_path, emitter(), f"{size} --request-rate 5 --output-dir run", TMPDIR=str(scratch))
    events = tmp_path / "run" / "client" / "0.jsonl"
    wait_until(process, lambda: any(line["phase"] == "preparing" for line in read_jsonl(events)))
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert "Error" not in errors
    assert not list(scratch.iterdir())
    assert RunDirectory.open(tmp_path / "run").read_run_json()["validity"] == "interrupted"


def test_killed_run_is_readable(tmp_path: Path, emitter: Any) -> None:
    server = emitter("--tick-ms", "20")
    process = start_long_run(tmp_path, server)
    process.kill()
    process.communicate(timeout=60)
    run = RunDirectory.open(tmp_path / "run")
    assert not run.sealed
    done = shell("atom report run --json out.json; atom get run completed", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "INTERRUPTED" in done.stdout
    assert "did not come to its end" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["completed"] >= 4


def start(folder: Path, server: Emitter, arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "atom.cli.main", "bench", "random", "--port", server.port, *arguments.split()],
        cwd=folder,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_long_run(folder: Path, server: Emitter) -> subprocess.Popen[str]:
    """A run that would take minutes, after its first four requests have been recorded."""
    arguments = "--random-input-len 8 --random-output-len 10 --num-prompts 5000 --max-concurrency 4 --output-dir run"
    process = start(folder, server, arguments)
    requests = folder / "run" / "requests" / "0.jsonl"
    wait_until(process, lambda: len(list(read_jsonl(requests))) >= 4)
    return process
