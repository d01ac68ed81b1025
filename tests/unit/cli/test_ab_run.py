"""Unit tests within a comparison: they keep to its deadline, and what they change is not what is then run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from atom.bench.rundir import RunDirectory
from atom.cli import ab_run
from atom.cli.ab_progress import ComparisonProgress
from atom.cli.ab_run import ComparisonRun
from atom.cli.publish import Output
from atom.diag.compare.conductor import Ending, EndReason
from atom.diag.compare.model import Arm, ArmKind, Comparison, Half, Load, Placement
from atom.diag.compare.plan import make_plan
from atom.diag.compare.source import Changed
from atom.diag.compare.unit_tests import DEFAULT_TIMEOUT_S, SuiteRun


@pytest.fixture
def comparison(tmp_path: Path) -> ComparisonRun:
    plan = make_plan(
        [Arm(label=one, kind=ArmKind.REF, spec=one, checkout=str(tmp_path / one / "tree")) for one in ("base", "head")],
        [Comparison(base="base", head="head")],
        [Load(name="load", bench="random")],
        Placement(halves=(Half(name="all"),), reason="of the test"),
        extras={"tests_command": "true"},
    )
    one = ComparisonRun(output=Output(directory=tmp_path), plan=plan)
    one._run_dir = RunDirectory(tmp_path / "out")
    one._progress = ComparisonProgress(quiet=True)
    return one


@pytest.mark.parametrize(("left_s", "most"), [(None, DEFAULT_TIMEOUT_S), (60.0, 60.0), (1e6, DEFAULT_TIMEOUT_S)])
def test_unit_tests_end_at_the_deadline(
    comparison: ComparisonRun, monkeypatch: pytest.MonkeyPatch, left_s: float | None, most: float
) -> None:
    seen: list[float] = []

    def run(arm: Arm, out: Path, *, command: str, timeout_s: float) -> SuiteRun:
        seen.append(timeout_s)
        return SuiteRun(label=arm.label, command=command, exit_status=0, seconds=0)

    monkeypatch.setattr(ab_run, "run_unit_tests", run)
    comparison._deadline_ns = None if left_s is None else time.monotonic_ns() + int(left_s * 1e9)
    comparison._unit_tests()
    assert len(seen) == 2
    assert all(0 < one <= most for one in seen)
    assert comparison._problems == {}


def test_after_the_deadline_there_are_none(comparison: ComparisonRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> SuiteRun:
        raise AssertionError

    monkeypatch.setattr(ab_run, "run_unit_tests", run)
    comparison._deadline_ns = time.monotonic_ns() - 1
    comparison._unit_tests()


@pytest.mark.parametrize("undone", [True, False])
def test_an_arm_whose_checkout_its_tests_changed_for_good_is_not_run(
    comparison: ComparisonRun, monkeypatch: pytest.MonkeyPatch, undone: bool
) -> None:
    suite = SuiteRun(label="x", command="true", exit_status=0, seconds=0)
    monkeypatch.setattr(ab_run, "run_unit_tests", lambda *_, **__: suite)
    monkeypatch.setattr(
        ab_run, "put_back", lambda tree: Changed(["a.py"] if "head" in str(tree) else [], undone=undone)
    )
    comparison._unit_tests()
    told = "its unit tests changed a.py in its checkout, so its server would run other code"
    assert comparison._problems == ({} if undone else {"head": told})


def test_a_deadline_says_what_was_made_and_how_long_it_took(
    comparison: ComparisonRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ab_run.time, "monotonic_ns", lambda: int(44e9))
    comparison._deadline_ns = 0
    left_out = comparison.plan.schedule
    late = Ending(
        reason=EndReason.DEADLINE, text="3 pairs left out at the deadline. 1 pair left out: x", left_out=left_out
    )
    assert comparison._told(late, 5.0) == "deadline 5 s: 0 of 3 pairs made, took 49 s. 1 pair left out: x"
    whole = Ending(reason=EndReason.COMPLETE, text="all pairs were made")
    assert comparison._told(whole, 5.0) == "all pairs were made"
