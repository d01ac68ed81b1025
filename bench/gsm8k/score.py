"""Accuracy of a run: value ± standard error per filter, as figures of its summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from atom.bench.gsm8k.extract import FILTERS, FLEXIBLE, STRICT
from atom.bench.gsm8k.questions import Questions
from atom.bench.metrics import Figure

__all__ = ["Accuracy", "accuracies", "accuracy_figures"]

_DEFINITIONS: Final[Mapping[str, str]] = {
    FLEXIBLE: "share of questions whose text's last number is the right one (flexible-extract)",
    STRICT: "share of questions whose text's first number after '#### ' is the right one (strict-match)",
}


@dataclass(frozen=True, slots=True)
class Accuracy:
    filter: str
    correct: int
    n: int

    @property
    def value(self) -> float | None:
        return self.correct / self.n if self.n else None

    @property
    def stderr(self) -> float | None:
        """Sample standard deviation of the hits / √n = sqrt(p (1 − p) / (n − 1)); None below two questions."""
        if self.n < 2 or self.value is None:
            return None
        return math.sqrt(self.value * (1 - self.value) / (self.n - 1))


def accuracies(questions: Questions) -> list[Accuracy]:
    """Failed requests count as wrong."""
    results = questions.results
    return [Accuracy(name, sum(result.hit(name) for result in results), len(results)) for name in FILTERS]


def accuracy_figures(questions: Questions, prefix: str) -> dict[str, Figure]:
    """`{prefix}_flexible_extract`, `{prefix}_strict_match`, and `…_stderr` of each."""
    figures: dict[str, Figure] = {}
    for accuracy in accuracies(questions):
        name, text = f"{prefix}_{accuracy.filter}", _DEFINITIONS[accuracy.filter]
        figures[name] = Figure(accuracy.value, "fraction", accuracy.n, f"{text}; a failed request is wrong")
        figures[f"{name}_stderr"] = Figure(
            accuracy.stderr, "fraction", accuracy.n, f"standard error of {name}: sqrt(p (1 - p) / (n - 1))"
        )
    return figures
