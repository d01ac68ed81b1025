"""What `atom trace-consensus run` takes, and which pipeline that is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from atom.cli.dispatch import main
from atom.cli.trace_consensus_run import _stage_times
from atom.diag.consensus.arms import ARMS, ArmsPlan


@pytest.mark.parametrize(
    ("arguments", "times"),
    [
        (("10", None, 4), [10, 10, 10, 20]),
        (("10", None, 2), [10, 20]),
        (("5", "1:3:2", 4), [5, 5, 15, 10]),
        (("10,40,10", None, 3), [10, 40, 10]),
    ],
)
def test_gaps_are_the_times_of_the_later_stages(arguments: tuple[str, str | None, int], times: list[float]) -> None:
    assert _stage_times(*arguments) == times


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arms", "async,fast"], "--arms takes names of control, blocking, local-only, async, each once"),
        (["--arms", "async,async"], "each once"),
        (["--pp", "1"], "--pp must be from 2"),
        (["--pp", "0"], "--pp must be from 2"),
        (["--pp", "-3", "--gaps", "1:2"], "--pp must be from 2"),
        (["--pp", "20000"], "--pp must be from 2 (one stage waits for nobody) to 64, got 20000"),
        (["--pp", "8", "--tp", "9"], "--pp 8 × --tp 9 are 72 ranks; at most 64 are run"),
        (["--tp", "-1"], "--tp must be at least 1"),
        (["--failures", "0.6", "--timeouts", "0.5"], "--failures 0.6 and --timeouts 0.5 are more than all"),
        (["--stage-ms", "10,10"], "--stage-ms has 2 times for 4 stages"),
        (["--stage-ms", "10,x"], "--stage-ms takes numbers separated by ','"),
        (["--stage-ms", "10,10,10,10", "--gaps", "1:1:1"], "--gaps are in units of the first stage's time"),
        (["--gaps", "1:2"], "between 4 stages (--pp) there are 3"),
        (["--failures", "2"], "--failures must be a fraction from 0 to 1"),
        (["--timeout-ms", "-1"], "--timeout-ms must be milliseconds"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--deadline", "soon"], "--deadline"),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace-consensus", "run", *arguments]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def plan(arms: Sequence[str], repeats: int) -> ArmsPlan:
    return ArmsPlan(
        arms=arms,
        pp=2,
        tp=1,
        requests=100,
        stage_ms=[10, 30],
        jitter=0,
        transfer_ms=0,
        failures=0,
        timeouts=0,
        timeout_ms=100,
        micro_batches=2,
        depth=4,
        blocks=1,
        seed=5,
        repeats=repeats,
        deadline_s=10,
    )


def test_arms_alternate_and_share_the_seed_of_their_repeat(tmp_path: Path) -> None:
    one = plan(list(ARMS), 4)
    order = list(one.order())
    assert [arm for repeat, arm in order if repeat == 2] == ["blocking", "local-only", "async", "control"]
    assert {arm for _, arm in order[::4]} == set(ARMS)  # each begins once
    seeds = {repeat: {one.config("r", arm, repeat, tmp_path)["seed"] for arm in ARMS} for repeat in (1, 4)}
    assert seeds == {1: {5}, 4: {8}}


def test_a_blocking_arm_takes_as_long_as_all_stages_together() -> None:
    one = plan(list(ARMS), 1)
    assert one.arm_seconds("blocking") == pytest.approx(100 * 0.04 + 0.04)
    assert one.arm_seconds("async") == pytest.approx(100 * 0.03 + 0.04)
