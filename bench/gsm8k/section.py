"""What the summary of a run that asked word problems says of its accuracy: section `accuracy`, figures, notes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atom.bench.gsm8k.load import KIND
from atom.bench.gsm8k.problems import GSM8K
from atom.bench.gsm8k.questions import questions_of
from atom.bench.gsm8k.score import accuracies, accuracy_figures
from atom.bench.gsm8k.speculation import speculation_of
from atom.bench.metrics import Figure
from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import RunDirectory

__all__ = ["COMPARISON_FILE", "HARNESS_FILE", "UNSCORED", "AccuracySection", "accuracy_section", "asks_word_problems"]

COMPARISON_FILE: Final = "accuracy/comparison.json"
HARNESS_FILE: Final = "accuracy/lm_eval.json"
"""Written after the load; a summary takes them in as they are."""
UNSCORED: Final = "{:,} records cannot be scored: they lack their text or the right answer"


@dataclass(frozen=True, slots=True)
class AccuracySection:
    content: dict[str, Any]
    figures: dict[str, Figure]
    reasons: list[str]
    """Why the accuracy is no valid evidence, beyond what holds for every load."""
    damage: list[str]
    """What of that can only be damage where the run was found valid once."""
    title: str
    """What was asked, as a title says it: a file in GSM8K's format may be GSM8K or not."""


def asks_word_problems(load: Mapping[str, Any]) -> bool:
    source = load.get("source")
    return isinstance(source, dict) and source.get("kind") == KIND


def accuracy_section(
    run_dir: RunDirectory,
    run: Mapping[str, Any],
    load: Mapping[str, Any],
    records: Iterable[RequestRecord],
    window: tuple[int, int],
) -> AccuracySection:
    """Of a run for which `asks_word_problems`. `window`: start and end of the measured phase, monotonic ns."""
    source, questions = load["source"], questions_of(records)
    failed = Counter(result.error or "?" for result in questions.results if result.outcome == Outcome.FAILED)
    speculation = speculation_of(run_dir, run, *window)
    prefix = str(source.get("figure"))
    content = {
        "problems": str(source.get("problems")),
        "figure": prefix,
        "filters": [
            {"filter": a.filter, "value": a.value, "stderr": a.stderr, "correct": a.correct, "n": a.n}
            for a in accuracies(questions)
        ],
        "failed": dict(failed),
        "truncated": sum(result.finish_reason == "length" for result in questions.results),
        "cancelled": questions.cancelled,
        "unscored": questions.unscored,
        "speculation": {"state": speculation.state, "text": speculation.text},
        "compared": _written(run_dir.path / COMPARISON_FILE),
        "harness": _written(run_dir.path / HARNESS_FILE),
    }
    reasons = [speculation.text] if speculation.state == "forced" else []
    damage = [UNSCORED.format(questions.unscored)] if questions.unscored else []
    title = f"{GSM8K} format, {source.get('problems')}" if prefix == GSM8K else str(load.get("name"))
    return AccuracySection(content, accuracy_figures(questions, prefix), [*reasons, *damage], damage, title)


def _written(path: Path) -> dict[str, Any] | None:
    """The file's object; None if there is none. A run directory may have been damaged since."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
