"""Arrivals: rates, patterns and ramps, met exactly and the same for the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.arrivals import ArrivalPattern, Arrivals, Ramp
from atom.recipes.errors import UsageError

rates = st.floats(0.01, 1e5)
ramps = st.builds(Ramp, st.sampled_from(("linear", "exponential")), rates, rates)


@given(st.integers(1, 500), ramps, st.integers(0, 99))
def test_a_ramp_ends_when_its_requests_are_expected_to(count: int, ramp: Ramp, seed: int) -> None:
    offsets = Arrivals(ramp=ramp).offsets_ns(count, seed)
    assert offsets is not None
    assert (np.diff(offsets) >= 0).all()
    assert offsets[0] >= 0
    assert offsets[-1] == pytest.approx(ramp.duration_s(count) * 1e9, rel=1e-6, abs=2)


@given(ramps)
def test_half_way_in_time_a_ramp_has_sent_what_its_rate_sums_to(ramp: Ramp) -> None:
    count = 100_000
    offsets = Arrivals(ramp=ramp, pattern=ArrivalPattern.CONSTANT).offsets_ns(count, 0)
    assert offsets is not None
    half = np.searchsorted(offsets / 1e9, ramp.duration_s(count) / 2)
    start, end = ramp.start_rps, ramp.end_rps
    middle = (start + end) / 2 if ramp.strategy == "linear" else math.sqrt(start * end)
    if ramp.strategy == "linear":
        assert half == pytest.approx((start + middle) / 2 * ramp.duration_s(count) / 2, rel=1e-3, abs=2)
    elif start != end:
        assert half == pytest.approx((middle - start) / (end - start) * count, rel=1e-3, abs=2)


def test_constant_arrivals_have_equal_gaps() -> None:
    offsets = Arrivals(request_rate=50, pattern=ArrivalPattern.CONSTANT).offsets_ns(10, 3)
    assert offsets is not None
    assert offsets.tolist() == [20_000_000 * (i + 1) for i in range(10)]


@pytest.mark.parametrize("bad", [{"pattern": ArrivalPattern.CONSTANT, "burstiness": 2.0}, {"burstiness": 0.0}])
def test_what_would_be_ignored_or_cannot_be_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="--burstiness"):
        Arrivals(request_rate=1, **bad)  # type: ignore[arg-type]
