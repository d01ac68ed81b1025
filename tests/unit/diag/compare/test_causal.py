"""Causal arms: the rows, what follows by rule, shares of the gap; with the figures of a published investigation."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

from atom.cli.ab_causal_tables import causal_tables
from atom.cli.render import markdown
from atom.diag.compare.causal import Question, causal_section
from atom.diag.compare.model import Arm, ArmKind, RunResult
from atom.diag.compare.outcomes import ArmOutcome, RunEvidence, outcomes_of
from atom.diag.compare.statistics import Estimate
from atom.diag.compare.student_t import t_quantile

ROLES = ("control", "treatment", "bypass", "repair")
HEAD = "a2fca7808c94f90ca396fb047fd3d0887e293706"
OLD = "1111111111111111111111111111111111111111"


def arm(label: str, role: str | None = None, kind: ArmKind = ArmKind.REF, sha: str | None = HEAD) -> Arm:
    return Arm(
        label=label,
        kind=kind,
        spec=label,
        role=role or (label if label in ROLES else "discriminator"),
        provenance={"sha": sha} if sha else {},
    )


def found(mean: float, se: float, n: int = 4) -> Estimate:
    df = float(n - 1) if n > 1 else math.inf
    half = t_quantile(0.975, df) * se
    return Estimate(mean=mean, se=se, df=df, low=mean - half, high=mean + half, n=n, p=0.5, level=0.95)


_NUMBERS = itertools.count(1)


def run(label: str, value: float | None, completed: int | None = 512, **fields: Any) -> RunEvidence:
    problem, stage = fields.pop("problem", None), fields.pop("stage", "done")
    result = RunResult(
        matched="m",
        arm=label,
        side=0,
        directory=fields.pop("directory", f"arms/{label}/run-{next(_NUMBERS)}"),
        status=0,
        started_ns=0,
        ended_ns=1,
        problem=problem,
        stage=stage,
    )
    return RunEvidence(result=result, completed=completed, requests=512, value=value, **fields)


def section(arms: list[Arm], runs: list[RunEvidence], estimates: dict[tuple[str, str], Estimate], **more: Any) -> Any:
    made = causal_section(arms, outcomes_of(runs), estimates, Question(load="128k8k"), **more)
    assert made is not None
    return json.loads(json.dumps(made, allow_nan=False))


def rows(made: Any) -> dict[str, Any]:
    return {one["arm"]: one for one in made["arms"]}


def test_two_arms_are_no_causal_comparison() -> None:
    assert causal_section([arm("a", "base"), arm("b", "head")], {}, {}, Question(load="x")) is None


def test_the_investigations_table() -> None:
    """Five single runs without spread: what the document says of them, but for what a rule cannot know."""
    kind = ArmKind.RECORDED
    arms = [
        arm("control", kind=kind, sha=OLD),
        arm("treatment", kind=kind, sha=OLD),
        arm("trace", kind=kind, sha=OLD),
        arm("bypass", kind=kind, sha=OLD),
        arm("repair", kind=kind, sha=OLD),
    ]
    timed_out = {"censored": ["31 requests are missing"], "failure_class": "functional", "failure_line": "timed out"}
    made = section(
        arms,
        [
            run("control", 1557.83),
            run("treatment", 598.42, 481, **timed_out),
            run("trace", 818.0, 480, **timed_out),
            run("bypass", 1564.71),
            run("repair", 1548.84),
        ],
        {},
        head_sha=HEAD,
    )
    by = rows(made)
    assert by["control"]["interpretation"] == "valid matched control"
    assert by["treatment"]["interpretation"].startswith("censored: the load is not completed with the change")
    assert by["treatment"]["pct_of_control"] is None
    assert by["trace"]["interpretation"] == "censored: no evidence"
    assert by["bypass"]["interpretation"].startswith("indicative: causal upper bound")
    assert by["repair"]["interpretation"] == "indicative: repair: completes the load at 99.42% of its matched control"
    assert by["repair"]["stamp"] == "not this head"
    assert by["control"]["stamp"] is None
    assert made["gap"] is None  # a censored treatment has no throughput
    text = markdown(causal_tables({"causal": made}))
    assert "| 481/512 completed; functional" in text
    assert "598.4 raw, censored" in text
    assert "99.42" in text
    assert "| repair, not this head" in text


def test_the_investigations_discriminators() -> None:
    """814.02 and 798.99 tok/s against 794.61 of the head: +2.44% and +0.55%, of a gap to 1557.83."""
    arms = [arm("main", "base"), arm("branch", "head"), arm("cute"), arm("accounting")]
    values = {"main": 1557.83, "branch": 794.61, "cute": 814.02, "accounting": 798.99}
    made = section(arms, [run(name, value) for name, value in values.items()], {})
    cute, accounting = made["discriminators"]
    assert cute["effect_pct"] == pytest.approx(2.44, abs=0.005)
    assert accounting["effect_pct"] == pytest.approx(0.55, abs=0.005)
    assert cute["share"] == pytest.approx(math.log(814.02 / 794.61) / math.log(1557.83 / 794.61))
    assert cute["share_ci"] is None
    assert cute["verdict"] == accounting["verdict"] == "indicative: not the dominant factor"
    assert rows(made)["branch"]["interpretation"] == "indicative: the change costs 48.99% of its matched control"


def test_shares_with_intervals() -> None:
    arms = [arm("main", "base"), arm("branch", "head"), arm("small"), arm("large"), arm("unsure")]
    runs = [run(one.label, 100.0) for one in arms]
    estimates = {
        ("main", "branch"): found(-0.20, 0.004),
        ("main", "small"): found(-0.18, 0.004),
        ("main", "large"): found(-0.03, 0.004),
        ("main", "unsure"): found(-0.10, 0.03),
    }
    made = section(arms, runs, estimates)
    verdicts = {one["arm"]: one["verdict"] for one in made["discriminators"]}
    assert verdicts == {"small": "not the dominant factor", "large": "the dominant factor", "unsure": "not decided"}
    small = made["discriminators"][0]
    assert small["share_ci"][0] < small["share"] < small["share_ci"][1]
    assert made["gap"]["pct"] == pytest.approx(100 * math.expm1(-0.20))


def test_without_a_gap_there_are_no_shares() -> None:
    arms = [arm("main", "base"), arm("branch", "head"), arm("factor")]
    estimates = {("main", "branch"): found(-0.001, 0.004), ("main", "factor"): found(-0.002, 0.004)}
    made = section(arms, [run(one.label, 100.0) for one in arms], estimates)
    assert made["discriminators"][0]["share"] is None
    assert made["discriminators"][0]["verdict"].startswith("the gap is not told from zero")


def test_a_head_beside_the_treatment_is_to_be_kept_and_called_no_repair() -> None:
    arms = [arm("main", "base"), arm("branch", "head"), arm("treatment"), arm("bypass")]
    runs = [run(one.label, 100.0) for one in arms]
    estimates = {
        ("main", "branch"): found(-0.002, 0.001),
        ("main", "treatment"): found(-0.3, 0.004),
        ("main", "bypass"): found(0.004, 0.001),
    }
    by = rows(section(arms, runs, estimates))
    assert by["branch"]["role"] == "head"
    assert by["branch"]["interpretation"] == "completes the load at 99.80% of its matched control"
    assert by["treatment"]["interpretation"] == "the change costs 25.92% of its matched control"
    assert by["bypass"]["interpretation"].startswith("causal upper bound")


@pytest.mark.parametrize(
    ("mean", "se", "begins"),
    [
        (-0.67, 0.002, "completes the load; throughput is not recovered: 51.17%"),
        (-0.01, 0.02, "completes the load; recovery is not decided"),
        (0.02, 0.001, "repair: completes the load at 102.02%"),
    ],
)
def test_repairs(mean: float, se: float, begins: str) -> None:
    arms = [arm("main", "base"), arm("treatment"), arm("repair")]
    estimates = {("main", "treatment"): found(-0.7, 0.01), ("main", "repair"): found(mean, se)}
    by = rows(section(arms, [run(one.label, 100.0) for one in arms], estimates))
    assert by["repair"]["interpretation"].startswith(begins)


@pytest.mark.parametrize(
    ("mean", "begins"),
    [
        (-0.001, "causal upper bound"),
        (-0.10, "50% (47 … 53%) of the gap is in what it bypasses"),
        (-0.199, "the loss is not in what it bypasses"),
    ],
)
def test_bypasses(mean: float, begins: str) -> None:
    arms = [arm("main", "base"), arm("treatment"), arm("bypass")]
    estimates = {("main", "treatment"): found(-0.2, 0.002), ("main", "bypass"): found(mean, 0.002)}
    by = rows(section(arms, [run(one.label, 100.0) for one in arms], estimates))
    assert by["bypass"]["interpretation"].startswith(begins)


def test_an_arm_that_did_not_start_leaves_a_readable_row() -> None:
    arms = [arm("main", "base"), arm("branch", "head"), arm("repair")]
    runs = [
        run("main", 100.0),
        run("branch", None, None, problem="server exited with 1 (see arms/branch/run-1/server)", stage="start"),
        run("repair", 99.0),
    ]
    made = section(arms, runs, {})
    row = rows(made)["branch"]
    assert row["interpretation"] == "inconclusive: did not start"
    assert (row["completed"], row["value"], row["pct_of_control"]) == (None, None, None)
    text = markdown(causal_tables({"causal": [made]}))
    assert "nothing recorded" in text
    assert "branch: server exited with 1" in text
    assert "has no size" in text


def test_without_a_valid_control_nothing_is_compared() -> None:
    arms = [arm("main", "base"), arm("branch", "head"), arm("repair")]
    made = section(
        arms, [run("main", 9.0, 500, censored=["12 requests failed"]), *(run(x, 9.0) for x in ("branch", "repair"))], {}
    )
    by = rows(made)
    assert by["main"]["interpretation"].startswith("censored: no valid control")
    assert by["branch"]["interpretation"] == by["repair"]["interpretation"] == "no valid control to compare it with"


def test_infrastructure_says_nothing_of_an_arm() -> None:
    arms = [arm("main", "base"), arm("treatment"), arm("repair")]
    lost = run("treatment", 5.0, 100, censored=["ended early"], failure_class="infrastructure", failure_line="no space")
    by = rows(section(arms, [run("main", 9.0), lost, run("repair", 9.0)], {}))
    assert by["treatment"]["interpretation"] == "censored: infrastructure failed, which says nothing of this arm"


def test_performance_gate_alone() -> None:
    arms = [arm("main", "base"), arm("treatment"), arm("repair")]
    gated = run("repair", 5.0, failure_class="performance gate", failure_line="--slo ttft:p99<=1")
    by = rows(section(arms, [run("main", 9.0), run("treatment", 5.0), gated], {}))
    assert by["repair"]["interpretation"].endswith("; failed on a performance gate alone")


def test_a_recorded_arm_beside_live_ones_is_unmatched() -> None:
    arms = [arm("main", "base"), arm("branch", "head"), arm("repair", kind=ArmKind.RECORDED, sha=None)]
    made = section(arms, [run(one.label, 9.0) for one in arms], {})
    by = rows(made)
    assert by["repair"]["pct_of_control"]["matched"] is False
    assert by["repair"]["stamp"] == "head not known"
    assert by["branch"]["pct_of_control"]["matched"] is True
    assert "100.00 unmatched" in markdown(causal_tables({"causal": made}))


def test_recorded_at_this_head_has_no_stamp() -> None:
    arms = [arm("main", "base"), arm("branch", "head"), arm("repair", kind=ArmKind.RECORDED, sha=HEAD[:12])]
    assert rows(section(arms, [run(one.label, 9.0) for one in arms], {}))["repair"]["stamp"] is None


def test_a_record_that_is_in_several_comparisons_counts_once() -> None:
    one = run("a", 10.0, directory="/records/a.json")
    same, other = run("a", 10.0, directory="/records/a.json"), run("a", 12.0, directory="/records/a-2.json")
    found = outcomes_of([one, same, other])["a"]
    assert (found.runs, found.completed, found.requests) == (2, 1024, 1024)


def test_outcomes_sum_requests_and_average_figures() -> None:
    one = outcomes_of(
        [run("a", 10.0), run("a", 12.0, 500, censored=["x"]), run("a", None, None, stage="start", problem="p")]
    )["a"]
    assert one == ArmOutcome(
        arm="a",
        runs=3,
        started=2,
        completed=1012,
        requests=1536,
        values=(10.0, 12.0),
        censored=("x",),
        failure=None,
        problem="p",
    )
    assert one.value == pytest.approx(math.sqrt(10.0 * 12.0))
    assert not one.valid
