"""The verdict on one metric of one load, in words that can be pasted into a pull request.

`statistics.py` estimates; here the estimate meets what was declared before anything ran (which way is better, the
margin), what an arm compared with itself shows, how many metrics were looked at, and whether the evidence is any. What
passes or fails a gate is `gates.py`'s.

In this order: a **censored** arm never wins; a difference that survives the correction for multiplicity is **faster**
or **slower**, unless the whole interval lies within an A/A noise floor of at least two pairs; an interval within the
margin is **equivalent**, one within the floor **within noise**; anything else is **inconclusive**. One pair is at most
**indicative**, and arms that differ in more than the ref are **confounded**: both stand before what the figures say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from atom.diag.compare.sequential import Boundary
from atom.diag.compare.statistics import ALPHA, Effects, Estimate, estimate, holm, noise_floor, pairs_needed

__all__ = [
    "Better",
    "MetricEvidence",
    "Verdict",
    "Word",
    "correct",
    "evidence_of",
    "interval_text",
    "judge",
    "judge_all",
    "pairs_text",
]

Better = Literal["lower", "higher"]
Word = Literal["faster", "slower", "equivalent", "within noise", "inconclusive", "censored", "confounded", "indicative"]
Finding = Literal["faster", "slower", "equivalent", "within noise", "inconclusive"]
Key = TypeVar("Key", bound=Hashable)

_FEWEST_CONTROL_PAIRS = 2
_MOST_PAIRS_WORTH_SAYING = 1_000
_MOST_PAIRS_WORTH_COUNTING = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricEvidence:
    """One metric of one load, as it goes before the judge. Made by `evidence_of`."""

    better: Better
    estimate: Estimate
    """With its repeated interval where `repeated`."""
    p: float
    """Two-sided, of this metric alone; over all looks where `repeated`."""
    swapped: bool = True
    """False: there are single matched runs, so that the halves' speeds are in the figures."""
    adjusted_p: float | None = None
    """Corrected for the metrics judged beside it (`correct`); None: there are none."""
    family: int = 1
    """How many were judged together."""
    margin_pct: float | None = None
    """Differences within ± this are called equivalent; None: none was declared."""
    floor: float | None = None
    """|ln ratio| that 95% of as many A/A pairs stay below (`statistics.noise_floor`); None: not measured."""
    floor_pairs: int = 0
    """A/A pairs that the floor rests on."""
    repeated: bool = False
    alpha: float = ALPHA
    """Of all looks together."""
    most_pairs: int | None = None
    """Where pairs are added until it is decided: how many at most."""
    censored: tuple[str, ...] = ()
    confounded: tuple[str, ...] = ()
    problem: str | None = None
    """Why there is no pair, in one line."""

    @property
    def significant(self) -> bool:
        p = self.p if self.adjusted_p is None else self.adjusted_p
        return p <= self.alpha and (self.estimate.low > 0 or self.estimate.high < 0)

    @property
    def head_is_worse(self) -> bool:
        return (self.estimate.mean > 0) == (self.better == "lower")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    word: Word
    text: str
    """Begins with the word."""
    n_more: int | None = None
    """About how many more pairs would decide; None: decided, or nobody can tell."""
    finding: Finding | None = None
    """What the figures alone say, under `indicative` and `confounded`; None: censored."""
    indicative: bool = False
    """It is of one pair."""

    @property
    def decided(self) -> bool:
        """True if further pairs are not needed, or cannot help."""
        return self.finding is None or (self.finding != "inconclusive" and not self.indicative)


def evidence_of(
    effects: Effects,
    *,
    better: Better,
    margin_pct: float | None = None,
    control: Effects | None = None,
    boundary: Boundary | None = None,
    censored: Collection[str] = (),
    confounded: Collection[str] = (),
    problem: str | None = None,
) -> MetricEvidence:
    """Evidence of one metric. `control`: its A/A pairs. `boundary`: pairs were added until it was decided."""
    found = estimate(effects) if boundary is None else boundary.estimate(effects)
    floor = noise_floor(control, max(found.n, 1)) if control is not None else math.nan
    return MetricEvidence(
        better=better,
        estimate=found,
        p=found.p if boundary is None or found.n < 2 else boundary.p_value(found.n, found.p),
        swapped=effects.swapped,
        margin_pct=margin_pct,
        floor=None if math.isnan(floor) else floor,
        floor_pairs=0 if control is None else len(control.pair_means),
        repeated=boundary is not None and found.n > 1,
        alpha=ALPHA if boundary is None else boundary.alpha,
        most_pairs=None if boundary is None else boundary.looks[-1],
        censored=tuple(censored),
        confounded=tuple(confounded),
        problem=problem,
    )


def correct(evidence: Mapping[Key, MetricEvidence], primary: Collection[Key]) -> dict[Key, MetricEvidence]:
    """Evidence with p-values corrected by Holm: the primary metrics of all loads among themselves, every other metric
    among all that were looked at. Under no difference at all, each of the two families errs in at most alpha of
    comparisons.
    """
    of_all = dict(zip(evidence, holm([one.p for one in evidence.values()]), strict=True))
    declared = [key for key in evidence if key in primary]
    of_declared = dict(zip(declared, holm([evidence[key].p for key in declared]), strict=True))
    return {
        key: dataclasses.replace(
            one,
            adjusted_p=of_declared.get(key, of_all[key]),
            family=len(of_declared) if key in of_declared else len(of_all),
        )
        for key, one in evidence.items()
    }


def judge_all(evidence: Mapping[Key, MetricEvidence], primary: Collection[Key]) -> dict[Key, Verdict]:
    """Verdicts of all metrics of a comparison, corrected for multiplicity as in `correct`."""
    return {key: judge(one) for key, one in correct(evidence, primary).items()}


def judge(evidence: MetricEvidence) -> Verdict:
    """The verdict on one metric, by the order that the module names."""
    if evidence.censored:
        return Verdict(word="censored", text=f"censored: {'; '.join(evidence.censored)}")
    finding, text, n_more = _finding(evidence)
    word: Word = finding
    indicative = evidence.estimate.n == 1
    if indicative:
        word, text, n_more = "indicative", f"indicative: {text}", max(n_more or 1, 1)
    if evidence.confounded:
        word, text = "confounded", f"confounded: {text}"
    return Verdict(word=word, text=text, n_more=n_more, finding=finding, indicative=indicative)


def _finding(evidence: MetricEvidence) -> tuple[Finding, str, int | None]:
    found = evidence.estimate
    if found.n == 0:
        return "inconclusive", f"inconclusive: no complete pair{_because(evidence.problem)}", None
    if found.ci_pct is None or found.delta_pct is None:
        return "inconclusive", f"inconclusive: {_change(evidence)}", 1
    low, high = found.ci_pct
    margin, floor_pct = evidence.margin_pct, _floor_pct(evidence)
    within_margin = margin is not None and -margin < low and high < margin
    within_floor = floor_pct is not None and -floor_pct < low and high < floor_pct
    floor_text = f"one arm against itself differs by up to {_size(floor_pct or 0.0)}"
    if evidence.significant and not (within_floor and evidence.floor_pairs >= _FEWEST_CONTROL_PAIRS):
        word: Finding = "slower" if evidence.head_is_worse else "faster"
        closing = f", within the {margin:g}% margin" if within_margin else ""
        return word, f"{word} by {_magnitude(evidence)}{closing}", None
    if evidence.significant:
        return "within noise", f"within noise: {_change(evidence)}; {floor_text}", None
    if within_margin:
        return "equivalent", f"equivalent within {margin:g}%: {_change(evidence)}", None
    if within_floor:
        return "within noise", f"within noise: {_change(evidence)}; {floor_text}", None
    n_more = _pairs_more(evidence)
    return "inconclusive", f"inconclusive: {_change(evidence)}{_what_is_missing(evidence, n_more)}", n_more


def _what_is_missing(evidence: MetricEvidence, n_more: int | None) -> str:
    found, parts = evidence.estimate, []
    if evidence.p <= evidence.alpha and evidence.adjusted_p is not None and evidence.family > 1:
        parts.append(
            f"not enough where {evidence.family} metrics are looked at (p {evidence.adjusted_p:.2g} corrected)"
        )
    if evidence.most_pairs is not None and found.n >= evidence.most_pairs:
        parts.append("no more pairs were allowed")
    if n_more is None:
        parts.append("no number of pairs worth running would tell")
    else:
        parts.append(f"{pairs_text(n_more)} needed")
    return "; " + "; ".join(parts)


def pairs_text(n_more: int) -> str:
    """`about 3 more pairs`"""
    if n_more > _MOST_PAIRS_WORTH_COUNTING:
        return f"more than {_MOST_PAIRS_WORTH_COUNTING} more pairs"
    return f"about {n_more} more {'pair' if n_more == 1 else 'pairs'}"


def _pairs_more(evidence: MetricEvidence) -> int | None:
    """Pairs until the interval leaves zero, if the difference is as it seems, or fits into the margin."""
    found = evidence.estimate
    if evidence.family > 1:
        found = dataclasses.replace(found, level=1.0 - (1.0 - found.level) / evidence.family)
    margin = 0.0 if evidence.margin_pct is None else math.log1p(evidence.margin_pct / 100.0)
    # The margin needs no correction, yet is measured by the same quantile: about is what it says.
    total = pairs_needed(found, half_width=max(abs(found.mean), margin - abs(found.mean)))
    if total is None or total - found.n > _MOST_PAIRS_WORTH_SAYING:
        return None
    return max(total - found.n, 1)


def _floor_pct(evidence: MetricEvidence) -> float | None:
    return None if evidence.floor is None else 100.0 * math.expm1(min(evidence.floor, 700.0))


def _because(problem: str | None) -> str:
    return f" ({problem})" if problem else ""


def _magnitude(evidence: MetricEvidence) -> str:
    """`2.03% (95% CI 1.71% to 2.35%, 3 pairs)` of a rise as of a fall."""
    found = evidence.estimate
    assert found.ci_pct is not None
    assert found.delta_pct is not None
    low, high = found.ci_pct
    if found.delta_pct < 0:
        low, high = -high, -low
    return f"{_size(abs(found.delta_pct))} ({_level(evidence)} {_size(low)} to {_size(high)}, {_amount(evidence)})"


def _change(evidence: MetricEvidence) -> str:
    """`+0.20% (95% CI −0.30% to +0.70%, 3 pairs)`: head against base, whichever way is better."""
    delta = evidence.estimate.delta_pct
    return f"{'?' if delta is None else _signed(delta)} ({interval_text(evidence)})"


def interval_text(evidence: MetricEvidence) -> str:
    """`95% CI −0.30% to +0.70%, 3 pairs`."""
    interval = evidence.estimate.ci_pct
    if interval is None:
        return "no interval: nothing says how much runs scatter"
    return f"{_level(evidence)} {_signed(interval[0])} to {_signed(interval[1])}, {_amount(evidence)}"


def _level(evidence: MetricEvidence) -> str:
    return f"{100.0 * (1.0 - evidence.alpha):g}% {'repeated ' if evidence.repeated else ''}CI"


def _amount(evidence: MetricEvidence) -> str:
    n = evidence.estimate.n
    if not evidence.swapped:
        return f"{n} matched {'run' if n == 1 else 'runs'}, not swapped"
    return "blocks of time of 1 pair" if n == 1 else f"{n} pairs"


def _size(percent: float) -> str:
    return f"{_rounded(percent):.{_digits(percent)}f}%".replace("-", "−")


def _signed(percent: float) -> str:
    return f"{_rounded(percent):+.{_digits(percent)}f}%".replace("-", "−")


def _rounded(percent: float) -> float:
    """Without a minus before what rounds to zero."""
    return round(percent, _digits(percent)) + 0.0


def _digits(percent: float) -> int:
    return 2 if abs(percent) < 100 else 0
