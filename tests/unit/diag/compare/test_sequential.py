"""The boundary of `--until-decided`; its error rates are in test_statistics_simulation.py."""

from __future__ import annotations

import numpy as np
import pytest

from atom.diag.compare.sequential import Boundary, boundary_of
from atom.diag.compare.sequential import _two_sided as many_p
from atom.diag.compare.statistics import Effects, estimate
from atom.diag.compare.student_t import t_two_sided_p


def test_a_look_spends_in_proportion_to_its_pairs_and_less_than_alpha() -> None:
    boundary = boundary_of(3, 9)
    assert boundary.looks == (3, 4, 5, 6, 7, 8, 9)
    nominal = [boundary.nominal(n) for n in boundary.looks]
    assert nominal == pytest.approx([nominal[-1] * n / 9 for n in boundary.looks])
    assert 0.001 < nominal[0] < nominal[-1] < 0.05
    assert boundary.level(9) == 1 - nominal[-1]


def test_a_single_look_is_students_test() -> None:
    only = Boundary((4,))
    assert only.nominal(4) == pytest.approx(0.0486, abs=0.0015)  # 5% less two standard errors of the simulation
    assert only.p_value(4, 0.02) == pytest.approx(0.02, abs=0.0015)


@pytest.mark.parametrize("looks", [(3, 4, 5, 6), (2, 5, 9), tuple(range(3, 13))])
def test_the_repeated_p_value_and_the_interval_agree(looks: tuple[int, ...]) -> None:
    boundary = Boundary(looks)
    for n in looks:
        level = boundary.nominal(n)
        assert boundary.p_value(n, level * 0.98) <= 0.05 < boundary.p_value(n, level * 1.03)
        assert boundary.p_value(n, 0.3) >= 0.3
        assert boundary.p_value(n, 1.0) == 1.0


def test_it_is_the_same_everywhere() -> None:
    """Checked with 800,000 further sequences and exact quantiles: they cross in 4.9% and 4.8%."""
    assert boundary_of(3, 6).nominal(3) == pytest.approx(0.01207, abs=2e-4)
    assert boundary_of(3, 12).nominal(12) == pytest.approx(0.01691, abs=2e-4)


def test_there_is_no_look_before_the_pairs_that_were_asked_for() -> None:
    assert list(boundary_of(4, 8).looks) == [4, 5, 6, 7, 8]
    assert boundary_of(1, 3).looks == (2, 3)


def test_a_deadline_between_looks_spends_what_the_look_before_would() -> None:
    boundary = Boundary((4, 8))
    assert boundary.nominal(6) == boundary.nominal(4) == boundary.nominal(3)
    assert boundary.nominal(9) == boundary.nominal(8)


def test_one_pair_has_the_plain_interval() -> None:
    one = Effects(np.array([[0.01, 0.02]]), np.array([0.001]))
    assert boundary_of(3, 6).estimate(one) == estimate(one)


@pytest.mark.parametrize("looks", [(), (1, 2), (3, 3), (5, 4)])
def test_looks_that_cannot_be_are_refused(looks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="looks"):
        Boundary(looks)


def test_fewer_pairs_at_most_than_at_first_are_refused() -> None:
    with pytest.raises(ValueError, match="first look"):
        boundary_of(5, 4)
    with pytest.raises(ValueError, match="alpha"):
        Boundary((3, 4), alpha=0.0)


@pytest.mark.parametrize("df", [1, 2, 5, 11, 39])
def test_many_p_values_at_once_are_those_of_one(df: int) -> None:
    t = np.linspace(0.7, 60.0, 500)
    found = many_p(np.append(t**2, 1e7), df)[:-1]
    exact = np.array([t_two_sided_p(float(one), df) for one in t])
    counted = exact > 1e-9
    assert found[counted] == pytest.approx(exact[counted], rel=2e-3)
