"""Two runs question by question: which of them got it right, and whether the difference could be chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atom.bench.gsm8k.extract import FILTERS
from atom.bench.gsm8k.questions import QuestionResult

__all__ = ["Paired", "compared", "keyed", "mcnemar_p"]


@dataclass(frozen=True, slots=True)
class Paired:
    """One filter. Counts of questions that both runs have."""

    filter: str
    both: int
    only_a: int
    only_b: int
    neither: int

    @property
    def n(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> float | None:
        """Accuracy of B − accuracy of A, over these questions."""
        return (self.only_b - self.only_a) / self.n if self.n else None

    @property
    def stderr(self) -> float | None:
        """Standard error of the mean of the per-question differences (+1, 0, −1)."""
        if self.n < 2:
            return None
        differ, sum_ = self.only_a + self.only_b, self.only_b - self.only_a
        return math.sqrt(max(0.0, differ - sum_**2 / self.n) / (self.n - 1) / self.n)

    @property
    def p(self) -> float | None:
        """None over no question."""
        return mcnemar_p(self.only_a, self.only_b) if self.n else None

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "n": self.n,
            "difference": self.difference,
            "difference_stderr": self.stderr,
            "mcnemar_p": self.p,
        }


def mcnemar_p(only_a: int, only_b: int) -> float:
    """McNemar's exact test, two-sided: how likely the questions that one run alone got right are split at least this
    unevenly, were each as likely to be A's as B's. 1 where there are none."""
    n, fewer = only_a + only_b, min(only_a, only_b)
    # The tail's terms one from the other: a sum of binomials by themselves would take minutes for long lists.
    term = tail = 1
    for k in range(fewer):
        term = term * (n - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / (1 << n)) if n else 1.0


def compared(a: Sequence[QuestionResult], b: Sequence[QuestionResult]) -> list[Paired]:
    """Both filters, over the questions that both have. A question that a set has twice is paired in order."""
    others = dict(keyed(b))
    pairs = [(result, others[key]) for key, result in keyed(a) if key in others]
    rows = []
    for name in FILTERS:
        hits = [(left.hit(name), right.hit(name)) for left, right in pairs]
        rows.append(
            Paired(
                name,
                both=hits.count((True, True)),
                only_a=hits.count((True, False)),
                only_b=hits.count((False, True)),
                neither=hits.count((False, False)),
            )
        )
    return rows


def keyed(results: Sequence[QuestionResult]) -> list[tuple[tuple[str, int], QuestionResult]]:
    """Each with what it is paired by: the question's key, and how often it had come before."""
    seen: dict[str, int] = {}
    pairs = []
    for result in results:
        seen[result.question] = seen.get(result.question, 0) + 1
        pairs.append(((result.question, seen[result.question]), result))
    return pairs
