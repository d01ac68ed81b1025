"""The questions of a run one by one, as its page lists them: what was right, what each filter found, how it ended."""

from __future__ import annotations

from typing import Final

from atom.bench.gsm8k.questions import QuestionResult, Questions
from atom.bench.table import Table

__all__ = ["MOST", "question_table"]

MOST: Final = 500
"""Rows; `accuracy/questions.jsonl` has all of them."""
_LONGEST: Final = 40


def question_table(questions: Questions) -> Table:
    """The first `MOST`, in the order of the load. ✓ stands behind an answer that is right."""
    results = questions.results
    notes = [f"the first {MOST} of {len(results):,}; accuracy/questions.jsonl has all"] if len(results) > MOST else []
    return Table(
        "",
        ("#", "question", "right answer", "flexible-extract", "strict-match", "tokens", "end"),
        [_row(result) for result in results[:MOST]],
        notes,
        text_columns=(1, 6),
    )


def _row(result: QuestionResult) -> list[str]:
    return [
        str(result.index),
        result.question,
        _short(result.gold),
        _found(result.flexible_extract, result.flexible_extract_hit),
        _found(result.strict_match, result.strict_match_hit),
        "–" if result.output_tokens is None else f"{result.output_tokens:,}",
        result.error or result.finish_reason or "–",
    ]


def _found(answer: str | None, hit: bool) -> str:
    return "–" if answer is None else _short(answer) + (" ✓" if hit else "")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
