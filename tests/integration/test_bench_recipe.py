"""`atom bench random` with a server that a recipe starts: both APIs, the server's side in the table, the report."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from itertools import chain
from pathlib import Path

import pytest
from rich.cells import cell_len

from atom.bench.rundir import RunDirectory, read_jsonl

ROOT = Path(__file__).resolve().parents[2]


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    load = (
        "--random-input-len 24 --random-output-len 12 --num-prompts 24 --max-concurrency 6 --num-warmups 2 --ignore-eos"
    )
    return subprocess.run(
        [sys.executable, "-m", "atom.cli.main", "bench", "random", *load.split(), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "140"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.embedded_model
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_simulated_engine(tmp_path: Path, embedded_model: Path, backend: str) -> None:
    done = bench(
        tmp_path,
        "--recipe",
        "simulated",
        "--backend",
        backend,
        "--continuous-usage-stats",
        "--output-dir",
        "run",
        "--json",
        "out.json",
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "SIMULATED executor" in done.stdout
    assert "gen-2 share" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (24, 0, 24 * 12)
    assert result["atom"]["anomalies"] == {}
    assert result["atom"]["figures"]["merged_share"]["n"] > 0
    if backend == "openai":
        assert result["total_input_tokens"] == 24 * 24
    run = RunDirectory.open(tmp_path / "run")
    assert run.read_run_json()["validity"] == "valid"
    assert run.read_run_json()["target"]["executor"] == "simulated"
    assert run.report_html.stat().st_size > 20_000
    assert any(run.server.glob("gc-api-*.jsonl"))


@pytest.mark.embedded_model
def test_context_that_cannot_hold_the_load_is_refused_before_it(tmp_path: Path, embedded_model: Path) -> None:
    done = bench(
        tmp_path,
        "--recipe",
        "simulated",
        "--random-input-len",
        "500",
        "--output-dir",
        "run",
        "--quiet",
        "--",
        "--max-model-len",
        "256",
    )
    assert done.returncode == 2, done.stderr
    assert "--random-input-len" in done.stderr
    assert not (tmp_path / "run").exists(), "nothing was recorded: a corrected command can take the place"


def engine_core_of(pid: int) -> int:
    children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    for child in chain.from_iterable(children):
        if b"core_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("the server has no engine core")


@pytest.mark.embedded_model
@pytest.mark.parametrize(("role", "count"), [("api", 100000), ("core", 100000), ("core", 60)])
def test_server_that_dies_during_the_load_fails_the_run(
    tmp_path: Path, embedded_model: Path, role: str, count: int
) -> None:
    """Killed by the run directory: the pid is in run.json as soon as it serves. The cause comes first, in one line that
    is complete, and nobody is said to have interrupted anything. A short load is over before the server has ended."""
    arguments = f"--random-input-len 8 --random-output-len 20 --num-prompts {count} --max-concurrency 4"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "atom.cli.main", "bench", "random", "--recipe", "simulated", "--quiet"),
            *("--output-dir", "run", "--junit", "run.xml", *arguments.split()),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".src")},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(read_jsonl(tmp_path / "run" / "requests" / "0.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = RunDirectory.open(tmp_path / "run").read_run_json()["server"]["pid"]
    os.kill(pid if role == "api" else engine_core_of(pid), signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    run = RunDirectory.open(tmp_path / "run").read_run_json()
    assert run["validity"] == "failed"
    cause = run["reasons"][0]
    assert cause.startswith("the server died: ")
    assert ("EngineCore 0" in cause) == (role == "core")
    assert "SIGKILL" in cause
    assert not any(reason.rstrip().endswith(":") or "interrupted" in reason for reason in run["reasons"])
    assert cause in errors
    assert "Traceback" not in errors
    assert "<failure" in (tmp_path / "run.xml").read_text()


@pytest.mark.embedded_model
def test_interrupt_while_the_server_starts(tmp_path: Path, embedded_model: Path) -> None:
    """From a shell script's background job, where the shell has SIGINT ignored."""
    script = f"""
    '{sys.executable}' -m atom.cli.main bench random --recipe simulated --num-prompts 4 --output-dir run --quiet &
    until [ -s run/run.json ]; do sleep 0.05; done
    kill -INT $!; wait $!; echo "status $?"
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "status 130\n", done.stderr
    assert RunDirectory.open(tmp_path / "run").read_run_json()["validity"] == "interrupted"


@pytest.mark.embedded_model
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_progress_on_a_terminal_is_one_line_that_rewrites_itself(
    tmp_path: Path, embedded_model: Path, columns: int
) -> None:
    """From the server's start to the load's end: nothing wraps, nothing else draws, one line is left."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    load = "--random-input-len 8 --random-output-len 8 --num-prompts 40 --max-concurrency 4 --output-dir run"
    process = subprocess.Popen(
        [sys.executable, "-m", "atom.cli.main", "bench", "random", "--recipe", "simulated", *load.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".src")},
        stdout=subprocess.DEVNULL,
        stderr=slave,
    )
    os.close(slave)
    written = b""
    with contextlib.suppress(OSError):  # EIO: nobody has the terminal open any more
        while data := os.read(master, 65536):
            written += data
    os.close(master)
    assert process.wait(60) in (0, 4)
    text = written.decode()
    first, *frames = text.split("\r\x1b[2K")
    assert first == ""
    assert any(frame.startswith("server starting") for frame in frames)
    assert "40/40" in frames[-1]
    assert frames[-1].endswith("\r\n")
    for frame in frames:
        assert "\x1b" not in frame
        assert cell_len(frame.removesuffix("\r\n")) < columns
    assert "".join(frames).count("\n") == 1
