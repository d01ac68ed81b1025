"""What the runs of one arm under one load came to, all its matched runs together: requests completed of those asked,
the failure's class, throughput, and why it is no valid evidence. The rows of a causal comparison are made of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atom.diag.compare.model import RunResult

__all__ = ["ArmOutcome", "RunEvidence", "outcomes_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvidence:
    """One run as it was scored."""

    result: RunResult
    completed: int | None = None
    requests: int | None = None
    """Those the load asks for; None where it ends by time or nothing was recorded."""
    value: float | None = None
    """Of the metric that the arms are compared by, raw; None: not measured."""
    censored: Sequence[str] = ()
    invalid: Sequence[str] = ()
    """Why its record is no valid evidence, whatever the server did: a saturated client."""
    failure_class: str | None = None
    """`functional`, `transport`, `agreement`, `infrastructure`, `performance gate`."""
    failure_line: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmOutcome:
    """All runs of one arm."""

    arm: str
    runs: int
    started: int
    """Runs of these whose server came up."""
    completed: int | None
    requests: int | None
    values: tuple[float, ...]
    censored: tuple[str, ...]
    failure: Mapping[str, Any] | None
    """`class` and the evidence's `line`, of the first run that has one."""
    problem: str | None
    """Why there is nothing to compare."""
    invalid: tuple[str, ...] = ()
    """As of its runs, each once."""

    @property
    def value(self) -> float | None:
        """Geometric mean, as effects are of logarithms."""
        if not self.values or min(self.values) <= 0:
            return 0.0 if self.values else None
        return math.exp(math.fsum(map(math.log, self.values)) / len(self.values))

    @property
    def valid(self) -> bool:
        """Whether its throughput is evidence."""
        return bool(self.values) and not self.censored and self.problem is None


def outcomes_of(runs: Sequence[RunEvidence]) -> dict[str, ArmOutcome]:
    """By label, in the order of the runs. `runs`: the counted ones of one load, superseded ones left out. A record of
    the base stands in a comparison with each other arm, and counts once."""
    by_arm: dict[str, dict[str, RunEvidence]] = {}
    for run in runs:
        by_arm.setdefault(run.result.arm, {}).setdefault(run.result.directory, run)
    return {arm: _together(arm, list(some.values())) for arm, some in by_arm.items()}


def _together(arm: str, runs: Sequence[RunEvidence]) -> ArmOutcome:
    failed = next((run for run in runs if run.failure_class is not None), None)
    counted = [run for run in runs if run.completed is not None]
    asked = [run.requests for run in runs if run.requests is not None]
    return ArmOutcome(
        arm=arm,
        runs=len(runs),
        started=sum(run.result.has_records for run in runs),
        completed=sum(run.completed or 0 for run in counted) if counted else None,
        requests=sum(asked) if asked else None,
        values=tuple(run.value for run in runs if run.value is not None),
        censored=tuple(dict.fromkeys(reason for run in runs for reason in run.censored)),
        invalid=tuple(dict.fromkeys(reason.partition(":")[0] for run in runs for reason in run.invalid)),
        failure=None if failed is None else {"class": failed.failure_class, "line": failed.failure_line},
        problem=next((run.result.problem for run in runs if run.result.problem is not None), None),
    )
