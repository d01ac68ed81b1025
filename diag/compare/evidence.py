"""The matched runs of a comparison as they were scored, pair by pair, and one metric of them as effects. Reads run
directories; what follows from the effects is `statistics.py`'s and `verdict.py`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from atom.diag.compare.journal import DonePair
from atom.diag.compare.model import MatchedRun, RunResult
from atom.diag.compare.scores import LOAD_ENDED, RunScore, Score, score_matched, score_run
from atom.diag.compare.statistics import Effects, effects_of
from atom.recipes.errors import AtomError, ExitStatus

__all__ = ["ScoredPair", "ScoredRun", "Side", "metric_effects", "metric_values", "scored_pairs"]


@dataclass(frozen=True, slots=True)
class Side:
    """One arm's part of a matched run."""

    result: RunResult
    score: RunScore | None
    problem: str | None
    """Why there is no score."""
    path: Path
    """Its run directory."""

    @property
    def dismissed(self) -> bool:
        """It was well, and not run because its counterpart did not start."""
        return not self.result.has_records and self.result.status == ExitStatus.INTERRUPTED

    @property
    def censored(self) -> list[str]:
        """Why it can be no winner."""
        if self.score is None:
            return [self.problem or "nothing was recorded"]
        if self.problem is None:
            return list(self.score.censored)
        return [self.problem, *(one for one in self.score.censored if one != LOAD_ENDED)]

    def metric(self, name: str) -> Score | None:
        return None if self.score is None else self.score.metrics.get(name)


@dataclass(frozen=True, slots=True)
class ScoredRun:
    run: MatchedRun
    sides: tuple[Side, Side]
    """As the base, as the head."""


@dataclass(frozen=True, slots=True)
class ScoredPair:
    number: int
    runs: tuple[ScoredRun, ...]
    """In the order in which they were made."""


def scored_pairs(out: Path, pairs: Sequence[DonePair], *, concurrent: bool) -> list[ScoredPair]:
    """Of the comparison in `out`. What cannot be read has no score, and says why."""
    return [
        ScoredPair(
            one.pair.pair,
            tuple(
                ScoredRun(run, _sides(out, results, concurrent))
                for run, results in zip(one.pair.runs, one.results, strict=True)
            ),
        )
        for one in pairs
    ]


def _sides(out: Path, results: tuple[RunResult, RunResult], concurrent: bool) -> tuple[Side, Side]:
    paths = [out / one.directory for one in results]
    if all(one.has_records for one in results):
        try:
            scores = _matched(paths[0], paths[1], concurrent)
        except AtomError:
            pass  # one of them cannot be read: each by itself says which
        else:
            base, head = (
                Side(one, score, one.problem, path) for one, score, path in zip(results, scores, paths, strict=True)
            )
            return base, head
    base, head = (_alone(path, one) for path, one in zip(paths, results, strict=True))
    return base, head


@lru_cache(maxsize=4096)
def _matched(base: Path, head: Path, concurrent: bool) -> tuple[RunScore, RunScore]:
    """A run that is over does not change."""
    return score_matched(base, head, concurrent=concurrent)


def _alone(path: Path, result: RunResult) -> Side:
    if not result.has_records:
        return Side(result, None, result.problem or "nothing was recorded", path)
    try:
        return Side(result, score_run(path), result.problem, path)
    except AtomError as error:
        return Side(result, None, result.problem or str(error).partition("\n")[0], path)


def metric_effects(pairs: Sequence[ScoredPair], metric: str) -> Effects:
    """One metric's effects; a matched run without it on both sides counts as missing."""
    shape = (len(pairs), 2, 2)
    values, errors = np.full(shape, np.nan), np.full(shape, np.nan)  # [pair, index, side]
    for row, pair in enumerate(pairs):
        for one in pair.runs:
            for side, score in enumerate(one_side.metric(metric) for one_side in one.sides):
                if score is not None:
                    values[row, one.run.index, side] = score.value
                    errors[row, one.run.index, side] = np.nan if score.log_se is None else score.log_se
    return effects_of(values[:, :, 0], values[:, :, 1], errors[:, :, 0], errors[:, :, 1])


def metric_values(pairs: Sequence[ScoredPair], metric: str, side: int) -> list[float]:
    """Of every run of one side that has it."""
    scores = (one.sides[side].metric(metric) for pair in pairs for one in pair.runs)
    return [score.value for score in scores if score is not None]
