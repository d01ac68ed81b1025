"""The slope test on series whose truth is known: noise of every kind does not grow, a line does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.diag.gc_profile.trend import fit_trend

RUNS = 20
Series = Callable[[np.random.Generator], Any]


def grows(series: Series, seed: int) -> bool:
    rng = np.random.default_rng(seed)
    y = series(rng)
    trend = fit_trend(np.linspace(0, 10, len(y)), y, rng)
    assert trend is not None
    assert trend.low <= trend.slope <= trend.high or trend.low == trend.high
    return trend.low > 0 and trend.steady


def white(rng: np.random.Generator) -> Any:
    return rng.normal(size=200)


def correlated(rng: np.random.Generator) -> Any:
    noise, y = rng.normal(size=200), np.zeros(200)
    for i in range(1, 200):
        y[i] = 0.9 * y[i - 1] + noise[i]
    return y


def sawtooth(rng: np.random.Generator) -> Any:
    return (np.arange(200) + rng.integers(40)) % 40 + rng.normal(size=200)


def one_step(rng: np.random.Generator) -> Any:
    return 100 + 5.0 * (np.arange(200) > rng.integers(200)) + rng.normal(size=200) * 0.01


def spikes(rng: np.random.Generator) -> Any:
    return 5 + 200 * (rng.random(200) < 0.05) * rng.exponential(size=200)


def few(rng: np.random.Generator) -> Any:
    return rng.lognormal(size=8)


@pytest.mark.parametrize("noise", [white, correlated, sawtooth, one_step, spikes, few], ids=lambda f: f.__name__)
def test_noise_rarely_grows(noise: Series) -> None:
    assert sum(grows(noise, seed) for seed in range(RUNS)) <= 1


@pytest.mark.parametrize("noise", [white, correlated, spikes], ids=lambda f: f.__name__)
def test_a_line_through_noise_always_grows(noise: Series) -> None:
    def rising(rng: np.random.Generator) -> Any:
        y = noise(rng)
        return y + np.linspace(0, 16 * np.std(y), len(y))

    assert all(grows(rising, seed) for seed in range(RUNS))


def test_passes_that_get_longer_by_a_quarter_each_grow() -> None:
    assert all(grows(lambda rng: 1.25 ** np.arange(8) * rng.uniform(0.95, 1.05, 8), seed) for seed in range(RUNS))


@settings(max_examples=25, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(-1e3, 1e3), st.integers(4, 60))
def test_a_straight_line_is_found_exactly(offset: float, slope: float, n: int) -> None:
    x = np.arange(n, dtype=float)
    trend = fit_trend(x, offset + slope * x, np.random.default_rng(0))
    assert trend is not None
    assert trend.slope == pytest.approx(slope, abs=1e-6)
    assert trend.first == pytest.approx(offset, abs=1e-5)


def test_nothing_to_fit() -> None:
    rng = np.random.default_rng(0)
    assert fit_trend(np.arange(3.0), np.arange(3.0), rng) is None
    assert fit_trend(np.ones(9), np.arange(9.0), rng) is None


def test_the_same_seed_gives_the_same_interval() -> None:
    x, y = np.arange(50.0), np.random.default_rng(1).normal(size=50)
    assert fit_trend(x, y, np.random.default_rng(5)) == fit_trend(x, y, np.random.default_rng(5))
