"""When requests are sent: offsets from the start of the measured phase, fixed before it begins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.recipes.errors import UsageError

__all__ = ["Arrivals"]

_STREAM = 2
"""Keeps these random numbers apart from the prompts' (`bench/random_load.py`)."""
MAX_SCHEDULE_S: Final = 10 * 365 * 86400.0
"""Arrivals are nanoseconds in 64 bits; this is far inside, and beyond what anybody waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """The arrival process of a load."""

    request_rate: float = math.inf
    """Requests per second; inf: as fast as the concurrency lets through."""
    burstiness: float = 1.0
    """Shape of the gamma distributed gaps: 1 is Poisson, below 1 burstier, above 1 more even."""

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise UsageError(f"--request-rate must be positive or inf, got {self.request_rate:g}")
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            raise UsageError(f"--burstiness must be positive, got {self.burstiness:g}")

    def check(self, count: int) -> None:
        """UsageError if `count` requests cannot be scheduled."""
        if count / self.request_rate > MAX_SCHEDULE_S:
            raise UsageError(f"--request-rate {self.request_rate:g}: {count:,} requests would take more than ten years")

    def offsets_ns(self, count: int, seed: int) -> npt.NDArray[np.int64] | None:
        """[count] nanoseconds, ascending; None for an infinite rate (no schedule).

        Gaps are gamma distributed with shape `burstiness` and mean 1/`request_rate` (1: exponential gaps, a Poisson
        process), then scaled together so that the last request is due at exactly count/rate: the requested rate is met
        on average in every run, not only over many.
        """
        if math.isinf(self.request_rate):
            return None
        rate, shape = self.request_rate, self.burstiness
        gaps = np.random.default_rng([seed, _STREAM]).gamma(shape, 1.0 / (rate * shape), count)
        offsets = np.cumsum(gaps)
        if offsets[-1] > 0:
            offsets *= (count / rate) / offsets[-1]
        return np.rint(offsets * 1e9).astype(np.int64)

    def describe(self) -> dict[str, Any]:
        return {
            "request_rate": self.request_rate if math.isfinite(self.request_rate) else "inf",
            "burstiness": self.burstiness,
        }
