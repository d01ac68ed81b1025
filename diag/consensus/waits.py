"""How long each rank waited in the calls of a group, and for whom.

All ranks leave a blocking call about when the last one enters it. So the wait of a rank is the time from its entry to
its exit, the rank of least wait is the one that came last, and what a wait has above the least one is the **skew**:
time that this rank lost because of that one. All of it comes from durations on each rank's own clock; no clocks are
joined. Polls of an asynchronous agreement are no meetings: there, time inside the calls is all there is.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from atom.bench.metrics import is_supported
from atom.diag.consensus.model import Call, RankTrace, Recording, Round, Work

__all__ = [
    "GroupWaits",
    "Meeting",
    "OpenCall",
    "Quantiles",
    "RankWait",
    "group_waits",
    "quantiles",
    "work_between_calls",
]

SLOW_S: Final = 0.1
"""A call that takes at least this long is counted as slow."""
Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of durations, in seconds."""

    n: int
    total: float
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    longest: float | None = None

    def supports(self, percentile: float) -> bool:
        return is_supported(self.n, percentile)


def quantiles(values: Sequence[float] | npt.NDArray[np.float64]) -> Quantiles:
    data = np.asarray(values, dtype=np.float64)
    if not data.size:
        return Quantiles(0, 0.0)
    p50, p95, p99 = (float(one) for one in np.percentile(data, (50, 95, 99)))
    return Quantiles(data.size, float(data.sum()), float(data.mean()), p50, p95, p99, float(data.max()))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWait:
    """One rank in one group."""

    rank: int
    stage: int
    total_s: float
    """All its calls: what it said at its end, or the sum of what was recorded."""
    recorded: Quantiles
    """Of the calls in the record."""
    share: float | None
    """`total_s` of its wall time, 0..1."""
    skew_s: float = 0.0
    """Lost in meetings because another rank came later."""
    last: int = 0
    """Meetings that it entered last."""
    first: int = 0
    slow: int = 0
    longest_gap_s: float | None = None
    """Longest time from leaving a call to entering the next one."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One call in which all ranks met. `entry_gaps_s` and waits are by the place of a rank in `members`."""

    members: tuple[int, ...]
    culprit: int
    """Rank that came last."""
    waits_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that ranks entered and did not leave."""

    group: str
    kind: str
    number: int
    inside: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks that have not entered it."""


@dataclass(kw_only=True, slots=True)
class GroupWaits:
    """One group of a recording."""

    group: str
    ranks: list[RankWait]
    meets: bool
    """Whether calls are meetings of all ranks."""
    collectives: bool = False
    """Of a program that is no agreement of ours."""
    matched: int = 0
    """Meetings in which every rank was recorded."""
    unmatched: int = 0
    """Calls that are not recorded on every rank."""
    late: list[list[float]] = field(default_factory=list)
    """[waiter][culprit] skew in seconds."""
    late_from: str = "calls"
    """`calls`, or `totals` where no meeting was recorded: then all is put down to the rank that waited least."""
    late_rank: int | None = None
    """The rank that others lost most time to; None where nobody lost any."""
    phases: dict[str, float] = field(default_factory=dict)
    """What the late rank did in the time before it entered those meetings, in seconds."""
    open: list[OpenCall] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)

    @property
    def most_s(self) -> float:
        """Wait of the rank that waited longest."""
        return max((one.total_s for one in self.ranks), default=0.0)

    @property
    def most_share(self) -> float:
        return max((one.share or 0.0 for one in self.ranks), default=0.0)

    @property
    def total_s(self) -> float:
        return sum(one.total_s for one in self.ranks)


def group_waits(recording: Recording) -> dict[str, GroupWaits]:
    """By group, those of which anything is known; `pp` and `tp` first."""
    names = {call.group for one in recording.ranks for call in one.calls}
    names |= {name for one in recording.ranks if one.end is not None for name in one.end.wait_s}
    order = sorted(names, key=lambda name: (name != "pp", name != "tp", name))
    return {name: _group(recording, name) for name in order}


def _group(recording: Recording, group: str) -> GroupWaits:
    meets = all(one.meets for one in recording.ranks)
    waits = GroupWaits(group=group, ranks=[], meets=meets, collectives=recording.mode == "collectives")
    size = recording.size
    waits.late = [[0.0] * size for _ in range(size)]
    first, last = [0] * size, [0] * size
    if meets:
        for members, (enters, exits) in _meetings(recording, group, waits):
            _attribute(waits, members, exits - enters, first, last)
    for one in recording.ranks:
        waits.ranks.append(_rank(one, group, sum(waits.late[one.rank]), first[one.rank], last[one.rank]))
    if meets and not waits.matched:
        _from_totals(waits)
    columns = [sum(row[rank] for row in waits.late) for rank in range(size)]
    if any(columns):
        waits.late_rank = int(np.argmax(columns))
        late = next((one for one in recording.ranks if one.rank == waits.late_rank), None)
        waits.phases = {} if late is None or not waits.matched else _phases(late, group)
    return waits


def _rank(trace: RankTrace, group: str, skew_s: float, first: int, last: int) -> RankWait:
    calls = [call for call in trace.calls if call.group == group]
    done = [call for call in calls if call.exit is not None]
    recorded = quantiles([(call.exit - call.enter) / 1e9 for call in done if call.exit is not None])
    said = trace.end.wait_s.get(group) if trace.end is not None else None
    total = recorded.total if said is None else said
    gaps = [after.enter - before.exit for before, after in itertools.pairwise(calls) if before.exit is not None]
    return RankWait(
        rank=trace.rank,
        stage=trace.stage,
        total_s=total,
        recorded=recorded,
        share=total / trace.wall_s if trace.wall_s > 0 else None,
        skew_s=skew_s,
        first=first,
        last=last,
        slow=sum((call.exit or 0) - call.enter >= SLOW_S * 1e9 for call in done),
        longest_gap_s=max(gaps) / 1e9 if gaps else None,
    )


Key = tuple[str, str]


def _meetings(recording: Recording, group: str, waits: GroupWaits) -> list[tuple[tuple[int, ...], tuple[Int, Int]]]:
    """Per communicator and kind of call: members, and their entries and exits [member, call]. Counts what does not
    match, and notes calls that were not left."""
    by_key: dict[Key, dict[int, dict[int, Call]]] = defaultdict(dict)
    members: dict[str, set[int]] = defaultdict(set)
    for one in recording.ranks:
        for call in one.calls:
            if call.group == group:
                by_key[call.domain, call.kind].setdefault(one.rank, {})[call.number] = call
                members[call.domain].add(one.rank)
    found = []
    for (domain, kind), ranks in by_key.items():
        expected = tuple(sorted(members[domain]))
        numbers = {number for calls in ranks.values() for number in calls}
        whole = []
        for number in sorted(numbers):
            calls = [ranks.get(rank, {}).get(number) for rank in expected]
            if all(call is not None and call.exit is not None for call in calls):
                whole.append(calls)
            else:
                waits.unmatched += 1
        waits.open += _open(group, kind, expected, ranks)
        if whole and len(expected) > 1:
            waits.matched += len(whole)
            enters = np.array([[call.enter for call in calls if call] for calls in whole], dtype=np.int64).T
            exits = np.array([[call.exit for call in calls if call] for calls in whole], dtype=np.int64).T
            found.append((expected, (enters, exits)))
    return found


def _open(group: str, kind: str, expected: tuple[int, ...], ranks: Mapping[int, Mapping[int, Call]]) -> list[OpenCall]:
    """The last call, where some are still in it: who is, and who has not come."""
    stuck = {rank: last for rank, calls in ranks.items() if calls and calls[last := max(calls)].exit is None}
    return [
        OpenCall(
            group,
            kind,
            number,
            tuple(sorted(rank for rank, one in stuck.items() if one == number)),
            tuple(rank for rank in expected if number not in ranks.get(rank, {})),
        )
        for number in sorted(set(stuck.values()))
    ]


def _attribute(waits: GroupWaits, members: tuple[int, ...], waits_mc: Int, first: list[int], last: list[int]) -> None:
    """Skew of every meeting to the rank that waited least in it. `waits_mc` [member, call] in ns."""
    culprits = waits_mc.argmin(axis=0)
    skews = (waits_mc - waits_mc.min(axis=0)) / 1e9
    for place, rank in enumerate(members):
        came_last = culprits == place
        last[rank] += int(came_last.sum())
        first[rank] += int((waits_mc.argmax(axis=0) == place).sum())
        for other, waiter in enumerate(members):
            waits.late[waiter][rank] += float(skews[other][came_last].sum())
    columns = (waits_mc / 1e9).T.tolist()
    waits.meetings += [
        Meeting(members, members[int(culprit)], tuple(one)) for culprit, one in zip(culprits, columns, strict=True)
    ]


def _from_totals(waits: GroupWaits) -> None:
    if len(waits.ranks) < 2 or waits.most_s <= 0:
        return
    waits.late_from = "totals"
    least = min(waits.ranks, key=lambda one: one.total_s)
    for one in waits.ranks:
        waits.late[one.rank][least.rank] = one.total_s - least.total_s


def _phases(trace: RankTrace, group: str) -> dict[str, float]:
    """What a rank did between leaving one call of the group and entering the next, by kind of work, in seconds. What no
    work was recorded for is `unrecorded`."""
    calls = [call for call in trace.calls if call.group == group]
    windows = [(before.exit, after.enter) for before, after in itertools.pairwise(calls) if before.exit is not None]
    if calls:
        windows.insert(0, (trace.start, calls[0].enter))
    spent: dict[str, float] = defaultdict(float)
    work = work_between_calls(trace)
    whole, at = 0.0, 0
    for begin, end in windows:
        whole += max(end - begin, 0) / 1e9
        while at < len(work) and work[at].end <= begin:
            at += 1
        ahead = at
        while ahead < len(work) and work[ahead].start < end:
            one = work[ahead]
            spent[one.what] += max(min(one.end, end) - max(one.start, begin), 0) / 1e9
            ahead += 1
    rest = whole - sum(spent.values())
    if rest > 0:
        spent["unrecorded"] = rest
    return dict(sorted(spent.items(), key=lambda one: -one[1]))


def work_between_calls(trace: RankTrace) -> list[Work]:
    """What the rank did between its calls; where no work was recorded, the forward passes of its requests."""
    if trace.work:
        return sorted(trace.work, key=lambda one: one.start)
    started: dict[Round, int] = {}
    work = []
    for event in trace.requests:
        if event.name == "forward_start":
            started[event.round] = event.t
        elif event.name == "forward_end" and (start := started.pop(event.round, None)) is not None:
            work.append(Work("forward", start, event.t))
    return sorted(work, key=lambda one: one.start)
