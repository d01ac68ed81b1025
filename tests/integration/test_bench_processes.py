"""`atom bench` by several processes: workers, and the ranks of a real `mpiexec`. Every load goes to one server, which
answers with the digest of what it was asked."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from atom.bench.load import Endpoint
from atom.bench.records import read_records
from atom.bench.rundir import RunDirectory, read_jsonl
from atom.bench.runner import run_load
from atom.bench.target import Target
from atom.cli.load_choices import LOAD_DEFAULTS, random_load
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "atom.cli.main", "bench", "random"]
TINY = "--random-input-len 4 --random-output-len 3 --max-concurrency 4"
SHORT = f"{TINY} --num-prompts 20 --save-detailed".split()
ENDLESS = f"{TINY} --num-prompts 8000".split()


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "echo"}]}).encode() if self.path == "/v1/models" else b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.01)
        choice = {"index": 0, "text": hashlib.sha1(body).hexdigest(), "finish_reason": "length"}
        usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
        events = [json.dumps({"choices": [choice]}), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        self._answer("".join(f"data: {event}\n\n" for event in events).encode(), "text/event-stream")

    def _answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield str(server.server_address[1])
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def mpiexec() -> str:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("there is no mpiexec")
    return found


def start(folder: Path, *command: str, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "120"}
    env.pop("GITHUB_STEP_SUMMARY", None)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **pipes, **options)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=90)
    assert "Traceback" not in errors
    return process.returncode, output, errors


def wait_for_records(process: subprocess.Popen[str], run: Path, workers: int) -> None:
    def recorded() -> bool:
        assert process.poll() is None, process.communicate()
        return all(list(read_jsonl(run / "requests" / f"{worker}.jsonl")) for worker in range(workers))

    until(recorded)


def worker_pids(run: Path) -> dict[str, int]:
    """Of the run in this folder: which workers there are, by name."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if any(b"atom.bench.worker" in word for word in words) and (entry / "cwd").readlink() == run.parent:
                found[json.loads(words[-2])["worker"]] = int(entry.name)
        except (OSError, ValueError):
            continue
    return found


def outcome(run: Path) -> tuple[str, list[str], int]:
    content = RunDirectory.open(run).read_run_json()
    return content["validity"], content["reasons"], len(list(read_records(RunDirectory.open(run))))


def test_killed_worker_fails_the_run_with_one_line(tmp_path: Path, port: str) -> None:
    run = tmp_path / "run"
    process = start(tmp_path, *COMMAND, "--port", port, *ENDLESS, "--workers", "2", "--output-dir", "run")
    wait_for_records(process, run, 2)
    os.kill(worker_pids(run)["1"], signal.SIGKILL)
    status, output, errors = finish(process)
    assert status == 1
    assert errors.splitlines()[-1].startswith("error: worker 1 (pid ")
    validity, reasons, records = outcome(run)
    assert (validity, records > 0) == ("failed", True)
    assert "worker 1" in reasons[0]
    assert "TTFT" in output
    until(lambda: not worker_pids(run))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_ctrl_c_reaches_a_whole_group_and_keeps_what_was_recorded(
    tmp_path: Path, port: str, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = start(tmp_path, *COMMAND, "--port", port, *ENDLESS, "--workers", "2", "--output-dir", "run")
    wait_for_records(process, run, 2)
    os.killpg(process.pid, number)
    status, output, errors = finish(process)
    assert status == 128 + number, errors
    validity, _, records = outcome(run)
    assert (validity, records > 0) == ("interrupted", True)
    assert "TTFT" in output


def test_file_system_that_takes_no_more_is_one_line(tmp_path: Path, port: str) -> None:
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    arguments = ["--port", port, *ENDLESS, "--workers", "2", "--output-dir", "run"]
    status, _, errors = finish(start(tmp_path, *COMMAND, *arguments, preexec_fn=limit))
    assert status == 1
    assert errors.splitlines()[-1].startswith("error: worker ")
    assert "cannot write run/requests/" in errors.splitlines()[-1]
    assert errors.splitlines()[-1].endswith("File too large")
    assert outcome(tmp_path / "run")[0] == "failed"


def by_index(run_dir: RunDirectory) -> list[tuple[int, str | None, int | None]]:
    """Of each request: its number, the digest of its body, and when it was due."""
    begin = run_dir.read_run_json()["measured_start_ns"]
    records = sorted(read_records(run_dir), key=lambda record: record.index)
    return [(r.index, r.text, None if r.scheduled_ns is None else r.scheduled_ns - begin) for r in records]


@pytest.mark.parametrize("rate", ["inf", "100"], ids=["closed-loop", "poisson"])
def test_ranks_send_what_one_process_sends(tmp_path: Path, port: str, mpiexec: str, rate: str) -> None:
    arguments = ["--port", port, *SHORT, "--request-rate", rate, "--output-dir", "two", "--json", "-"]
    status, output, errors = finish(start(tmp_path, mpiexec, "-n", "2", *COMMAND, *arguments))
    two = RunDirectory.open(tmp_path / "two")
    run = two.read_run_json()
    assert status == {"valid": 0, "not valid": 4}[run["validity"]], errors
    assert json.loads(output)["completed"] == 20  # only one rank prints
    assert run["load"]["workers"] == 2
    assert [rank["workers"] for rank in run["ranks"]] == [["0"], ["1"]]
    given = {"random_input_len": 4, "random_output_len": 3, "max_concurrency": 4, "num_prompts": 20}
    load = random_load({**LOAD_DEFAULTS, **given, "request_rate": rate, "save_detailed": True})
    url = f"http://127.0.0.1:{port}"
    spec = load.spec("random", Endpoint(base_url=url, model="echo"), Target(url, "echo"))
    one = RunDirectory(tmp_path / "one")
    asyncio.run(run_load(spec, one, None, asyncio.Event()))
    assert len(by_index(one)) == 20
    assert by_index(one) == by_index(two)


def test_ranks_put_the_marker_of_one_nonce_into_their_sessions(tmp_path: Path, port: str, mpiexec: str) -> None:
    """Each rank would draw one of its own: rank 0's counts, and is what run.json says."""
    sessions = "--generate --generate-sessions 4 --generate-turns 3 --generate-input-len 200 --generate-output-len 2"
    options = "--concurrency 4 --num-sessions 4 --duration 60 --scenario none --endpoint-type completions"
    gaps = "--system-idle-gap-cap-seconds none --trace-idle-gap-cap-seconds 0.01 --generate-block-size 4"
    command = [*COMMAND[:-1], "aiperf-agentic", "--port", port, *f"{sessions} {options} {gaps}".split(), "--quiet"]

    def markers(name: str, *command: str) -> tuple[str, dict[str, str]]:
        status, _, errors = finish(start(tmp_path, *command, "--output-dir", name))
        assert status in (0, 4), errors
        run_dir = RunDirectory.open(tmp_path / name)
        tags = [record.tags or {} for record in read_records(run_dir, None)]
        return run_dir.read_run_json()["load"]["nonce"], {tag["root"]: tag["marker"] for tag in tags}

    nonce, two = markers("two", mpiexec, "-n", "2", *command)
    assert len(set(two.values())) == 4
    assert markers("one", *command, "--cache-bust-nonce", nonce) == (nonce, two)
    assert markers("other", *command)[0] != nonce


def test_error_of_a_job_is_said_once(tmp_path: Path, port: str, mpiexec: str) -> None:
    wrong = start(tmp_path, mpiexec, "-n", "3", *COMMAND, "--port", port, "--num-prompts", "0", "--output-dir", "run")
    status, output, errors = finish(wrong)
    assert (status, output) == (2, "")
    assert errors == "error: --num-prompts must be at least 1, got 0\n"
    absent = start(tmp_path, mpiexec, "-n", "2", *COMMAND, "--base-url", "http://127.0.0.1:1", *SHORT)
    status, output, errors = finish(absent)
    assert (status, output) == (1, "")
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: no server answers")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_on_a_job_keeps_what_was_recorded(tmp_path: Path, port: str, mpiexec: str) -> None:
    arguments = ["--port", port, *ENDLESS, "--workers", "2", "--output-dir", "run"]
    process = start(tmp_path, mpiexec, "-n", "2", *COMMAND, *arguments)
    wait_for_records(process, tmp_path / "run", 4)
    process.send_signal(signal.SIGINT)
    status, output, errors = finish(process)
    assert status == 130, errors
    validity, _, records = outcome(tmp_path / "run")
    assert (validity, records > 0) == ("interrupted", True)
    assert output.count("report: ") == 1
    until(lambda: not worker_pids(tmp_path / "run"))


def test_killed_rank_ends_the_job_and_its_records_are_readable(tmp_path: Path, port: str, mpiexec: str) -> None:
    run = tmp_path / "run"
    process = start(tmp_path, mpiexec, "-n", "2", *COMMAND, "--port", port, *ENDLESS, "--output-dir", "run")
    wait_for_records(process, run, 2)
    os.kill(RunDirectory.open(run).read_run_json()["ranks"][1]["pid"], signal.SIGKILL)
    status, _, _ = finish(process)
    assert status != 0
    until(lambda: not worker_pids(run))
    assert outcome(run)[0] is None
    done = start(tmp_path, sys.executable, "-m", "atom.cli.main", "report", "run")
    status, output, errors = finish(done)
    assert "TTFT" in output, errors


def test_ranks_on_two_clocks(tmp_path: Path, port: str, mpiexec: str) -> None:
    """The other rank has a CLOCK_MONOTONIC of its own, and a private view of the run directory's place."""
    elsewhere = ["unshare", "--mount", "--time", "--monotonic", "5000", "--fork", "--"]
    if subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces cannot be made here")
    (tmp_path / "run").mkdir()
    arguments = [*COMMAND, "--port", port, *SHORT, "--output-dir", "run", "--quiet"]
    hide = ["sh", "-c", 'mount -t tmpfs none run && exec "$@"', "sh"]
    status, _, errors = finish(
        start(tmp_path, mpiexec, "-n", "1", *arguments, ":", "-n", "1", *elsewhere, *hide, *arguments)
    )
    assert status in (0, 4), errors
    run_dir = RunDirectory.open(tmp_path / "run")
    clock = run_dir.read_run_json()["ranks"][1]["clock"]
    for measured in clock:
        assert abs(measured["offset_ns"] + 5000 * 10**9) <= measured["uncertainty_ns"]
    records = list(read_records(run_dir))
    assert sorted(record.index for record in records) == list(range(20))
    sent = [record.sent_ns for record in records if record.sent_ns is not None]
    assert max(sent) - min(sent) < 60 * 10**9
