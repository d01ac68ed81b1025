"""A recording as a timeline for ui.perfetto.dev (Chrome trace format): a process per rank with lanes for its work, its
calls, and its votes and commits; arrows from every vote over the coordinator's commit to the rank's own; requests as
asynchronous slices; blocks held as a counter.

Slices on one lane must nest, so what can overlap has lanes of its own or is asynchronous. Times are microseconds since
the first event. Ranks that share a clock are placed by it; others each begin at zero, and the file says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from atom.diag.consensus.lifecycle import rounds_of
from atom.diag.consensus.model import RankTrace, Recording, Round
from atom.diag.consensus.waits import work_between_calls

__all__ = ["perfetto_trace"]

Event = dict[str, Any]
_WORK, _DECISIONS, _FIRST_GROUP = 1, 2, 3
_MARK_US: Final = 1.0
"""Length of the slice that stands for a moment: arrows need slices to hold on to."""
_STEPS: Final = (
    ("queued", "enqueue", "forward_start"),
    ("forward", "forward_start", "forward_end"),
    ("transfer", "forward_end", "transfer_done"),
    ("agreement", "transfer_done", "apply"),
    ("release", "apply", "cleanup"),
)


def perfetto_trace(recording: Recording) -> dict[str, Any]:
    """The whole file as JSON."""
    shared = recording.one_clock
    zero = min(trace.start for trace in recording.ranks)
    groups = sorted({call.group for trace in recording.ranks for call in trace.calls})
    events: list[Event] = []
    for trace in recording.ranks:
        at = zero if shared else trace.start
        events += [*_names(trace, groups), *_work(trace, at), *_calls(trace, at, groups), *_requests(trace, at)]
        events += _held(trace, at)
    events += _decisions(recording, {trace.rank: zero if shared else trace.start for trace in recording.ranks})
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "metadata": {
            "arm": recording.label,
            "mode": recording.mode,
            "clocks": "shared by all ranks" if shared else "not shared: each rank begins at zero",
        },
    }


def _us(t: int, at: int) -> float:
    return (t - at) / 1e3


def _names(trace: RankTrace, groups: list[str]) -> Iterator[Event]:
    stage = f", stage {trace.stage}" if trace.pp > 1 else ""
    yield {"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": f"rank {trace.rank}{stage}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": trace.rank, "args": {"sort_index": trace.rank}}
    lanes = {_WORK: "work", _DECISIONS: "votes and commits"}
    lanes |= {_FIRST_GROUP + index: f"{name.upper()} calls" for index, name in enumerate(groups)}
    for lane, name in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": trace.rank, "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": trace.rank, "tid": lane, "args": {"sort_index": lane}}


def _slice(name: str, rank: int, lane: int, start: float, length: float, **args: Any) -> Event:
    return {"ph": "X", "name": name, "pid": rank, "tid": lane, "ts": start, "dur": length, "args": args}


def _work(trace: RankTrace, at: int) -> Iterator[Event]:
    """Pieces that overlap without nesting are cut at the next one's start."""
    ends: list[int] = []
    for one in work_between_calls(trace):
        while ends and ends[-1] <= one.start:
            ends.pop()
        end = min(one.end, ends[-1]) if ends else one.end
        ends.append(end)
        yield _slice(one.what, trace.rank, _WORK, _us(one.start, at), (end - one.start) / 1e3)


def _calls(trace: RankTrace, at: int, groups: list[str]) -> Iterator[Event]:
    free: dict[str, int] = {}
    for call in trace.calls:
        start = max(call.enter, free.get(call.group, call.enter))
        end = max(call.exit if call.exit is not None else trace.stop, start)
        free[call.group] = end
        lane = _FIRST_GROUP + groups.index(call.group)
        name = call.kind if call.exit is not None else f"{call.kind} (never left)"
        args = {"number": call.number, "votes": call.votes, "commits": call.commits}
        yield _slice(name, trace.rank, lane, _us(start, at), (end - start) / 1e3, **args)


def _requests(trace: RankTrace, at: int) -> Iterator[Event]:
    for round_, times in rounds_of(trace).items():
        identity = {
            "ph": "b",
            "cat": "request",
            "id": f"{trace.rank}:{round_.request}:{round_.epoch}",
            "pid": trace.rank,
        }
        first, last = min(times.values()), max(times.values())
        yield {**identity, "tid": _WORK, "name": str(round_), "ts": _us(first, at)}
        for name, begin, end in _STEPS:
            if begin in times and end in times and times[end] >= times[begin]:
                yield {**identity, "tid": _WORK, "name": name, "ts": _us(times[begin], at)}
                yield {**identity, "ph": "e", "tid": _WORK, "name": name, "ts": _us(times[end], at)}
        yield {**identity, "ph": "e", "tid": _WORK, "name": str(round_), "ts": _us(last, at)}


def _held(trace: RankTrace, at: int) -> Iterator[Event]:
    for one in trace.held:
        args = {"blocks": one.blocks}
        yield {"ph": "C", "name": "KV blocks held", "pid": trace.rank, "ts": _us(one.t, at), "args": args}


def _decisions(recording: Recording, zeros: Mapping[int, int]) -> Iterator[Event]:
    """Marks for votes, timeouts and commits, and the arrows between them."""
    coordinator = recording.size - 1
    decided: dict[Round, int] = {}
    votes: dict[tuple[int, Round], int] = {}
    commits: dict[tuple[int, Round], int] = {}
    for trace in recording.ranks:
        for event in trace.requests:
            if event.name not in ("vote", "timeout", "commit"):
                continue
            name = event.name if event.outcome is None else f"{event.name} {event.outcome}"
            args = {"request": str(event.round), **({"sequence": event.value} if event.name == "commit" else {})}
            yield _slice(name, trace.rank, _DECISIONS, _us(event.t, zeros[trace.rank]), _MARK_US, **args)
            if event.name == "vote":
                votes.setdefault((trace.rank, event.round), event.t)
            elif event.name == "commit":
                commits.setdefault((trace.rank, event.round), event.t)
                if trace.rank == coordinator:
                    decided.setdefault(event.round, event.t)
    for number, ((rank, round_), voted) in enumerate(votes.items(), 1):
        if (applied := commits.get((rank, round_))) is None:
            continue
        arrow = {"cat": "agreement", "name": "vote → commit", "id": number}
        yield {**arrow, "ph": "s", "pid": rank, "tid": _DECISIONS, "ts": _us(voted, zeros[rank])}
        if recording.mode == "async" and rank != coordinator and round_ in decided:
            at = _us(decided[round_], zeros[coordinator])
            yield {**arrow, "ph": "t", "pid": coordinator, "tid": _DECISIONS, "ts": at}
        yield {**arrow, "ph": "f", "bp": "e", "pid": rank, "tid": _DECISIONS, "ts": _us(applied, zeros[rank])}
