"""A histogram that costs a bisection per observation. A prometheus-client one takes a lock and walks its buckets,
1 to 2 µs each, which at 40,000 tokens a second and several families would be a tenth of the API process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import Final

from prometheus_client.utils import floatToGoString

# vLLM's buckets, so that dashboards made for it work: vllm/v1/metrics/loggers.py.
TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
FINE_ITL_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, *ITL_BUCKETS)
"""Of the `atom:` family: decode steps of a few milliseconds all fall into vLLM's first bucket."""
REQUEST_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_BUCKETS: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
OVERHEAD_BUCKETS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
LAG_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
ITERATION_BUCKETS: Final = (1.0, 8.0, *(float(1 << power) for power in range(4, 15)))
N_BUCKETS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to the context length."""
    buckets: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > max_model_len:
                return tuple(buckets) or (1.0,)
            buckets.append(float(mantissa * scale))
        scale *= 10


@cache
def _le(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text


class Histogram:
    """Counts by upper bound (inclusive, as Prometheus' `le`). One thread observes; others may take snapshots."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of what was observed."""

    def observe(self, value: float, weight: int = 1) -> None:
        """Count `value` as often as `weight` says."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self.total += value * weight

    def plus(self, other: Histogram) -> Histogram:
        """Both together; the bounds must be the same."""
        assert self._bounds == other._bounds
        both = Histogram(self._bounds)
        both._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        both.total = self.total + other.total
        return both

    def rebinned(self, bounds: Sequence[float]) -> Histogram:
        """The same observations by fewer bounds, each of which must be one of ours."""
        coarse = Histogram(bounds)
        coarse.total = self.total
        for bound, count in zip([*self._bounds, float("inf")], self._counts.copy(), strict=True):
            coarse._counts[bisect_left(coarse._bounds, bound)] += count
        return coarse

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by `le`, the last is +Inf: what `HistogramMetricFamily` takes."""
        cumulative = 0
        rows: list[tuple[str, float]] = []
        bounds = [*self._bounds, float("inf")]
        for bound, count in zip(bounds, self._counts.copy(), strict=True):
            cumulative += count
            rows.append((_le(bound), float(cumulative)))
        return rows
