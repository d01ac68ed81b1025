"""`atom gc-profile` from the command line to its files, against servers that know nothing of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from atom.bench.rundir import RunDirectory, read_jsonl
from atom.cli.dispatch import main

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("pausing_server.py")
WAIT_S = 60.0
PORT = ("--port", "{port}")
LOAD = "--input-len 8 --output-len 4 --max-concurrency 4"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "atom.cli.main", "gc-profile", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "160"}


def profile(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )


def foreign(*options: str) -> list[str]:
    return ["--", sys.executable, str(SERVER), *options]


@contextlib.contextmanager
def running_server(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One that somebody else started, and its URL."""
    process = subprocess.Popen([sys.executable, str(SERVER), *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, f"http://127.0.0.1:{int(process.stdout.readline().split()[1])}"
    finally:
        process.terminate()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def watching(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A profile in `run`, once it has begun to watch and has seen a second of it."""
    process = subprocess.Popen(
        command("--output-dir", "run", *arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + WAIT_S
    while not list(read_jsonl(folder / "run" / "client" / "observer.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.2)
    return process


def check_measured(done: subprocess.CompletedProcess[str]) -> None:
    """On a busy machine the client may be late, which makes a load no evidence of speed; speed is not tested here."""
    assert done.returncode in (0, 4), done.stderr + done.stdout


def reading(run: Path, otherwise: int = 0) -> int:
    """The status of reading a run again: a busy machine may have made it no evidence."""
    return otherwise if RunDirectory.open(run).read_run_json()["validity"] == "valid" else 4


def result(folder: Path, name: str = "out.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


# ---- servers of others -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of a server with forced collections of known length, under our load; in `run`, with `truth`."""
    folder = tmp_path_factory.mktemp("profiled")
    done = profile(
        folder,
        *f"--num-prompts 250 {LOAD} --request-rate 60 --output-dir run --window 1s --json out.json".split(),
        *foreign(*PORT, "--truth", str(folder / "truth"), "--pause-ms", "20", "--every-s", "0.1"),
    )
    check_measured(done)
    assert "gen-2" in done.stdout
    return folder


def test_forced_collections_are_reported_as_long_as_they_were(profiled: Path) -> None:
    """Within 1% of what the server itself took down, in number exactly."""
    start_ns = RunDirectory.open(profiled / "run").read_run_json()["measured_start_ns"]
    report = result(profiled)
    end_ns = start_ns + round(report["duration_s"] * 1e9)
    truth = [json.loads(line) for line in (profiled / "truth").read_text().splitlines()]
    inside = [(begin, end) for begin, end in truth if begin >= start_ns and end <= end_ns]
    clipped = sum(max(0, min(end, end_ns) - max(begin, start_ns)) for begin, end in truth) / 1e9
    assert len(inside) >= 20
    assert report["gen2_passes"] in (len(inside), len(inside) + 1)
    assert report["gen2_seconds"] == pytest.approx(clipped, rel=0.01)
    assert report["gen2_share"] == pytest.approx(clipped / report["duration_s"], rel=0.01)
    assert sum(window["gen2_passes"] for window in report["windows"]) == report["gen2_passes"]


def test_what_a_profile_leaves(profiled: Path) -> None:
    run = profiled / "run"
    record = RunDirectory.open(run).read_run_json()
    assert record["validity"] in ("valid", "not valid")
    assert record["name"] == "gc-profile"
    assert record["load"]["num_prompts"] == 250
    assert (run / "gc-profile.html").stat().st_size > 20_000
    assert json.loads((run / "gc-profile.json").read_text()) == result(profiled)
    (api,) = [process for process in result(profiled)["processes"] if process["role"] == "api"]
    assert api["hooked"]
    assert api["gen2_passes"] >= 20
    assert result(profiled)["hook_cpu_share"] < 0.05


def test_reading_a_run_again_says_the_same(profiled: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (profiled / "run").rglob("*") if path.is_file()}
    done = profile(tmp_path, str(profiled / "run"), "--window", "1s", "--json", "-", "--html", "page.html")
    assert done.returncode == reading(profiled / "run"), done.stderr
    again, first = json.loads(done.stdout), result(profiled)
    for document in (again, first):
        for one in (document, *document["arms"]):
            one.pop("directory")  # as it was typed
    assert again == first
    assert (tmp_path / "page.html").stat().st_size > 20_000
    after = {path: path.stat().st_mtime_ns for path in (profiled / "run").rglob("*") if path.is_file()}
    changed = {path.name for path in after if after[path] != before.get(path)}
    assert changed <= {"gc-profile.json", "gc-profile.html"}


@pytest.mark.parametrize(
    ("gates", "status"),
    [
        (["gen2_share>90%"], 0),
        (["gen2_share>1%"], 3),
        (["metrics_p50_ms>9min", "gen2_passes>=20"], 3),
        (["growth.ttft_ms.slope>1e9", "itl_p50_ms>1s", "health_p50_ms>1"], 2),
    ],
)
def test_gates(profiled: Path, tmp_path: Path, gates: list[str], status: int) -> None:
    options = [word for gate in gates for word in ("--fail-if", gate)]
    assert main(["gc-profile", str(profiled / "run"), "--quiet", "--junit", str(tmp_path / "g.xml"), *options]) == (
        reading(profiled / "run", status) if status != 2 else 2
    )
    if status != 2:
        assert ("<failure" in (tmp_path / "g.xml").read_text()) == (reading(profiled / "run", status) != 0)


def test_two_runs_side_by_side(profiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(profiled / "run", copy)
    assert main(["gc-profile", str(profiled / "run"), str(copy), "--json", "-"]) == reading(copy)
    assert len(json.loads(capsys.readouterr().out)["arms"]) == 2


@pytest.mark.parametrize("validity", ["not valid", "failed", "interrupted", None])
def test_reading_what_is_no_evidence_is_status_4(
    profiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], validity: str | None
) -> None:
    """With a gate that passes, with one that fails, and beside a run that may be valid."""
    copy = tmp_path / "copy"
    shutil.copytree(profiled / "run", copy)
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**record, "validity": validity}))
    for more in ([], ["--fail-if", "gen2_share>1%"], [str(profiled / "run")]):
        assert main(["gc-profile", str(copy), *more, "--quiet"]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"({validity or 'not sealed'}" in captured.err


def test_junit_on_standard_output_is_all_there_is(profiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["gc-profile", str(profiled / "run"), "--junit", "-", "--fail-if", "gen2_share>90%"])
    suites = ElementTree.fromstring(capsys.readouterr().out)
    assert len(list(suites.iter("testcase"))) >= 2


def test_pauses_that_have_nothing_to_do_with_latency_are_no_cause(tmp_path: Path) -> None:
    """The process that collects serves nobody: a slow first token meets its pauses as often as chance has it."""
    pauses = ("--truth", "truth", "--pause-ms", "30", "--every-s", "0.06", "--elsewhere", "--idle")
    done = profile(
        tmp_path,
        *f"--num-prompts 1200 {LOAD} --output-len 1 --request-rate 250 --output-dir run".split(),
        *("--json", "out.json", "--quiet"),
        *foreign(*PORT, *pauses, "--slow-share", "0.06"),
    )
    check_measured(done)
    report = result(tmp_path)
    first = report["attribution"]["first_tokens"]
    assert report["gen2_share"] > 0.1
    assert first["slow"] >= 55
    assert first["expected_in_pass"] > 10
    assert 0.5 < first["lift_pass"] < 1.7, "a busy machine delays both at the same moments, hence the width"


def test_a_server_by_its_url(tmp_path: Path) -> None:
    """From outside there is no collector to be seen: null, not zero, and a gate on it has no answer."""
    with running_server() as (_, url):
        done = profile(
            tmp_path, "--url", f"{url}/v1", "--duration", "2s", "--json", "-", "--fail-if", "gen2_share>1%", "--quiet"
        )
    assert done.returncode == 4, done.stderr
    report = json.loads(done.stdout)
    assert report["gen2_share"] is None
    assert report["metrics_p50_ms"] > 0
    assert max(window["health_max_ms"] for window in report["windows"]) > 0
    assert "gen2_share" in done.stderr


def test_a_server_that_was_given_the_printed_environment(tmp_path: Path) -> None:
    """As in a container: started by hand with what --print-env prints, then also measured from outside. Nothing about
    its command line says what it is: the URL does."""
    printed = profile(tmp_path, "--print-env", "--output-dir", "run")
    assert printed.returncode == 0, printed.stderr
    assert f"--url http://HOST:PORT --output-dir {tmp_path}/run" in printed.stdout
    assert f"atom gc-profile {tmp_path}/run" in printed.stdout
    exports = [line for line in printed.stdout.splitlines() if line.startswith("export ")]
    options = [sys.executable, str(SERVER), "--truth", "truth", "--pause-ms", "5"]
    script = "\n".join([*exports, 'exec "$@"'])
    server = subprocess.Popen(
        ["bash", "-c", script, "server", *options], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline().split()[1])}"
        done = profile(tmp_path, "--url", url, "--duration", "3s", "--output-dir", "run", "--json", "-")
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()  # type: ignore[union-attr]
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["gen2_passes"] > 3
    assert [one["role"] for one in report["processes"] if one["hooked"]] == ["api"]
    assert report["metrics_p50_ms"] > 0
    again = profile(tmp_path, "--url", url, "--output-dir", "run")
    assert again.returncode == 2, "a run that was measured is not overwritten"


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_a_server_by_its_pid(tmp_path: Path) -> None:
    with running_server("--truth", str(tmp_path / "truth"), "--pause-ms", "5") as (process, _):
        done = profile(tmp_path, "--pid", str(process.pid), "--duration", "2s", "--json", "out.json", "--quiet")
        assert process.poll() is None, "it lives on"
    assert done.returncode == 0, done.stderr
    report = result(tmp_path)
    assert report["gen2_passes"] > 5
    assert [one["pid"] for one in report["processes"] if one["hooked"]] == [process.pid]


def test_ctrl_c_is_how_watching_ends(tmp_path: Path) -> None:
    process = watching(tmp_path, *foreign("--truth", "truth", "--pause-ms", "5"))
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    assert "gen-2" in output
    assert RunDirectory.open(tmp_path / "run").read_run_json()["validity"] == "valid"


def test_ctrl_c_before_the_duration_is_over_interrupts(tmp_path: Path) -> None:
    with running_server() as (_, url):
        process = watching(tmp_path, "--url", url, "--duration", "1h", "--json", "out.json")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, errors
    assert "/metrics" in output, "what was seen is reported"
    assert result(tmp_path)["validity"] == "interrupted"
    assert 1 < result(tmp_path)["duration_s"] < 60


def test_a_server_that_dies_leaves_a_report(tmp_path: Path) -> None:
    process = watching(tmp_path, "--json", "out.json", *foreign("--no-metrics"))
    pid = RunDirectory.open(tmp_path / "run").read_run_json()["server"]["pid"]
    os.kill(pid, signal.SIGKILL)
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, errors
    assert "SIGKILL" in output
    assert "Traceback" not in errors
    report = result(tmp_path)
    assert report["validity"] == "failed"
    assert report["metrics_p50_ms"] is None
    assert report["metrics_series"] is None
    assert report["duration_s"] > 1


def test_a_command_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    done = profile(tmp_path, "--quiet", "--json", "-", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "exit status 7" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_does_not_exist_is_wrong_usage_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "atom-runs" / "before").mkdir(parents=True)
    (tmp_path / "atom-runs" / "latest").symlink_to("before")
    assert main(["gc-profile", "--", "no-such-server", "--port", "8123"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: cannot run 'no-such-server': No such file or directory"
    assert sorted(path.name for path in (tmp_path / "atom-runs").iterdir()) == ["before", "latest"]
    assert (tmp_path / "atom-runs" / "latest").readlink() == Path("before")


def test_nobody_at_the_url_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert main(["gc-profile", "--url", url, "--duration", "5s", "--output-dir", "run"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: no server answers at {url}: connection refused; nothing was measured\n"
    assert not (tmp_path / "run").exists()


def test_a_second_ctrl_c_kills_a_server_that_does_not_stop(tmp_path: Path) -> None:
    process = watching(tmp_path, *foreign("--ignore-sigterm"))
    pid = RunDirectory.open(tmp_path / "run").read_run_json()["server"]["pid"]
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    lines: list[str] = []
    while not lines or "SIGTERM sent, SIGKILL after 59 s" not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, errors
    assert "interrupted again: killing the server" in errors
    assert not Path(f"/proc/{pid}").exists()


def test_a_what_if_says_what_changed_and_a_kill_leaves_the_first_arm(tmp_path: Path) -> None:
    """Frozen objects are not walked, so what the same forced collections cost is gone. Killed before the second arm's
    load, the first is read as if it had been alone."""
    load = f"--num-prompts 60 {LOAD} --request-rate 60 --what-if freeze:1 --output-dir run --quiet".split()
    server = foreign(*PORT, "--truth", "truth", "--pause-ms", "20", "--every-s", "0.1")
    done = profile(tmp_path, *load, "--num-warmups", "60", "--json", "out.json", "--markdown", "table.md", *server)
    check_measured(done)
    report = result(tmp_path)
    assert [arm["label"] for arm in report["arms"]] == ["as-is", "freeze-1"]
    before, after = report["arms"]
    assert after["gen2_mean_pause_ms"] < before["gen2_mean_pause_ms"] / 4
    assert report["changes"]["gen2_seconds"]["before"] == before["gen2_seconds"]
    text = (tmp_path / "table.md").read_text()
    assert "what freeze:1 changes" in text
    assert "no evidence of small differences" in text
    killed = tmp_path / "run" / "arms" / "freeze-1" / "run-1"
    shutil.rmtree(killed / "requests")
    (killed / "client" / "0.jsonl").unlink()
    record = json.loads((killed / "run.json").read_text())
    del record["measured_start_ns"]
    (killed / "run.json").write_text(json.dumps({**record, "validity": None}))
    whole = tmp_path / "run" / "run.json"
    whole.write_text(json.dumps({**json.loads(whole.read_text()), "validity": None}))
    again = profile(tmp_path, "run", "--json", "-")
    assert again.returncode == 4, again.stderr
    assert json.loads(again.stdout)["arms"][0]["label"] == "as-is"
    assert json.loads(again.stdout)["arms"][0]["requests"] == 60


# ---- our own server, with arms -----------------------------------------------------------------------------------


@pytest.mark.embedded_model
def test_the_replay_with_all_its_arms(tmp_path: Path, embedded_model: Path) -> None:
    """Too short for verdicts; each arm ran with its fault and no other, and what it recorded says so."""
    load = (
        "--num-prompts 220 --scale 3 --max-concurrency 32 --input-len 256 --output-len 8"  # 1.5 s: one scrape at least
    )
    done = profile(
        tmp_path,
        *f"replay {load} --arms clean,retention,gauges,both --output-dir run --json - --markdown table.md".split(),
    )
    check_measured(done)
    assert "4 arms" in done.stderr
    report = json.loads(done.stdout)
    arms = {arm["label"]: arm for arm in report["arms"]}
    assert list(arms) == ["clean", "retention", "gauges", "both"]
    assert all(arm["simulated"] and arm["requests"] == 220 for arm in arms.values())
    assert "SIMULATED" in (tmp_path / "table.md").read_text()
    for label, fault, gauges in (("clean", 0, 0), ("retention", 1, 0), ("gauges", 0, 1), ("both", 1, 1)):
        run = RunDirectory.open(tmp_path / "run" / "arms" / label / "run-1").read_run_json()
        environment = run["server"]["env"]
        assert environment.get("ATOM_FAULTS") == ("retain-finished" if fault else None)
        assert environment.get("ATOM_METRICS_PER_REQUEST_CONTEXT") == ("1" if gauges else None)
        assert any((tmp_path / "run" / "arms" / label / "run-1" / "server").glob("gc-api-*.jsonl"))
    assert arms["gauges"]["metrics_series"] > arms["clean"]["metrics_series"] + 100
    parent = RunDirectory.open(tmp_path / "run").read_run_json()
    assert [arm["label"] for arm in parent["arms"]] == list(arms)
    assert parent["validity"] in ("valid", "not valid")
