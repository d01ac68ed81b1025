"""Differences between arms that were compared in a net of matched pairs: control with treatment, control with repair,
base with each corner of a crossover. What two of them differ by follows from the comparisons that connect them.

Each comparison has matched runs of its own, so their estimates are independent. The arms' log values are fitted to
them by weighted least squares; any contrast of the arms is then a weighted sum of the estimates, with the variance
and, by Satterthwaite's formula, the degrees of freedom of that sum. Ratios of contrasts have Fieller's interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from atom.diag.compare.statistics import Estimate
from atom.diag.compare.student_t import t_quantile

__all__ = ["Contrast", "Network", "Ratio"]

FloatArray = npt.NDArray[np.float64]
SMALLEST_SE: Final = 1e-9
"""Of a log ratio. Recorded figures that are equal to the last digit have no spread; weights need some."""
NARROWEST: Final = 1e-4
"""A standard error below this share of the largest one counts as this: the fit stays well conditioned."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """A difference of log values."""

    value: float
    se: float
    df: float
    """Infinite where the spread is known from within the runs alone."""

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        half = t_quantile(0.5 + level / 2, self.df) * self.se
        return self.value - half, self.value + half


@dataclass(frozen=True, slots=True)
class Ratio:
    """A contrast over another one."""

    value: float
    low: float
    high: float
    """±inf where the denominator is not told from zero: then the ratio can be anything."""

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


class Network:
    """`estimates`: log(head / base) of each comparison by (base, head); those without an interval are left out."""

    def __init__(self, estimates: Mapping[tuple[str, str], Estimate]) -> None:
        self._pairs = [pair for pair, one in estimates.items() if math.isfinite(one.mean) and math.isfinite(one.se)]
        self._found = [estimates[pair] for pair in self._pairs]
        self._arms = sorted({arm for pair in self._pairs for arm in pair})

    def difference(self, head: str, base: str) -> Contrast | None:
        """log(head / base); None where no comparisons connect them."""
        return self.contrast({head: 1.0, base: -1.0})

    def contrast(self, coefficients: Mapping[str, float]) -> Contrast | None:
        """Σ coefficient × log value of the arm; the coefficients' sum is 0."""
        weights = self._weights(coefficients)
        if weights is None:
            return None
        means = np.array([one.mean for one in self._found])
        return Contrast(float(weights @ means), *self._spread(weights))

    def ratio(self, above: Mapping[str, float], below: Mapping[str, float], level: float = 0.95) -> Ratio | None:
        """One contrast over another, which may share comparisons with it. Fieller (1954): the interval is the set of
        ratios r for which `above − r × below` is not told from zero."""
        top, bottom = self._weights(above), self._weights(below)
        if top is None or bottom is None:
            return None
        means, variances = np.array([one.mean for one in self._found]), self._variances()
        a, b = float(top @ means), float(bottom @ means)
        if b == 0.0:
            return None
        _, df = self._spread(top - a / b * bottom)
        t2 = t_quantile(0.5 + level / 2, df) ** 2
        v11, v12, v22 = (
            float((one * other) @ variances) for one, other in ((top, top), (top, bottom), (bottom, bottom))
        )
        leading = b * b - t2 * v22
        root = (a * b - t2 * v12) ** 2 - leading * (a * a - t2 * v11)
        if leading <= 0 or root < 0:
            return Ratio(a / b, -math.inf, math.inf)
        middle, half = (a * b - t2 * v12) / leading, math.sqrt(root) / leading
        return Ratio(a / b, middle - half, middle + half)

    def _weights(self, coefficients: Mapping[str, float]) -> FloatArray | None:
        """Of each comparison's estimate; None where the comparisons do not tell."""
        if not self._pairs or any(arm not in self._arms for arm, one in coefficients.items() if one):
            return None
        assert abs(sum(coefficients.values())) < 1e-9
        place = {arm: index for index, arm in enumerate(self._arms)}
        incidence = np.zeros((len(self._pairs), len(self._arms)))
        for row, (base, head) in enumerate(self._pairs):
            incidence[row, place[base]], incidence[row, place[head]] = -1.0, 1.0
        wanted = np.zeros(len(self._arms))
        for arm, one in coefficients.items():
            if one:
                wanted[place[arm]] = one
        precision = 1.0 / self._variances()
        laplacian = incidence.T @ (precision[:, None] * incidence)
        scale = float(np.abs(laplacian).max())
        weights: FloatArray = precision * (incidence @ (np.linalg.pinv(laplacian / scale) @ wanted)) / scale
        return weights if np.allclose(incidence.T @ weights, wanted, atol=1e-6) else None

    def _variances(self) -> FloatArray:
        errors = np.array([one.se for one in self._found])
        return np.asarray(np.maximum(errors, max(SMALLEST_SE, NARROWEST * float(errors.max()))) ** 2)

    def _spread(self, weights: FloatArray) -> tuple[float, float]:
        """Standard error and degrees of freedom of a weighted sum (Satterthwaite 1946)."""
        parts = weights**2 * self._variances()
        total = float(parts.sum())
        lost = sum(part * part / one.df for part, one in zip(parts, self._found, strict=True) if _limited(one.df))
        return math.sqrt(total), total * total / lost if lost > 0 else math.inf


def _limited(df: float) -> bool:
    return math.isfinite(df) and df > 0
