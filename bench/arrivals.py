"""When requests are sent: offsets from the start of the measured phase, fixed before it begins.

All processes of a load compute the whole schedule and take their own requests from it, so it is the same however many
they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.recipes.errors import UsageError

__all__ = ["ArrivalPattern", "Arrivals", "Ramp"]

FloatArray = npt.NDArray[np.float64]

_STREAM = 2
"""Keeps these random numbers apart from the prompts' (`bench/random_load.py`)."""
MAX_SCHEDULE_S: Final = 10 * 365 * 86400.0
"""Arrivals are nanoseconds in 64 bits; this is far inside, and beyond what anybody waits for."""


class ArrivalPattern(StrEnum):
    POISSON = "poisson"
    """Exponential gaps: requests of many independent users."""
    GAMMA = "gamma"
    """Gamma distributed gaps of shape `burstiness`."""
    CONSTANT = "constant"
    """Equal gaps."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """The request rate changes in the course of the load, linearly or exponentially in time."""

    strategy: str
    """`linear` or `exponential`."""
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.strategy not in ("linear", "exponential"):
            raise UsageError(f"--ramp-up-strategy must be linear or exponential, got {self.strategy!r}")
        for flag, value in (("--ramp-up-start-rps", self.start_rps), ("--ramp-up-end-rps", self.end_rps)):
            if not (value > 0 and math.isfinite(value)):
                raise UsageError(f"{flag} must be positive and finite, got {value:g}")

    def duration_s(self, count: int) -> float:
        """How long `count` requests take."""
        start, end = self.start_rps, self.end_rps
        if self.strategy == "linear" or start == end:
            return 2 * count / (start + end)
        return count * math.log(end / start) / (end - start)

    def rate_at(self, share: float) -> float:
        """Requests per second when this share (0 … 1) of the ramp's time is over."""
        if self.strategy == "linear":
            return self.start_rps + share * (self.end_rps - self.start_rps)
        return float(self.start_rps * (self.end_rps / self.start_rps) ** share)

    def times_s(self, positions: FloatArray, count: int) -> FloatArray:
        """When the expected number of requests so far is `positions` (0 … count): the inverse of the integral of the
        rate. Positions of a process of rate 1 become arrivals of the process with this rate (time rescaling)."""
        start, end, duration = self.start_rps, self.end_rps, self.duration_s(count)
        if start == end:
            return positions / start
        if self.strategy == "linear":
            slope = (end - start) / duration
            inside = np.maximum(0.0, start * start + 2 * slope * positions)
            return np.asarray(2 * positions / (start + np.sqrt(inside)), dtype=np.float64)
        growth = math.log(end / start) / duration
        return np.asarray(np.log1p(positions * growth / start) / growth, dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """The arrival process of a load."""

    request_rate: float = math.inf
    """Requests per second; inf: as fast as the concurrency lets through. With a ramp: its mean."""
    pattern: ArrivalPattern = ArrivalPattern.GAMMA
    burstiness: float = 1.0
    """Shape of the gamma distributed gaps: 1 is Poisson, below 1 burstier, above 1 more even."""
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise UsageError(f"--request-rate must be positive or inf, got {self.request_rate:g}")
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            raise UsageError(f"--burstiness must be positive, got {self.burstiness:g}")
        if self.pattern is not ArrivalPattern.GAMMA and self.burstiness != 1:
            raise UsageError(
                f"--burstiness is the shape of gamma distributed gaps, --arrival-pattern is {self.pattern}"
            )

    @property
    def scheduled(self) -> bool:
        return self.ramp is not None or math.isfinite(self.request_rate)

    def check(self, count: int) -> None:
        """UsageError if `count` requests cannot be scheduled."""
        if self.scheduled and self._duration_s(count) > MAX_SCHEDULE_S:
            raise UsageError(
                f"--request-rate {count / self._duration_s(count):g}: {count:,} requests would take more than ten years"
            )

    def due_within(self, duration_s: float) -> int | None:
        """How many requests are due before that time is over; None without a schedule."""
        if not self.scheduled:
            return None
        mean = self.request_rate if self.ramp is None else 1 / self.ramp.duration_s(1)
        # A hair less, for a product that should be a whole number and is more by rounding: that one would be due when
        # nothing is started any more.
        return math.ceil(mean * duration_s * (1 - 1e-12)) - 1

    def offsets_ns(self, count: int, seed: int) -> npt.NDArray[np.int64] | None:
        """[count] nanoseconds, ascending; None for an infinite rate (no schedule).

        Gaps are drawn with mean 1, then scaled together so that the last request is due exactly when `count` requests
        are expected: the requested rate is met on average in every run, not only over many.
        """
        if not self.scheduled:
            return None
        positions: FloatArray
        if self.pattern is ArrivalPattern.CONSTANT:
            positions = np.arange(1, count + 1, dtype=np.float64)
        else:
            shape = self.burstiness
            gaps = np.random.default_rng([seed, _STREAM]).gamma(shape, 1.0 / shape, count)
            positions = np.cumsum(gaps)
            if positions[-1] > 0:
                positions *= count / positions[-1]
        times = positions / self.request_rate if self.ramp is None else self.ramp.times_s(positions, count)
        return np.rint(times * 1e9).astype(np.int64)

    def describe(self) -> dict[str, Any]:
        ramp = self.ramp
        return {
            "request_rate": self.request_rate if math.isfinite(self.request_rate) else "inf",
            "arrival_pattern": str(self.pattern) if self.scheduled else None,
            "burstiness": self.burstiness,
            "ramp": None
            if ramp is None
            else {"strategy": ramp.strategy, "start_rps": ramp.start_rps, "end_rps": ramp.end_rps},
        }

    def _duration_s(self, count: int) -> float:
        return count / self.request_rate if self.ramp is None else self.ramp.duration_s(count)
