"""Does a noisy series rise? A robust slope, its interval, and whether the rise is spread over the whole span.

What is measured on a server is no independent noise: neighbouring points are alike (a busy machine stays busy), and
memory moves in steps. So: points are pooled into at most 48 groups in time; the slope is the median of the slopes
between all pairs of groups (Theil and Sen), which a few wild groups do not move; its interval is a circular block
bootstrap of the residuals, whose blocks keep neighbours together; and `steady` asks that each quarter of the span lies
above the one before, because one step of an allocator has a slope too, and is no growth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal

import numpy as np

from atom.diag.server_captures import FloatArray

__all__ = ["CONFIDENCE", "Trend", "fit_trend"]

CONFIDENCE: Final = 0.995
"""Level of the interval. About nine quantities are judged in a run, and of twenty runs of a flat server together at
most one verdict may be wrong."""
MOST_GROUPS: Final = 48
RESAMPLES: Final = 1000
FEW: Final = 12
LEAST_PART: Final = 0.05
"""Of the rise between the first and the last quarter, that each of the three steps between quarters has to bring. A
straight line brings a third each, a rise that only accelerates much less at first, a single step one of all."""


@dataclass(frozen=True, slots=True)
class Trend:
    slope: float
    low: float
    high: float
    """Interval of the slope at CONFIDENCE."""
    first: float
    last: float
    """The fitted line at both ends."""
    steady: bool
    blocks: int
    """Blocks in a bootstrap sample."""


def fit_trend(
    x: FloatArray, y: FloatArray, rng: np.random.Generator, *, pool: Literal["median", "mean"] = "median"
) -> Trend | None:
    """Trend of `y` over `x`, both in the order of time, x ascending; None if x does not move or points are too few.

    `pool`: how the points of a group become one: their median, or their mean where rare large values are what counts.
    """
    assert len(x) == len(y)
    if len(x) < 4 or x[-1] <= x[0]:
        return None
    groups = np.array_split(np.arange(len(x)), min(len(x), MOST_GROUPS))
    centre = np.median if pool == "median" else np.mean
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
    tail = (1 - CONFIDENCE) / 2
    # Few blocks show too little of how much a slope varies: widen as Student's t does, a straight line taking two.
    low, high = slope + (np.quantile(slopes, [tail, 1 - tail]) - slope) * _widening(max(blocks - 2, 3))
    return Trend(
        slope=slope,
        low=float(low),
        high=float(high),
        first=slope * float(x[0]) + offset,
        last=slope * float(x[-1]) + offset,
        steady=_is_steady(value, pool),
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


def _is_steady(value: FloatArray, pool: Literal["median", "mean"]) -> bool:
    centre = np.median if pool == "median" else np.mean
    quarters = np.array([centre(part) for part in np.array_split(value, 4)])
    steps = np.diff(quarters)
    rise = quarters[-1] - quarters[0]
    return bool(rise > 0 and np.all(steps >= LEAST_PART * rise))
