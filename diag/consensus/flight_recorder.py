"""Reads a dump of PyTorch's Flight Recorder as JSON: the last collectives of one rank, by process group and sequence
number. The files that it writes by itself on a time-out are pickles, which are refused: reading one runs its code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from atom.diag.consensus.foreign_json import call_name, group_name, is_point_to_point, load_json, ranks_of
from atom.diag.consensus.model import Call, RankTrace
from atom.recipes.errors import UsageError

__all__ = ["complete_by_clock", "is_flight_record", "read_flight_record", "refuse_pickle"]

_MOST: Final = 1 << 62
UNTIMED: Final = (
    "durations were not recorded (TORCH_NCCL_ENABLE_TIMING=1 does): waits are from when each rank made a call to when "
    "the last one did, by their wall clocks"
)


def refuse_pickle(path: Path, head: bytes) -> None:
    """UsageError for a pickle, with what to do instead."""
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1:
        raise UsageError(
            f"{path} is a pickle, and reading one runs whatever code it has; dump JSON instead: "
            "torch._C._distributed_c10d._dump_nccl_trace_json() (gloo: _dump_fr_trace_json()) in the ranks, or "
            "dump_nccl_trace_json of torch.distributed's debug server"
        )


def is_flight_record(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("entries"), list) and ("pg_config" in value or "pg_status" in value)


def read_flight_record(path: Path, value: Mapping[str, Any] | None = None) -> RankTrace:
    """`value`: the file's, where it is read already. UsageError if it is none, or its rank is not known. Calls that are
    over at a time that is not known end as they begin: see `complete_by_clock`."""
    value = load_json(path) if value is None else value
    if not is_flight_record(value):
        raise UsageError(f"{path} is no dump of a Flight Recorder: it has no entries and pg_config")
    groups = _groups(value.get("pg_config"))
    rank = _rank(path, value)
    size = max((len(ranks) for _, ranks in groups.values()), default=0)
    trace = RankTrace(source=path, format="flight recorder", rank=rank, size=max(size, rank + 1))
    for entry in value["entries"]:
        if (call := _call(entry, groups)) is not None:
            trace.calls.append(call)
    trace.calls.sort(key=lambda call: call.enter)
    trace.start = min((call.enter for call in trace.calls), default=0)
    trace.stop = max((call.exit or call.enter for call in trace.calls), default=0)
    trace.notes.append("the recorder keeps the last collectives alone: totals are of these")
    if value["entries"] and not any(_timed(one) for one in value["entries"]):
        trace.notes.append(UNTIMED)
    return trace


def complete_by_clock(traces: Sequence[RankTrace]) -> None:
    """Calls that are over, but for how long is not recorded, end when the last rank made them."""
    untimed = [one for one in traces if UNTIMED in one.notes]
    if len(untimed) < len(traces):
        return
    entered: dict[tuple[str, str, str, int], list[int]] = {}
    for one in untimed:
        for call in one.calls:
            entered.setdefault(_key(call), []).append(call.enter)
    for one in untimed:
        one.calls = [
            call._replace(exit=max(entered[_key(call)])) if call.exit == call.enter else call for call in one.calls
        ]
        one.stop = max((call.exit or call.enter for call in one.calls), default=one.stop)


def _key(call: Call) -> tuple[str, str, str, int]:
    return call.group, call.domain, call.kind, call.number


def _rank(path: Path, value: Mapping[str, Any]) -> int:
    said = value.get("rank")
    if type(said) is int and 0 <= said < 1 << 16:
        return said
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    found = re.search(r"rank[_.-]?(\d{1,5})", stem) or re.search(r"(\d{1,5})$", stem)
    if found is None:
        raise UsageError(f"{path}: a dump does not say its rank; name the files by it, such as fr_rank_3.json")
    return int(found[1])


def _groups(config: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    if not isinstance(config, dict):
        return {}
    return {
        str(name): (str(one.get("desc", "")), ranks_of(one.get("ranks")))
        for name, one in config.items()
        if isinstance(one, dict)
    }


def _call(entry: Any, groups: Mapping[str, tuple[str, tuple[int, ...]]]) -> Call | None:
    """None for what is no collective, or malformed."""
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return None
    enter, number, name = entry.get("time_created_ns"), entry.get("collective_seq_id"), entry.get("profiling_name")
    if not _whole(enter) or not _whole(number) or not isinstance(name, str) or is_point_to_point(name):
        return None
    assert isinstance(enter, int)
    assert isinstance(number, int)
    given = entry.get("process_group")
    pair = [str(one) for one in given[:2]] if isinstance(given, list) and len(given) >= 2 else ["", ""]
    described = pair[1] if pair[1] not in ("", "undefined") else groups.get(pair[0], ("", ()))[0]
    ranks = groups.get(pair[0], ("", ()))[1]
    domain = str(ranks) if ranks else pair[0]
    return Call(group_name(described, pair[0]), domain, call_name(name), number, enter, _exit(entry, enter))


def _exit(entry: Mapping[str, Any], enter: int) -> int | None:
    """When it was over; `enter` where it is over and nothing says when; None where it is not."""
    took, seen = entry.get("duration_ms"), entry.get("time_discovered_completed_ns")
    if isinstance(took, int | float) and 0 <= took < 1e12:
        return enter + int(took * 1e6)
    if isinstance(seen, int) and _whole(seen) and seen > enter:
        return seen
    return enter if entry.get("state") == "completed" or entry.get("retired") is True else None


def _timed(entry: Any) -> bool:
    return isinstance(entry, dict) and bool(entry.get("duration_ms") or entry.get("time_discovered_completed_ns"))


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST
