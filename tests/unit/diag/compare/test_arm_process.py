"""The command of an arm's load, and why a run came to nothing, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atom.diag.compare.arm_problem import complaint, port_was_taken, telling_line
from atom.diag.compare.arm_process import (
    ProcessExecutor,
    command_of,
    longest_of,
    secret_environment,
    server_environment,
)
from atom.diag.compare.model import Arm, ArmKind, ArmRun, Half, Load, MatchedRun, Placement, Purpose
from atom.recipes.errors import UsageError

HALF = Half(name="first", devices="0,1", server_cpus=(0, 1, 2), client_cpus=(3,))
OUT = Path("/out/arms/base/run-1")


def arm(**fields: Any) -> Arm:
    return Arm(**{"label": "base", "kind": ArmKind.RECIPE, "spec": "simulated", "recipe": "simulated", **fields})


def load(**fields: Any) -> Load:
    return Load(**{"name": "l", "bench": "random", **fields})


def test_everything_of_a_ref_is_in_its_command() -> None:
    one = arm(
        kind=ArmKind.REF,
        recipe=None,
        src="/co/.src",
        python="/venv/bin/python",
        variables={"size": "8"},
        env={"A": "of the arm", "B": "x=y"},
        server_args=("--max-num-seqs", "8"),
    )
    given = load(
        recipe="embedded",
        options={"num-prompts": 10, "ignore-eos": True, "goodput": ["ttft:5", "tpot:1"], "duration": None},
        env={"A": "of the load"},
        server_args=("--eager",),
    )
    words = command_of(one, given, HALF, directory=OUT, seed=7)
    expected = (
        "bench random --recipe embedded --set src=/co/.src --set python=/venv/bin/python --set size=8",
        "--devices 0,1 --server-cpus 0-2 --client-cpus 3 --seed 7 --num-prompts 10 --ignore-eos --goodput ttft:5",
        f"--goodput tpot:1 --output-dir {OUT} --quiet -- --eager --max-num-seqs 8",
    )
    assert words[: words.index("--server-env")] == expected[0].split()
    assert " ".join(words).endswith(" ".join(expected[1:]))
    pairs = [words[at + 1] for at, word in enumerate(words) if word == "--server-env"]
    assert {"A=of the arm", "B=x=y"} <= set(pairs)
    assert not any("of the load" in pair for pair in pairs)


def test_a_server_that_runs_already_is_only_loaded() -> None:
    one = arm(kind=ArmKind.URL, recipe=None, url="http://127.0.0.1:8000")
    words = command_of(one, load(server_args=("--x",)), HALF, directory=OUT)
    assert words == (
        f"bench random --base-url http://127.0.0.1:8000 --client-cpus 3 --seed 0 --output-dir {OUT} --quiet".split()
    )


def test_values_that_look_like_flags_stay_with_theirs() -> None:
    words = command_of(arm(), load(options={"extra-body": "-x", "seed": 5, "insecure": False}), HALF, directory=OUT)
    assert "--extra-body=-x" in words
    assert words[words.index("--seed") + 1] == "5"
    assert "--insecure" not in words


def test_no_recipe_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="arm base: neither it nor load l has a recipe"):
        command_of(arm(recipe=None), load(), HALF, directory=OUT)


def test_caches_are_the_arms_own_and_what_is_asked_for_wins() -> None:
    one = arm(cache="/caches/base", env={"TRITON_CACHE_DIR": "/mine"})
    found = server_environment(one, load())
    assert found["TRITON_CACHE_DIR"] == "/mine"
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/caches/base/inductor"


def test_recorded_arms_start_nothing(tmp_path: Path) -> None:
    arms = [
        arm(label=label, kind=ArmKind.RECORDED, recipe=None, recorded=(f"/{label}/1", f"/{label}/2")) for label in "xy"
    ]
    executor = ProcessExecutor(tmp_path, arms, [load()], Placement(halves=(HALF,), reason=""))
    matched = MatchedRun(
        comparison="x..y",
        purpose=Purpose.COMPARE,
        load="l",
        pair=1,
        index=0,
        runs=(ArmRun(arm="x", half=0, order=0), ArmRun(arm="y", half=0, order=1)),
    )
    results = executor.execute(matched, (tmp_path / "a", tmp_path / "b"))
    assert [one.directory for one in results] == ["/x/2", "/y/2"]
    assert list(tmp_path.iterdir()) == []


# ---- problems --------------------------------------------------------------------------------------------------------


def run_of(tmp_path: Path, client: str, server: str = "") -> tuple[Path, Path]:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "server.log").write_text(server)
    (tmp_path / "client.log").write_text(client)
    return tmp_path, tmp_path / "client.log"


DIED = (
    "error: server of recipe vllm died with exit status 1 after 12.3 s, while it started: a hint; last lines of its "
    "log /out/server.log:\n    RuntimeError: Engine core initialization failed. See root cause above.\n"
)


def test_a_server_that_died_is_told_by_what_its_log_says(tmp_path: Path) -> None:
    server = (
        "INFO starting\n(EngineCore pid=7) ERROR 11-30 [core.py:7] ValueError: no KV cache for 4096 tokens\n"
        "Traceback (most recent call last):\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert complaint(*run_of(tmp_path, DIED, server), 1) == (
        "the server died with exit status 1 while it started: "
        "(EngineCore pid=7) ERROR 11-30 [core.py:7] ValueError: no KV cache for 4096 tokens"
    )


def test_a_silent_one_too(tmp_path: Path) -> None:
    assert complaint(*run_of(tmp_path, DIED), 1) == (
        "the server died with exit status 1 while it started; it wrote nothing"
    )


def test_prepare_is_named(tmp_path: Path) -> None:
    said = (
        "error: command prepare[1] of recipe x died with signal SIGKILL after 3.0 s; last lines of its log:\n    make\n"
    )
    assert complaint(*run_of(tmp_path, said, "make: *** [all] Error 2\n"), 1) == (
        "the command prepare[1] died with signal SIGKILL: make: *** [all] Error 2"
    )


ROUTINE = "INFO: listening on http://127.0.0.1:8000\n"


@pytest.mark.parametrize(
    ("said", "server", "problem"),
    [
        ("died with exit status 3", ROUTINE, "the server died with exit status 3 under load"),
        (
            "died with exit status 3; it last wrote: INFO: listening",
            "",
            "the server died with exit status 3 under load",
        ),
        (
            "died with exit status 3; it last wrote: INFO: listening; 20 of 30 requests failed",
            f"{ROUTINE}ValueError: no block is free\n{ROUTINE}",
            "the server died with exit status 3 under load: ValueError: no block is free",
        ),
        (
            "died: EngineCore 0 was killed by SIGKILL (exit status 1); 3 of 4 requests failed",
            ROUTINE,
            "the server died with exit status 1 under load: EngineCore 0 was killed by SIGKILL",
        ),
    ],
)
def test_a_server_that_died_under_load(tmp_path: Path, said: str, server: str, problem: str) -> None:
    assert complaint(*run_of(tmp_path, f"failed: the server {said}\n", server), 1) == problem


@pytest.mark.parametrize(
    ("said", "status", "problem"),
    [
        ("warning: x\nerror: --set a=b: no such\n  more\n", 2, "--set a=b: no such"),
        ("failed: all requests failed: HTTP 500\n", 1, "all requests failed: HTTP 500"),
        ("", -9, "the load ended with signal SIGKILL"),
        ("something\n", 7, "the load ended with exit status 7 and said nothing"),
        ("error: http://user:secret@host refuses\x1b[2J\n", 1, "http://host refuses [2J"),
    ],
)
def test_other_ends(tmp_path: Path, said: str, status: int, problem: str) -> None:
    assert complaint(*run_of(tmp_path, said), status) == problem


def test_no_log_at_all_and_a_line_without_end(tmp_path: Path) -> None:
    assert complaint(tmp_path, tmp_path / "client.log", 1).startswith("the load ended with exit status 1")
    assert len(complaint(*run_of(tmp_path, "error: " + "x" * 10_000), 1)) == 300


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], None),
        (["", "  "], None),
        (["a", "b", ""], "b"),
        (["ModuleNotFoundError: No module named 'x'", "bye"], "ModuleNotFoundError: No module named 'x'"),
        (
            ["torch.OutOfMemoryError: CUDA out of memory", "[rank0] exiting"],
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (["KeyboardInterrupt"], "KeyboardInterrupt"),
        (["cannot open model", "shutting down"], "cannot open model"),
        (["usage: x", "error: unrecognized arguments: --y"], "unrecognized arguments: --y"),
        (["see the log above"], "see the log above"),
    ],
)
def test_the_line_that_says_most(lines: list[str], found: str | None) -> None:
    assert telling_line(lines) == found


def test_a_port_that_was_taken_is_recognised(tmp_path: Path) -> None:
    directory, log = run_of(tmp_path, "error: x", "OSError: [Errno 98] Address already in use\n")
    assert port_was_taken(directory, log)
    (directory / "server" / "server.log").write_text("fine\n")
    assert not port_was_taken(directory, log)
    log.write_text("error: --port 8000 is already in use by pid 7; choose another\n")
    assert port_was_taken(directory, log)


def test_secrets_of_the_environment_are_on_no_command_line() -> None:
    one = arm(env={"MY_SECRET_TOKEN": "hunter2", "A": "b"}, server_args=("--x",))
    given = load(env={"PROXY": "http://user:hunter2@host"})
    words = command_of(one, given, HALF, directory=OUT)
    assert "hunter2" not in " ".join(words)
    assert "A=b" in words
    at = words.index("--server-env-file")
    assert words[at + 1] == "-"
    assert at < words.index("--")
    assert secret_environment(one, given) == {"MY_SECRET_TOKEN": "hunter2", "PROXY": "http://user:hunter2@host"}
    assert "--server-env-file" not in command_of(arm(env={"A": "b"}), load(), HALF, directory=OUT)


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"seconds": 30.0}, 1800),
        ({"seconds": 600.0}, 6000),
        ({}, 1800),
        ({"options": {"duration": 1200}}, 1800 + 2400),
        ({"options": {"num-prompts": 640, "max-concurrency": 64}}, 1800 + 600),
        ({"options": {"num-prompts": 10, "request-rate": 0.5}}, 1800 + 20 + 600),
        ({"options": {"num-prompts": 10, "request-rate": "inf", "duration": None}}, 1800 + 600),
    ],
)
def test_every_load_has_a_limit(fields: dict[str, Any], seconds: float) -> None:
    assert longest_of(load(**fields)) == seconds
