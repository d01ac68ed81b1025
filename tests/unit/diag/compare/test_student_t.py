"""Student's t against tables, closed forms, and numpy's own random numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.diag.compare.student_t import incomplete_beta, t_quantile, t_two_sided_p


def t_cdf(t: float, df: float) -> float:
    """P(T <= t)."""
    tail = t_two_sided_p(t, df) / 2.0
    return tail if t < 0 else 1.0 - tail


@pytest.mark.parametrize(
    ("q", "df", "expected"),
    [
        (0.975, 1, 12.7062047362),
        (0.975, 2, 4.3026527297),
        (0.975, 3, 3.1824463053),
        (0.975, 4, 2.7764451052),
        (0.995, 10, 3.1692726726),
        (0.9995, 5, 6.8688266259),
        (0.9, 30, 1.3104150254),
        (0.975, 120, 1.9799304051),
        (0.975, math.inf, 1.9599639845),
    ],
)
def test_quantiles_are_those_of_the_tables(q: float, df: float, expected: float) -> None:
    assert t_quantile(q, df) == pytest.approx(expected, rel=1e-9)
    assert t_quantile(1.0 - q, df) == pytest.approx(-expected, rel=1e-9)


@pytest.mark.parametrize("t", [0.0, 0.01, 0.7, 3.0, 31.0, 1e4, 1e8])
def test_one_and_two_degrees_of_freedom_have_closed_forms(t: float) -> None:
    assert t_two_sided_p(t, 1) == pytest.approx(2.0 * math.atan2(1.0, t) / math.pi, rel=1e-10)
    root = math.sqrt(t * t + 2.0)
    assert t_two_sided_p(t, 2) == pytest.approx(2.0 / (root * (root + t)), rel=1e-10)  # 1 - t/root without cancellation
    assert t_two_sided_p(-t, 2) == t_two_sided_p(t, 2)


@pytest.mark.parametrize(
    ("a", "b", "x", "expected"),
    [(1.0, 1.0, 0.3, 0.3), (2.0, 3.0, 0.4, 0.5248), (0.5, 0.5, 0.25, 1.0 / 3.0), (5.0, 1.0, 0.9, 0.59049)],
)
def test_the_incomplete_beta_function_has_its_known_values(a: float, b: float, x: float, expected: float) -> None:
    assert incomplete_beta(a, b, x) == pytest.approx(expected, rel=1e-12)
    assert incomplete_beta(b, a, 1.0 - x) == pytest.approx(1.0 - expected, rel=1e-12)


@pytest.mark.parametrize("df", [2, 3, 7, 24])
def test_it_agrees_with_random_numbers(df: int) -> None:
    draws = np.random.default_rng(df).standard_t(df, 200_000)
    for t in (-2.5, -0.4, 0.0, 1.0, 3.0):
        expected = t_cdf(t, df)
        assert abs(np.mean(draws <= t) - expected) < 4.0 * math.sqrt(expected * (1 - expected) / len(draws))


@settings(deadline=None)
@given(q=st.floats(1e-9, 1 - 1e-9), df=st.one_of(st.floats(0.5, 5_000), st.just(math.inf)))
def test_quantile_and_distribution_are_inverse(q: float, df: float) -> None:
    assert t_cdf(t_quantile(q, df), df) == pytest.approx(q, rel=1e-6, abs=1e-12)


def test_the_ends() -> None:
    assert t_two_sided_p(math.inf, 3) == 0.0
    assert t_two_sided_p(0.0, 3) == 1.0
    assert t_quantile(0.5, 3) == 0.0
    assert incomplete_beta(2.0, 3.0, 0.0) == 0.0
    assert incomplete_beta(2.0, 3.0, 1.0) == 1.0


@pytest.mark.parametrize("call", [lambda: t_quantile(1.0, 3), lambda: t_quantile(0.5, 0), lambda: t_two_sided_p(1, -1)])
def test_what_cannot_be_is_refused(call: object) -> None:
    with pytest.raises(ValueError):
        call()  # type: ignore[operator]
