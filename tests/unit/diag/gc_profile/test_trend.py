"""The slope test on series whose truth is known: noise of every kind does not grow, a line does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.diag.gc_profile.trend import Shape, fit_trend

RUNS = 20
Series = Callable[[np.random.Generator], Any]


def grows(series: Series, seed: int) -> bool:
    rng = np.random.default_rng(seed)
    y = series(rng)
    trend = fit_trend(np.linspace(0, 10, len(y)), y, rng)
    assert trend is not None
    assert trend.low <= trend.slope <= trend.high or trend.low == trend.high
    return trend.low > 0 and trend.shape is Shape.STEADY


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


def noisy_step(rng: np.random.Generator) -> Any:
    return 100 + 5.0 * (np.arange(200) > rng.integers(200)) + rng.normal(size=200) * 3


def step_of_a_busy_machine(rng: np.random.Generator) -> Any:
    return correlated(rng) + 8.0 * (np.arange(200) > rng.integers(200))


def two_steps(rng: np.random.Generator) -> Any:
    """Both in the middle half, where they look most like a line."""
    first, second = rng.integers(50, 150, size=2)
    return 100 + 5.0 * (np.arange(200) > first) + 5.0 * (np.arange(200) > second) + rng.normal(size=200) * 0.01


def step_of_few(rng: np.random.Generator) -> Any:
    return 100 + 5.0 * (np.arange(10) > rng.integers(10)) + rng.normal(size=10)


def spikes(rng: np.random.Generator) -> Any:
    return 5 + 200 * (rng.random(200) < 0.05) * rng.exponential(size=200)


def few(rng: np.random.Generator) -> Any:
    return rng.lognormal(size=8)


NO_GROWTH = (
    *(white, correlated, sawtooth, one_step, noisy_step, step_of_a_busy_machine, two_steps, step_of_few, spikes, few),
)


@pytest.mark.parametrize("noise", NO_GROWTH, ids=lambda f: f.__name__)
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


def of_mixed_kinds(rng: np.random.Generator) -> Any:
    """Pauses that get longer; some passes have little to walk."""
    return np.linspace(10, 70, 105) * np.where(rng.random(105) < 0.3, 0.5, 1) * rng.lognormal(0, 0.15, 105)


def slowing_down(rng: np.random.Generator) -> Any:
    return 60 * np.sqrt(np.linspace(0.02, 1, 105)) * rng.lognormal(0, 0.2, 105)


def speeding_up(rng: np.random.Generator) -> Any:
    return np.linspace(1, 8, 200) ** 2 * rng.lognormal(0, 0.1, 200)


@pytest.mark.parametrize("rise", [of_mixed_kinds, slowing_down, speeding_up], ids=lambda f: f.__name__)
def test_what_keeps_rising_grows_however_the_points_scatter(rise: Series) -> None:
    assert sum(grows(rise, seed) for seed in range(RUNS)) >= RUNS - 1


# Groups of two gen-2 pauses in ms, of a server that kept a metric series per request.
MEASURED = (
    *(9.21, 13.73, 18.9, 18.25, 18.66, 23.23, 26.05, 29.69, 22.88, 36.67, 29.58, 46.74, 33.77, 36.79, 35.3, 37.49),
    *(50.76, 51.34, 40.03, 49.09, 48.56, 52.55, 55.46, 43.09, 47.86, 41.22, 42.67, 56.25, 45.96, 42.68, 43.12, 44.27),
    *(49.27, 54.98, 57.19, 47.51, 52.25, 61.74, 70.29, 79.83, 51.55, 58.83, 51.82, 56.56, 65.67, 61.21, 78.49, 76.3),
)


def test_a_quarter_that_comes_out_low_by_noise_does_not_hide_a_rise() -> None:
    assert grows(lambda _: np.array(MEASURED), 0)
    quiet = np.repeat([20.0, 45.0, 45.0, 60.0], 12)
    assert not grows(lambda _: quiet, 0)


def test_the_ends_are_what_was_seen() -> None:
    """A line through a rise that accelerates begins below zero; a share does not."""
    y = np.linspace(0, 1, 60) ** 4
    trend = fit_trend(np.arange(60.0), y, np.random.default_rng(0), pool="mean")
    assert trend is not None
    assert trend.first == pytest.approx(y[:10].mean())
    assert trend.last == pytest.approx(y[-10:].mean())
    wild = fit_trend(np.arange(60.0), np.where(np.arange(60) == 3, 1e6, 5.0), np.random.default_rng(0))
    assert wild is not None
    assert (wild.first, wild.last) == (5, 5)


@settings(max_examples=25, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(-1e3, 1e3), st.integers(4, 60))
def test_a_straight_line_is_found_exactly(offset: float, slope: float, n: int) -> None:
    x = np.arange(n, dtype=float)
    trend = fit_trend(x, offset + slope * x, np.random.default_rng(0))
    assert trend is not None
    assert trend.slope == pytest.approx(slope, abs=1e-6)
    assert trend.last - trend.first == pytest.approx(slope * (n - math.ceil(n / 6)), abs=1e-5)


def test_nothing_to_fit() -> None:
    rng = np.random.default_rng(0)
    assert fit_trend(np.arange(3.0), np.arange(3.0), rng) is None
    assert fit_trend(np.ones(9), np.arange(9.0), rng) is None


def test_the_same_seed_gives_the_same_interval() -> None:
    x, y = np.arange(50.0), np.random.default_rng(1).normal(size=50)
    assert fit_trend(x, y, np.random.default_rng(5)) == fit_trend(x, y, np.random.default_rng(5))
