"""How a run of `atom bench` ends other than by itself: signals at every moment, closed descriptors, full disks, and the
place that a run takes and gives back. Real processes, a real emitter."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.bench import spool
from atom.bench.load import PlannedRequest
from atom.bench.rundir import RunDirectory, read_jsonl
from atom.recipes.errors import RunError

ROOT = Path(__file__).resolve().parents[2]
EMITTER = ROOT / "tests" / "benchmarks" / "emitter.py"
COMMAND = [sys.executable, "-m", "atom.cli.main"]
ATOM = f"'{sys.executable}' -m atom.cli.main"
QUICK = "--random-input-len 8 --random-output-len 4 --num-prompts 6 --max-concurrency 2"
ENDLESS = "--random-input-len 8 --random-output-len 20 --num-prompts 5000 --max-concurrency 4"


def environment() -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "120"}
    env.pop("GITHUB_STEP_SUMMARY", None)
    return env


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an emitter."""
    file = tmp_path_factory.mktemp("emitter") / "port"
    process = subprocess.Popen([sys.executable, str(EMITTER), "--port-file", str(file), "--tick-ms", "2"])
    deadline = time.monotonic() + 30
    while not (file.exists() and file.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield file.read_text()
    process.terminate()
    process.wait(20)


def shell(script: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-uc", f'atom() {{ {ATOM} "$@"; }}\n{script}'],
        cwd=folder,
        env=environment() | options.pop("env", {}),
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "bench", "random", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def status_of(run: Path) -> int:
    """What a run that came to its end exits with: on a busy machine it may be no evidence."""
    return {"valid": 0, "not valid": 4}[RunDirectory.open(run).read_run_json()["validity"]]


def wait_for_records(process: subprocess.Popen[str], run: Path) -> None:
    deadline = time.monotonic() + 60
    while not list(read_jsonl(run / "requests" / "0.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
)
@pytest.mark.parametrize("times", [1, 3])
def test_signal_during_the_load_keeps_what_was_recorded(
    tmp_path: Path, port: str, number: signal.Signals, status: int, times: int
) -> None:
    process = start(tmp_path, "--port", port, *ENDLESS.split(), "--output-dir", "run")
    wait_for_records(process, tmp_path / "run")
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.03)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert "TTFT" in output
    run = RunDirectory.open(tmp_path / "run")
    assert run.read_run_json()["validity"] == "interrupted"
    assert run.read_summary()["figures"]["completed"]["value"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=str)
def test_nohup_is_respected_and_nothing_else_ignored(tmp_path: Path, port: str, number: signal.Signals) -> None:
    script = f"""
    trap '' INT HUP
    atom bench random --port {port} {ENDLESS} --duration 3 --output-dir run --quiet &
    until [ -s run/requests/0.jsonl ]; do sleep 0.05; done
    pid=$(pgrep -P $! || echo $!); kill -{int(number)} $pid; wait $!; echo "status $?"
    """
    done = shell(script, tmp_path)
    expected = status_of(tmp_path / "run") if number == signal.SIGHUP else 130
    assert done.stdout == f"status {expected}\n", done.stderr


@pytest.mark.parametrize("delay_s", [0.03, 0.1, 0.2, 0.4, 0.8])
def test_interrupt_at_any_moment_of_the_start_is_no_traceback(tmp_path: Path, port: str, delay_s: float) -> None:
    """From when Python itself is up. A busy machine may still be before the first line of `main` then."""
    code = "print('up', flush=True); import sys; from atom.cli.main import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "bench", "random", "--port", port, *ENDLESS.split(), "--output-dir", "run"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    time.sleep(delay_s)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, errors = process.communicate(timeout=60)
    if process.returncode == -signal.SIGINT:
        assert "in main" not in errors
    else:
        assert process.returncode == 130
        assert "Traceback" not in errors


def test_interrupt_while_requests_are_prepared(tmp_path: Path, port: str) -> None:
    arguments = "--random-input-len 200 --num-prompts 300000 --output-dir run --quiet"
    process = start(tmp_path, "--port", port, *arguments.split())
    while not (tmp_path / "run" / "client" / "0.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    time.sleep(1.2)
    process.send_signal(signal.SIGINT)  # a second wish
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", "2>&1 | true"])
def test_descriptors_that_nobody_reads_do_not_change_the_status(tmp_path: Path, port: str, closed: str) -> None:
    done = shell(
        f"atom bench random --port {port} {QUICK} --output-dir run {closed}; echo ${{PIPESTATUS[0]}}", tmp_path
    )
    assert int(done.stdout.splitlines()[-1]) == status_of(tmp_path / "run"), done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("options", ["", "--json -", "--markdown -"])
def test_full_standard_output_is_an_error(tmp_path: Path, port: str, options: str) -> None:
    done = shell(f"atom bench random --port {port} {QUICK} --output-dir run {options} > /dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: cannot write standard output: No space left")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=str)
def test_helpers_say_nothing_after_their_session_is_gone(tmp_path: Path, port: str, number: signal.Signals) -> None:
    process = start(tmp_path, "--port", port, *ENDLESS.split(), "--output-dir", "run", "--quiet")
    wait_for_records(process, tmp_path / "run")
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)  # to the end of all who hold the pipe
    assert "Traceback" not in errors


def limit_file_size(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size", [3_000, 9_000])
def test_file_system_that_takes_no_more_is_named_and_what_was_measured_shown(
    tmp_path: Path, port: str, size: int
) -> None:
    load = "--random-input-len 8 --random-output-len 4 --num-prompts 40 --max-concurrency 2"
    done = shell(f"atom bench random --port {port} {load} --output-dir run", tmp_path, preexec_fn=limit_file_size(size))
    assert done.returncode == 1, done.stderr
    assert "fault in atom" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "run/" in done.stderr.splitlines()[-1]
    assert "File too large" in done.stderr.splitlines()[-1]
    if (tmp_path / "run" / "requests" / "0.jsonl").exists():
        assert "TTFT" in done.stdout


def test_outputs_that_fail_at_the_end_cost_only_themselves(tmp_path: Path, port: str) -> None:
    done = shell(
        f"atom bench random --port {port} {QUICK} --output-dir run --json /dev/full --markdown out.md",
        tmp_path,
        env={"GITHUB_STEP_SUMMARY": "/nonexistent/step.md"},
    )
    assert done.returncode == 1
    assert "TTFT" in done.stdout
    assert "| TTFT |" in (tmp_path / "out.md").read_text()
    assert "warning: GITHUB_STEP_SUMMARY /nonexistent/step.md" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: cannot write /dev/full: No space left")


def test_step_summary_that_cannot_be_written_is_no_failure(tmp_path: Path, port: str) -> None:
    script = f"atom bench random --port {port} {QUICK} --output-dir run --quiet"
    done = shell(script, tmp_path, env={"GITHUB_STEP_SUMMARY": "/dev/full"})
    assert done.returncode == status_of(tmp_path / "run")
    assert "warning: GITHUB_STEP_SUMMARY" in done.stderr


def test_latest_is_the_newest_run_of_the_default_place(tmp_path: Path, port: str) -> None:
    script = f"""
    atom bench random --port {port} {QUICK} --quiet
    readlink atom-runs/latest
    atom bench random --port {port} {QUICK} --quiet
    readlink atom-runs/latest
    atom bench random --port {port} {QUICK} --quiet --output-dir elsewhere
    atom bench random --port 1 --quiet
    readlink atom-runs/latest
    atom get atom-runs/latest itl_p50_ms; atom report atom-runs/latest --quiet; ls -A atom-runs
    """
    done = shell(script, tmp_path)
    first, second, third, figure, *names = done.stdout.splitlines()
    assert first != second == third
    assert "/" not in first
    assert float(figure) > 0
    assert sorted(names) == sorted([first, second, "latest"])


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("--port 1", 1),
        ("--base-url http://127.0.0.1:{port}/nowhere", 2),
    ],
)
@pytest.mark.parametrize("place", ["empty", "used", "default"])
def test_run_that_never_started_gives_its_place_back(
    tmp_path: Path, port: str, arguments: str, status: int, place: str
) -> None:
    if place != "new":
        (tmp_path / "run").mkdir()
    if place == "used":
        (tmp_path / "run" / "server").mkdir()
        (tmp_path / "run" / "server" / "mine").write_text("kept")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    where = "" if place == "default" else "--output-dir run"
    done = shell(f"atom bench random {arguments.format(port=port)} {where} --quiet", tmp_path)
    assert done.returncode == status, done.stderr
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert done.stderr.count("\n") == 1


def test_requests_that_find_no_room_name_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MAX_MEMORY", 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(RunError, match=rf"{tempfile.gettempdir()}: File too large"):
            spool.RequestSpool(PlannedRequest(b"x" * 1_000) for _ in range(50_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("command", ["get run completed", "report run", "--version", "bench random --help"])
def test_every_command_names_a_full_standard_output(tmp_path: Path, port: str, command: str) -> None:
    measure = f"atom bench random --port {port} {QUICK} --output-dir run -q"
    before = measure if "run" in command.split() else ":"
    done = shell(f"{before}; atom {command} > /dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: cannot write standard output: No space left")
