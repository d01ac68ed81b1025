"""The verdict: whether the wait is in the agreement, for whom, and if not, where the first interval is that grew.

By rule, in this order:
1. Ranks hang in a call that others never entered: these are named.
   Where ranks have no trace and even the least waiter waited long in the calls of a group, the late one is among those
   without.
2. A group in which some rank lost at least `SIGNIFICANT` of its time because another one came later is where the wait
   is. The late arriver is the rank that the others lost most time to.
3. It is a symptom if forwards grew against the control, the growth explains most of the wait, and no bypass brings the
   throughput back: then the wait is for whatever made these forwards slow.
4. Where no group is significant, the wait is elsewhere. Intervals of work are compared first (forward, submission,
   transfer): queues grow with whatever is slow behind them. The first inflated one in the order of a request's life,
   and of the stages, is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from atom.diag.consensus.lifecycle import STEPS, lifecycle
from atom.diag.consensus.model import Recording
from atom.diag.consensus.outcome import ArmRuns
from atom.diag.consensus.stages import Structure, own_offsets, stage_offsets, structure
from atom.diag.consensus.waits import GroupWaits, group_waits

__all__ = ["Analysis", "Inflated", "Verdict", "analyse", "localise", "subject_of"]

SIGNIFICANT: Final = 0.05
"""Of a rank's wall time."""
NEGLIGIBLE: Final = 0.01
INFLATED: Final = 1.25
"""Median over that of the control; of the other ranks where there is none, `STANDS_OUT`."""
STANDS_OUT: Final = 1.5
LEAST_S: Final = 0.0005
"""A median that grew by less is not called inflated."""
OTHERS: Final = "the other ranks"
FEWEST: Final = 3
"""Samples on both sides."""
DOMINANT: Final = 0.6
"""A rank that at least this share of the wait is for is the late one by itself."""
RECOVERED: Final = 0.5
"""A bypass that brings back this share of the loss shows that the loss is in what it bypasses."""


@dataclass(frozen=True, slots=True)
class Inflated:
    """An interval that takes longer than it should."""

    step: str
    rank: int
    seconds: float
    """Its median."""
    usual: float
    against: str
    """What the usual one is of."""

    @property
    def factor(self) -> float:
        return self.seconds / self.usual if self.usual > 0 else float("inf")

    def __str__(self) -> str:
        return f"{self.step} on rank {self.rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    sentence: str
    rule: str
    """`stuck`, `absent`, `agreement`, `symptom`, `cost`, `elsewhere`, `nothing`, `unknown`."""
    arm: str
    """Whose run it is about."""
    group: str | None = None
    late_rank: int | None = None
    inflated: Inflated | None = None
    details: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """What was measured of one arm's typical run."""

    arm: ArmRuns
    recording: Recording
    waits: Mapping[str, GroupWaits]
    structure: Mapping[str, Structure]
    """By group, of those that meet."""
    inflated: Inflated | None
    """The first interval of work that is; else the first of any kind but the agreement."""


def subject_of(arms: Sequence[ArmRuns]) -> ArmRuns:
    """The arm to explain: that with the change; else the one that lost most time; else the first that agrees at all."""
    treatment = next((one for one in arms if one.role == "treatment"), None)
    if treatment is not None:
        return treatment
    others = [one for one in arms if one.role != "control"] or list(arms)
    return max(others, key=lambda one: max((w.most_s for w in group_waits(one.typical).values()), default=0.0))


def control_of(arms: Sequence[ArmRuns], subject: ArmRuns) -> ArmRuns | None:
    return next((one for one in arms if one.role == "control" and one is not subject), None)


def analyse(arm: ArmRuns, control: ArmRuns | None) -> Analysis:
    recording = arm.typical
    waits = group_waits(recording)
    base = None if control is None else control.typical
    offsets = None if base is None else stage_offsets(base)
    split = {}
    for name, one in waits.items():
        found = offsets if offsets is not None and name != "tp" else own_offsets(one)
        if found is not None and one.matched:
            split[name] = structure(one, found, controlled=found is offsets)
    return Analysis(arm=arm, recording=recording, waits=waits, structure=split, inflated=find_inflated(recording, base))


def find_inflated(recording: Recording, control: Recording | None) -> Inflated | None:
    """Against the control; without one, against the other ranks' median of the same step."""
    mine, theirs = lifecycle(recording), None if control is None else lifecycle(control)
    for kinds in (("work",), ("queue",)) if control is not None else (("work",),):
        for step in STEPS:
            if step.kind not in kinds:
                continue
            for trace in sorted(recording.ranks, key=lambda one: one.rank):
                own = mine.get(step.name, {}).get(trace.rank)
                if own is None or own.p50 is None or own.n < FEWEST:
                    continue
                if theirs is not None and control is not None:
                    other = theirs.get(step.name, {}).get(trace.rank)
                    usual = None if other is None or other.n < FEWEST else other.p50
                    against, factor = control.label, INFLATED
                else:
                    rest = [one.p50 for rank, one in mine[step.name].items() if rank != trace.rank and one.p50]
                    usual = float(np.median(rest)) if rest else None
                    against, factor = OTHERS, STANDS_OUT
                if usual is not None and own.p50 >= factor * usual and own.p50 - usual >= LEAST_S:
                    return Inflated(step.name, trace.rank, own.p50, usual, against)
    return None


def localise(subject: Analysis, arms: Sequence[ArmRuns]) -> Verdict:
    """`arms`: all that were recorded, for what removing the agreement brings."""
    if (stuck := _stuck(subject)) is not None:
        return stuck
    if (absent := _absent(subject)) is not None:
        return absent
    group = _where(subject)
    if group is None:
        return _elsewhere(subject)
    if group.late_rank is None:
        return _cost(subject, group)
    control = control_of(arms, subject.arm)
    recovery = _recovery(arms, subject.arm, control)
    if _is_symptom(subject, group, recovery):
        return _symptom(subject, group)
    parts = [f"{_name(group)}, {_late(subject, group)}", *_others(subject, group)]
    if recovery is not None:
        parts.append(recovery.words)
    found = subject.inflated
    if found is not None and found.step == "context forward" and found.against != OTHERS:
        parts.append(f"besides, {found} takes {found.factor:.1f} times as long as in {found.against}")
    return Verdict(
        sentence="; ".join(parts),
        rule="agreement",
        arm=subject.arm.label,
        group=group.group.upper(),
        late_rank=group.late_rank,
        inflated=subject.inflated,
        details=[*_phase(group), *_structure(subject, group), *_standing_out(subject)],
    )


# ---- rules


def _stuck(subject: Analysis) -> Verdict | None:
    ended = {trace.rank for trace in subject.recording.ranks if trace.end is not None and trace.end.error is None}
    for group in subject.waits.values():
        for call in group.open if group.meets else ():
            missing = [rank for rank in call.missing if rank not in ended]
            if not call.inside or not missing or ended >= set(call.inside):
                continue
            inside, gone = _ranks(call.inside), _ranks(missing)
            return Verdict(
                sentence=f"{inside} {'is' if len(call.inside) == 1 else 'are'} in {_name(group)} call {call.number} "
                f"({call.kind}), which {gone} never entered",
                rule="stuck",
                arm=subject.arm.label,
                group=group.group.upper(),
                late_rank=missing[0],
            )
    return None


def _absent(subject: Analysis) -> Verdict | None:
    """Ranks without a trace, and even the rank that waited least waited long: for one of these."""
    recording = subject.recording
    missing = sorted(set(range(recording.size)) - {trace.rank for trace in recording.ranks})
    if not missing:
        return None
    for group in sorted(subject.waits.values(), key=lambda one: -one.most_s):
        least = _least_share(recording, group) if group.meets and len(group.ranks) > 1 else 0.0
        if least >= SIGNIFICANT:
            without = f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'} none"
            return Verdict(
                sentence=f"{_name(group)}, but the late rank is not among the traces ({without}): even the ranks that "
                f"waited least waited {least:.1%} of the time in the calls",
                rule="absent",
                arm=subject.arm.label,
                group=group.group.upper(),
                inflated=subject.inflated,
                details=["who waited for whom is told among the ranks with a trace alone"],
            )
    return None


def _least_share(recording: Recording, group: GroupWaits) -> float:
    """Of the time: the wait of the rank that waited least, call by call, where a member may be without a trace."""
    wall = recording.wall_s
    if not group.matched:
        least = min(group.ranks, key=lambda one: one.total_s)
        return (least.share or 0.0) if wall > 0 else float(least.total_s > 0)
    first = recording.ranks[0]
    whole = recording.size if group.collectives else {"pp": first.pp, "tp": first.tp}.get(group.group, recording.size)
    by_members: dict[tuple[int, ...], float] = {}
    for one in group.meetings:
        if len(one.members) < whole:
            by_members[one.members] = by_members.get(one.members, 0.0) + min(one.waits_s)
    longest = max(by_members.values(), default=0.0)
    return longest / wall if wall > 0 else float(longest > 0)


def _unknown(subject: Analysis) -> str | None:
    """Why nothing can be said about waits."""
    recording = subject.recording
    if recording.mode == "none":
        return None
    if len(recording.ranks) == 1:
        rank = recording.ranks[0].rank
        return f"rank {rank} of {recording.size} ranks is the only one with a trace"
    if not subject.waits:
        return "no calls in which ranks agree or meet were recorded"
    return None


def _where(subject: Analysis) -> GroupWaits | None:
    """The group in which most time was lost, if that is significant."""
    groups = sorted(subject.waits.values(), key=_lost, reverse=True)
    return next((group for group in groups if _share(subject, group) >= SIGNIFICANT), None)


def _lost(group: GroupWaits) -> float:
    """Of the rank that lost most: to late ranks where ranks meet, inside the calls where they do not."""
    if not group.meets:
        return group.most_s
    return max((sum(row) for row in group.late), default=0.0)


def _share(subject: Analysis, group: GroupWaits) -> float:
    wall = subject.recording.wall_s
    if wall > 0:
        return _lost(group) / wall
    return 1.0 if _lost(group) > 0 else 0.0


def _elsewhere(subject: Analysis) -> Verdict:
    label, found = subject.arm.label, subject.inflated
    inside = [group for group in subject.waits.values() if group.meets and group.most_share >= SIGNIFICANT]
    costly = [
        f"the calls of {_name(one)} take {one.most_share:.0%} of a rank, though no rank is late" for one in inside
    ]
    if subject.arm.mode == "none":
        costly.append("nothing is agreed on in this arm")
    unknown = _unknown(subject)
    if unknown is not None:
        besides = "" if found is None else f"; what stands out is {found}"
        return Verdict(
            sentence=f"not known: {unknown}{besides}",
            rule="unknown",
            arm=label,
            inflated=found,
            details=[*([] if found is None else [_grown(found)]), *costly],
        )
    if found is None:
        largest = max(subject.waits.values(), key=_lost, default=None)
        text = "the wait is not here: no rank waits for a late one, and no interval stands out"
        if largest is not None:
            text += f"; {_name(largest)} costs {_share(subject, largest):.2%} of a rank at most"
        return Verdict(sentence=text, rule="nothing", arm=label, details=costly)
    word = "first inflated interval" if found.against != OTHERS else "first interval that stands out"
    return Verdict(
        sentence=f"the wait is not here: {word} is {found}",
        rule="elsewhere",
        arm=label,
        inflated=found,
        details=[_grown(found), *costly],
    )


def _cost(subject: Analysis, group: GroupWaits) -> Verdict:
    """Calls that wait for nobody and take long all the same."""
    worst = max(group.ranks, key=lambda one: one.total_s)
    inside = "publish and poll" if not group.meets else "its calls"
    return Verdict(
        sentence=f"{_name(group)} waits for no late rank, but {inside} cost rank {worst.rank} "
        f"{_share(subject, group):.1%} of its time",
        rule="cost",
        arm=subject.arm.label,
        group=group.group.upper(),
        inflated=subject.inflated,
    )


def _is_symptom(subject: Analysis, group: GroupWaits, recovery: _Recovery | None) -> bool:
    found, split = subject.inflated, subject.structure.get(group.group)
    if found is None or found.step != "context forward" or found.against == OTHERS:
        return False
    if recovery is not None and recovery.bypass is not None:
        return not recovery.proven
    return split is not None and split.controlled and sum(split.changed_s) > sum(split.structural_s)


def _symptom(subject: Analysis, group: GroupWaits) -> Verdict:
    found = subject.inflated
    assert found is not None
    symptom = f"{_name(group)}, {_late(subject, group)}, waits for it"
    return Verdict(
        sentence=f"the wait is not here: first inflated interval is {found}, and {symptom}",
        rule="symptom",
        arm=subject.arm.label,
        group=None,
        late_rank=None,
        inflated=found,
        details=[_grown(found), *_phase(group), *_structure(subject, group)],
    )


# ---- what removing the agreement brings


@dataclass(frozen=True, slots=True)
class _Recovery:
    bypass: float | None
    """Throughput without the agreement, of the control's."""
    proven: bool
    """Whether the bypass brings back a good part of what the subject lost."""
    words: str


def _recovery(arms: Sequence[ArmRuns], subject: ArmRuns, control: ArmRuns | None) -> _Recovery | None:
    if control is None or not control.rate or control.censored:
        return None

    def of_control(role: str) -> float | None:
        arm = next((one for one in arms if one.role == role and one is not subject), None)
        return None if arm is None or arm.rate is None or arm.censored else arm.rate / control.rate  # type: ignore[operator]

    bypass, repair = of_control("bypass"), of_control("repair")
    own = None if subject.rate is None or subject.censored else subject.rate / control.rate
    words = []
    if own is not None:
        words.append(f"throughput is {own:.1%} of control")
    if bypass is not None:
        words.append(f"removing it recovers {bypass:.1%} of control")
    if repair is not None:
        words.append(f"the asynchronous agreement keeps {repair:.1%}")
    if not words:
        return None
    lost = None if own is None else 1 - own
    proven = bypass is not None and (lost is None or lost <= 0 or bypass - (1 - lost) >= RECOVERED * lost)
    return _Recovery(bypass, proven, "; ".join(words))


# ---- words


def _name(group: GroupWaits) -> str:
    return f"{group.group.upper()} {'collectives' if group.collectives else 'agreement'}"


def _late(subject: Analysis, group: GroupWaits) -> str:
    """One rank, where most of the wait is for it; else the stage whose shards it is for; else several in turn."""
    late = group.late_rank
    assert late is not None
    cost = {rank: sum(row[rank] for row in group.late) for rank in range(len(group.late))}
    whole = sum(cost.values())
    if cost[late] >= DOMINANT * whole:
        return f"entered last by rank {late}"
    stages = {trace.rank: trace.stage for trace in subject.recording.ranks}
    shards = sorted(rank for rank, stage in stages.items() if stage == stages.get(late) and cost[rank] > 0)
    if (
        subject.recording.ranks[0].tp > 1
        and group.group != "tp"
        and sum(cost[rank] for rank in shards) >= DOMINANT * whole
    ):
        return f"entered last by stage {stages[late]} ({_ranks(shards)})"
    order = sorted((rank for rank in cost if cost[rank] >= 0.01 * whole), key=lambda rank: -cost[rank])[:3]
    told = ", ".join(f"rank {rank} {cost[rank] / whole:.0%}" for rank in order)
    return f"entered last by one rank after the other ({told})"


def _others(subject: Analysis, group: GroupWaits) -> list[str]:
    found = []
    for name, other in subject.waits.items():
        if name == group.group:
            continue
        share, against = _share(subject, other), _lost(other) / max(_lost(group), 1e-12)
        negligible = share < NEGLIGIBLE or against < NEGLIGIBLE
        found.append(f"{name.upper()} negligible" if negligible else f"{name.upper()} {share:.1%} of a rank")
    return found


def _phase(group: GroupWaits) -> list[str]:
    whole = sum(group.phases.values())
    if not whole or group.late_rank is None:
        return []
    told = ", ".join(f"{name} {one / whole:.0%}" for name, one in group.phases.items() if one / whole >= 0.01)
    return [f"between its calls rank {group.late_rank} was in {told}"]


def _structure(subject: Analysis, group: GroupWaits) -> list[str]:
    split = subject.structure.get(group.group)
    if split is None:
        return []
    one, two = sum(split.structural_s), sum(split.changed_s)
    if one + two <= 0:
        return []
    if not split.controlled:
        return [
            f"{one / (one + two):.0%} of the skew is in every call; {two / (one + two):.0%} varies from call to call"
        ]
    own = f"{one / (one + two):.0%} of the skew is the pipeline's own offset ({split.basis})"
    return [f"{own}; {two / (one + two):.0%} came with this arm"]


def _standing_out(subject: Analysis) -> list[str]:
    """A forward that takes long besides: in a pipeline, late ranks wait for the slow one themselves."""
    found = subject.inflated
    return [_grown(found)] if found is not None and found.step == "context forward" else []


def _grown(found: Inflated) -> str:
    return (
        f"{found}: median {found.seconds * 1e3:,.2f} ms against {found.usual * 1e3:,.2f} ms in {found.against} "
        f"(×{found.factor:.2f})"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]} … {ranks[-1]})"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
