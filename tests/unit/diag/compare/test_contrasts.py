"""Contrasts in a net of comparisons, against least squares by hand, and Fieller's interval against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atom.diag.compare.contrasts import Network
from atom.diag.compare.statistics import Estimate
from atom.diag.compare.student_t import t_quantile


def found(mean: float, se: float, n: int = 3) -> Estimate:
    df = float(n - 1) if n > 1 else math.inf
    half = t_quantile(0.975, df) * se
    return Estimate(mean=mean, se=se, df=df, low=mean - half, high=mean + half, n=n, p=0.5, level=0.95)


def test_one_comparison_is_itself() -> None:
    one = Network({("base", "head"): found(0.02, 0.004)}).difference("head", "base")
    assert one is not None
    assert (one.value, one.se, one.df) == pytest.approx((0.02, 0.004, 2.0))
    assert one.interval() == pytest.approx((0.02 - 4.302652730 * 0.004, 0.02 + 4.302652730 * 0.004))


def test_direction_is_of_the_asked_difference() -> None:
    one = Network({("base", "head"): found(0.02, 0.004)}).difference("base", "head")
    assert one is not None
    assert one.value == pytest.approx(-0.02)


def test_a_star_adds_variances() -> None:
    net = Network({("c", "t"): found(-0.5, 0.03), ("c", "d"): found(-0.4, 0.04)})
    one = net.difference("d", "t")
    assert one is not None
    assert (one.value, one.se) == pytest.approx((0.1, 0.05))
    assert one.df == pytest.approx((0.03**2 + 0.04**2) ** 2 / (0.03**4 / 2 + 0.04**4 / 2))  # Welch and Satterthwaite


def test_two_ways_to_a_difference_are_weighted_by_their_precision() -> None:
    """Straight with se 1, round with se² 2 + 2 = 4: weights 4/5 and 1/5."""
    net = Network(
        {("a", "b"): found(1.0, 1.0), ("a", "c"): found(0.0, math.sqrt(2)), ("c", "b"): found(2.0, math.sqrt(2))}
    )
    one = net.difference("b", "a")
    assert one is not None
    assert one.value == pytest.approx(0.8 * 1.0 + 0.2 * 2.0)
    assert one.se**2 == pytest.approx(0.8)


def test_what_nothing_connects_is_not_known() -> None:
    net = Network({("a", "b"): found(0.1, 0.01), ("c", "d"): found(0.1, 0.01)})
    assert net.difference("c", "a") is None
    assert net.difference("e", "a") is None
    assert net.contrast({"b": 1.0, "d": 1.0, "a": -1.0, "c": -1.0}) is not None
    assert Network({}).difference("a", "b") is None


def test_an_estimate_without_an_interval_connects_nothing() -> None:
    net = Network(
        {("a", "b"): found(0.1, math.nan), ("a", "c"): found(math.nan, 0.1), ("a", "d"): found(0.1, math.inf)}
    )
    assert net.difference("b", "a") is net.difference("c", "a") is net.difference("d", "a") is None


def test_figures_without_spread_are_fitted() -> None:
    net = Network({("a", "b"): found(0.1, 0.0), ("a", "c"): found(0.3, 0.01)})
    one = net.difference("c", "b")
    assert one is not None
    assert one.value == pytest.approx(0.2)
    assert one.se == pytest.approx(0.01, rel=1e-3)


def test_share_of_a_gap() -> None:
    net = Network({("c", "t"): found(-0.67, 0.005, n=9), ("c", "d"): found(-0.646, 0.005, n=9)})
    share = net.ratio({"d": 1.0, "t": -1.0}, {"c": 1.0, "t": -1.0})
    assert share is not None
    assert share.bounded
    assert share.value == pytest.approx(0.024 / 0.67)
    assert 0.0 < share.low < share.value < share.high < 0.07


def test_share_of_no_gap_is_unbounded() -> None:
    net = Network({("c", "t"): found(-0.001, 0.005), ("c", "d"): found(-0.646, 0.005)})
    share = net.ratio({"d": 1.0, "t": -1.0}, {"c": 1.0, "t": -1.0})
    assert share is not None
    assert not share.bounded


def test_fiellers_interval_covers_the_share() -> None:
    """Control, treatment, discriminator with a true share of 0.3; three pairs each with scatter of 4% of a 20% gap."""
    rng = np.random.default_rng(5)
    draws, gap, share, sd, n = 2000, 0.20, 0.3, 0.008, 3
    inside = 0
    for _ in range(draws):
        treatment, factor = (rng.normal(mean, sd, n) for mean in (-gap, -gap * (1 - share)))
        net = Network(
            {
                ("c", name): found(float(np.mean(x)), float(np.std(x, ddof=1)) / math.sqrt(n))
                for name, x in (("t", treatment), ("d", factor))
            }
        )
        one = net.ratio({"d": 1.0, "t": -1.0}, {"c": 1.0, "t": -1.0})
        assert one is not None
        inside += one.low <= share <= one.high
    assert 0.94 <= inside / draws <= 0.995
