"""What is told of a load beyond its verdicts: gates without evidence, controls that are none, noise, and hedges."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from atom.bench.accounting import Counts
from atom.diag.compare.evidence import ScoredPair, ScoredRun, Side
from atom.diag.compare.gate_document import is_load_decided, section_gates, unmatched_gates
from atom.diag.compare.load_document import load_documents
from atom.diag.compare.model import (
    Arm,
    ArmKind,
    ArmRun,
    Comparison,
    Half,
    Load,
    MatchedRun,
    Placement,
    Purpose,
    RunResult,
)
from atom.diag.compare.plan import Plan, make_plan
from atom.diag.compare.scores import RunScore, Score
from atom.diag.compare.weighed import LoadEvidence, contrast_level, weigh
from atom.diag.compare.window import Window

HALVES = Placement(halves=(Half(name="0", devices="0"), Half(name="1", devices="1")), reason="two devices")
BASE = {"itl_p50": 10.0, "ttft_mean": 50.0, "output_throughput": 100.0}
Changes = Mapping[str, float]
"""Metric → head ÷ base."""
TINY = (0.9999, 1.0, 1.0001)
"""What pairs scatter by."""


def plan_of(loads: Mapping[str, str] = MappingProxyType({"long": "load"}), **options: Any) -> Plan:
    """`loads`: with the section of each."""
    arms = [Arm(label=label, kind=ArmKind.REF, spec=label) for label in ("main", "branch")]
    made = [Load(name=name, bench="random", section=section, seconds=10) for name, section in loads.items()]
    return make_plan(arms, [Comparison(base="main", head="branch")], made, HALVES, **options)


def side(arm: str, name: str, metrics: Changes, **what: Any) -> Side:
    result = RunResult(matched="", arm=arm, side=0, directory=f"arms/{arm}/{name}", status=0, started_ns=0, ended_ns=1)
    counts = Counts(started=8, sent=8, completed=8, failed=0, cancelled=0)
    scores = {metric: Score(value, 0.0001, 100) for metric, value in metrics.items()}
    return Side(result, RunScore(scores, counts, Window(0, 10**9, True), **what), None, Path("nowhere") / name)


def pair(
    number: int, changes: Sequence[Changes], head: str = "branch", drop: str | None = None, **what: Any
) -> ScoredPair:
    """`changes`: of its matched runs. `drop`: a metric that the head does not have. `what`: of the head's runs."""
    runs = []
    for index, change in enumerate(changes):
        sides = (ArmRun(arm="main", half=index, order=index), ArmRun(arm=head, half=1 - index, order=1 - index))
        run = MatchedRun(
            comparison=f"main..{head}", purpose=Purpose.COMPARE, load="long", pair=number, index=index, runs=sides
        )
        own = {name: value * change.get(name, 1.0) for name, value in BASE.items() if name != drop}
        runs.append(ScoredRun(run, (side("main", "run-1", BASE), side(head, f"run-{number + 2}", own, **what))))
    return ScoredPair(number, tuple(runs))


def pairs(change: Changes, count: int = 3, **what: Any) -> list[ScoredPair]:
    """That differ by little more than the change."""
    return [pair(n, [{name: value * TINY[n % 3] for name, value in change.items()}] * 2, **what) for n in range(count)]


def told(plan: Plan, made: Sequence[ScoredPair], **what: Any) -> dict[str, Any]:
    evidence = LoadEvidence(plan=plan, comparison=plan.comparisons[0], load=plan.loads[0], pairs=made, **what)
    (load,) = load_documents([weigh(evidence)])
    json.dumps(load, allow_nan=False)
    return load


# ---- gates


def test_a_gate_on_what_one_arm_does_not_have_is_undecided() -> None:
    plan = plan_of(gates=[{"slower_pct": 2.0, "metric": "ttft_mean"}, {"slower_pct": 2.0, "metric": "itl_p50"}])
    load = told(plan, pairs({"itl_p50": 1.0}, drop="ttft_mean"))
    outcomes = {gate["metric"]: (gate["outcome"], gate["reason"]) for gate in load["gates"]}
    assert outcomes["itl_p50"][0] == "pass"
    assert outcomes["ttft_mean"][0] == "undecided"
    assert outcomes["ttft_mean"][1].startswith("it is not in the records of both arms")


def test_a_gate_on_a_load_that_is_not_gated_is_undecided() -> None:
    """A plan may have been written by hand; the command refuses it."""
    gates = [{"slower_pct": 2.0, "metric": "itl_p50", "load": "soak"}, {"slower_pct": 3.0}]
    plan = plan_of({"long": "load", "soak": "gc"}, gates=gates)
    (gate,) = unmatched_gates(plan)
    assert (gate["load"], gate["outcome"], gate["limit_pct"]) == ("soak", "undecided", 2.0)
    load = told(plan, pairs({"itl_p50": 1.0}))
    assert [gate["limit_pct"] for gate in load["gates"]] == [3.0]


def test_pairs_end_on_gates_as_they_are_told_at_the_end() -> None:
    """A gate that would fail alone does not where there are others: then pairs are added, not left undecided."""
    gate = {"slower_pct": 0.5, "metric": "ttft_mean"}
    made = [pair(n, [{"itl_p50": 1.05, "ttft_mean": 1.03 + step}] * 2) for n, step in enumerate((-0.005, 0.0, 0.005))]
    for others, expected in ((0, True), (12, False)):
        gates = [gate, *({"slower_pct": 90.0 - n, "metric": "output_throughput"} for n in range(others))]
        plan = plan_of(gates=gates, until_decided=True, max_pairs=3)
        evidence = LoadEvidence(plan=plan, comparison=plan.comparisons[0], load=plan.loads[0], pairs=made)
        assert is_load_decided(evidence, 1) is expected
        outcome = next(one["outcome"] for one in told(plan, made)["gates"] if one["metric"] == "ttft_mean")
        assert (outcome == "fail") is expected


def row(low: float, difference: float, p: float = 1.0) -> dict[str, Any]:
    ci = [low, 2 * difference - low]
    return {"filter": "strict", "ci": ci, "difference": difference, "adjusted_p": p, "verdict": "branch is less"}


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        ([row(-0.01, 0.0)], "pass"),
        ([row(-0.06, 0.0)], "undecided"),
        ([row(-0.01, 0.0), row(-0.06, 0.0)], "undecided"),  # one filter does not answer
        ([row(-1.0, -0.9, 0.0625)], "undecided"),  # everything was lost, of five questions
        ([row(-0.2, -0.1, 0.001)], "fail"),
        ([row(-0.04, -0.02, 0.01)], "pass"),  # a loss that the margin allows
        ([], "undecided"),
    ],
)
def test_accuracy_passes_only_where_a_loss_is_excluded(rows: list[dict[str, Any]], outcome: str) -> None:
    plan = plan_of(gates=[{"section": "accuracy", "margin_pct": 5.0}])
    section = {"n": len(rows) * 100, "filters": rows, "head": "branch"}
    (gate,) = section_gates(plan, {"accuracy": section})
    assert (gate["outcome"], gate["limit_pct"]) == (outcome, 5.0)
    (untrusted,) = section_gates(plan, {"accuracy": section}, untrusted=["accuracy"])
    assert untrusted["outcome"] == "undecided"


@pytest.mark.parametrize("unknown", ["rss_mb", "gen2_share"])
@pytest.mark.parametrize("how", ["no data", "not there"])
def test_gc_passes_only_where_memory_and_collections_are_known(unknown: str, how: str) -> None:
    plan = plan_of(gates=[{"section": "gc"}])
    names = ("rss_mb", "gen2_share", "threads")
    quantities = [{"quantity": name, "finding": "neither"} for name in names]
    section = {"head": "branch", "exposed": [], "verdict": "nothing grows", "quantities": quantities}
    assert section_gates(plan, {"gc": section})[0]["outcome"] == "pass"
    kept = [one for one in quantities if how == "no data" or one["quantity"] != unknown]
    section["quantities"] = [{**one, "finding": None} if one["quantity"] == unknown else one for one in kept]
    assert section_gates(plan, {"gc": section})[0]["outcome"] == "undecided"
    section["exposed"] = ["branch"]
    assert section_gates(plan, {"gc": section})[0]["outcome"] == "fail"


# ---- controls


@pytest.mark.parametrize("what", [{"censored": ["3 of 8 requests failed"]}, {"invalid": ["client saturated: late"]}])
def test_a_control_that_is_no_evidence_sets_no_noise_floor(what: dict[str, Any]) -> None:
    plan = plan_of(aa_pairs=2)
    good = [pair(n, [{"itl_p50": 1.001}, {"itl_p50": 0.999}], head="main") for n in range(2)]
    bad = pair(1, [{"itl_p50": 1.5}, {"itl_p50": 1.4}], head="main", **what)
    made = pairs({"itl_p50": 1.03})
    load = told(plan, made, control=[good[0], bad])
    alone = told(plan, made, control=good[:1])
    metric = load["metrics"]["itl_p50"]
    assert metric["noise_floor_pct"] == alone["metrics"]["itl_p50"]["noise_floor_pct"]
    assert metric["noise_floor_pairs"] == 1
    reason = next(iter(what.values()))[0]
    assert load["control"]["left_out"] == [f"A/A pair 2 is in no noise floor: run-3: {reason}"]
    assert load["control"]["left_out"][0] in load["remarks"]
    assert len(load["control"]["pairs"]) == 2
    nothing = told(plan, made, control=[bad])
    assert nothing["metrics"]["itl_p50"]["noise_floor_pct"] is None
    assert nothing["word"] == "slower"


def test_single_runs_are_held_against_single_runs_of_the_control() -> None:
    """Halves that differ by 2% tilt every single run, of the control as well; its floor is of means, which they do
    not tilt."""
    plan = plan_of(aa_pairs=3)
    tilt = [{"itl_p50": 1.02}, {"itl_p50": 1 / 1.02}]
    small = [{"itl_p50": 1.015}, {"itl_p50": 1 / 1.015}]
    control = [pair(n, tilt, head="main") for n in range(3)]
    noise = told(plan, [pair(n, small) for n in range(3)], control=control)["noise"]
    assert "ITL p50 moves −1.48% to +1.50%, within what A/A runs move (−1.96% to +2.00%)" in noise
    beyond = told(plan, [pair(n, [{"itl_p50": 1.05}] * 2) for n in range(3)], control=control)["noise"]
    assert "ITL p50 moves +5.00% to +5.00%, where A/A runs move −1.96% to +2.00%" in beyond
    assert "A/A" not in told(plan, [pair(0, small)])["noise"]


def test_the_control_says_how_the_halves_differ() -> None:
    tilt = [{"itl_p50": 1.02}, {"itl_p50": 1 / 1.02}]
    control = [pair(n, tilt, head="main") for n in range(3)]
    one = told(plan_of(aa_pairs=3), [pair(0, tilt)], control=control)
    assert one["metrics"]["itl_p50"]["asymmetry_pct"] == pytest.approx(2.0)
    assert any("the halves differ by +2.00% in ITL p50" in line and "free of it" in line for line in one["remarks"])
    unswapped = [pair(n, tilt[:1], head="main") for n in range(3)]
    told_so = told(plan_of(aa_pairs=3, swap=False), [pair(n, tilt[:1]) for n in range(3)], control=unswapped)
    assert told_so["metrics"]["itl_p50"]["asymmetry_pct"] == pytest.approx(2.0)
    assert any("nothing was swapped, so that is in the figures" in line for line in told_so["remarks"])
    assert told(plan_of(), [pair(0, tilt[:1])])["metrics"]["itl_p50"]["asymmetry_pct"] is None


# ---- hedges


def test_one_pair_lets_metrics_disagree_only_indicatively() -> None:
    changes = {"itl_p50": 1.2, "ttft_mean": 0.8}
    (line, *_) = told(plan_of(), [pair(0, [changes, changes])])["disagreement"]
    assert line.startswith("long: indicative: metrics disagree: ")
    (line, *_) = told(plan_of(), pairs(changes))["disagreement"]
    assert line.startswith("long: metrics disagree: ")


def test_weighing_without_pairs_says_why() -> None:
    load = told(plan_of(), [], problem="branch did not start")
    assert load["metrics"]["itl_p50"]["verdict"] == "inconclusive: no complete pair (branch did not start)"


def test_what_is_made_of_several_comparisons_is_not_peeked_at_either() -> None:
    assert contrast_level(plan_of(), [3, 3]) == contrast_level(plan_of(until_decided=True), []) == 0.95
    levels = [contrast_level(plan_of(until_decided=True, max_pairs=8), counts) for counts in ([3, 8], [5], [8])]
    assert 0.95 < levels[2] < levels[1] < levels[0] < 1
