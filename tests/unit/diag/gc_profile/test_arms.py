"""Arms: which there are, in which order, and what is left of them after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.bench.rundir import RunDirectory, Validity
from atom.diag.gc_profile.arms import (
    REPLAY_ARMS,
    Arm,
    ArmEnd,
    changes,
    faulty_arm,
    recorded_runs,
    run_arms,
    select_arms,
    what_if_arms,
)
from atom.diag.gc_profile.model import Attribution, Profile, Totals
from atom.recipes.errors import RunError, UsageError

VALID = ArmEnd(validity=Validity.VALID, reasons=[])


def test_faults_reach_the_server_through_its_environment_alone() -> None:
    assert REPLAY_ARMS["clean"].env == {}
    assert REPLAY_ARMS["retention"].env == {"ATOM_FAULTS": "retain-finished"}
    assert REPLAY_ARMS["gauges"].env == {"ATOM_METRICS_PER_REQUEST_CONTEXT": "1"}
    assert REPLAY_ARMS["both"].env == {**REPLAY_ARMS["retention"].env, **REPLAY_ARMS["gauges"].env}
    assert all(arm.gc_action is None for arm in REPLAY_ARMS.values())


def test_arms_by_name() -> None:
    assert [arm.label for arm in select_arms(["both", "clean", "both"])] == ["both", "clean"]
    assert faulty_arm(["gauges"]) == "gauges"
    assert faulty_arm(["gauges", "retention"]) == "both"
    for names in ([], ["clena"]):
        with pytest.raises(UsageError):
            select_arms(names)
        with pytest.raises(UsageError):
            faulty_arm(names)


@pytest.mark.parametrize("action", ["freeze", "freeze:2.5", "disable", "threshold:50000,20,100"])
def test_a_what_if_changes_one_thing(action: str) -> None:
    before, after = what_if_arms(action)
    assert before.gc_action is None
    assert after.gc_action == action
    assert before.env == after.env == {}


def test_arms_are_planned_before_they_run_and_sealed_together(tmp_path: Path) -> None:
    parent = RunDirectory(tmp_path / "run")
    arms = select_arms(["both", "clean"])
    planned: list[Any] = []

    def one(arm: Arm, run_dir: RunDirectory) -> ArmEnd:
        planned.append(parent.read_run_json()["arms"])
        if arm.label == "both":
            return ArmEnd(validity=Validity.NOT_VALID, reasons=["too few"])
        return VALID

    run_arms(arms, parent, {"name": "x"}, one)
    assert [[arm["label"] for arm in plan] for plan in planned] == [["both", "clean"]] * 2
    run = parent.read_run_json()
    assert (run["validity"], run["reasons"], run["name"]) == ("not valid", ["both: too few"], "x")
    assert [(run.label, run.path.name) for run in recorded_runs(parent.path)] == [("both", "run-1"), ("clean", "run-1")]


def test_an_arm_that_was_asked_to_end_ends_the_run(tmp_path: Path) -> None:
    parent = RunDirectory(tmp_path)
    end = ArmEnd(validity=Validity.INTERRUPTED, reasons=["interrupted"], stop=True)
    assert run_arms(select_arms(["clean", "both"]), parent, {}, lambda arm, run_dir: end) == [end]
    assert parent.read_run_json()["validity"] == "interrupted"
    assert parent.read_run_json()["reasons"] == ["clean: interrupted", "arms not run: both"]


@pytest.mark.parametrize(
    ("error", "validity"), [(RunError("no server\nlog"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_whatever_ends_an_arm_seals_the_run(tmp_path: Path, error: BaseException, validity: str) -> None:
    parent = RunDirectory(tmp_path)

    def one(arm: Arm, run_dir: RunDirectory) -> ArmEnd:
        if arm.label == "both":
            raise error
        return VALID

    with pytest.raises(type(error)):
        run_arms(select_arms(["clean", "both", "gauges", "retention"]), parent, {}, one)
    run = parent.read_run_json()
    assert run["validity"] == validity
    assert run["reasons"][0].startswith("both: ")
    assert "log" not in run["reasons"][0]
    assert run["reasons"][1:] == ["arms not run: gauges, retention"]


def test_finding_runs_in_directories_of_any_content(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run directory"):
        recorded_runs(tmp_path)
    parent = RunDirectory(tmp_path)
    assert [(run.path, run.label) for run in recorded_runs(tmp_path)] == [(tmp_path, None)]
    parent.arms.mkdir()
    (parent.arms / "stray").mkdir()
    (parent.arms / "file").write_text("")
    with pytest.raises(UsageError, match="no arm"):
        recorded_runs(tmp_path)
    for label, number in (("b", 10), ("b", 2), ("a", 1)):
        parent.arm(label, number)
    content = json.loads(parent.run_json.read_text())
    for planned in (None, 7, [1, {"label": 2}], [{"label": "b"}, {"label": "a"}]):
        parent.run_json.write_text(json.dumps({**content, "arms": planned}))
        labels = [run.label for run in recorded_runs(tmp_path)]
        assert sorted(labels, key=str) == ["a", "b run-10", "b run-2"]
    assert labels == ["b run-2", "b run-10", "a"]


def profile(**totals: float | None) -> Profile:
    return Profile(
        label="x",
        directory="x",
        simulated=False,
        old_object_passes="",
        window_s=1.0,
        windows=(),
        totals=Totals(duration_s=1.0, **totals),  # type: ignore[arg-type]
        growth={},
        attribution=Attribution(first_tokens=None, chunk_gaps=None, shifts=0),
        causes=(),
        verdict="",
        is_problem=None,
        processes=(),
    )


def test_changes_are_of_what_was_seen() -> None:
    found = changes(profile(requests_per_s=10.0, gen2_seconds=0.0), profile(requests_per_s=9.0, ttft_mean_ms=3.0))
    assert {change.key: change.relative for change in found} == {
        "requests_per_s": pytest.approx(-0.1),
        "ttft_mean_ms": None,
        "gen2_seconds": None,
    }
