"""Does a noisy series rise? A robust slope, its interval, and whether the rise is spread over the whole span.

What is measured on a server is no independent noise: neighbouring points are alike (a busy machine stays busy), and
memory moves in steps. So: points are pooled into at most 48 groups in time; the slope is the median of the slopes
between all pairs of groups (Theil and Sen), which a few wild groups do not move; and its interval is a circular block
bootstrap of the residuals, whose blocks keep neighbours together.

One step of an allocator has a slope too, and is no growth. So a rise is called steady if a line describes it better
than any one step does, and if each quarter of the span lies above the one before as far as the noise lets that be seen.
A quarter of noisy points may come out a little low in a rise that is real, one of quiet points may not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist
from typing import Any, Final, Literal

import numpy as np

from atom.diag.server_captures import FloatArray

__all__ = ["CONFIDENCE", "Pool", "Shape", "Trend", "fit_trend"]

Pool = Literal["median", "mean"]


class Shape(StrEnum):
    """How a rise is spread over the span."""

    STEADY = "steady"
    STEP = "step"
    """Most of it at one moment, as far as can be told."""
    UNEVEN = "uneven"
    """Some part of the span stands still or falls."""


CONFIDENCE: Final = 0.995
"""Level of the interval. About nine quantities are judged in a run, and of twenty runs of a flat server together at
most one verdict may be wrong."""
MOST_GROUPS: Final = 48
RESAMPLES: Final = 1000
FEW: Final = 12
LEAST_PART: Final = 0.05
"""Of the rise between the first and the last quarter, that each of the three steps between quarters has to bring. A
straight line brings a third each, a rise that only accelerates much less at first, a single step one of all."""
NOISE: Final = 2.0
"""Standard errors of a step between two quarters, by which noise may make it look smaller."""
ENDS: Final = 1 / 6
"""Of the points: what `Trend.first` and `Trend.last` are taken from."""


@dataclass(frozen=True, slots=True)
class Trend:
    slope: float
    low: float
    high: float
    """Interval of the slope at CONFIDENCE."""
    first: float
    last: float
    """What was seen in the first and in the last sixth of the points, pooled; no fitted values."""
    shape: Shape
    blocks: int
    """Blocks in a bootstrap sample."""


def fit_trend(x: FloatArray, y: FloatArray, rng: np.random.Generator, *, pool: Pool = "median") -> Trend | None:
    """Trend of `y` over `x`, both in the order of time, x ascending; None if x does not move or points are too few.

    `pool`: how points become one: their median, or their mean where rare large values are what counts.
    """
    assert len(x) == len(y)
    if len(x) < 4 or x[-1] <= x[0]:
        return None
    groups = np.array_split(np.arange(len(x)), min(len(x), MOST_GROUPS))
    centre = _CENTRES[pool]
    at = np.array([x[group].mean() for group in groups])
    value = np.array([centre(y[group]) for group in groups])
    i, j = np.triu_indices(len(at), 1)
    apart = at[j] > at[i]
    i, j = i[apart], j[apart]
    if not len(i):
        return None
    run = at[j] - at[i]
    slope = float(np.median((value[j] - value[i]) / run))
    offset = float(np.median(value - slope * at))
    residuals = value - (slope * at + offset)
    samples, blocks = _resample(residuals, rng)
    if np.ptp(residuals) > 0:
        slopes = slope + np.median((samples[:, j] - samples[:, i]) / run, axis=1)
    else:
        slopes = np.full(RESAMPLES, slope)  # what does not move needs no resampling
    end = math.ceil(ENDS * len(y))
    tail = (1 - CONFIDENCE) / 2
    # Few blocks show too little of how much a slope varies: widen as Student's t does, a straight line taking two.
    low, high = slope + (np.quantile(slopes, [tail, 1 - tail]) - slope) * _widening(max(blocks - 2, 3))
    return Trend(
        slope=slope,
        low=float(low),
        high=float(high),
        first=float(centre(y[:end])),
        last=float(centre(y[-end:])),
        shape=_shape(at, value, pool),
        blocks=blocks,
    )


def _widening(freedom: int) -> float:
    """Quantile of Student's t at CONFIDENCE ÷ that of the normal distribution (Abramowitz and Stegun 26.7.5)."""
    z, v = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), freedom
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    return (t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)) / z


def _resample(residuals: FloatArray, rng: np.random.Generator) -> tuple[FloatArray, int]:
    """Circular block bootstrap: (resamples, n). Blocks of √n, of one where the points are few (single passes)."""
    n = len(residuals)
    length = math.ceil(math.sqrt(n)) if n > FEW else 1
    blocks = math.ceil(n / length)
    starts = rng.integers(0, n, size=(RESAMPLES, blocks))
    index = (starts[:, :, None] + np.arange(length)) % n
    picked: FloatArray = residuals[index.reshape(RESAMPLES, -1)[:, :n]]
    return picked * math.sqrt(n / max(n - 2, 1)), blocks


def _shape(at: FloatArray, value: FloatArray, pool: Pool) -> Shape:
    """Of pooled values in the order of time."""
    n = len(value)
    quarters = np.array([_CENTRES[pool](part) for part in np.array_split(value, 4)])
    rise = quarters[-1] - quarters[0]
    # The noise from differences of neighbours: a step, or a few, do not show in their median.
    differences = np.diff(value)
    noise = _MAD * float(np.median(np.abs(differences - np.median(differences)))) / math.sqrt(2)
    error = noise * math.sqrt(2 * 4 / n) * (_MEDIANS_ERROR if pool == "median" else 1.0)
    if rise <= 0 or np.any(np.diff(quarters) < LEAST_PART * rise - NOISE * error):
        return Shape.STEP if rise > 0 and not _line_is_better(at, value) else Shape.UNEVEN
    return Shape.STEADY if _line_is_better(at, value) else Shape.STEP


_CENTRES: Final[Mapping[Pool, Callable[[FloatArray], np.floating[Any]]]] = {"median": np.median, "mean": np.mean}
_MAD: Final = 1.4826
"""Standard deviation ÷ median absolute deviation, of normal noise."""
_MEDIANS_ERROR: Final = 1.2533
"""Standard error of a median ÷ that of a mean, of normal noise."""


def _line_is_better(at: FloatArray, value: FloatArray) -> bool:
    """Whether a line describes the values better than one step at the best moment, by Schwarz's criterion: the step has
    a parameter more."""
    n = len(value)
    from_line = np.sum((value - np.polyval(np.polyfit(at, value, 1), at)) ** 2)
    centred = value - value.mean()
    before, sums = np.arange(1, n), np.cumsum(centred)[:-1]
    from_step = np.sum(centred**2) - np.max(sums**2 / before + sums**2 / (n - before))
    return bool(from_line < from_step * n ** (1 / n))
