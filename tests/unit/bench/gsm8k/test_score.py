"""Standard errors and the comparison of two runs question by question."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.gsm8k.compare import compared, mcnemar_p
from atom.bench.gsm8k.extract import FLEXIBLE, STRICT
from atom.bench.gsm8k.questions import QuestionResult, Questions
from atom.bench.gsm8k.score import accuracies, accuracy_figures


def result(index: int, strict: bool, flexible: bool, question: str | None = None) -> QuestionResult:
    return QuestionResult(
        index=index,
        question=question or f"q{index}",
        gold="1",
        outcome="completed",
        strict_match="1",
        strict_match_hit=strict,
        flexible_extract="1",
        flexible_extract_hit=flexible,
        finish_reason="stop",
        output_tokens=3,
        error=None,
    )


@given(st.lists(st.booleans(), min_size=2, max_size=60))
def test_standard_error_is_that_of_a_mean(hits: list[bool]) -> None:
    flexible, _ = accuracies(Questions(tuple(result(i, False, hit) for i, hit in enumerate(hits))))
    assert flexible.filter == FLEXIBLE
    assert flexible.value == sum(hits) / len(hits)
    assert flexible.stderr == pytest.approx(statistics.stdev(map(int, hits)) / math.sqrt(len(hits)), abs=1e-12)


def test_a_known_standard_error() -> None:
    hits = [False, False, False, True] * 25
    figures = accuracy_figures(Questions(tuple(result(i, hit, hit) for i, hit in enumerate(hits))), "gsm8k")
    assert figures["gsm8k_strict_match"].value == 0.25
    assert figures["gsm8k_strict_match_stderr"].value == pytest.approx(0.04351941398892446)
    assert figures["gsm8k_flexible_extract"].n == 100


def test_one_question_has_no_standard_error_and_none_no_value() -> None:
    assert accuracies(Questions((result(0, True, True),)))[0].stderr is None
    assert accuracies(Questions(()))[0].value is None


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_exact_binomial_test(only_a: int, only_b: int) -> None:
    n, fewer = only_a + only_b, min(only_a, only_b)
    tail = sum(Fraction(math.comb(n, k), 2**n) for k in range(fewer + 1))
    assert mcnemar_p(only_a, only_b) == pytest.approx(float(min(Fraction(1), 2 * tail)))


@pytest.mark.parametrize(("a", "b", "p"), [(0, 0, 1.0), (0, 5, 0.0625), (10, 2, 0.03857421875), (7, 7, 1.0)])
def test_mcnemar_by_hand(a: int, b: int, p: float) -> None:
    assert mcnemar_p(a, b) == mcnemar_p(b, a) == pytest.approx(p)


def test_mcnemar_of_long_lists() -> None:
    assert mcnemar_p(5_000, 5_000) == 1.0
    assert 0 < mcnemar_p(4_900, 5_100) < 0.05


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_pairs_add_up(hits: list[tuple[bool, bool]]) -> None:
    a = [result(i, left, left) for i, (left, _) in enumerate(hits)]
    b = [result(i, right, right) for i, (_, right) in enumerate(hits)]
    paired = compared(a, list(reversed(b)))[0]
    assert paired.n == len(hits)
    assert paired.both == hits.count((True, True))
    assert (paired.only_a, paired.only_b) == (hits.count((True, False)), hits.count((False, True)))
    differences = [right - left for left, right in hits]
    assert paired.difference == pytest.approx(statistics.mean(differences))
    assert paired.stderr == pytest.approx(statistics.stdev(differences) / math.sqrt(len(hits)), abs=1e-12)


def test_questions_are_paired_by_their_text_and_not_by_their_number() -> None:
    a = [result(0, True, True, "x"), result(1, False, False, "y"), result(2, True, True, "y")]
    b = [result(0, True, False, "y"), result(1, False, True, "z")]
    strict = {row.filter: row for row in compared(a, b)}[STRICT]
    assert (strict.n, strict.only_b) == (1, 1)
