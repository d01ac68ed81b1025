"""Everything that is said of a set of recordings, as one JSON document; the tables are made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from atom.diag.consensus.lifecycle import STEPS, blocks_held, durations, vote_spread
from atom.diag.consensus.localise import Analysis, Verdict, analyse, control_of, localise, subject_of
from atom.diag.consensus.model import Recording
from atom.diag.consensus.outcome import ArmRuns, causal
from atom.diag.consensus.safety import Safety
from atom.diag.consensus.waits import GroupWaits, Quantiles, group_waits, quantiles
from atom.recipes.errors import ExitStatus, UsageError

__all__ = ["arms_of", "consensus_document", "exit_status"]

SCHEMA_VERSION: Final = "1.0"
MOST_NAMED: Final = 10


def arms_of(recordings: Sequence[Recording], control: str | None = None) -> list[ArmRuns]:
    """Recordings by arm, the control first. `control`: label of the one to compare with; UsageError if it is none."""
    by_label: dict[str, list[Recording]] = {}
    for one in recordings:
        by_label.setdefault(one.label, []).append(one)
    arms = [ArmRuns.of(label, some) for label, some in by_label.items()]
    if control is not None:
        if control not in by_label:
            raise UsageError(f"--control {control}: there is no such arm; there are {', '.join(by_label)}")
        arms = [one.as_role("control" if one.label == control else _demoted(one.role)) for one in arms]
    return sorted(arms, key=lambda one: _ORDER.index(one.role) if one.role in _ORDER else len(_ORDER))


_ORDER: Final = ("control", "treatment", "bypass", "repair")


def _demoted(role: str) -> str:
    """Another arm cannot be the control as well."""
    return "treatment" if role in ("control", "arm") else role


def consensus_document(arms: Sequence[ArmRuns]) -> dict[str, Any]:
    """Of at least one arm. The arms' own figures, who waited for whom in the one to explain, and the verdict."""
    subject = subject_of(arms)
    control = control_of(arms, subject)
    analysis = analyse(subject, control)
    verdict = localise(analysis, arms)
    section = causal(arms)
    rows = {row["arm"]: row for row in section["arms"]} if section else {}
    main = _main_group(analysis, verdict)
    size = analysis.recording.size
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": _verdict(verdict),
        "arms": [_arm(one, control or _control(arms), rows.get(one.label)) for one in arms],
        "late_arriver": main.late if main is not None else [[0.0] * size for _ in range(size)],
        "subject": subject.label,
        "control": None if control is None else control.label,
        "groups": [_group(one, analysis) for one in analysis.waits.values()],
        "lifecycle": _lifecycle(analysis, control),
        "votes": _votes(analysis.recording),
        "causal": section,
        "notes": _notes(arms),
    }


def exit_status(document: Mapping[str, Any]) -> ExitStatus:
    """3 where ranks ended a request differently, or applied commits in different orders though they agree on one."""
    wrong = any(arm["divergences"] or arm["order_differs"] for arm in document["arms"])
    return ExitStatus.GATE if wrong else ExitStatus.OK


def _control(arms: Sequence[ArmRuns]) -> ArmRuns | None:
    return next((one for one in arms if one.role == "control"), None)


def _main_group(analysis: Analysis, verdict: Verdict) -> GroupWaits | None:
    """The verdict's; else the first."""
    named = (verdict.group or "").lower()
    found = (one for one in analysis.waits.values() if one.group.lower() == named)
    return next(found, next(iter(analysis.waits.values()), None))


def _verdict(verdict: Verdict) -> dict[str, Any]:
    found = verdict.inflated
    return {
        "group": verdict.group,
        "late_rank": verdict.late_rank,
        "sentence": verdict.sentence,
        "rule": verdict.rule,
        "arm": verdict.arm,
        "inflated": None if found is None else {**asdict(found), "factor": _finite(found.factor)},
        "details": list(verdict.details),
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


# ---- arms


def _arm(arm: ArmRuns, control: ArmRuns | None, row: Mapping[str, Any] | None) -> dict[str, Any]:
    completed = [one.completed for one in arm.outcomes if one.completed is not None]
    totals = [one.total for one in arm.outcomes if one.total is not None]
    waits = [group_waits(one) for one in arm.recordings]
    names = list(dict.fromkeys(name for one in waits for name in one))
    first = next((name for name in names if name != "tp"), None)
    size = max(one.size for one in arm.recordings)
    traces = [trace for one in arm.recordings for trace in one.ranks]
    return {
        "label": arm.label,
        "mode": arm.mode,
        "role": arm.role,
        "runs": len(arm.recordings),
        "completed": sum(completed) if completed else None,
        "total": sum(totals) if totals else None,
        "failed": sum(one.failed for one in arm.outcomes),
        "cancelled": sum(one.cancelled for one in arm.outcomes),
        "requests_per_s": arm.rate,
        "requests_per_s_runs": arm.rates,
        "pct_of_control": _of_control(arm, control, row),
        "interpretation": None if row is None else row["interpretation"],
        "censored": bool(arm.censored),
        "reasons": arm.censored,
        "wall_s": float(np.median([one.wall_s for one in arm.recordings])),
        "wait_s": _by_rank([one.get(first or "") for one in waits], size),
        "tp_wait_s": _by_rank([one.get("tp") for one in waits], size),
        "group_wait_s": {name: _by_rank([one.get(name) for one in waits], size) for name in names},
        "group": first,
        "cpu_s": [_median([_cpu(one, rank) for one in arm.recordings]) for rank in range(size)],
        **_safety(arm.safety, arm.mode),
        "blocks_held": _blocks(arm.typical),
        "dropped": sum(one.dropped for one in traces),
        "damaged": sum(one.damaged for one in traces),
        "unread": sum(one.unread for one in traces),
        "ended": sum(one.end is not None for one in traces) if any(one.ends for one in traces) else None,
        "ranks": len(traces),
        "facts": _facts(arm.typical),
    }


def _facts(recording: Recording) -> dict[str, Any]:
    """What the run says of itself: small values alone, as the header has them."""
    facts = recording.ranks[0].facts
    return {name: facts[name] for name in sorted(facts) if isinstance(facts[name], str | int | float | bool | list)}


def _of_control(arm: ArmRuns, control: ArmRuns | None, row: Mapping[str, Any] | None) -> float | None:
    if row is not None:
        found = row["pct_of_control"]
        return None if found is None else float(found["value"])
    if control is None or arm is control or arm.censored or control.censored or not arm.rate or not control.rate:
        return None
    return 100 * arm.rate / control.rate


def _by_rank(waits: Sequence[GroupWaits | None], size: int) -> list[float | None]:
    """Median over the runs."""
    found: list[list[float | None]] = [[] for _ in range(size)]
    for one in waits:
        for rank in one.ranks if one is not None else ():
            found[rank.rank].append(rank.total_s)
    return [_median(some) for some in found]


def _cpu(recording: Recording, rank: int) -> float | None:
    trace = next((one for one in recording.ranks if one.rank == rank), None)
    return None if trace is None or trace.end is None else trace.end.cpu_s


def _median(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return float(np.median(known)) if known else None


def _safety(runs: Sequence[Safety], mode: str) -> dict[str, Any]:
    def total(name: str) -> int | None:
        known = [value for one in runs if (value := getattr(one, name)) is not None]
        return sum(known) if known else None

    agrees = mode in ("async", "blocking")
    committed = mode == "none" or any(one.decided for one in runs)
    orders = [one.same_order for one in runs if one.same_order is not None]
    return {
        "divergences": sum(len(one.divergent) for one in runs) if committed else None,
        "divergent": [str(round_) for one in runs for round_ in one.divergent][:MOST_NAMED],
        "incomplete": sum(len(one.incomplete) for one in runs) if committed else None,
        "same_order": all(orders) if orders else None,
        "order_differs": agrees and not all(orders),
        "digests": [runs[0].digests.get(rank) for rank in range(max(runs[0].digests, default=-1) + 1)],
        "abandoned": total("abandoned"),
        "pending_sends": total("pending_sends"),
        "released_before_commit": total("released_before_commit"),
    }


def _blocks(recording: Recording) -> list[dict[str, Any]]:
    return [asdict(one) for one in blocks_held(recording)]


# ---- the arm that is explained


def _group(group: GroupWaits, analysis: Analysis) -> dict[str, Any]:
    split = analysis.structure.get(group.group)
    return {
        "group": group.group,
        "meets": group.meets,
        "calls_matched": group.matched,
        "calls_unmatched": group.unmatched,
        "late_arriver": group.late,
        "late_from": group.late_from if group.meets else None,
        "late_rank": group.late_rank,
        "late_phases_s": group.phases,
        "ranks": [
            {
                "rank": one.rank,
                "stage": one.stage if analysis.recording.ranks[0].pp > 1 else None,
                "wait_s": one.total_s,
                "share": one.share,
                "skew_s": one.skew_s if group.meets else None,
                "structural_s": split.structural_s[one.rank] if split else None,
                "changed_s": split.changed_s[one.rank] if split else None,
                "last": one.last if group.meets else None,
                "first": one.first if group.meets else None,
                "slow": one.slow,
                "longest_gap_s": one.longest_gap_s,
                "call": _quantiles(one.recorded),
            }
            for one in group.ranks
        ],
        "offsets": None if split is None else {"basis": split.basis, "of_control": split.controlled},
        "open": [asdict(one) for one in group.open],
    }


def _quantiles(one: Quantiles) -> dict[str, Any]:
    return {
        "n": one.n,
        "total_s": one.total,
        "mean_s": one.mean,
        "p50_s": one.p50,
        "p95_s": one.p95,
        "p99_s": one.p99,
        "max_s": one.longest,
        "supported": {"p50": one.supports(50), "p95": one.supports(95), "p99": one.supports(99)},
    }


def _lifecycle(analysis: Analysis, control: ArmRuns | None) -> list[dict[str, Any]]:
    """Per step, over all ranks and for each, with the control's beside it."""
    mine = durations(analysis.recording)
    theirs = {} if control is None else durations(control.typical)
    return [
        {
            "step": step.name,
            "kind": step.kind,
            **_pooled(mine[step.name]),
            "control": _pooled(theirs[step.name]) if step.name in theirs else None,
            "ranks": {str(rank): _quantiles(quantiles(some)) for rank, some in sorted(mine[step.name].items())},
        }
        for step in STEPS
        if step.name in mine
    ]


def _pooled(ranks: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    return _quantiles(quantiles([one for some in ranks.values() for one in some]))


def _votes(recording: Recording) -> dict[str, Any] | None:
    found = vote_spread(recording)
    if found is None:
        return None
    return {
        "spread": _quantiles(found.spread),
        "last_vote_to_commit": _quantiles(found.decision),
        "last_voter": {str(rank): count for rank, count in found.last.items()},
    }


def _notes(arms: Sequence[ArmRuns]) -> list[str]:
    notes: list[str] = []
    for arm in arms:
        simulated = arm.typical.ranks[0].facts.get("simulated")
        if isinstance(simulated, str):
            notes.append(f"SIMULATED: {simulated}")
        fell_back = arm.typical.ranks[0].facts.get("fell_back")
        if isinstance(fell_back, str):
            notes.append(f"{arm.label}: {fell_back}")
        for recording in arm.recordings:
            notes += [f"{arm.label}: {problem}" for problem in recording.problems]
            notes += [f"{arm.label}: {note}" for trace in recording.ranks for note in trace.notes]
    return list(dict.fromkeys(notes))
