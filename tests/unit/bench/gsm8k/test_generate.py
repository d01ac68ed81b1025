"""Generated problems: every answer is found again from the question's own numbers, by formulas written here."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from fractions import Fraction

import pytest

from atom.bench.gsm8k.extract import FLEXIBLE, STRICT, extracted, is_hit
from atom.bench.gsm8k.generate import generate_problems
from atom.bench.gsm8k.templates import TEMPLATES
from atom.recipes.errors import UsageError

F = Fraction
Formula = Callable[..., Fraction | int]

# Beginning of the question → the answer from its numbers, in the order in which they stand there.
FORMULAS: dict[str, Formula] = {
    "A baker": lambda a, b, c: a * b - c,
    "A librarian": lambda a, b: a * (1 + b),
    "A farmer": lambda a, b, c, d: F(a * b - c, d),
    "A taxi": lambda a, b, c: a + b * c,
    "A runner": lambda a, b, c: F(a * b * c, 60),
    "A painter": lambda a, b, c, d: F(a * b * d, c),
    "A school": lambda a, b, c: F(a * b, c),
    "A cinema": lambda a, b, c, d: a * b + c * d,
    "A gardener": lambda a, b, c: a - F(a * b, c),
    "A train": lambda a, b, c: a * b - c,
    "A shop": lambda a, b, c: a * c - a * b,
    "A tank": lambda a, b, c: F(a, b - c),
    "A coat": lambda a, b: F(a * (100 - b), 100),
    "A worker": lambda a, b, c, d: a * (b + d) + c * d,
    "Three friends": lambda a, b: 4 * a + 3 * b,
    "A rectangle": lambda a, b, c: 2 * a * c + 2 * b * c,
    "A floor": lambda a, b, c, d: F(a * b * c, d),
    "A hiker": lambda a, b: 3 * (a + b),
    "A printer": lambda a, b, c, d: F(c * d, a + b),
    "A jar": lambda a, b: F(a, 2) - b,
    "A family": lambda a, b, _, c: F(a, 100) * b * c,
    "A club": lambda a, b, c: 12 * a * b - 12 * c,
    "A cook": lambda a, b, c, d: a * c + b * d,
    "A bus": lambda a, b, c, d: a + b * (d - c),
    "A saver": lambda a, b, c, d: a * b - c - d,
    "A machine": lambda a, b, c, _: F(a * b * (100 - c), 100),
    "A teacher": lambda a, b, c: F(a - b, 2) + c,
    "A rope": lambda a, b: F(a - b, 2),
    "A theater": lambda a, b, c, d: (a * b - c) * d,
    "A dog": lambda a, b, c: F(1000 * c, a + b),
    "A plumber": lambda a, b, c, d: a * c + b * c + 2 * d,
    "A parking": lambda a, b, c: 4 * a + 2 * b + c,
    "A bookseller": lambda a, b: F(2, 3) * F(a * b, 100),
    "Two trains": lambda a, b, c: a * c + b * c,
    "A group": lambda a, b, c: F(b, a) + c,
    "A carpenter": lambda a, b, c, d, e: a * b + c * d + e,
}


def test_every_template_has_its_formula() -> None:
    assert len(FORMULAS) == len(TEMPLATES)
    for template in TEMPLATES:
        assert sum(template.question.startswith(beginning) for beginning in FORMULAS) == 1


def test_answers_follow_from_the_questions() -> None:
    problems = generate_problems(1500, seed=3).problems
    seen = set()
    for problem in problems:
        beginning = next(text for text in FORMULAS if problem.question.startswith(text))
        seen.add(beginning)
        numbers = [int(number) for number in re.findall(r"\d+", problem.question)]
        value = Fraction(FORMULAS[beginning](*numbers))
        assert value.denominator == 1, problem
        assert value > 0
        assert problem.gold == str(value), problem
    assert seen == set(FORMULAS)
    assert len({problem.question for problem in problems}) == len(problems)


def test_worked_solutions_are_right_step_by_step_and_score_as_right() -> None:
    for problem in generate_problems(300, seed=4).problems:
        steps = re.findall(r"<<([-+*/().\d]+)=(\d+)>>", problem.answer)
        assert steps
        for expression, value in steps:
            exact = re.sub(r"\d+", lambda number: f"F({number[0]})", expression)
            assert eval(exact, {"F": Fraction}) == int(value)  # noqa: S307 (digits and operators alone)
        for name in (FLEXIBLE, STRICT):
            assert is_hit(extracted(problem.answer, name), problem.gold)


def test_the_seed_decides_and_a_smaller_set_is_the_beginning_of_a_larger() -> None:
    many, few, other = generate_problems(50, 1), generate_problems(20, 1), generate_problems(20, 2)
    assert many.problems[:20] == few.problems
    assert few.problems != other.problems


def test_it_never_claims_to_be_gsm8k() -> None:
    problems = generate_problems(1, 0)
    assert problems.name == "synthetic-arithmetic (not GSM8K)"
    assert "gsm8k" not in problems.figure


def test_limits_and_names() -> None:
    with pytest.raises(UsageError, match="--limit must be from 1 to"):
        generate_problems(0, 0)
    with pytest.raises(UsageError, match="--generator must be templates or reasoning-gym"):
        generate_problems(1, 0, "other")


def test_reasoning_gym_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match="pip install reasoning-gym"):
        generate_problems(1, 0, "reasoning-gym")
    module = types.ModuleType("reasoning_gym")
    entries = [
        {"question": "q1", "answer": "4", "metadata": {"answer_cot": "2+2=4\n#### 4"}},
        {"question": "q2", "answer": "5", "metadata": {}},
    ]
    module.create_dataset = lambda name, seed, size: entries  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    made = generate_problems(2, 0, "reasoning-gym")
    assert [problem.answer for problem in made.problems] == ["2+2=4\n#### 4", "#### 5"]
    assert made.name == "reasoning-gym gsm_symbolic (not GSM8K)"
