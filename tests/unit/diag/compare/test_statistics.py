"""Estimates over pairs, their helpers, and what missing runs do to them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.diag.compare.statistics import (
    Effects,
    asymmetry,
    effects_of,
    estimate,
    half_effects,
    holm,
    noise_floor,
    outliers,
    pairs_needed,
)
from atom.diag.compare.student_t import t_quantile

NAN = math.nan


def effects(rows: list[list[float]], within: float = NAN) -> Effects:
    return Effects(np.array(rows, dtype=np.float64).reshape(-1, 2), np.full(len(rows), within))


def test_three_pairs_by_hand() -> None:
    found = estimate(effects([[0.01, 0.03], [0.02, 0.04], [0.03, 0.05]]))  # pair means 0.02, 0.03, 0.04
    assert (found.n, found.df) == (3, 2.0)
    assert found.mean == pytest.approx(0.03)
    assert found.se == pytest.approx(0.01 / math.sqrt(3))
    assert found.sd == pytest.approx(0.01)
    assert found.high - found.mean == pytest.approx(4.3026527 * 0.01 / math.sqrt(3))
    assert found.p == pytest.approx(0.0351, abs=1e-4)  # t = 5.196
    assert found.delta_pct == pytest.approx(100 * math.expm1(0.03))
    assert not found.indicative


def test_agreement_by_luck_is_no_narrower_than_the_blocks_of_time_allow() -> None:
    rows = [[0.01, 0.01], [0.01, 0.01], [0.01, 0.01]]
    assert estimate(effects(rows)).se == 0.0
    assert estimate(effects(rows)).p == 0.0
    assert estimate(effects(rows, within=0.02)).se == pytest.approx(0.02 / math.sqrt(3))
    wide = [[0.0, 0.0], [0.1, 0.1], [0.2, 0.2]]
    assert estimate(effects(wide, within=0.02)).se == estimate(effects(wide)).se


def test_one_pair_is_indicative_and_rests_on_its_blocks() -> None:
    found = estimate(effects([[0.01, 0.03]], within=0.001))
    assert found.indicative
    assert found.high == pytest.approx(0.02 + 1.959964 * 0.001)
    blind = estimate(effects([[0.01, 0.03]]))
    assert (blind.ci_pct, blind.p, blind.high) == (None, 1.0, math.inf)
    assert blind.delta_pct is not None


def test_no_pair_is_no_estimate() -> None:
    found = estimate(effects([]))
    assert (found.n, found.delta_pct, found.ci_pct, found.p) == (0, None, None, 1.0)
    assert estimate(effects([[NAN, NAN]])).n == 0
    assert math.isnan(noise_floor(effects([]), 3))
    assert all(math.isnan(one) for one in half_effects(effects([])))
    assert asymmetry(effects([])).n == 0


def test_incomplete_pairs_do_not_count_beside_whole_ones() -> None:
    found = effects([[0.02, 0.04], [0.5, NAN], [0.01, 0.03]])
    assert estimate(found).n == 2
    assert estimate(found).mean == pytest.approx(0.025)
    assert found.swapped
    single = effects([[0.02, NAN], [0.04, NAN]])
    assert not single.swapped
    assert estimate(single).mean == pytest.approx(0.03)
    assert math.isnan(half_effects(single)[1])


def test_rounding_is_no_difference() -> None:
    found = estimate(effects([[0.1, -0.1 + 1e-17], [0.2 - 1e-17, -0.2], [0.3, -0.3]]))
    assert (found.mean, found.se, found.p) == (0.0, 0.0, 1.0)


def test_values_become_effects_and_what_has_no_logarithm_is_missing() -> None:
    found = effects_of(
        [[100.0, 100.0], [0.0, 100.0]], [[101.0, 99.0], [50.0, NAN]], [[0.01, 0.02]] * 2, [[0.02, 0.04]] * 2
    )
    assert found.log_ratios[0] == pytest.approx([math.log(1.01), math.log(0.99)])
    assert np.isnan(found.log_ratios[1]).all()
    assert found.within_se[0] == pytest.approx(math.sqrt(1e-4 + 4e-4 + 4e-4 + 16e-4) / 2)
    assert np.isnan(effects_of([[1, 1]], [[1, 1]]).within_se).all()
    half = effects_of([[100, NAN]], [[101, 99]], [[0.03, 0.5]], [[0.04, 0.5]])
    assert half.within_se[0] == pytest.approx(0.05)  # of the one run that there is


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-0.2, 0.2), st.floats(-0.2, 0.2)), min_size=2, max_size=8))
def test_the_arms_can_be_exchanged(rows: list[tuple[float, float]]) -> None:
    one = effects([list(row) for row in rows], within=0.001)
    other = effects([[-row[0], -row[1]] for row in rows], within=0.001)
    a, b = estimate(one), estimate(other)
    assert a.mean == pytest.approx(-b.mean, abs=1e-12)
    assert (a.low, a.high) == pytest.approx((-b.high, -b.low), abs=1e-12)
    assert a.p == pytest.approx(b.p)


def test_halves_separate_into_effect_and_asymmetry() -> None:
    rows = [[0.01 + 0.04, 0.01 - 0.04]] * 3  # head 1% above, second half 4% above the first
    assert half_effects(effects(rows)) == pytest.approx((0.05, -0.03))
    assert estimate(effects(rows)).mean == pytest.approx(0.01)
    assert asymmetry(effects(rows)).mean == pytest.approx(0.04)
    assert asymmetry(effects([*rows, [0.9, NAN]])).n == 3


@pytest.mark.parametrize(("control_pairs", "pairs"), [(1, 3), (2, 3), (3, 5), (6, 3)])
def test_the_noise_floor_holds_for_so_many_comparisons(control_pairs: int, pairs: int) -> None:
    """Also from one or two A/A pairs: 95% of later comparisons without a difference stay below it."""
    generator = np.random.default_rng(control_pairs)
    draws, below = 2_000, 0
    control = generator.normal(0, 0.003, (draws, control_pairs, 2))
    later = generator.normal(0, 0.003, (draws, pairs, 2)).mean(axis=(1, 2))
    for index in range(draws):
        floor = noise_floor(Effects(control[index], np.full(control_pairs, NAN)), pairs)
        below += abs(later[index]) < floor
    assert below / draws == pytest.approx(0.95, abs=0.015)


def test_the_noise_floor_is_not_below_the_blocks_of_time() -> None:
    quiet = effects([[1e-6, -1e-6], [2e-6, -1e-6]], within=0.01)
    assert noise_floor(quiet, 4) == pytest.approx(4.3026527 * 0.01 / 2)
    with pytest.raises(ValueError, match="at least one pair"):
        noise_floor(quiet, 0)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, NAN]) == pytest.approx([0.04, 0.09, 0.09, 1.0])
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_never_lowers_a_p_value_nor_changes_their_order(p: list[float]) -> None:
    adjusted = holm(p)
    assert all(a >= b for a, b in zip(adjusted, p, strict=True))
    assert max(adjusted) <= 1
    order = sorted(range(len(p)), key=p.__getitem__)
    assert [adjusted[i] for i in order] == sorted(adjusted)


def test_pairs_needed_are_enough_and_one_fewer_is_not() -> None:
    found = estimate(effects([[0.002, 0.004], [0.006, 0.008], [0.001, -0.005]]))
    n = pairs_needed(found, half_width=0.002)
    assert n is not None

    def half(pairs: int) -> float:
        return t_quantile(0.975, pairs - 1) * found.sd / math.sqrt(pairs)

    assert half(n) <= 0.002 < half(n - 1)
    more = pairs_needed(found, effect=0.002)
    assert more is not None
    assert more > n
    assert pairs_needed(found, half_width=1e-9) is None
    assert pairs_needed(estimate(effects([[0.01, 0.01]])), half_width=0.01) is None
    assert pairs_needed(estimate(effects([[0.01, 0.01]] * 3)), half_width=0.01) == 2
    with pytest.raises(ValueError, match="either"):
        pairs_needed(found)


def test_a_pair_that_stands_out_is_named_and_stays() -> None:
    rows = [[0.01, 0.012], [0.011, 0.01], [0.2, 0.22], [0.009, 0.01], [0.012, 0.013], [0.01, NAN]]
    found = effects(rows)
    assert outliers(found) == [2]
    assert estimate(found).mean == pytest.approx(np.mean([0.011, 0.0105, 0.21, 0.0095, 0.0125]))
    assert outliers(effects(rows[:4])) == []  # too few to say
    assert outliers(effects([[0.01, 0.01]] * 6)) == []
    assert outliers(effects([[0.01, 0.01]] * 6 + [[0.5, 0.5]])) == [6]


def test_a_level_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="confidence level"):
        estimate(effects([[0.0, 0.1]] * 2), level=95)
    with pytest.raises(ValueError, match="pairs"):
        Effects(np.zeros((3, 2)), np.zeros(2))


def test_a_control_says_more_of_the_halves() -> None:
    """Swapped, its pairs are more of the same; where nothing was swapped, they alone show it: their effect is none."""
    none, nan = np.full(2, math.nan), math.nan
    compared = Effects(np.array([[0.05, 0.01], [0.06, 0.02]]), none)
    control = Effects(np.array([[0.03, -0.03], [0.03, -0.03]]), none)
    assert asymmetry(compared, control).mean == pytest.approx(0.025)
    assert asymmetry(compared, control).n == 4
    single = Effects(np.array([[0.05, nan], [0.06, nan]]), none)
    assert asymmetry(single).n == 0
    assert asymmetry(single, Effects(np.array([[0.03, nan], [nan, -0.05]]), none)).mean == pytest.approx(0.04)
    assert asymmetry(single, control).mean == pytest.approx(0.03)
