"""Reads one rank's trace of the PyTorch profiler (Kineto, Chrome trace format): collectives and what lies between them.

On a device a collective is its kernel, which spins until the others have come, so its duration is the wait. On the CPU
(gloo) it is the annotation around the operation.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from atom.diag.consensus.foreign_json import call_name, group_name, is_point_to_point, load_json, ranks_of, text
from atom.diag.consensus.model import Call, RankTrace, Work
from atom.recipes.errors import UsageError

__all__ = ["is_profile", "read_profile"]

_COLLECTIVE: Final = re.compile(r"^(?:(?:nccl|rccl)(?:Dev)?Kernel|(?:nccl|rccl|gloo|mpi|ucc|xccl):)", re.I)
_STEP: Final = re.compile(r"^ProfilerStep#(\d{1,12})$")
_ONE_STEP: Final = 1_000_000
"""More collectives of a kind than a step has: numbers of two steps do not overlap."""
_MOST_US: Final = 1e17
_JOINED_NS: Final = 5_000
"""Kernels this close after one another are one piece of work."""


def is_profile(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("traceEvents"), list)


class _Span(NamedTuple):
    start: int
    end: int
    name: str
    category: str
    thread: str
    args: Mapping[str, Any]


def read_profile(path: Path, value: Mapping[str, Any] | None = None) -> RankTrace:
    """`value`: the file's, where it is read already. UsageError if it is none, or has no collectives."""
    value = load_json(path) if value is None else value
    if not is_profile(value):
        raise UsageError(f"{path} is no profiler trace: it has no traceEvents")
    spans = sorted(_spans(value["traceEvents"]), key=lambda one: one.start)
    found = value.get("distributedInfo")
    info: Mapping[str, Any] = found if isinstance(found, dict) else {}
    rank = info.get("rank")
    rank = rank if type(rank) is int and 0 <= rank < 1 << 16 else _rank_of_name(path)
    size = info.get("world_size")
    trace = RankTrace(
        source=path,
        format="profiler trace",
        rank=rank,
        size=size if type(size) is int and rank < size <= 1 << 16 else rank + 1,
        host=text(value.get("host_name") or ""),
        start=spans[0].start if spans else 0,
        stop=max((one.end for one in spans), default=0),
    )
    kernels = [one for one in spans if one.category == "kernel"]
    collectives = _collectives(kernels) or _collectives([one for one in spans if one.category != "cpu_op"])
    if not collectives:
        raise UsageError(f"{path} has no collectives; profile with CUDA activities, or on the CPU with gloo")
    trace.calls = _calls(collectives, _steps(spans), info, trace)
    trace.work = _kernel_work(kernels) if kernels else _annotated_work(spans)
    return trace


def _rank_of_name(path: Path) -> int:
    found = re.search(r"rank[_.-]?(\d{1,5})", path.name) or re.search(r"(\d{1,5})(?=\D*$)", path.name.partition(".")[0])
    if found is None:
        raise UsageError(f"{path}: the trace does not say its rank (distributedInfo), and its name has no number")
    return int(found[1])


def _spans(events: Sequence[Any]) -> list[_Span]:
    """Complete events with times in ns; others, and what is malformed, are left out."""
    spans = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        start, took, name = event.get("ts"), event.get("dur", 0), event.get("name")
        timed = all(isinstance(one, int | float) and 0 <= one < _MOST_US for one in (start, took))
        if not timed or not isinstance(name, str):
            continue
        begin, args = int(start * 1000), event.get("args")  # type: ignore[operator]
        span_args = args if isinstance(args, dict) else {}
        end, category, thread = begin + int(took * 1000), str(event.get("cat", "")), str(event.get("tid", ""))
        spans.append(_Span(begin, end, name, category, thread, span_args))
    return spans


def _collectives(spans: Sequence[_Span]) -> list[_Span]:
    return [
        one
        for one in spans
        if (_COLLECTIVE.match(one.name) or (one.category == "kernel" and "Collective name" in one.args))
        and not is_point_to_point(str(one.args.get("Collective name") or one.name))
    ]


def _steps(spans: Sequence[_Span]) -> list[tuple[int, int]]:
    """(start, number) of the profiler's steps, on the device where they are there."""
    marked = [(one, found) for one in spans if (found := _STEP.match(one.name))]
    device = [(one, found) for one, found in marked if one.category == "gpu_user_annotation"]
    return sorted((one.start, int(found[1])) for one, found in device or marked)


def _calls(
    collectives: Sequence[_Span], steps: Sequence[tuple[int, int]], info: Mapping[str, Any], trace: RankTrace
) -> list[Call]:
    groups = _groups(info)
    starts = [start for start, _ in steps]
    counted: dict[tuple[str, str, str, int], int] = {}
    by_order = False
    calls = []
    for one in collectives:
        name = str(one.args.get("Process Group Name", ""))
        described = str(one.args.get("Process Group Description") or groups.get(name, ("", ""))[0])
        ranks = ranks_of(one.args.get("Process Group Ranks")) or groups.get(name, ("", ""))[1]
        if name or described:
            group = group_name(described, name)
        else:
            group = _only_group(info)
        kind = call_name(str(one.args.get("Collective name") or one.name))
        sequence = one.args.get("Seq")
        if type(sequence) is int and 0 <= sequence < 1 << 62:
            number = sequence
        else:
            by_order = True
            at = bisect.bisect_right(starts, one.start) - 1
            step = steps[at][1] if at >= 0 else 0
            key = (group, str(ranks), kind, step)
            counted[key] = counted.get(key, -1) + 1
            number = step * _ONE_STEP + counted[key]
        calls.append(Call(group, str(ranks), kind, number, one.start, one.end))
    if by_order:
        within = "within the profiler's steps" if steps else "from the start of the profile"
        trace.notes.append(f"collectives have no sequence number: they are matched by their order {within}")
    return calls


def _groups(info: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    config = info.get("pg_config")
    return {
        str(one.get("pg_name")): (str(one.get("pg_desc", "")), ranks_of(one.get("ranks")))
        for one in (config if isinstance(config, list) else ())
        if isinstance(one, dict)
    }


def _only_group(info: Mapping[str, Any]) -> str:
    """The group of collectives that do not say theirs: known where there is but one."""
    groups = _groups(info)
    own = [described for described, _ in groups.values() if described != "default_pg"]
    if len(own) <= 1:
        return group_name(own[0], "") if own else "world"
    return "world"


def _kernel_work(kernels: Sequence[_Span]) -> list[Work]:
    """Time in which the device computed; collectives are no work."""
    work: list[Work] = []
    for one in kernels:
        if _COLLECTIVE.match(one.name) or "Collective name" in one.args:
            continue
        if work and one.start - work[-1].end <= _JOINED_NS:
            work[-1] = work[-1]._replace(end=max(work[-1].end, one.end))
        else:
            work.append(Work("compute kernels", one.start, one.end))
    return work


def _annotated_work(spans: Sequence[_Span]) -> list[Work]:
    """What the program itself annotated, outermost ranges alone."""
    work: list[Work] = []
    ends: dict[str, int] = {}
    for one in spans:
        outer = one.category == "user_annotation" and not _COLLECTIVE.match(one.name) and not _STEP.match(one.name)
        if outer and one.start >= ends.get(one.thread, 0) and not one.name.startswith("PyTorch Profiler"):
            ends[one.thread] = one.end
            work.append(Work(text(one.name), one.start, one.end))
    return work
