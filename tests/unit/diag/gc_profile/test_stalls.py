"""A server that hangs for another reason than its collector is not passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.diag.gc_profile.profile import profile_run

Builder = Callable[..., Any]


def given_up(directory: Path, start_s: int, until_s: int, error: str = "no complete answer within 10 s") -> Path:
    """Probes of a hang: each waits 10 s and is given up."""
    path = directory / "server/health.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    epoch = json.loads((directory / "run.json").read_text())["measured_start_ns"]
    begin, end = epoch + start_s * 10**9, epoch + until_s * 10**9
    kept = [line for line in lines if not begin <= line["sent_ns"] < end]
    cut = [
        {"t_ns": at, "sent_ns": at, "latency_ns": None, "status": None, "error": error}
        for at in range(begin, end, 10 * 10**9)
    ]
    lines = sorted([*kept, *cut], key=lambda line: int(line["sent_ns"]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


@pytest.mark.parametrize("error", ["no complete answer within 10 s", "connection refused"])
def test_a_hang_is_told_once_as_long_as_it_was(synthetic: Builder, error: str) -> None:
    directory = given_up(synthetic(seconds=60, requests_per_s=2).write(), 12, 42, error)
    profile = profile_run(directory, shifts=5)
    assert profile.is_problem is False
    assert "The server did not answer /health for 30" in profile.verdict
    assert "s at 12 s, with no gen-2 pass meanwhile." in profile.verdict


def test_a_hang_up_to_the_end(synthetic: Builder) -> None:
    profile = profile_run(given_up(synthetic(seconds=60, requests_per_s=2).write(), 40, 60), shifts=5)
    assert "for 20 s at 40 s, up to the end, with no gen-2 pass" in profile.verdict


def test_a_slow_answer_is_a_stall_and_the_longest_is_told(synthetic: Builder) -> None:
    profile = profile_run(synthetic(seconds=60, stalls=[(20, 1.5), (30, 3)], passes=[(30.5, 0.1)]).write(), shifts=5)
    assert "did not answer /health for 2.95 s at 30.1 s, of which gen-2 passes explain 100 ms" in profile.verdict
    assert "the longest of 2 such stalls" in profile.verdict


def test_without_a_hook_nothing_is_said_of_passes(synthetic: Builder) -> None:
    profile = profile_run(synthetic(seconds=60, stalls=[(30, 3)], with_hook=False).write(), shifts=5)
    assert "did not answer /health for 2.95 s at 30.1 s." in profile.verdict


@pytest.mark.parametrize("stall", [(30, 3.0), (30, 0.9)])
def test_a_stall_within_a_pass_and_a_short_one_are_none(synthetic: Builder, stall: tuple[float, float]) -> None:
    passes = [stall] if stall[1] > 1 else []
    profile = profile_run(synthetic(seconds=60, stalls=[stall], passes=passes).write(), shifts=5)
    assert "did not answer" not in profile.verdict


def test_without_an_answer_ever_there_is_no_stall(synthetic: Builder) -> None:
    profile = profile_run(given_up(synthetic(seconds=40, requests_per_s=2).write(), 0, 40), shifts=5)
    assert "did not answer" not in profile.verdict
