"""Word problems without a download: seeded, with worked solutions in GSM8K's form, and never under its name."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from importlib import import_module
from typing import Any, Final

from atom.bench.gsm8k.problems import Problem, ProblemSet
from atom.bench.gsm8k.templates import TEMPLATES, Template
from atom.recipes.errors import UsageError

__all__ = ["GENERATORS", "evaluated", "generate_problems"]

GENERATORS: Final = ("templates", "reasoning-gym")
MAX_GENERATED: Final = 20_000
ATTEMPTS: Final = 10_000
"""Draws for one question; the templates have room for many times `MAX_GENERATED`."""

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_STEP: Final = re.compile(r"\{(\w+) = ([^}]+)\}")


def generate_problems(count: int, seed: int, generator: str = "templates") -> ProblemSet:
    """`count` problems; those of a smaller count are the first ones of a larger."""
    if not 1 <= count <= MAX_GENERATED:
        raise UsageError(f"--limit must be from 1 to {MAX_GENERATED:,} for generated problems, got {count}")
    if generator not in GENERATORS:
        raise UsageError(f"--generator must be {' or '.join(GENERATORS)}, got {generator!r}")
    name = "reasoning-gym gsm_symbolic" if generator == "reasoning-gym" else "synthetic-arithmetic"
    problems = _reasoning_gym(count, seed) if generator == "reasoning-gym" else _from_templates(count, seed)
    return ProblemSet(
        name=f"{name} (not GSM8K)",
        problems=tuple(problems),
        figure="gsm_symbolic" if generator == "reasoning-gym" else "synthetic_arithmetic",
        origin={"generator": generator, "seed": seed, "problems": count},
    )


def _from_templates(count: int, seed: int) -> list[Problem]:
    rng, problems, seen = random.Random(seed), list[Problem](), set[str]()
    while len(problems) < count:
        problem = _drawn(rng.choice(TEMPLATES), rng)
        if problem.question not in seen:
            seen.add(problem.question)
            problems.append(problem)
    return problems


def _drawn(template: Template, rng: random.Random) -> Problem:
    """Numbers for `template` whose every step is a whole number above zero, and its text."""
    for _ in range(ATTEMPTS):
        numbers: dict[str, Fraction] = {
            name: Fraction(rng.randrange(*bounds)) for name, bounds in template.numbers.items()
        }
        lines = [_worked(step, numbers) for step in template.steps]
        if all(value > 0 and value.denominator == 1 for value in numbers.values()):
            question = template.question.format_map({name: str(value) for name, value in numbers.items()})
            return Problem(question, "\n".join([*lines, f"#### {list(numbers.values())[-1]}"]))
    raise AssertionError(f"no numbers found for {template.question!r}")


def _worked(step: str, numbers: dict[str, Fraction]) -> str:
    """`They cost {sum = a * b} dollars.` → `They cost 3*4=<<3*4=12>>12 dollars.`; `numbers` gains `sum`."""

    def replaced(match: re.Match[str]) -> str:
        name, expression = match.groups()
        shown = re.sub(r"[A-Za-z_]\w*", lambda found: str(numbers[found[0]]), expression).replace(" ", "")
        numbers[name] = evaluated(expression, numbers)
        return f"{shown}=<<{shown}={numbers[name]}>>{numbers[name]}"

    return _STEP.sub(replaced, step)


def evaluated(expression: str, numbers: Mapping[str, Fraction]) -> Fraction:
    """+, −, ×, ÷ and parentheses over whole numbers and names."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return numbers[node.id]
        assert isinstance(node, ast.Constant)
        assert isinstance(node.value, int)
        return Fraction(node.value)

    return value(_parsed(expression))


@cache
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _reasoning_gym(count: int, seed: int) -> list[Problem]:
    try:
        reasoning_gym: Any = import_module("reasoning_gym")
    except ImportError:
        raise UsageError(
            "--generator reasoning-gym needs the package reasoning-gym (pip install reasoning-gym); "
            "--generator templates needs nothing"
        ) from None
    dataset = reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=count)
    problems = []
    for entry in dataset:
        answer = str(entry["answer"])
        worked = str(entry["metadata"].get("answer_cot") or "")
        if not worked.endswith(f"#### {answer}"):
            worked = f"#### {answer}"
        problems.append(Problem(str(entry["question"]), worked))
    return problems
