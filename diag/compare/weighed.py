"""What there is of one load in one comparison, weighed: which pairs count, each metric's effects and evidence.

How it is judged is `verdict.py`'s, how it is told `load_document.py`'s, what passes a gate `gate_document.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atom.diag.compare.evidence import ScoredPair, Side, metric_effects, metric_values
from atom.diag.compare.metrics import METRICS
from atom.diag.compare.model import Comparison, Load
from atom.diag.compare.plan import Plan
from atom.diag.compare.sequential import Boundary, boundary_of
from atom.diag.compare.statistics import ALPHA, Effects
from atom.diag.compare.verdict import MetricEvidence, evidence_of

__all__ = ["Key", "LoadEvidence", "Weighed", "contrast_level", "sound_control", "weigh"]

MOST_REASONS: Final = 4
Key = tuple[str, str, str]
"""(`Comparison.key`, load, metric)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadEvidence:
    """What there is of one load in one comparison."""

    plan: Plan
    comparison: Comparison
    load: Load
    pairs: Sequence[ScoredPair]
    control: Sequence[ScoredPair] = ()
    """A/A pairs of the base under this load, all that were made."""
    confounded: Sequence[str] = ()
    planned: int = 0
    """Pairs."""
    problem: str | None = None
    """Why there is none."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """And its metrics, before they are judged."""

    evidence: LoadEvidence
    metrics: Mapping[str, MetricEvidence]
    effects: Mapping[str, Effects]
    control: Mapping[str, Effects]
    """Of the A/A pairs that count; empty where there are none."""
    censored: Sequence[str]
    left_out: Sequence[str]
    """A/A pairs that say nothing of noise, and why, a line each."""

    @property
    def primary(self) -> str:
        return self.evidence.load.primary

    def key(self, metric: str) -> Key:
        return (self.evidence.comparison.key, self.evidence.load.name, metric)


def weigh(evidence: LoadEvidence) -> Weighed:
    """The primary metric in any case, the others as far as both arms have them."""
    plan, load = evidence.plan, evidence.load
    boundary = _boundary(plan) if load.section == "load" else None
    censored = _censored(evidence)
    names = [
        name
        for name in METRICS
        if name == load.primary or all(metric_values(evidence.pairs, name, side) for side in (0, 1))
    ]
    effects = {name: metric_effects(evidence.pairs, name) for name in names}
    sound, left_out = sound_control(evidence.control)
    control = {name: metric_effects(sound, name) for name in names} if sound else {}
    metrics = {
        name: evidence_of(
            effects[name],
            better=METRICS[name].better,
            margin_pct=load.margin_pct,
            control=control.get(name),
            boundary=boundary,
            censored=censored,
            confounded=evidence.confounded,
            problem=evidence.problem,
        )
        for name in names
    }
    return Weighed(evidence, metrics, effects, control, censored, left_out)


def _boundary(plan: Plan) -> Boundary | None:
    """Where pairs are added until it is decided."""
    return boundary_of(plan.pairs, plan.max_pairs) if plan.until_decided else None


def contrast_level(plan: Plan, pairs: Sequence[int]) -> float:
    """Confidence level of what is made of several comparisons of a load with so many pairs each: where pairs are added
    until it is decided, that of the repeated interval of the one with the fewest."""
    boundary = _boundary(plan)
    return 1.0 - ALPHA if boundary is None or not pairs else boundary.level(min(pairs))


def sound_control(pairs: Sequence[ScoredPair]) -> tuple[list[ScoredPair], list[str]]:
    """The A/A pairs that say how much an arm differs from itself, and why others do not: a run in which requests failed
    or the client was late would make every difference noise."""
    sound, left_out = [], []
    for pair in pairs:
        reasons = [reason for _, side in _sides(pair) for reason in _unsound(side)]
        if reasons:
            left_out.append(f"A/A pair {pair.number + 1} is in no noise floor: {reasons[0]}")
        else:
            sound.append(pair)
    return sound, left_out


def _unsound(side: Side) -> list[str]:
    reasons = side.censored or ([] if side.score is None else list(side.score.invalid))
    return [f"{side.result.directory.rpartition('/')[2]}: {reason}" for reason in reasons]


def _sides(pair: ScoredPair) -> Iterator[tuple[str, Side]]:
    """With the arm of each."""
    for one in pair.runs:
        for run, side in zip(one.run.runs, one.sides, strict=True):
            yield run.arm, side


def _censored(evidence: LoadEvidence) -> list[str]:
    """`branch, run-2: 20 of 300 requests failed`, each reason once; which runs stands behind it."""
    found: dict[tuple[str, str], list[str]] = {}
    for arm, side in (one for pair in evidence.pairs for one in _sides(pair)):
        for reason in () if side.dismissed else side.censored:
            found.setdefault((arm, reason), []).append(side.result.directory.rpartition("/")[2])
    # A recorded arm of one file is called as its run.
    lines = [
        f"{arm}: {reason}"
        if set(runs) == {arm}
        else f"{arm}, {_listed(runs)}{' each' if len(runs) > 1 else ''}: {reason}"
        for (arm, reason), runs in found.items()
    ]
    more = len(lines) - MOST_REASONS
    return lines if more <= 0 else [*lines[:MOST_REASONS], f"and {more} more like these"]


def _listed(runs: Sequence[str]) -> str:
    return ", ".join(runs) if len(runs) <= 3 else f"{', '.join(runs[:2])} and {len(runs) - 2} more"
