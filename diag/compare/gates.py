"""Gates on a comparison: `--fail-if-slower 2%` and the like.

A gate **fails** where the head is slower beyond doubt and by at least the limit, **passes** where even the interval's
worst end stays below the limit, and is **undecided** otherwise: evidence that does not answer must not look like an
answer. All gates of a comparison are corrected for one another where they fail; passing needs no correction,
since every one of them has to.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from atom.diag.compare.model import Load
from atom.diag.compare.statistics import holm, pairs_needed
from atom.diag.compare.verdict import MetricEvidence, interval_text, judge
from atom.recipes.errors import ExitStatus, UsageError

__all__ = [
    "Gate",
    "GateOutcome",
    "GateResult",
    "check_gate_loads",
    "gate_status",
    "judge_gate",
    "judge_gates",
    "parse_gate",
]

_SPEC = re.compile(
    r"(?:(?:(?P<load>[A-Za-z0-9._-]+)/)?(?P<metric>[A-Za-z][A-Za-z0-9_]*)\s*[:=])?\s*(?P<limit>[0-9.]+)\s*%?"
)


class GateOutcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """At most `slower_pct` slower: of a metric where lower is better, a rise by so much; of others, a fall."""

    slower_pct: float
    metric: str | None = None
    """None: the load's primary one."""
    load: str | None = None
    """None: every load; one that has not the metric leaves the gate undecided."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slower_pct) and 0 <= self.slower_pct < 100):
            raise UsageError(f"a gate's limit is a percentage from 0 to below 100, not {self.slower_pct:g}")


def parse_gate(text: str) -> Gate:
    """`2%`, `ttft_p99:5%`, or `LOAD/ttft_p99:5%`. UsageError for anything else."""
    match = _SPEC.fullmatch(text.strip())
    try:
        limit = float(match["limit"]) if match else math.nan
    except ValueError:
        limit = math.nan
    if match is None or math.isnan(limit):
        raise UsageError(f"gate {text!r}: expected 2%, METRIC:2%, or LOAD/METRIC:2%")
    return Gate(slower_pct=limit, metric=match["metric"], load=match["load"])


def check_gate_loads(gates: Sequence[Gate], loads: Sequence[Load]) -> None:
    """UsageError for a gate that no load would answer."""
    names = [load.name for load in loads if load.section == "load"]
    for gate in gates:
        if gate.load is not None and gate.load not in names:
            there = f"there are {', '.join(names)}" if names else "there is none"
            raise UsageError(f"--gate {gate.load}/{gate.metric}: there is no load {gate.load!r} to gate; {there}")
        if not names:
            raise UsageError(f"a gate at {gate.slower_pct:g}% slower needs a load, and there is none")


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    gate: Gate
    outcome: GateOutcome
    text: str
    """In one line, without the metric's and load's names; begins with the outcome."""
    n_more: int | None = None
    """About how many more pairs would decide; None: decided, or nobody can tell."""


def judge_gates(asked: Sequence[tuple[Gate, MetricEvidence]]) -> list[GateResult]:
    """Results of all gates of a comparison, in order, corrected for one another by Holm."""
    adjusted = holm([evidence.p for _, evidence in asked])
    return [
        judge_gate(gate, dataclasses.replace(evidence, adjusted_p=p, family=len(asked)))
        for (gate, evidence), p in zip(asked, adjusted, strict=True)
    ]


def judge_gate(gate: Gate, evidence: MetricEvidence) -> GateResult:
    """The result of one gate. Confounded evidence gates all the same, and says so."""
    outcome, text, n_more = _outcome(gate, evidence)
    mark = " (confounded)" if evidence.confounded else ""
    return GateResult(gate=gate, outcome=outcome, text=f"{outcome}{mark}: {text}", n_more=n_more)


def _outcome(gate: Gate, evidence: MetricEvidence) -> tuple[GateOutcome, str, int | None]:
    found = evidence.estimate
    unmarked = dataclasses.replace(evidence, confounded=())
    verdict = judge(unmarked)
    limit = f"limit {gate.slower_pct:g}% slower"
    if evidence.censored or found.n < 2 or found.ci_pct is None or found.delta_pct is None:
        return GateOutcome.UNDECIDED, f"{verdict.text}; {limit}", verdict.n_more
    sign = 1.0 if evidence.better == "lower" else -1.0
    slower, worst = sign * found.delta_pct, max(sign * one for one in found.ci_pct)
    if worst < gate.slower_pct:
        return GateOutcome.PASS, f"{_side(slower)} ({interval_text(evidence)}), {limit}", None
    if slower >= gate.slower_pct and verdict.finding == "slower":
        return GateOutcome.FAIL, f"{verdict.text}, {limit}", None
    n_more = _pairs_more(gate, evidence)
    needed = "" if n_more is None else f"; about {n_more:,} more {'pair' if n_more == 1 else 'pairs'} needed"
    return GateOutcome.UNDECIDED, f"{_side(slower)} ({interval_text(evidence)}), {limit}{needed}", n_more


def _side(slower_pct: float) -> str:
    return f"{abs(slower_pct):.2f}% {'slower' if slower_pct > 0 else 'faster'}"


def _pairs_more(gate: Gate, evidence: MetricEvidence) -> int | None:
    """Pairs until the interval's worst end is below the limit, or leaves zero, if the difference is as it seems."""
    found = evidence.estimate
    sign = 1.0 if evidence.better == "lower" else -1.0
    limit = math.log1p(sign * gate.slower_pct / 100.0)
    beyond = sign * found.mean >= sign * limit
    if beyond and evidence.family > 1:
        found = dataclasses.replace(found, level=1.0 - (1.0 - found.level) / evidence.family)
    total = pairs_needed(found, half_width=abs(found.mean) if beyond else abs(limit - found.mean))
    return None if total is None else max(total - found.n, 1)


def gate_status(results: Sequence[GateResult]) -> ExitStatus:
    """0: all pass; 3: one fails; 4: one is undecided, which wins."""
    outcomes = {one.outcome for one in results}
    if GateOutcome.UNDECIDED in outcomes:
        return ExitStatus.INVALID
    return ExitStatus.GATE if GateOutcome.FAIL in outcomes else ExitStatus.OK
