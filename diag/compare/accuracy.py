"""Accuracy of two arms question by question, over all runs of word problems that both made.

The question is the unit: one that was asked in several runs counts once, with the share of the runs that got it right,
because its answers are no independent evidence. How much two runs of the *same* arm disagree is shown beside it:
engines are not batch-invariant, so answers differ between runs of one and the same code.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from atom.bench.gsm8k.asked import asked_differently
from atom.bench.gsm8k.compare import keyed, mcnemar_p
from atom.bench.gsm8k.extract import FILTERS
from atom.bench.gsm8k.questions import QuestionResult, read_questions
from atom.bench.rundir import RunDirectory
from atom.diag.compare.statistics import holm
from atom.recipes.errors import UsageError

__all__ = ["accuracy_section"]

LEVEL: Final = 0.95
_QUANTILE: Final = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)

_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One run."""

    directory: Path
    results: Mapping[_Key, QuestionResult]
    load: Mapping[str, Any]
    problems: str
    figure: str
    failed: int


def accuracy_section(base: Sequence[Path], head: Sequence[Path], *, base_label: str, head_label: str) -> dict[str, Any]:
    """Of run directories of `atom bench gsm8k`, one or more per arm.

    `{base, head, problems, figure, n, runs {base, head}, filters[] {filter, base {value, stderr}, head {value, stderr},
    difference, difference_stderr, ci [low, high], better, worse, p, adjusted_p, verdict}, within {base, head},
    notes[]}`. `better`: questions that the head gets right more often. `p`: exact sign test over the questions that
    differ, which with one run per arm is McNemar's; `adjusted_p`, which the verdict goes by: Holm's over the filters.
    `ci`: with half a question lost, half won, and one unchanged added (Agresti and Min 2005), so that a few questions
    that all agree do not look like certainty. `within`: share of the questions on which two runs of the arm disagree,
    None with one run. Runs that cannot be read are named in `notes`; `n` is 0 if no question is in both arms.
    """
    notes: list[str] = []
    sides = _read(base, notes), _read(head, notes)
    common = [key for key in _questions(sides[0]) if key in _questions(sides[1])]
    alone = len(_questions(sides[0]).keys() ^ _questions(sides[1]).keys())
    if not common:
        notes.append("nothing to compare: the two arms have no question in common")
    elif alone:
        notes.append(f"{alone:,} questions were answered by one arm alone, and are not compared")
    if all(sides) and (differing := asked_differently(sides[0][0].load, sides[1][0].load)):
        notes.append(f"the two were not asked the same way (A: {base_label}, B: {head_label}): {'; '.join(differing)}")
    for label, side in zip((base_label, head_label), sides, strict=True):
        if failed := sum(run.failed for run in side):
            notes.append(f"{label}: {failed:,} failed requests count as wrong")
    first = next((run for side in sides for run in side), None)
    return {
        "base": base_label,
        "head": head_label,
        "problems": None if first is None else first.problems,
        "figure": None if first is None else first.figure,
        "n": len(common),
        "runs": {"base": len(sides[0]), "head": len(sides[1])},
        "filters": _filters(common, sides, head_label),
        "within": {"base": _disagreement(sides[0]), "head": _disagreement(sides[1])},
        "notes": notes,
    }


def _read(directories: Sequence[Path], notes: list[str]) -> list[_Asked]:
    runs = []
    for directory in directories:
        try:
            run_dir = RunDirectory.open(directory)
            run, questions = run_dir.read_run_json(), read_questions(run_dir)
        except UsageError as error:
            notes.append(str(error))
            continue
        source = run["load"]["source"]
        failed = sum(result.error is not None for result in questions.results)
        results = dict(keyed(questions.results))
        runs.append(
            _Asked(directory, results, run["load"], str(source.get("problems")), str(source.get("figure")), failed)
        )
        if run.get("validity") != "valid":
            notes.append(
                f"{directory.parent.name}/{directory.name}: {run.get('validity') or 'did not come to its end'}"
            )
    return runs


def _questions(side: Sequence[_Asked]) -> dict[_Key, None]:
    """In the order of the loads."""
    return dict.fromkeys(key for run in side for key in run.results)


def _share(side: Sequence[_Asked], key: _Key, name: str) -> float:
    """Of the runs that asked the question, how many got it right."""
    return statistics.fmean(run.results[key].hit(name) for run in side if key in run.results)


def _filters(common: Sequence[_Key], sides: tuple[list[_Asked], list[_Asked]], head_label: str) -> list[dict[str, Any]]:
    rows = [_compared(name, common, sides) for name in FILTERS]
    adjusted = holm([1.0 if row["p"] is None else row["p"] for row in rows])
    for row, p in zip(rows, adjusted, strict=True):
        row["adjusted_p"] = None if row["p"] is None else p
        row["verdict"] = _verdict(row["adjusted_p"], row["ci"], row["difference"], head_label)
    return rows


def _compared(name: str, common: Sequence[_Key], sides: tuple[list[_Asked], list[_Asked]]) -> dict[str, Any]:
    before, after = ([_share(side, key, name) for key in common] for side in sides)
    steps = [new - old for old, new in zip(before, after, strict=True)]
    difference, error = _mean(steps)
    better, worse = sum(step > 0 for step in steps), sum(step < 0 for step in steps)
    return {
        "filter": name,
        "base": dict(zip(("value", "stderr"), _mean(before), strict=True)),
        "head": dict(zip(("value", "stderr"), _mean(after), strict=True)),
        "difference": difference,
        "difference_stderr": error,
        "ci": _interval(steps),
        "better": better,
        "worse": worse,
        "p": mcnemar_p(worse, better) if common else None,
    }


def _interval(steps: Sequence[float]) -> list[float] | None:
    """Of the mean step, each from -1 to 1."""
    if not steps:
        return None
    n = len(steps) + 2
    mean = math.fsum(steps) / n
    half = _QUANTILE * math.sqrt((math.fsum(step**2 for step in steps) + 1) / n - mean**2) / math.sqrt(n)
    return [max(mean - half, -1.0), min(mean + half, 1.0)]


def _mean(values: Sequence[float]) -> tuple[float | None, float | None]:
    """And its standard error."""
    if not values:
        return None, None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def _verdict(p: float | None, ci: list[float] | None, difference: float | None, head_label: str) -> str:
    if p is None or ci is None or difference is None:
        return "not compared"
    if p < 1 - LEVEL:
        return f"{head_label} is {'more' if difference > 0 else 'less'} accurate"
    return f"no difference found; {ci[0]:+.4f} to {ci[1]:+.4f} is not excluded"


def _disagreement(side: Sequence[_Asked]) -> float | None:
    """Between two runs of one arm, with the filter that finds the most."""
    per_filter: dict[str, list[bool]] = defaultdict(list)
    for a, b in combinations(side, 2):
        for name in FILTERS:
            per_filter[name] += [a.results[key].hit(name) != b.results[key].hit(name) for key in _shared(a, b)]
    return max((statistics.fmean(found) for found in per_filter.values() if found), default=None)


def _shared(a: _Asked, b: _Asked) -> Iterable[_Key]:
    return a.results.keys() & b.results.keys()
