"""What became of each question: read from the request records of a run, so also from a run that was killed.

`accuracy/questions.jsonl` in the run directory is this, written out: one line per question.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from atom.bench.gsm8k.extract import FILTERS, FLEXIBLE, STRICT, extracted, is_hit
from atom.bench.records import Outcome, RequestRecord, read_records
from atom.bench.rundir import RunDirectory, write_text
from atom.recipes.errors import UsageError

__all__ = ["QUESTIONS_FILE", "QuestionResult", "Questions", "questions_of", "read_questions", "write_questions"]

QUESTIONS_FILE: Final = "accuracy/questions.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionResult:
    """One question. `strict_match` and `flexible_extract`: what the filter found; None for a failed request, which
    counts as wrong."""

    index: int
    question: str
    """The question's key, see `Problem.key`."""
    gold: str
    outcome: str
    strict_match: str | None
    strict_match_hit: bool
    flexible_extract: str | None
    flexible_extract_hit: bool
    finish_reason: str | None
    output_tokens: int | None
    error: str | None

    def hit(self, name: str) -> bool:
        return self.strict_match_hit if name == STRICT else self.flexible_extract_hit


@dataclass(frozen=True, slots=True)
class Questions:
    results: tuple[QuestionResult, ...]
    """In order of the load."""
    cancelled: int = 0
    """Asked, and not waited for: the run was ended early. In no figure."""
    unscored: int = 0
    """Records that lack what a score needs: their text, or the right answer."""


def questions_of(records: Iterable[RequestRecord]) -> Questions:
    """Score the records of a load of word problems."""
    results: dict[int, QuestionResult] = {}
    cancelled = unscored = 0
    for record in records:
        if record.outcome == Outcome.CANCELLED:
            cancelled += 1
            continue
        result = _scored(record)
        if result is None or result.index in results:
            unscored += 1
        else:
            results[result.index] = result
    return Questions(tuple(results[index] for index in sorted(results)), cancelled, unscored)


def read_questions(run_dir: RunDirectory) -> Questions:
    """From the run's records; UsageError if it asked no word problems."""
    source = (run_dir.read_run_json().get("load") or {}).get("source")
    if not isinstance(source, dict) or "figure" not in source:
        raise UsageError(f"{run_dir.path} asked no word problems: `atom bench gsm8k` makes such a run")
    return questions_of(read_records(run_dir))


def write_questions(run_dir: RunDirectory) -> None:
    """Replace `accuracy/questions.jsonl`; it is made anew from the records whenever they are summed up."""
    results = read_questions(run_dir).results
    lines = (json.dumps(asdict(result), separators=(",", ":"), allow_nan=False) for result in results)
    write_text(run_dir.path / QUESTIONS_FILE, "".join(f"{line}\n" for line in lines))


def _scored(record: RequestRecord) -> QuestionResult | None:
    tags: Any = record.tags or {}
    key, gold = tags.get("question"), tags.get("gold")
    if not isinstance(key, str) or not isinstance(gold, str):
        return None
    answers: dict[str, str | None] = dict.fromkeys(FILTERS)
    if record.outcome == Outcome.COMPLETED:
        if record.text is None:
            return None
        answers = {name: extracted(record.text, name) for name in FILTERS}
    hits = {name: answer is not None and is_hit(answer, gold) for name, answer in answers.items()}
    return QuestionResult(
        index=record.index,
        question=key,
        gold=gold,
        outcome=str(record.outcome),
        strict_match=answers[STRICT],
        strict_match_hit=hits[STRICT],
        flexible_extract=answers[FLEXIBLE],
        flexible_extract_hit=hits[FLEXIBLE],
        finish_reason=record.finish_reason,
        output_tokens=record.output_tokens,
        error=record.error_class,
    )
