"""The judge: which word, in which order of precedence, and the sentence that goes into a pull request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.diag.compare.sequential import boundary_of
from atom.diag.compare.statistics import Effects
from atom.diag.compare.verdict import MetricEvidence, correct, evidence_of, interval_text, judge, judge_all, pairs_text


def pairs(*means_pct: float, within_pct: float = math.nan, tilt: float = 0.004) -> Effects:
    """Pairs that change by so many percent, on halves that differ."""
    logs = np.log1p(np.array(means_pct) / 100)
    return Effects(np.stack([logs + tilt, logs - tilt], axis=1), np.full(len(logs), within_pct / 100))


def evidence(*means_pct: float, within_pct: float = math.nan, **options: Any) -> MetricEvidence:
    return evidence_of(pairs(*means_pct, within_pct=within_pct), **{"better": "lower", **options})


STEADY = (1.9, 2.03, 2.16)


def test_slower_reads_as_it_will_be_pasted() -> None:
    verdict = judge(evidence(*STEADY))
    assert verdict.text == "slower by 2.03% (95% CI 1.71% to 2.35%, 3 pairs)"
    assert (verdict.word, verdict.finding, verdict.n_more, verdict.decided) == ("slower", "slower", None, True)


@pytest.mark.parametrize(
    ("means", "better", "word"),
    [(STEADY, "lower", "slower"), (STEADY, "higher", "faster"), ((-1.9, -2.03, -2.16), "lower", "faster"),
     ((-1.9, -2.03, -2.16), "higher", "slower")],
)  # fmt: skip
def test_which_way_is_better_decides_the_word_and_never_the_size(means: Any, better: Any, word: str) -> None:
    verdict = judge(evidence(*means, better=better))
    assert verdict.word == word
    assert verdict.text.startswith(f"{word} by 2.03% (95% CI 1.71% to 2.3")


def test_a_difference_within_the_margin_is_still_a_difference() -> None:
    verdict = judge(evidence(0.40, 0.42, 0.44, margin_pct=1.0))
    assert verdict.text == "slower by 0.42% (95% CI 0.37% to 0.47%, 3 pairs), within the 1% margin"


def test_equivalent_within_the_margin() -> None:
    verdict = judge(evidence(0.1, -0.1, 0.06, margin_pct=1.0))
    assert verdict.text == "equivalent within 1%: +0.02% (95% CI −0.24% to +0.28%, 3 pairs)"
    assert verdict.decided


def test_inconclusive_says_how_many_more_pairs() -> None:
    verdict = judge(evidence(-1.0, 1.0, 0.6, margin_pct=1.0))
    assert verdict.word == "inconclusive"
    assert verdict.n_more is not None
    assert verdict.text.startswith("inconclusive: +0.20% (95% CI −2.4")
    assert verdict.text.endswith(f"; about {verdict.n_more} more pairs needed")
    assert not verdict.decided


def test_the_pairs_it_asks_for_are_about_right() -> None:
    """With so many more pairs of the same scatter the question is decided in about half of the cases or more."""
    generator = np.random.default_rng(5)
    asked = judge(evidence(0.2, 1.6, 0.3))
    assert asked.n_more is not None
    scatter = float(np.std(np.log1p(np.array([0.2, 1.6, 0.3]) / 100), ddof=1))
    n = 3 + asked.n_more
    draws = generator.normal(0.007, scatter * 2**0.5, (400, n, 2))
    words = [judge(evidence_of(Effects(one, np.full(n, math.nan)), better="lower")) for one in draws]
    assert 0.35 < sum(one.word == "slower" for one in words) / 400 < 0.9


def test_no_number_of_pairs_tells_what_is_not_there() -> None:
    verdict = judge(evidence(-1.0, 1.0, 0.0))
    assert verdict.n_more is None
    assert verdict.text.endswith("no number of pairs worth running would tell")


@pytest.mark.parametrize(
    ("n_more", "told"),
    [(1, "about 1 more pair"), (100, "about 100 more pairs"), (101, "more than 100 more pairs")],
)
def test_hopeless_numbers_of_pairs_are_not_counted(n_more: int, told: str) -> None:
    assert pairs_text(n_more) == told


def test_one_pair_is_at_most_indicative() -> None:
    verdict = judge(evidence(2.03, within_pct=0.1))
    assert verdict.text == "indicative: slower by 2.03% (95% CI 1.83% to 2.23%, blocks of time of 1 pair)"
    assert (verdict.word, verdict.finding, verdict.decided) == ("indicative", "slower", False)
    assert verdict.n_more == 1
    blind = judge(evidence(2.03))
    assert blind.text == "indicative: inconclusive: +2.03% (no interval: nothing says how much runs scatter)"


def test_no_pair_says_why() -> None:
    assert judge(evidence(problem="head did not start")).text == "inconclusive: no complete pair (head did not start)"
    assert judge(evidence()).text == "inconclusive: no complete pair"


def test_matched_runs_that_were_not_swapped_are_called_so() -> None:
    logs = np.log1p(np.array([[1.9, math.nan], [2.03, math.nan], [2.16, math.nan]]) / 100)
    verdict = judge(evidence_of(Effects(logs, np.full(3, math.nan)), better="lower"))
    assert verdict.text == "slower by 2.03% (95% CI 1.71% to 2.35%, 3 matched runs, not swapped)"


def test_censored_stands_before_everything() -> None:
    verdict = judge(evidence(*STEADY, censored=["head: 6% of requests failed"], confounded=["env"]))
    assert verdict.text == "censored: head: 6% of requests failed"
    assert (verdict.word, verdict.finding, verdict.decided) == ("censored", None, True)


def test_confounded_is_a_mark_before_what_the_figures_say() -> None:
    verdict = judge(evidence(*STEADY, confounded=["env FOO"]))
    assert verdict.text == "confounded: slower by 2.03% (95% CI 1.71% to 2.35%, 3 pairs)"
    assert (verdict.word, verdict.finding, verdict.decided) == ("confounded", "slower", True)
    one = judge(evidence(2.03, within_pct=0.1, confounded=["env FOO"]))
    assert one.text.startswith("confounded: indicative: slower by")
    assert (one.word, one.indicative, one.decided) == ("confounded", True, False)


def test_within_the_noise_of_an_arm_against_itself() -> None:
    noisy = pairs(-3.0, 2.5, 1.0)
    verdict = judge(evidence(-0.5, 0.8, 0.3, control=noisy))
    assert verdict.word == "within noise"
    assert verdict.text.startswith("within noise: +0.20% (95% CI −1.42% to +1.84%, 3 pairs); one arm against itself")
    # A steady difference is no larger than that of an arm and itself: nobody would believe it.
    assert judge(evidence(0.40, 0.42, 0.44, control=noisy)).word == "within noise"
    assert judge(evidence(40, 42, 44, control=noisy)).word == "slower"


def test_a_single_control_pair_hides_no_difference() -> None:
    """Its floor is 12.7 times what it showed: wide because little is known, which is no evidence of noise."""
    assert judge(evidence(0.40, 0.42, 0.44, control=pairs(0.3))).word == "slower"
    assert judge(evidence(-0.1, 0.12, 0.1, control=pairs(0.3))).word == "within noise"


def test_equivalence_stands_before_noise() -> None:
    assert judge(evidence(0.1, -0.1, 0.06, margin_pct=1.0, control=pairs(-3.0, 2.5))).word == "equivalent"


def test_secondary_metrics_answer_for_all_that_were_looked_at() -> None:
    weak = evidence(0.2, 0.5, 0.6)
    assert judge(evidence(0.3, 0.5, 0.6)).word == "slower"
    many = {f"metric{i}": evidence(0.3, 0.5, 0.6) if i == 0 else evidence(-1, 1, 0.1) for i in range(6)}
    many["itl_p50"] = evidence(0.3, 0.5, 0.6)
    verdicts = judge_all(many, {"itl_p50"})
    assert verdicts["itl_p50"].word == "slower"
    assert verdicts["metric0"].word == "inconclusive"
    assert "not enough where 7 metrics are looked at (p 0.24 corrected)" in verdicts["metric0"].text
    assert judge(weak).word == "inconclusive"


def test_primaries_of_several_loads_are_corrected_among_themselves() -> None:
    loads = {
        ("a", "itl"): evidence(0.3, 0.5, 0.6),
        ("b", "itl"): evidence(-1, 1, 0.1),
        ("b", "ttft"): evidence(*STEADY),
    }
    corrected = correct(loads, [("a", "itl"), ("b", "itl")])
    assert corrected["a", "itl"].family == 2
    assert corrected["a", "itl"].adjusted_p == pytest.approx(2 * loads["a", "itl"].p)
    assert corrected["b", "ttft"].family == 3
    assert corrected["b", "ttft"].adjusted_p == pytest.approx(3 * loads["b", "ttft"].p)


def test_until_decided_prints_the_repeated_interval() -> None:
    boundary = boundary_of(3, 12)
    found = evidence(*STEADY, 2.1, 1.95, boundary=boundary)
    verdict = judge(found)
    assert verdict.text.startswith("slower by 2.03% (95% repeated CI 1.7")
    plain = evidence(*STEADY, 2.1, 1.95)
    assert found.estimate.low < plain.estimate.low
    assert found.p > plain.p
    assert interval_text(found).startswith("95% repeated CI +1.7")
    # What three pairs of a plain comparison would call, the first look does not.
    assert judge(evidence(0.3, 0.5, 0.6)).word == "slower"
    assert judge(evidence(0.3, 0.5, 0.6, boundary=boundary)).word == "inconclusive"


def test_no_more_pairs_than_allowed_ends_inconclusive() -> None:
    verdict = judge(evidence(-1.0, 1.0, 0.6, boundary=boundary_of(2, 3)))
    assert verdict.word == "inconclusive"
    assert "; no more pairs were allowed; more than 100 more pairs needed" in verdict.text


def test_nothing_rounds_to_minus_zero() -> None:
    assert "−0.00%" not in judge(evidence(-0.001, 0.0012, -0.0005, margin_pct=1.0)).text


@settings(deadline=None)
@given(
    means=st.lists(st.floats(-50, 200), max_size=6),
    within=st.one_of(st.just(math.nan), st.floats(0, 5)),
    better=st.sampled_from(["lower", "higher"]),
    margin=st.one_of(st.none(), st.floats(0.1, 10)),
    control=st.one_of(st.none(), st.lists(st.floats(-5, 5), max_size=3)),
    confounded=st.booleans(),
)
def test_whatever_comes_there_is_a_verdict_that_begins_with_its_word(
    means: list[float], within: float, better: Any, margin: float | None, control: list[float] | None, confounded: bool
) -> None:
    found = evidence(
        *means,
        within_pct=within,
        better=better,
        margin_pct=margin,
        control=None if control is None else pairs(*control),
        confounded=["x"] if confounded else [],
    )
    verdict = judge(found)
    assert verdict.text.startswith(verdict.word)
    assert "nan" not in verdict.text
    assert "inf" not in verdict.text
    assert verdict.finding is not None
    if verdict.decided:
        assert verdict.n_more is None
        assert len(means) >= 2
