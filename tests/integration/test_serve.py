"""`atom serve` and `atom clean` as a person or a script runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.bench.rundir import RunDirectory
from atom.cli.serve import _plan, _stop_grace
from atom.recipes.errors import UsageError
from atom.recipes.processes import LABEL_VARIABLE, labelled_processes, listening_processes, read_stat
from atom.recipes.spawn import import_root
from tests.waiting import until

STAND_IN = Path(__file__).with_name("stand_in_server.py")
WAIT_S = 30.0


def atom(*words: str) -> list[str]:
    code = f"import sys; sys.path.insert(0, {str(import_root())!r}); from atom.cli.main import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code, *words]


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        atom(*words), capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **(env or {})}
    )


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "stand-in.yaml"
    path.write_text(
        textwrap.dedent(f"""\
            name: stand-in
            command: ["{{python}}", {STAND_IN}, --host, "{{host}}", --port, "{{port}}", --port-file, "{{port_file}}"]
            roles: {{api: [stand_in_server]}}
            stop: {{grace: 10}}
            """)
    )
    return path


class Serving:
    """A running `atom serve … --port 0 --json -`."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            atom("serve", *words, "--port", "0", "--json", "-"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        self.ready: dict[str, Any] = json.loads(line)

    def end(self, number: int) -> tuple[int, str, str]:
        """Send a signal; exit status, rest of standard output, standard error."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out, err


@pytest.fixture
def serving() -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*words: str) -> Serving:
        started.append(Serving(*words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()
        until(lambda one=one: labelled_processes(one.ready["label"]) == [])  # type: ignore[misc]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_signals_end_it_cleanly(
    recipe: Path, serving: Callable[..., Serving], number: signal.Signals, status: int
) -> None:
    server = serving(str(recipe))
    ready = server.ready
    assert ready["event"] == "ready"
    assert (ready["model"], ready["recipe"]) == ("stand-in", "stand-in")
    port = int(ready["base_url"].rpartition(":")[2])
    assert listening_processes(port) == [ready["pid"]]
    code, out, err = server.end(number)
    assert code == status
    assert out == ""  # with --json - there is nothing but the JSON on standard output
    assert "stand-in: listening" in err  # the log is on standard error
    assert f"{number.name}: stopping the server" in err
    assert listening_processes(port) is None
    assert labelled_processes(ready["label"]) == []


def test_kill_9_of_atom_serve_leaves_no_process(recipe: Path, serving: Callable[..., Serving], tmp_path: Path) -> None:
    note = tmp_path / "pid"
    server = serving(str(recipe), "--quiet", "--behaviour", "grandchild", "--note", str(note))
    assert len(labelled_processes(server.ready["label"])) == 2
    server.process.kill()
    until(lambda: labelled_processes(server.ready["label"]) == [])
    until(lambda: read_stat(server.ready["supervisor_pid"]) is None)


def test_kill_9_with_our_own_engine_leaves_no_process(serving: Callable[..., Serving]) -> None:
    server = serving("simulated", "--quiet", "--sim-base-ms", "1")
    assert server.ready["executor"] == "simulated"
    assert len(labelled_processes(server.ready["label"])) == 2  # API and EngineCore
    server.process.kill()
    until(lambda: labelled_processes(server.ready["label"]) == [])


def test_a_second_interrupt_kills_a_server_that_hangs(recipe: Path, serving: Callable[..., Serving]) -> None:
    server = serving(str(recipe), "--stop-grace", "3600", "--behaviour", "hang-on-stop")
    server.process.send_signal(signal.SIGINT)
    assert server.process.stderr is not None
    while "stopping the server" not in server.process.stderr.readline():
        pass
    code, _, err = server.end(signal.SIGINT)
    assert code == 130
    assert "1 processes were killed" in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_loads_is_no_success(recipe: Path, number: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        atom("serve", str(recipe), "--port", "0", "--behaviour", "never-healthy"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "listening" not in process.stderr.readline():
        pass
    process.send_signal(number)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == status
    assert f"{number.name}: stopped before the server was ready" in err


def test_the_banner_and_the_log(recipe: Path) -> None:
    process = subprocess.Popen(
        atom("serve", str(recipe), "--port", "0"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    while "-d '" not in "".join(lines):
        lines.append(process.stdout.readline())
        assert lines[-1] != ""
    process.terminate()
    out, err = process.communicate(timeout=WAIT_S)
    banner = "".join(lines) + out
    assert re.search(r"url +http://127\.0\.0\.1:\d+\n", banner)
    assert re.search(r"model +stand-in\n", banner)
    assert '"model": "stand-in"' in banner
    assert "stand-in: stopped" in err
    assert process.returncode == 0


def test_a_server_that_dies_is_status_1(recipe: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    done = run("serve", str(recipe), "--port", "0", "--behaviour", "die-after-ready", "--json", str(ready))
    assert done.returncode == 1
    assert "error: server of recipe stand-in died with exit status 9" in done.stderr
    assert json.loads(ready.read_text())["event"] == "ready"
    done = run("serve", str(recipe), "--port", "0", "--behaviour", "die-at-start", "--quiet")
    assert done.returncode == 1
    assert "the module warp_drive is missing" in done.stderr


def test_a_run_directory_is_recorded(recipe: Path, serving: Callable[..., Serving], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    server = serving(str(recipe), "--quiet", "--output-dir", str(folder))
    assert server.ready["run_dir"] == str(folder)
    until(lambda: (folder / "server/process.jsonl").exists() and (folder / "server/process.jsonl").stat().st_size > 0)
    assert server.end(signal.SIGTERM)[0] == 0
    content = RunDirectory.open(folder).read_run_json()
    assert content["validity"] == "valid"
    assert content["kind"] == "serve"
    assert "stand-in: stopped" in (folder / "server/server.log").read_text()
    assert list((folder / "server").glob("gc-api-*.jsonl"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["no-such-model"],
            "'no-such-model' is neither a model directory, a .gguf file, nor a recipe",
        ),
        (["a.yaml"], "recipe a.yaml: cannot read it"),
        (["--recipe", "warp"], "no recipe 'warp'"),
        (["vllm-cpu", "m"], "needs a value for `python`"),
        (["--set", "x", "simulated"], "--set 'x' must look like name=value"),
        (["embedded", "--model", "x"], "neither"),
        (["--json", "/none/x.json"], "--json /none/x.json"),
        (
            ["simulated", "--host", "no.such.host.invalid", "--port", "8123"],
            "--host no.such.host.invalid: cannot listen",
        ),
        (["--port", "x"], "Invalid value for '--port'"),
        (["simulated", "--", "--port", "0"], "--port stands behind `--`"),
        (["simulated", "--", "--host=::1"], "--host stands behind `--`"),
    ],
)
def test_wrong_usage_is_status_2_and_one_line(words: list[str], message: str) -> None:
    done = run("serve", *words, env={"ATOM_VLLM_PYTHON": ""})
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_a_flag_the_server_does_not_know_is_wrong_usage(recipe: Path) -> None:
    done = run("serve", str(recipe), "--port", "0", "--quiet", "--warp", "9")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: unrecognized arguments: --warp" + " 9" * ("--warp 9" in done.stderr)


def test_help_shows_both_halves() -> None:
    done = run("serve", "--help")
    assert done.returncode == 0
    assert "--ready-timeout" in done.stdout
    assert "Examples" in done.stdout
    assert "--max-num-batched-tokens" in done.stdout or "atom-serving[engine]" in done.stdout


def test_the_target_and_the_flags_are_told_apart(tmp_path: Path) -> None:
    model = str(tmp_path)
    assert _plan([], None, None).recipe == "embedded"
    plan = _plan([model, "--max-num-seqs", "64"], None, None)
    assert (plan.recipe, plan.model, plan.extra) == ("embedded", model, ["--max-num-seqs", "64"])
    plan = _plan(["--max-num-seqs", "64"], None, None)
    assert (plan.recipe, plan.model, plan.extra) == ("embedded", None, ["--max-num-seqs", "64"])
    plan = _plan(["vllm-cpu", model, "--x"], None, None)
    assert (plan.recipe, plan.model, plan.extra) == ("vllm-cpu", model, ["--x"])
    plan = _plan([model], "vllm-cpu", None)
    assert (plan.recipe, plan.model) == ("vllm-cpu", model)
    assert _plan([], None, "preset:tiny").model == "preset:tiny"
    assert _plan(["simulated"], None, None).model is None
    with pytest.raises(UsageError, match="two models"):
        _plan([model], None, "other")


def test_the_grace_follows_the_time_requests_may_take() -> None:
    assert _stop_grace(None, ["--shutdown-timeout", "120"]) == 135
    assert _stop_grace(None, ["--shutdown-timeout=120"]) == 135
    assert _stop_grace(3.0, ["--shutdown-timeout", "120"]) == 3
    assert _stop_grace(None, ["--shutdown-timeout"]) is None


# ---- atom clean ----------------------------------------------------------------------------------------------------


def test_clean_sweeps_what_a_killed_supervisor_left(
    recipe: Path, serving: Callable[..., Serving], tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    server = serving(str(recipe), "--quiet", "--behaviour", "grandchild", "--note", str(note))
    until(lambda: note.exists() and note.read_text() != "")
    grandchild = int(note.read_text())
    before = json.loads(run("clean", "--dry-run", "--json", "-").stdout)
    assert grandchild not in [process["pid"] for process in before["processes"]]  # it has an owner
    # The worst case: both processes that would clean up are killed together.
    os.kill(server.process.pid, signal.SIGSTOP)
    os.kill(server.ready["supervisor_pid"], signal.SIGKILL)
    server.process.kill()
    server.process.communicate()
    until(lambda: labelled_processes(server.ready["label"]) == [grandchild])
    found = json.loads(run("clean", "--dry-run", "--json", "-").stdout)
    assert grandchild in [process["pid"] for process in found["processes"]]
    assert labelled_processes(server.ready["label"]) == [grandchild]
    done = run("clean")
    assert done.returncode == 0
    assert f"ended pid {grandchild}" in done.stdout
    assert labelled_processes(server.ready["label"]) == []
    assert LABEL_VARIABLE == "ATOM_RUN_LABEL"
