"""Matched runs with real processes: two arms at once, or one after the other; what goes wrong is told in one line, and
nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.diag.compare import arm_process
from atom.diag.compare.arm_process import ArmProgress, ProcessExecutor
from atom.diag.compare.model import Arm, ArmKind, ArmRun, Half, Load, MatchedRun, Placement, Purpose, RunResult
from atom.recipes.cpus import own_cpus
from atom.recipes.processes import all_pids, arguments_of, read_environment
from atom.recipes.spawn import import_root
from tests.waiting import until

CPU = own_cpus()[0]
BOTH = Placement(
    halves=(Half(name="first", server_cpus=(CPU,), client_cpus=(CPU,)), Half(name="second")), reason="of the test"
)
ONE = Placement(halves=(Half(name="whole"),), reason="of the test")
LONG = 5000
"""Requests: more than are answered until somebody has had enough."""


def arm(label: str, *server_args: str, **fields: Any) -> Arm:
    given = {"kind": ArmKind.RECIPE, "spec": "simulated", "recipe": "simulated", **fields}
    return Arm(label=label, server_args=server_args, **given)


def load(requests: int = 12) -> Load:
    options = {
        "random-input-len": 16,
        "random-output-len": 16,
        "num-prompts": requests,
        "max-concurrency": 4,
        "ignore-eos": True,
    }
    return Load(name="short", bench="random", options=options)


def matched(placement: Placement, *, index: int = 0) -> MatchedRun:
    halves = [number % len(placement.halves) for number in (index, index + 1)]
    base, head = (
        ArmRun(arm=label, half=half, order=(side + index) % 2)
        for side, (label, half) in enumerate(zip(("base", "head"), halves, strict=True))
    )
    return MatchedRun(
        comparison="base..head", purpose=Purpose.COMPARE, load="short", pair=0, index=index, runs=(base, head)
    )


def run(
    out: Path, base: Arm, head: Arm, placement: Placement, *, index: int = 0, **options: Any
) -> tuple[RunResult, RunResult]:
    given = {"loads": [load()], "seed": 3, **options}
    executor = ProcessExecutor(out, [base, head], placement=placement, **given)
    return executor.execute(
        matched(placement, index=index), (out / "arms" / "base" / "run-1", out / "arms" / "head" / "run-1")
    )


def run_json(out: Path, result: RunResult) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((out / result.directory / "run.json").read_text())
    return value


def first_sent(out: Path, result: RunResult) -> int:
    lines = [json.loads(line) for path in (out / result.directory / "requests").iterdir() for line in path.open()]
    return min(int(line["sent_ns"]) for line in lines if line.get("sent_ns"))


def processes_of(out: Path) -> list[int]:
    """Whose arguments or environment name the comparison's directory."""
    return [
        pid
        for pid in all_pids()
        if pid != os.getpid()
        and (any(str(out) in word for word in arguments_of(pid)) or str(out) in str(read_environment(pid)))
    ]


def test_two_arms_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[ArmProgress] = []
    results = run(
        tmp_path, arm("base", cache="/caches"), arm("head", env={"ARM_OF_TEST": "1"}), BOTH, on_progress=seen.append
    )
    assert [one.problem for one in results] == [None, None]
    assert [(one.status, one.stage, one.side, one.arm) for one in results] == [
        (0, "done", 0, "base"),
        (0, "done", 1, "head"),
    ]
    assert [one.directory for one in results] == ["arms/base/run-1", "arms/head/run-1"]
    base, head = (run_json(tmp_path, one) for one in results)
    assert base["validity"] == head["validity"] == "valid"
    assert max(one["server"]["ready_ns"] for one in (base, head)) <= min(first_sent(tmp_path, one) for one in results)
    assert base["server"]["cpus"] == [CPU]
    assert base["host"]["cpu_affinity"] == [CPU]
    assert head["server"]["cpus"] is None
    assert base["server"]["env"]["TRITON_CACHE_DIR"] == "/caches/triton"
    assert head["server"]["env"]["ARM_OF_TEST"] == "1"
    assert "ARM_OF_TEST" not in base["server"]["env"]
    for side in (0, 1):
        stages = list(dict.fromkeys(one.stage for one in seen if one.side == side))
        assert stages[0] == "starting"
        assert stages[-1] == "ended"
        assert "load" in stages
    assert capfd.readouterr() == ("", "")
    assert processes_of(tmp_path) == []


def test_one_after_the_other_in_the_order_of_the_plan(tmp_path: Path) -> None:
    base, head = run(tmp_path, arm("base"), arm("head"), ONE, index=1)
    assert (base.problem, head.problem) == (None, None)
    assert head.ended_ns <= base.started_ns


def test_a_server_that_does_not_start_is_told_in_one_line_and_the_other_is_ended(tmp_path: Path) -> None:
    base, head = run(tmp_path, arm("base"), arm("head", "--no-such-flag"), BOTH)
    assert (head.stage, head.status, head.has_records) == ("start", 1, False)
    assert head.problem is not None
    assert head.problem.startswith("the server died with exit status 2 while it started: ")
    assert "--no-such-flag" in head.problem
    assert (base.stage, base.status) == ("start", 130)
    assert base.problem == "not run: the other arm did not start"
    assert run_json(tmp_path, base)["validity"] == "interrupted"
    assert processes_of(tmp_path) == []


def test_one_after_the_other_the_second_is_not_tried(tmp_path: Path) -> None:
    base, head = run(tmp_path, arm("base", "--no-such-flag"), arm("head"), ONE)
    assert (base.stage, base.status) == ("start", 1)
    assert (head.stage, head.status) == ("start", 130)
    assert not (tmp_path / head.directory).exists()


def test_wrong_usage_is_a_result_too(tmp_path: Path) -> None:
    head = arm("head", variables={"no_such": "x"})
    base, head_result = run(tmp_path, arm("base"), head, BOTH)
    assert (head_result.stage, head_result.status) == ("start", 2)
    assert head_result.problem is not None
    assert head_result.problem.startswith("--set no_such=")
    assert base.status == 130


def test_a_load_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    results = run(tmp_path, arm("base"), arm("head"), BOTH, loads=[load(LONG)], limit_s=0.5)
    for result in results:
        assert (result.stage, result.status) == ("load", 143)
        assert result.problem == "it was ended after 0.5 s, before its load was over"
        assert run_json(tmp_path, result)["validity"] == "interrupted"
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("stage", ["load", "starting"])
def test_a_load_that_does_not_end_when_it_is_told_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """It is stopped, so that SIGTERM does not reach it; it overruns, or its counterpart does not start."""
    monkeypatch.setattr(arm_process, "_END_S", 0.5)
    own = str(tmp_path / "arms" / "base")
    stopped: set[int] = set()

    def stop(progress: ArmProgress) -> None:
        if progress.arm == "base" and progress.stage == stage and not stopped:

            def clients() -> set[int]:
                return {
                    pid
                    for pid in all_pids()
                    if {"bench", "--output-dir"} <= set(words := arguments_of(pid))
                    and any(word.startswith(own) for word in words)
                }

            until(lambda: bool(clients()))
            stopped.update(clients())
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)

    head = arm("head") if stage == "load" else arm("head", "--no-such-flag")
    base, _ = run(tmp_path, arm("base"), head, BOTH, loads=[load(LONG)], limit_s=1.0, on_progress=stop)
    assert stopped
    assert base.stage == ("load" if stage == "load" else "start")
    assert "it was ended after 1 s" in str(base.problem) if stage == "load" else base.status == 130
    until(lambda: processes_of(tmp_path) == [])


def test_secrets_reach_the_server_and_no_command_line(tmp_path: Path) -> None:
    seen: list[str] = []

    def look(progress: ArmProgress) -> None:
        if progress.stage in ("ready", "load"):
            seen.extend(word for pid in all_pids() for word in arguments_of(pid) if "hunter2" in word)

    script = tmp_path / "tells.py"
    script.write_text(
        "import os, sys\n"
        f"open({str(tmp_path / 'told')!r}, 'w').write(os.environ['MY_SECRET_TOKEN'])\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'atom.engine.server', *sys.argv[1:]])\n"
    )
    recipe = tmp_path / "tells.yaml"
    recipe.write_text(
        "name: tells\n"
        f'command: ["{{python}}", "{script}", embedded, --executor, simulated, --port, "{{port}}"]\n'
        'env: {PYTHONPATH: "{src}"}\n'
    )
    head = arm("head", recipe=str(recipe), env={"MY_SECRET_TOKEN": "hunter2 and\n more", "A": "b"})
    results = run(tmp_path, arm("base"), head, ONE, on_progress=look)
    assert [one.problem for one in results] == [None, None]
    assert (tmp_path / "told").read_text() == "hunter2 and\n more"
    assert not seen
    env = run_json(tmp_path, results[1])["server"]["env"]
    assert (env["MY_SECRET_TOKEN"], env["A"]) == ("<redacted>", "b")


def test_a_port_that_was_taken_is_tried_once_more(tmp_path: Path) -> None:
    """A server that says so once: its second start finds its mark."""
    script = tmp_path / "flaky.py"
    script.write_text(
        "import os, sys\n"
        f"mark = {str(tmp_path / 'mark')!r}\n"
        "seen = len(open(mark).read()) if os.path.exists(mark) else 0\n"
        "open(mark, 'a').write('x')\n"
        "if seen < 3: sys.exit('OSError: [Errno 98] address already in use')\n"  # the launcher itself tries three times
        f"os.execv(sys.executable, [sys.executable, '-m', 'atom.engine.server', *sys.argv[1:]])\n"
    )
    recipe = tmp_path / "flaky.yaml"
    recipe.write_text(
        "name: flaky\n"
        f'command: ["{{python}}", "{script}", embedded, --executor, simulated, --port, "{{port}}"]\n'
        'env: {PYTHONPATH: "{src}"}\n'
    )
    base, head = run(tmp_path, arm("base"), arm("head", recipe=str(recipe)), BOTH)
    assert (base.problem, head.problem) == (None, None)
    assert "once more" in (tmp_path / head.directory / "client.log").read_text()


CONDUCTOR = """
import sys
from pathlib import Path
from atom.diag.compare.arm_process import ProcessExecutor
from atom.diag.compare.model import Arm, Load, MatchedRun, Placement, Purpose
out = Path(sys.argv[1])
arms, load, placement, matched = sys.argv[2:6]
import json
executor = ProcessExecutor(
    out, [Arm.from_dict(one) for one in json.loads(arms)], [Load.from_dict(json.loads(load))],
    Placement.from_dict(json.loads(placement)), on_progress=lambda one: print(one.side, one.stage, flush=True),
)
try:
    executor.execute(MatchedRun.from_dict(json.loads(matched)), (out / "arms/base/run-1", out / "arms/head/run-1"))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def conductor(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """A process that makes a matched run of a long load, and says how far it is."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        values = [
            [arm("base").as_dict(), arm("head").as_dict()],
            load(LONG).as_dict(),
            BOTH.as_dict(),
            matched(BOTH).as_dict(),
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", CONDUCTOR, str(tmp_path), *map(json.dumps, values)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(import_root())},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    until(lambda: processes_of(tmp_path) == [])


def until_said(process: subprocess.Popen[str], *lines: str) -> None:
    assert process.stdout is not None
    missing = set(lines)
    while missing:
        line = process.stdout.readline()
        assert line, "the conductor has ended"
        missing.discard(line.strip())


@pytest.mark.parametrize("said", [("0 starting", "1 starting"), ("0 load", "1 load")], ids=["starting", "load"])
def test_kill_9_of_the_conductor_leaves_no_process(
    conductor: Callable[[], subprocess.Popen[str]], tmp_path: Path, said: tuple[str, str]
) -> None:
    process = conductor()
    until_said(process, *said)
    assert processes_of(tmp_path) != []
    process.kill()
    until(lambda: processes_of(tmp_path) == [])
    if said[0].endswith("load"):
        for label in ("base", "head"):
            run = json.loads((tmp_path / "arms" / label / "run-1" / "run.json").read_text())
            assert run["validity"] == "interrupted"


def test_ctrl_c_ends_both_and_leaves_readable_runs(
    conductor: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = conductor()
    until_said(process, "0 load", "1 load")
    until(lambda: all(_requests(tmp_path, label) for label in ("base", "head")))
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 130
    assert processes_of(tmp_path) == []
    for label in ("base", "head"):
        directory = tmp_path / "arms" / label / "run-1"
        assert json.loads((directory / "run.json").read_text())["validity"] == "interrupted"
        assert json.loads((directory / "summary.json").read_text())["validity"] == "interrupted"


def _requests(out: Path, label: str) -> int:
    return sum(len(path.read_bytes()) for path in out.glob(f"arms/{label}/run-1/requests/*.jsonl"))


def test_a_relative_directory_of_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--output-dir cmp`: runs lie below it, not below cmp/cmp."""
    monkeypatch.chdir(tmp_path)
    out = Path("cmp")
    out.mkdir()
    results = run(out, arm("base"), arm("head"), ONE)
    assert [one.directory for one in results] == ["arms/base/run-1", "arms/head/run-1"]
    assert all(run_json(out, one) for one in results)
