"""Looks at the evidence before it is complete, without peeking: the group-sequential boundary of `--until-decided`.

Whoever adds pairs until p < 0.05 finds a difference where there is none far more often than one time in twenty. Here
every look spends its share of the 5%: look n may call a difference only at a nominal level c·n/n_last, where c makes
the probability of *any* crossing, over all looks, alpha. Early looks spend less than Pocock's, more than O'Brien and
Fleming's. The interval at a look is the repeated one (Jennison and Turnbull 1989): all of them together cover the truth
with 95%, so whatever is concluded from the one at hand, also that arms are equivalent, or nothing, is allowed.

The distribution is simulated: t of the first n of a sequence of independent normal pairs depends on no parameter. The
seed is fixed, so that a plan has the same boundary everywhere, and the simulation's own error is added to alpha's use.
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass

import numpy as np

from atom.diag.compare.statistics import ALPHA, Effects, Estimate, FloatArray, estimate
from atom.diag.compare.student_t import t_two_sided_p

__all__ = ["Boundary", "boundary_of"]

_DRAWS = 100_000
_DRAWS_AT_ONCE = 10_000
_GRID = 400
_SEED = 20_011


@dataclass(frozen=True, slots=True)
class Boundary:
    """What each look may conclude. `looks`: numbers of complete pairs, rising, from 2; `alpha`: of all together."""

    looks: tuple[int, ...]
    alpha: float = ALPHA

    def __post_init__(self) -> None:
        if not self.looks or self.looks[0] < 2 or any(a >= b for a, b in zip(self.looks, self.looks[1:], strict=False)):
            raise ValueError(f"looks are rising numbers of pairs from 2, not {self.looks}")
        if not 0.001 <= self.alpha < 1:
            raise ValueError(f"alpha is from 0.001 to 1, not {self.alpha}")

    def nominal(self, pairs: int) -> float:
        """Two-sided p at or below which a look at `pairs` may call a difference.

        Where a deadline ended the comparison between looks or before the first, that is the level of the look before,
        or of the first: the ending was not chosen by the evidence.
        """
        return _critical(self.looks, self.alpha) * self._weight(pairs)

    def level(self, pairs: int) -> float:
        """Confidence level of the interval to print at a look: the repeated interval of 1 - alpha."""
        return 1.0 - self.nominal(pairs)

    def p_value(self, pairs: int, p: float) -> float:
        """Repeated p-value of a look with nominal `p`: the least alpha at which it would have crossed. For Holm."""
        minima = _null_minima(self.looks)
        share = np.searchsorted(minima, p / self._weight(pairs), side="right") / len(minima)
        return min(1.0, max(float(_upper_share(share)), p))

    def estimate(self, effects: Effects) -> Estimate:
        """The estimate with its repeated interval. `Estimate.p` stays nominal. One pair is indicative at most, so that
        it spends nothing: its interval is the plain one."""
        pairs = int(effects.used.sum())
        return estimate(effects, self.level(pairs) if pairs > 1 else 1.0 - self.alpha)

    def _weight(self, pairs: int) -> float:
        look = self.looks[max(bisect.bisect_right(self.looks, pairs) - 1, 0)]
        return look / self.looks[-1]


def boundary_of(pairs: int, max_pairs: int, alpha: float = ALPHA) -> Boundary:
    """A look after each pair from `pairs` (but at least 2) to `max_pairs`."""
    if max_pairs < max(pairs, 2):
        raise ValueError(f"at most {max_pairs} pairs, but the first look is after {max(pairs, 2)}")
    return Boundary(tuple(range(max(pairs, 2), max_pairs + 1)), alpha)


def _upper_share(share: FloatArray | float) -> FloatArray:
    """A simulated probability plus two of its standard errors."""
    value = np.asarray(share, dtype=np.float64)
    return np.asarray(value + 2.0 * np.sqrt(value * (1.0 - value) / _DRAWS) + 1.0 / _DRAWS)


@functools.lru_cache(maxsize=256)
def _critical(looks: tuple[int, ...], alpha: float) -> float:
    """c: the largest scaled p whose use of alpha, the simulation's error included, is within alpha."""
    minima = _null_minima(looks)
    used = _upper_share(np.arange(1, len(minima) + 1) / len(minima))
    allowed = int(np.searchsorted(used, alpha, side="right"))
    return float(minima[max(allowed - 1, 0)])


@functools.lru_cache(maxsize=32)
def _null_minima(looks: tuple[int, ...]) -> FloatArray:
    """[draws] ascending: the least p(n) n_last / n over the looks of each simulated comparison without a difference."""
    generator = np.random.default_rng(_SEED)
    minima = np.empty(_DRAWS)
    sizes = np.asarray(looks, dtype=np.float64)
    columns = np.asarray(looks) - 1
    for start in range(0, _DRAWS, _DRAWS_AT_ONCE):
        pairs = generator.standard_normal((_DRAWS_AT_ONCE, looks[-1]))
        sums = np.cumsum(pairs, axis=1)[:, columns]
        squares = np.cumsum(pairs**2, axis=1)[:, columns]
        variances = (squares - sums**2 / sizes) / (sizes - 1.0)
        t_squared = sums**2 / (sizes * variances)
        scaled = np.full(_DRAWS_AT_ONCE, np.inf)
        for column, n in enumerate(looks):
            p = _two_sided(t_squared[:, column], n - 1)
            np.minimum(scaled, p * (looks[-1] / n), out=scaled)
        minima[start : start + _DRAWS_AT_ONCE] = scaled
    minima.sort()
    minima.flags.writeable = False
    return minima


def _two_sided(t_squared: FloatArray, df: int) -> FloatArray:
    """p of many t at once: ln p, nearly linear in ln(1 + t²/df), is interpolated; within 1e-3 relative below 0.5."""
    place = np.log1p(t_squared / df)
    # Finer towards zero, where ln p bends.
    grid = np.linspace(0.0, math.sqrt(max(float(place.max()), 1.0)), _GRID) ** 2
    log_p = [math.log(max(t_two_sided_p(math.sqrt(df * math.expm1(one)), df), 1e-300)) for one in grid]
    return np.asarray(np.exp(np.interp(place, grid, log_p)), dtype=np.float64)
