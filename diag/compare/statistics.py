"""What pairs say about a difference: estimates with intervals, half effects, noise floor, multiplicity, pairs needed.

The unit of evidence is the **pair**: two matched runs, the second with the halves (or the order) swapped. Everything is
in logarithms of head/base, so that +1% and -1% weigh the same and arms can be swapped; they are turned into percent
where they are printed. Which direction is good is not known here: `verdict.py` knows. Looks before the end are
`sequential.py`'s.

Requests of one run share engine steps, so they are no independent evidence: within a run only the spread over blocks of
time counts, and it can only widen an interval, never narrow it below what the pairs show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atom.diag.compare.student_t import t_quantile, t_two_sided_p

__all__ = [
    "ALPHA",
    "Effects",
    "Estimate",
    "asymmetry",
    "effects_of",
    "estimate",
    "half_effects",
    "holm",
    "noise_floor",
    "outliers",
    "pairs_needed",
    "percent",
]

FloatArray = NDArray[np.float64]

ALPHA = 0.05
"""Share of comparisons without a difference in which one may be called."""

_MOST_PAIRS = 10_000
_ROUNDING = 1e-12
_OUTLIER_SCORE = 3.5
_FEWEST_FOR_OUTLIERS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """One metric of one load, over the pairs of one comparison.

    `log_ratios` [pairs, 2]: ln(head/base) of the two matched runs of each pair, NaN where there is none. Column 0 is
    the matched run in which the base had the first half (or ran first), column 1 the one in which the head had it, in
    whichever order they ran.
    `within_se` [pairs]: standard error of each pair's mean from the time-block bootstrap of its runs; NaN: unknown.
    """

    log_ratios: FloatArray
    within_se: FloatArray
    used: NDArray[np.bool_] = field(init=False)
    """[pairs] True for the pairs that count: those with both runs; where no pair has both, those with one.

    A half's speed cancels only within a whole pair, so the two kinds are never mixed.
    """
    swapped: bool = field(init=False)
    """True if the pairs that count have both of their runs."""

    def __post_init__(self) -> None:
        ratios = np.asarray(self.log_ratios, dtype=np.float64).reshape(-1, 2)
        within = np.asarray(self.within_se, dtype=np.float64).reshape(-1)
        if len(within) != len(ratios):
            raise ValueError(f"within_se has {len(within)} pairs, log_ratios {len(ratios)}")
        object.__setattr__(self, "log_ratios", np.where(np.isfinite(ratios), ratios, np.nan))
        object.__setattr__(self, "within_se", np.where(np.isfinite(within) & (within >= 0), within, np.nan))
        runs = np.isfinite(ratios).sum(axis=1)
        swapped = bool((runs == 2).any())
        object.__setattr__(self, "swapped", swapped)
        object.__setattr__(self, "used", runs == (2 if swapped else 1))

    @property
    def pair_means(self) -> FloatArray:
        """[pairs that count] mean of each one's runs."""
        kept = self.log_ratios[self.used]
        return np.asarray(kept.mean(axis=1) if self.swapped else kept[np.isfinite(kept)], dtype=np.float64)


def effects_of(
    base: ArrayLike, head: ArrayLike, base_log_se: ArrayLike | None = None, head_log_se: ArrayLike | None = None
) -> Effects:
    """Effects from values [pairs, 2] of both arms and, where known, the standard errors of their logarithms.

    A value that is missing, not finite, or not above zero has no logarithm: its matched run counts as missing. The
    arms' errors are taken as independent: too wide where both suffered the same disturbance, never too narrow.
    """
    base_pr = np.asarray(base, dtype=np.float64).reshape(-1, 2)
    head_pr = np.asarray(head, dtype=np.float64).reshape(-1, 2)
    usable = np.isfinite(base_pr) & np.isfinite(head_pr) & (base_pr > 0) & (head_pr > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(usable, np.log(head_pr) - np.log(base_pr), np.nan)
    unknown = np.full(base_pr.shape, np.nan)
    base_se = unknown if base_log_se is None else np.asarray(base_log_se, dtype=np.float64).reshape(-1, 2)
    head_se = unknown if head_log_se is None else np.asarray(head_log_se, dtype=np.float64).reshape(-1, 2)
    variances = np.where(usable, base_se**2 + head_se**2, 0.0)
    runs = np.maximum(usable.sum(axis=1), 1)
    return Effects(ratios, np.sqrt(variances.sum(axis=1)) / runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean ln(head/base) over pairs, with its confidence interval."""

    mean: float
    """NaN where no pair counts."""
    se: float
    df: float
    """n - 1; `math.inf` for one pair, whose interval is of the blocks of time within it."""
    low: float
    high: float
    """Infinite where the interval is unknown."""
    n: int
    """Pairs."""
    p: float
    """Two-sided, against no difference; 1 where it is unknown."""
    level: float
    """Confidence level of `low` and `high`."""

    @property
    def indicative(self) -> bool:
        """True for a single pair: nothing says how much another one would differ."""
        return self.n == 1

    @property
    def sd(self) -> float:
        """Standard deviation of a single pair that the interval rests on."""
        return self.se * math.sqrt(self.n)

    @property
    def delta_pct(self) -> float | None:
        return percent(self.mean)

    @property
    def ci_pct(self) -> tuple[float, float] | None:
        low, high = percent(self.low), percent(self.high)
        return None if low is None or high is None else (low, high)


def percent(log_ratio: float) -> float | None:
    """100 (head/base - 1) of ln(head/base); None where it is not finite."""
    return 100.0 * math.expm1(log_ratio) if math.isfinite(log_ratio) and log_ratio < 700 else None


def estimate(effects: Effects, level: float = 1.0 - ALPHA) -> Estimate:
    """Mean over pairs with its interval of Student's t, n - 1 degrees of freedom.

    se² = max(s², mean(within_se²)) / n: three pairs that agree by luck make no narrow interval where the blocks of time
    inside them scatter. With one pair the interval is of those blocks alone (normal quantile), and indicative.
    """
    used = effects.used
    return _of_means(effects.pair_means, effects.within_se[used], level)


def _of_means(means: FloatArray, within: FloatArray, level: float) -> Estimate:
    if not 0 < level < 1:
        raise ValueError(f"a confidence level is between 0 and 1, not {level}")
    n = len(means)
    known = within[np.isfinite(within)]
    within_variance = float(np.mean(known**2)) if len(known) else math.nan
    if n == 0:
        return Estimate(mean=math.nan, se=math.nan, df=math.nan, low=-math.inf, high=math.inf, n=0, p=1.0, level=level)
    mean = float(np.mean(means))
    mean = 0.0 if abs(mean) < _ROUNDING else mean
    if n == 1:
        se, df = math.sqrt(within_variance), math.inf
    else:
        variance = float(np.var(means, ddof=1))
        variance = 0.0 if variance < _ROUNDING**2 else variance
        se, df = math.sqrt(max(variance, 0.0 if math.isnan(within_variance) else within_variance) / n), float(n - 1)
    if math.isnan(se):
        return Estimate(mean=mean, se=se, df=df, low=-math.inf, high=math.inf, n=n, p=1.0, level=level)
    half = t_quantile((1.0 + level) / 2.0, df) * se
    if se > 0:
        p = t_two_sided_p(mean / se, df)
    else:
        p = 1.0 if mean == 0 else 0.0
    return Estimate(mean=mean, se=se, df=df, low=mean - half, high=mean + half, n=n, p=p, level=level)


def half_effects(effects: Effects) -> tuple[float, float]:
    """Mean ln(head/base) of the runs with the base on the first half, and of those with the head on it; NaN: none."""
    columns = effects.log_ratios[effects.used]
    first, second = (column[np.isfinite(column)] for column in (columns[:, 0], columns[:, 1]))
    return (
        float(np.mean(first)) if len(first) else math.nan,
        float(np.mean(second)) if len(second) else math.nan,
    )


def asymmetry(effects: Effects, control: Effects | None = None, level: float = 1.0 - ALPHA) -> Estimate:
    """ln(second half / first half) of the metric itself, whichever arm is there, over the whole pairs.

    With the base on the first half a matched run shows effect + asymmetry, swapped effect - asymmetry; half their
    difference is the asymmetry, their mean the effect. Pairs of an A/A `control` serve as well, and where nothing was
    swapped they alone do: the true effect is none, so a single matched run of theirs shows the asymmetry.
    """
    sets = [effects, *([] if control is None else [control])]
    means, within = [], []
    for one in sets:
        whole = np.isfinite(one.log_ratios).all(axis=1)
        means.append((one.log_ratios[whole, 0] - one.log_ratios[whole, 1]) / 2.0)
        within.append(one.within_se[whole])
    if control is not None and not any(map(len, means)):
        first, second = control.log_ratios[:, 0], -control.log_ratios[:, 1]
        leans = np.where(np.isfinite(first), first, second)
        means, within = [leans[control.used]], [control.within_se[control.used]]
    return _of_means(np.concatenate(means), np.concatenate(within), level)


def noise_floor(aa: Effects, pairs: int, level: float = 1.0 - ALPHA) -> float:
    """The |ln ratio| that `level` of comparisons of an arm with itself over `pairs` pairs stay below; NaN if unknown.

    The true difference is zero, so it is no parameter: s² = mean(d²) over the n A/A pairs has n degrees of freedom, and
    the mean of `pairs` further ones is predicted within t(n) s / sqrt(pairs). With one or two A/A pairs that is wide,
    and rightly so. As in `estimate`, s is at least what the blocks of time within the pairs show.
    """
    if pairs < 1:
        raise ValueError(f"a noise floor is of at least one pair, not {pairs}")
    means = aa.pair_means
    if not len(means):
        return math.nan
    within = aa.within_se[aa.used]
    known = within[np.isfinite(within)]
    variance = max(float(np.mean(means**2)), float(np.mean(known**2)) if len(known) else 0.0)
    return t_quantile((1.0 + level) / 2.0, float(len(means))) * math.sqrt(variance / pairs)


def holm(p: Sequence[float]) -> list[float]:
    """p-values adjusted so that calling those <= alpha errs anywhere with probability <= alpha (Holm 1979).

    Holds however the metrics depend on each other. NaN counts as 1.
    """
    values = [1.0 if math.isnan(one) else one for one in p]
    adjusted = [1.0] * len(values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = highest
    return adjusted


def pairs_needed(
    found: Estimate, *, half_width: float | None = None, effect: float | None = None, power: float = 0.8
) -> int | None:
    """Pairs in all, if further ones scatter as those of `found`: for an interval of ± `half_width`, or to find `effect`
    with probability `power`. Log ratios. None if the scatter is unknown or more than 10,000 are needed.
    """
    if (half_width is None) == (effect is None):
        raise ValueError("either half_width or effect")
    size = abs(half_width if half_width is not None else effect or 0.0)
    if not (math.isfinite(found.sd) and size > 0):
        return None
    if found.sd == 0:
        return 2

    def enough(n: int) -> bool:
        quantile = t_quantile((1.0 + found.level) / 2.0, n - 1.0)
        if half_width is None:
            quantile += t_quantile(power, n - 1.0)
        return quantile * found.sd / math.sqrt(n) <= size

    # t is above the normal quantile, so that no fewer will do, and by little from some ten pairs on.
    normal = t_quantile((1.0 + found.level) / 2.0, math.inf) + (0.0 if half_width else t_quantile(power, math.inf))
    least = (normal * found.sd / size) ** 2
    if least > _MOST_PAIRS:
        return None
    return next((n for n in range(max(math.ceil(least), 2), _MOST_PAIRS + 1) if enough(n)), None)


def outliers(effects: Effects) -> list[int]:
    """Numbers (from 0) of the pairs that stand out: modified z-score above 3.5 (Iglewicz and Hoaglin 1993).

    They are named, and stay in every figure: a pair that is thrown away because it does not fit proves nothing. Fewer
    than five pairs name none.
    """
    indices = np.flatnonzero(effects.used)
    means = effects.pair_means
    if len(means) < _FEWEST_FOR_OUTLIERS:
        return []
    distance = np.abs(means - np.median(means))
    scale = float(np.median(distance)) / 0.6745
    if scale < _ROUNDING:
        scale = 1.253314 * float(np.mean(distance))
    if scale < _ROUNDING:
        return []
    return [int(one) for one in indices[distance / scale > _OUTLIER_SCORE]]
