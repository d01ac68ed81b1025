"""When requests are sent: offsets from the start of the measured phase, fixed before it begins."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["arrival_offsets_ns"]

_STREAM = 2
"""Keeps these random numbers apart from the prompts' (`bench/random_load.py`)."""


def arrival_offsets_ns(count: int, rate: float, burstiness: float, seed: int) -> npt.NDArray[np.int64] | None:
    """[count] nanoseconds, ascending; None for an infinite rate (no schedule).

    Gaps are gamma distributed with shape `burstiness` and mean 1/`rate` (1: exponential gaps, a Poisson process), then
    scaled together so that the last request is due at exactly count/rate: the requested rate is met on average in every
    run, not only over many.
    """
    if math.isinf(rate):
        return None
    rng = np.random.default_rng([seed, _STREAM])
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), count)
    offsets = np.cumsum(gaps)
    if offsets[-1] > 0:
        offsets *= (count / rate) / offsets[-1]
    return np.rint(offsets * 1e9).astype(np.int64)
