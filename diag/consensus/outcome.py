"""What each arm came to: requests completed of those asked, throughput, and why it may be no evidence; and the causal
table over them, by the rules of `diag/compare/causal.py`.

An arm is the runs of one label. Runs of several arms with one number were made one after the other under the same seed:
a pair, like those of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from atom.diag.compare.causal import Question, causal_section
from atom.diag.compare.model import Arm, ArmKind
from atom.diag.compare.outcomes import ArmOutcome
from atom.diag.compare.statistics import Effects, Estimate, estimate
from atom.diag.consensus.lifecycle import rounds_of
from atom.diag.consensus.model import Recording, Round
from atom.diag.consensus.safety import Safety, check_safety

__all__ = ["ROLES", "ArmRuns", "RunOutcome", "causal", "role_of", "run_outcome"]

ROLES: Final = {
    "control": "control",
    "none": "control",
    "blocking": "treatment",
    "local-only": "bypass",
    "async": "repair",
}
"""By an arm's label, else by its mode."""


def role_of(label: str, mode: str) -> str:
    return ROLES.get(label) or ROLES.get(mode, "arm")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """One run of one arm."""

    completed: int | None
    """Requests that every rank applied as completed; where nothing was to agree on, that every rank was done with."""
    total: int | None
    failed: int
    cancelled: int
    undecided: int
    seconds: float
    """From the first event of a request to the last one."""
    censored: tuple[str, ...]

    @property
    def requests_per_s(self) -> float | None:
        return self.completed / self.seconds if self.completed and self.seconds > 0 else None


def run_outcome(recording: Recording) -> RunOutcome:
    """Requests are counted where they were recorded; collectives alone have none."""
    rounds = [rounds_of(trace) for trace in recording.ranks]
    known = {round_ for one in rounds for round_ in one}
    outcomes = _outcomes(recording)
    done = _done(recording, rounds, known, outcomes)
    counts = {name: sum(one == name for one in done.values()) for name in ("completed", "failed", "cancelled")}
    total = _asked(recording, known)
    undecided = max((total or 0) - len(done), 0)
    injected = any(_positive(recording.ranks[0].facts.get(name)) for name in ("failures", "timeouts"))
    unexpected = 0 if injected else counts["failed"]
    return RunOutcome(
        completed=counts["completed"] if known else None,
        total=total,
        failed=counts["failed"],
        cancelled=counts["cancelled"],
        undecided=undecided,
        seconds=_span(recording, rounds),
        censored=_censored(recording, undecided, unexpected, total),
    )


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _outcomes(recording: Recording) -> dict[Round, set[str]]:
    found: dict[Round, set[str]] = {}
    for trace in recording.ranks:
        for event in trace.requests:
            if event.name == "commit" and event.outcome is not None:
                found.setdefault(event.round, set()).add(event.outcome)
    return found


def _done(
    recording: Recording,
    rounds: Sequence[Mapping[Round, Mapping[str, int]]],
    known: set[Round],
    outcomes: Mapping[Round, set[str]],
) -> dict[Round, str]:
    """Rounds that every rank was done with, and the outcome that dominates."""
    done = {}
    for round_ in known:
        ended = all(
            any(name in one.get(round_, ()) for name in ("commit", "apply", "release", "cleanup")) for one in rounds
        )
        if ended:
            seen = outcomes.get(round_, {"completed"} if recording.mode == "none" else set())
            done[round_] = next((name for name in ("cancelled", "failed", "completed") if name in seen), "completed")
    return done


def _asked(recording: Recording, known: set[Round]) -> int | None:
    """As the run says, else as many as it began."""
    said = recording.ranks[0].facts.get("requests")
    if type(said) is int and said >= 0:
        return said
    totals = [trace.end.total for trace in recording.ranks if trace.end is not None and trace.end.total]
    return max(totals) if totals else len(known) or None


def _span(recording: Recording, rounds: Sequence[Mapping[Round, Mapping[str, int]]]) -> float:
    """From the first event of any request to the last, over all ranks where they share a clock: no rank sees both the
    first request come in and the last one leave the pipeline. Else the longest of the ranks' own."""
    times = [[t for one in some.values() for t in one.values()] for some in rounds]
    spans = [(min(some), max(some)) for some in times if some]
    if not spans:
        return 0.0
    if recording.one_clock:
        return (max(last for _, last in spans) - min(first for first, _ in spans)) / 1e9
    return max(last - first for first, last in spans) / 1e9


def _censored(recording: Recording, undecided: int, unexpected: int, total: int | None) -> tuple[str, ...]:
    reasons = list(recording.problems)
    if undecided:
        reasons.append(f"{undecided} of {total} requests were not decided")
    if unexpected > 0:
        reasons.append(f"{unexpected} requests failed")
    for trace in recording.ranks:
        if trace.ends and trace.end is None:
            how = "did not come to its end" if trace.killed_by is None else f"was killed by {trace.killed_by}"
            reasons.append(f"rank {trace.rank} {how}")
        elif trace.end is not None and trace.end.error:
            reasons.append(f"rank {trace.rank}: {trace.end.error}")
    return tuple(reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRuns:
    """All runs of one arm, in order."""

    label: str
    mode: str
    role: str
    recordings: tuple[Recording, ...]
    outcomes: tuple[RunOutcome, ...]
    safety: tuple[Safety, ...]

    @classmethod
    def of(cls, label: str, recordings: Sequence[Recording]) -> ArmRuns:
        mode = recordings[0].mode
        return cls(
            label=label,
            mode=mode,
            role=role_of(label, mode),
            recordings=tuple(recordings),
            outcomes=tuple(run_outcome(one) for one in recordings),
            safety=tuple(check_safety(one) for one in recordings),
        )

    def as_role(self, role: str) -> ArmRuns:
        return replace(self, role=role)

    @property
    def censored(self) -> list[str]:
        return list(dict.fromkeys(reason for one in self.outcomes for reason in one.censored))

    @property
    def rates(self) -> list[float]:
        return [one.requests_per_s for one in self.outcomes if one.requests_per_s is not None]

    @property
    def rate(self) -> float | None:
        """Median over the runs."""
        return float(np.median(self.rates)) if self.rates else None

    @property
    def typical(self) -> Recording:
        """The run of median throughput, for what is shown of one run."""
        order = sorted(range(len(self.recordings)), key=lambda at: self.outcomes[at].requests_per_s or 0.0)
        return self.recordings[order[len(order) // 2]]


def causal(arms: Sequence[ArmRuns]) -> dict[str, Any] | None:
    """The causal table's section: rows, gap, discriminators. None with fewer than three arms that have requests, or
    without a control among them."""
    arms = [one for one in arms if any(outcome.completed is not None for outcome in one.outcomes)]
    control = next((one for one in arms if one.role == "control"), None)
    if control is None or len(arms) < 3:
        return None
    made = [Arm(label=one.label, kind=ArmKind.RECORDED, spec=one.label, role=one.role) for one in arms]
    estimates = {
        (control.label, one.label): found
        for one in arms
        if one is not control and (found := _against(control, one)) is not None
    }
    question = Question(load="agreement", metric="requests_per_s", title="throughput", unit="req/s")
    return causal_section(made, {one.label: _arm_outcome(one) for one in arms}, estimates, question)


def _arm_outcome(arm: ArmRuns) -> ArmOutcome:
    completed = [one.completed for one in arm.outcomes if one.completed is not None]
    totals = [one.total for one in arm.outcomes if one.total is not None]
    diverged = sum(len(one.divergent) for one in arm.safety)
    lines = [f"{diverged} requests ended differently on different ranks"] if diverged else []
    failure = {"class": "agreement", "line": lines[0]} if lines else None
    return ArmOutcome(
        arm=arm.label,
        runs=len(arm.outcomes),
        started=len(arm.outcomes),
        completed=sum(completed) if completed else None,
        requests=sum(totals) if totals else None,
        values=tuple(arm.rates),
        censored=tuple(arm.censored),
        failure=failure,
        problem=None,
    )


def _against(control: ArmRuns, arm: ArmRuns) -> Estimate | None:
    """ln(arm / control) over runs of one number; None without two of them."""
    theirs = {one.repeat: out.requests_per_s for one, out in zip(control.recordings, control.outcomes, strict=True)}
    ratios = [
        math.log(out.requests_per_s / base)
        for one, out in zip(arm.recordings, arm.outcomes, strict=True)
        if out.requests_per_s and (base := theirs.get(one.repeat))
    ]
    if len(ratios) < 2:
        return None
    matched = np.column_stack([np.array(ratios), np.full(len(ratios), np.nan)])
    return estimate(Effects(matched, np.full(len(ratios), np.nan)))
