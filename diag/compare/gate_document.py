"""What the gates of a comparison come to: those on metrics, load by load, and those on tests, accuracy and the API
process. Evidence that is missing leaves a gate undecided; none is passed because there was nothing to look at.

The rule of a single gate on a metric is `gates.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from atom.diag.compare.gates import Gate, GateOutcome, judge_gate, judge_gates
from atom.diag.compare.metrics import METRICS
from atom.diag.compare.model import Comparison, Load
from atom.diag.compare.plan import Plan
from atom.diag.compare.statistics import ALPHA
from atom.diag.compare.verdict import judge
from atom.diag.compare.weighed import LoadEvidence, Weighed, weigh

__all__ = ["ACCURACY_MARGIN_PCT", "is_load_decided", "load_gates", "section_gates", "unmatched_gates"]

ACCURACY_MARGIN_PCT: Final = 5.0
"""Percentage points that `--gate accuracy` lets the head lose, where it names no other."""
GROWING: Final = ("rss_mb", "gen2_share")
"""What `--gate gc` has to know of both arms before it passes."""

GateDocument = dict[str, Any]


# ---- of metrics


def load_gates(loads: Sequence[Weighed]) -> list[list[GateDocument]]:
    """Of each load; those that fail are corrected for how many there are, over all loads."""
    asked = [
        (place, gate, gate.metric or one.primary) for place, one in enumerate(loads) for gate in _gates_of(one.evidence)
    ]
    known = [one for one in asked if one[2] in loads[one[0]].metrics]
    results = judge_gates([(gate, loads[place].metrics[name]) for place, gate, name in known])
    told: list[list[GateDocument]] = [[] for _ in loads]
    for (place, gate, name), result in zip(known, results, strict=True):
        reason = result.text.partition(": ")[2] or result.text
        told[place].append(_gate(gate, name, loads[place].evidence, result.outcome, reason))
    for place, gate, name in asked:
        if name not in loads[place].metrics:
            reason = "it is not in the records of both arms"
            if gate.load is None:
                reason += f"; LOAD/{name}:{gate.slower_pct:g}% is of a load that has it"
            told[place].append(_gate(gate, name, loads[place].evidence, GateOutcome.UNDECIDED, reason))
    return told


def unmatched_gates(plan: Plan) -> list[GateDocument]:
    """Gates on a load that the plan does not have."""
    names = {load.name for load in plan.loads if load.section == "load"}
    return [
        _gate(gate, gate.metric, None, GateOutcome.UNDECIDED, "this load is not one that has gates")
        for gate in _plan_gates(plan)
        if not names or gate.load not in (None, *names)
    ]


def is_load_decided(evidence: LoadEvidence, family: int) -> bool:
    """Whether no more pairs are needed: for the primary metric, corrected for `family` primary ones, and for the gates,
    corrected for all of the plan, so that what ends the pairs is also what is told at the end."""
    weighed = weigh(evidence)
    if weighed.censored:
        return True  # more pairs make no winner of it
    metric = weighed.metrics[weighed.primary]
    if not judge(replace(metric, adjusted_p=min(1.0, metric.p * family), family=family)).decided:
        return False
    plan = evidence.plan
    count = len(plan.comparisons) * sum(len(_matching(plan, load)) for load in plan.loads)
    for gate in _gates_of(evidence):
        found = weighed.metrics.get(gate.metric or weighed.primary)
        if found is None:
            continue  # more pairs do not bring it
        corrected = replace(found, adjusted_p=min(1.0, found.p * count), family=count)
        if judge_gate(gate, corrected).outcome is GateOutcome.UNDECIDED:
            return False
    return True


def _gates_of(evidence: LoadEvidence) -> list[Gate]:
    return _matching(evidence.plan, evidence.load)


def _matching(plan: Plan, load: Load) -> list[Gate]:
    """The gates on a load."""
    return [gate for gate in _plan_gates(plan) if load.section == "load" and gate.load in (None, load.name)]


def _plan_gates(plan: Plan) -> list[Gate]:
    return [
        Gate(slower_pct=float(one["slower_pct"]), metric=one.get("metric"), load=one.get("load"))
        for one in plan.gates
        if "slower_pct" in one
    ]


def _gate(
    gate: Gate, name: str | None, evidence: LoadEvidence | None, outcome: GateOutcome, reason: str
) -> GateDocument:
    """`evidence`: what the gate was held against; None: no load is the gate's."""
    title = "primary metric" if name is None else METRICS[name].title if name in METRICS else name
    return {
        **_of(None if evidence is None else evidence.comparison),
        "load": gate.load if evidence is None else evidence.load.name,
        "gate": f"{title} at most {gate.slower_pct:g}% slower",
        "metric": name,
        "limit_pct": gate.slower_pct,
        "outcome": str(outcome),
        "reason": reason,
    }


def _of(comparison: Comparison | None) -> GateDocument:
    if comparison is None:
        return dict.fromkeys(("comparison", "base", "head"))
    return {"comparison": comparison.key, "base": comparison.base, "head": comparison.head}


# ---- of sections


def section_gates(plan: Plan, sections: Mapping[str, Any], untrusted: Iterable[str] = ()) -> list[GateDocument]:
    """`untrusted`: sections whose runs are no evidence of their arms; nothing is decided on them."""
    told = []
    for one in plan.gates:
        name = one.get("section")
        if name not in _SECTION_GATES:
            continue
        limit = _accuracy_margin(one) if name == "accuracy" else None
        result = _SECTION_GATES[name](sections[name], limit)
        if name in untrusted:
            result = {"outcome": "undecided", "reason": "its runs are not valid evidence of their arms"}
        told.append(
            {**_of(plan.comparisons[0]), "gate": name, "load": None, "metric": None, "limit_pct": limit, **result}
        )
    return told


def _tests_gate(told: Mapping[str, Any] | None, _: float | None) -> dict[str, str]:
    if told is None or told["ok"] is None:
        return {"outcome": "undecided", "reason": "the tests of both arms did not all run"}
    new = told["new_failures"]
    if not told["ok"]:
        return {"outcome": "fail", "reason": f"{len(new)} fail on {told['head']} alone: {', '.join(map(str, new[:3]))}"}
    return {"outcome": "pass", "reason": f"none fails on {told['head']} alone"}


def _accuracy_margin(gate: Mapping[str, Any]) -> float:
    value = gate.get("margin_pct")
    return float(value) if isinstance(value, int | float) and 0 < value <= 100 else ACCURACY_MARGIN_PCT


def _accuracy_gate(told: Mapping[str, Any] | None, margin: float | None) -> dict[str, str]:
    """Passes where the whole interval of every filter is above −margin, fails where a loss is beyond doubt."""
    assert margin is not None
    if told is None or not told["n"]:
        return {"outcome": "undecided", "reason": "no question was answered by both arms"}
    worst = min(told["filters"], key=lambda one: one["ci"][0])
    limit = f"{told['n']:,} questions, limit {margin:g} points less"
    if worst["ci"][0] > -margin / 100:
        return {"outcome": "pass", "reason": f"{_points(worst)}, {limit}"}
    for one in told["filters"]:
        if one["adjusted_p"] < ALPHA and one["difference"] < 0:
            return {"outcome": "fail", "reason": f"{one['verdict']}: {_points(one)}, {limit}"}
    return {"outcome": "undecided", "reason": f"{_points(worst)}, {limit}; more questions narrow that"}


def _points(row: Mapping[str, Any]) -> str:
    """`strict-match: +0.5 points (95% CI −1.2 to +2.2)` of a row of `accuracy_section`."""
    change, low, high = (f"{100 * one:+.1f}".replace("-", "−") for one in (row["difference"], *row["ci"]))
    return f"{row['filter']}: {change} points (95% CI {low} to {high})"


def _gc_gate(told: Mapping[str, Any] | None, _: float | None) -> dict[str, str]:
    if told is None or not told["quantities"]:
        return {"outcome": "undecided", "reason": "the long run was not made by both arms"}
    if told["head"] in told["exposed"]:
        return {"outcome": "fail", "reason": told["verdict"]}
    found = {one["quantity"]: one for one in told["quantities"]}
    unknown = [name for name in GROWING if name not in found or found[name]["finding"] is None]
    return {"outcome": "undecided" if unknown else "pass", "reason": told["verdict"]}


_SECTION_GATES: Final = {"tests": _tests_gate, "accuracy": _accuracy_gate, "gc": _gc_gate}
