"""What was recorded as an arm: which runs of a comparison count, of which commit they are, under which load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.diag.compare.arms import resolve_arm
from atom.diag.compare.journal import RUNS_FILE
from atom.diag.compare.model import Arm, ArmKind, Comparison, Half, Load, Placement, RunResult
from atom.diag.compare.plan import Plan, make_plan
from atom.diag.compare.recorded_arms import recorded_load, recorded_source
from atom.recipes.errors import UsageError

SHA = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"


def comparison(out: Path, loads: int = 1) -> Plan:
    """Two arms and a control, every run made; the first pair of the comparison twice."""
    arms = [
        Arm(label=label, kind=ArmKind.REF, spec=label, provenance={"sha": sha, "ref": label, "packages": {"x": "1"}})
        for label, sha in (("main", SHA), ("branch", OTHER))
    ]
    plan = make_plan(
        arms,
        [Comparison(base="main", head="branch")],
        [Load(name=f"load-{number}", bench="random") for number in range(loads)],
        Placement(halves=(Half(name="all"),), reason="one"),
        pairs=2,
        aa_pairs=1,
    )
    out.mkdir()
    plan.write(out)
    numbers = {"main": 0, "branch": 0}
    lines = []
    again = next(pair for pair in plan.schedule if pair.comparison == "main..branch")
    for pair in [again, *plan.schedule]:
        for run in pair.runs:
            for side, part in enumerate(run.runs):
                numbers[part.arm] += 1
                directory = f"arms/{part.arm}/run-{numbers[part.arm]}"
                (out / directory).mkdir(parents=True)
                (out / directory / "run.json").write_text("{}")
                times: dict[str, Any] = {"status": 0, "started_ns": 1, "ended_ns": 2}
                result = RunResult(matched=run.key, arm=part.arm, side=side, directory=directory, **times)
                lines.append(json.dumps(result.as_dict()))
    (out / RUNS_FILE).write_text("\n".join(lines) + "\n")
    return plan


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["b-0.json", "b-1.json"], "b"),
        (["left.json", "right.json"], "left-and-1-more"),
        (["0.json", "1.json", "2.json"], "0-and-2-more"),
        (["b-0.json"], "b-0.json"),
    ],
)
def test_several_files_are_not_named_after_the_first(tmp_path: Path, names: list[str], label: str) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    spec = ",".join(str(tmp_path / name) for name in names)
    assert resolve_arm(f"run:{spec}", role="base", repo=None, recipe=None).label == label


def write_run(path: Path, **facts: Any) -> Path:
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(facts))
    return path


def of(spec: str, **more: Any) -> Arm:
    return resolve_arm(spec, role="base", **more)


def test_an_arm_of_a_comparison_is_its_runs_that_count(tmp_path: Path) -> None:
    plan = comparison(tmp_path / "out")
    arm = of(f"run:{tmp_path}/out/arms/main")
    records = {
        (one["matched"], one["side"]): one["directory"]
        for one in map(json.loads, (tmp_path / "out" / RUNS_FILE).read_text().splitlines())
    }
    expected = [
        records[run.key, 0]
        for pair in plan.pairs_of(("main..branch", "load-0"))
        for run in sorted(pair.runs, key=lambda one: one.index)
    ]
    assert list(arm.recorded) == [str(tmp_path / "out" / one) for one in expected]
    assert (arm.label, of(f"run:{tmp_path}/out/arms/main/run-3").label) == ("main", "main")
    assert len(arm.recorded) == 4  # neither the control's four nor the two that were made again


def test_runs_of_several_loads_are_not_taken_for_one(tmp_path: Path) -> None:
    comparison(tmp_path / "out", loads=2)
    with pytest.raises(UsageError, match=r"has runs of several loads; name those of one: load-\d: run:/") as caught:
        of(f"run:{tmp_path}/out/arms/main")
    ways = str(caught.value).partition("of one: ")[2].split("; ")
    assert len(ways) == 2
    assert len(of(ways[0].partition(": ")[2]).recorded) == 4


def test_a_whole_comparison_is_no_arm(tmp_path: Path) -> None:
    comparison(tmp_path / "out")
    (tmp_path / "out/run.json").write_text("{}")
    with pytest.raises(
        UsageError, match=r"is a whole comparison: name one of its arms, .*/arms/branch or .*/arms/main"
    ):
        of(f"run:{tmp_path}/out")


# ---- of which commit -----------------------------------------------------------------------------------------------


def test_the_commit_of_a_run_in_a_comparison_is_its_plans(tmp_path: Path) -> None:
    comparison(tmp_path / "out")
    for spec in (f"run:{tmp_path}/out/arms/branch", f"run:{tmp_path}/out/arms/branch/run-1"):
        assert of(spec).provenance == {"sha": OTHER, "ref": "branch", "sha_from": "plan.json"}
    both = of(f"run:{tmp_path}/out/arms/branch/run-1,{tmp_path}/out/arms/main/run-1")
    assert both.provenance == {"notes": [f"its runs are of several commits: {OTHER[:12]}, {SHA[:12]}"]}


def test_the_commit_of_a_run_of_this_projects_engine(tmp_path: Path) -> None:
    git = {"sha": SHA, "branch": "main", "dirty": False}
    own = {"recipe": {"name": "embedded"}, "git": git, "command": ["atom", "bench", "random", "--recipe", "embedded"]}
    run = write_run(tmp_path / "own", **own)
    assert recorded_source([run]) == {"sha": SHA, "ref": "main", "dirty": False, "sha_from": "run.json"}
    others: dict[str, dict[str, Any]] = {
        "another program": {"recipe": {"name": "vllm"}},
        "another tree": {"command": ["atom", "bench", "random", "--set", "src=/x"]},
        "a url": {"recipe": None},
        "installed": {"git": None},
        "nonsense": {"git": {"sha": ["x"]}},
    }
    for name, change in others.items():
        assert recorded_source([write_run(tmp_path / name, **{**own, **change})]) == {}, name
    (tmp_path / "result.json").write_text("[]")
    assert recorded_source([tmp_path / "result.json"]) == {}
    assert recorded_source([run, tmp_path / "result.json"]) == {}


def test_a_commit_may_be_stated(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert of(f"run:{run}", sha=OTHER[:12]).provenance == {"sha": OTHER[:12], "sha_from": "--arm-sha"}
    comparison(tmp_path / "out")
    known = f"run:{tmp_path}/out/arms/main"
    assert of(known, sha=SHA[:8]).provenance["sha"] == SHA
    for spec, sha, message in (
        (known, OTHER, "is known to be of commit 0123456789ab, and not of"),
        (f"run:{run}", "main", "--arm-sha: 'main' is no commit"),
    ):
        with pytest.raises(UsageError, match=message):
            of(spec, sha=sha)


# ---- under which load ----------------------------------------------------------------------------------------------


def test_the_load_is_what_all_records_agree_on(tmp_path: Path) -> None:
    def arm(label: str, load: Any) -> Arm:
        return Arm(
            label=label, kind=ArmKind.RECORDED, spec=label, recorded=(str(write_run(tmp_path / label, load=load)),)
        )

    first = {"num_prompts": 10, "max_concurrency": 4, "request_rate": "inf", "source": {"random_input_len": 64}}
    timed = {"max_concurrency": 4, "duration_s": 30.0}
    a, b, c, bad = arm("a", first), arm("b", {**first, "max_concurrency": 8}), arm("c", timed), arm("bad", [1])
    assert recorded_load([a, a]).options == {"num-prompts": 10, "max-concurrency": 4, "random-input-len": 64}
    assert recorded_load([a, b]).options == {"num-prompts": 10, "random-input-len": 64}
    assert recorded_load([c, c]).options == {"max-concurrency": 4, "duration": 30.0}
    assert recorded_load([a, bad]).options == {}
