"""What has been done of a comparison: `runs.jsonl`, one RunResult a line, appended by one writer.

The two results of a matched run are appended when it has ended. A pair counts when all its matched runs have both;
one that was interrupted is made again in whole, under new run numbers, and its lines from before are superseded: of
the lines of one matched run and side the last one counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from atom.bench.rundir import JsonlFile, JsonlWriter
from atom.diag.compare.model import MatchedRun, RunResult
from atom.diag.compare.plan import Pair, Plan, Stream
from atom.recipes.errors import UsageError

__all__ = ["RUNS_FILE", "DonePair", "Journal", "Records", "read_records"]

RUNS_FILE: Final = "runs.jsonl"
_RUN: Final = re.compile(r"run-(\d{1,9})")

Results = tuple[RunResult, RunResult]
"""As the base, as the head."""


@dataclass(frozen=True, slots=True)
class DonePair:
    """A pair that was made in whole. Its runs may have failed."""

    pair: Pair
    results: tuple[Results, ...]
    """Of `pair.runs`."""

    @property
    def has_records(self) -> bool:
        """Whether every run left something to compare."""
        return all(one.has_records for both in self.results for one in both)


@dataclass(frozen=True, slots=True)
class Records:
    """What `runs.jsonl` says."""

    lines: tuple[RunResult, ...]
    """All, in the order in which they were written."""
    malformed: int = 0
    """Lines that are no result."""

    @property
    def current(self) -> dict[tuple[str, int], RunResult]:
        """(`MatchedRun.key`, side) → the result that counts."""
        return {(one.matched, one.side): one for one in self.lines}

    @property
    def superseded(self) -> list[RunResult]:
        """Of pairs that were interrupted and made again."""
        current = self.current
        return [one for one in self.lines if current[one.matched, one.side] is not one]

    def done(self, plan: Plan) -> list[DonePair]:
        """The complete pairs, in the order of the schedule."""
        return self._done(plan.schedule)

    def done_of(self, plan: Plan, stream: Stream) -> list[DonePair]:
        """The complete pairs of a stream, by their number."""
        return self._done(plan.pairs_of(stream))

    def _done(self, pairs: Iterable[Pair]) -> list[DonePair]:
        current = self.current
        found = []
        for pair in pairs:
            results = [self._results(run, current) for run in pair.runs]
            complete = tuple(one for one in results if one is not None)
            if len(complete) == len(results):
                found.append(DonePair(pair, complete))
        return found

    @staticmethod
    def _results(run: MatchedRun, current: Mapping[tuple[str, int], RunResult]) -> Results | None:
        base, head = current.get((run.key, 0)), current.get((run.key, 1))
        if base is None or head is None or (base.arm, head.arm) != (run.runs[0].arm, run.runs[1].arm):
            return None
        return base, head


def read_records(out: Path) -> Records:
    """Those of the comparison in `out`; none if it has not begun. Torn and foreign lines are counted and skipped."""
    lines: list[RunResult] = []
    malformed = 0
    recorded: frozenset[str] | None = None
    file = JsonlFile(out / RUNS_FILE)
    for value in file:
        try:
            result = RunResult.from_dict(value)
        except UsageError:
            malformed += 1
            continue
        if recorded is None and result.directory.startswith("/"):
            recorded = _recorded(out)
        if result.side in (0, 1) and _is_own(result, recorded or frozenset()):
            lines.append(result)
        else:
            malformed += 1
    return Records(tuple(lines), malformed + file.malformed)


def _is_own(result: RunResult, recorded: frozenset[str]) -> bool:
    """Whether its directory is one of this comparison's, or what the plan names as recorded: a line says nothing of any
    other place."""
    parts = result.directory.split("/")
    made = len(parts) == 3 and parts[:2] == ["arms", result.arm] and _RUN.fullmatch(parts[2]) is not None
    return result.directory in recorded or (made and result.arm not in ("", ".", ".."))


def _recorded(out: Path) -> frozenset[str]:
    try:
        return frozenset(path for arm in Plan.read(out).arms for path in arm.recorded)
    except UsageError:
        return frozenset()


class Journal:
    """Appends to `runs.jsonl` of the comparison in `out`, and numbers its run directories. UsageError if another
    process writes it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._writer = JsonlWriter(out / RUNS_FILE)
        before = read_records(out)
        self._lines = list(before.lines)
        self._malformed = before.malformed
        self._numbers: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._writer.close()

    @property
    def records(self) -> Records:
        return Records(tuple(self._lines), self._malformed)

    def append(self, results: Sequence[RunResult]) -> None:
        for one in results:
            self._writer.append(one.as_dict())
            self._lines.append(one)

    def new_directory(self, arm: str) -> Path:
        """`arms/<label>/run-N` with the next number, also after runs that left a directory and no line. Not made."""
        folder = self.out / "arms" / arm
        if arm not in self._numbers:
            used = [Path(one.directory).name for one in self._lines if one.arm == arm]
            if folder.is_dir():
                used += [path.name for path in folder.iterdir()]
            numbers = [int(found[1]) for found in map(_RUN.fullmatch, used) if found]
            self._numbers[arm] = max(numbers, default=0)
        self._numbers[arm] += 1
        return folder / f"run-{self._numbers[arm]}"
