"""Profiler traces and Flight Recorder dumps: as PyTorch writes them, and as it does not."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from atom.diag.consensus.document import arms_of, consensus_document
from atom.diag.consensus.foreign_json import call_name, group_name
from atom.diag.consensus.sources import find_recordings, read_rank
from atom.diag.consensus.waits import group_waits
from atom.recipes.errors import UsageError


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(value).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# ---- profiler traces

CONFIG = [
    {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]},
    {"pg_name": "1", "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "pg_size": 2, "ranks": [0, 1]},
]


def kernel(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def device_profile(rank: int, enters: list[float], exits: list[float], *, sequence: bool = True) -> dict[str, Any]:
    events: list[Any] = []
    for number, (enter, over) in enumerate(zip(enters, exits, strict=True)):
        args = {
            "Collective name": "allreduce",
            "Process Group Name": "1",
            "Process Group Description": "PIPELINE_MODEL_PARALLEL_GROUP",
            "Process Group Ranks": "[0, 1]",
        } | ({"Seq": number + 10} if sequence else {})
        events.append(
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", enter, over - enter, **args)
        )
        events.append(kernel("gemm_bf16", enter - 900, 800))
        events.append(kernel("ncclDevKernel_SendRecv(ncclDevKernelArgs)", enter - 50, 40))
        step = {"ph": "X", "cat": "gpu_user_annotation", "name": f"ProfilerStep#{number + 3}", "pid": 0, "tid": 7}
        events.append({**step, "ts": enter - 1000, "dur": 900})
    info = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": CONFIG}
    return {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("name", ["trace-{}.json", "trace-{}.pt.trace.json.gz"])
def test_kernels_of_a_device(tmp_path: Path, name: str, sequence: bool) -> None:
    exits = [5000.0 * (number + 1) for number in range(4)]
    write(tmp_path / name.format(0), device_profile(0, [one - 3000 for one in exits], exits, sequence=sequence))
    write(tmp_path / name.format(1), device_profile(1, [one - 10 for one in exits], exits, sequence=sequence))
    recording = find_recordings([tmp_path])[0]
    waits = group_waits(recording)["pp"]
    assert waits.matched == 4
    assert waits.late_rank == 1
    assert waits.late[0][1] == pytest.approx(4 * 2990e-6)
    assert waits.phases["compute kernels"] == pytest.approx(4 * 800e-6)
    assert bool(recording.ranks[0].notes) is not sequence
    document = consensus_document(arms_of([recording]))
    assert document["verdict"]["sentence"] == "PP collectives, entered last by rank 1"
    assert document["arms"][0]["completed"] is None


def test_profiles_that_start_at_different_steps_are_matched_by_the_step(tmp_path: Path) -> None:
    exits = [5000.0 * (number + 1) for number in range(4)]
    write(tmp_path / "0.json", device_profile(0, [one - 3000 for one in exits], exits, sequence=False))
    late = device_profile(1, [one - 10 for one in exits], exits, sequence=False)
    late["traceEvents"] = late["traceEvents"][4:]
    write(tmp_path / "1.json", late)
    waits = group_waits(find_recordings([tmp_path])[0])["pp"]
    assert (waits.matched, waits.unmatched) == (3, 1)
    assert waits.late[0][1] == pytest.approx(3 * 2990e-6)


def gloo_profile(rank: int) -> dict[str, Any]:
    """As torch 2.13 writes it for gloo: annotations around the operations, times as numbers in µs with a fraction."""
    events: list[dict[str, Any]] = []
    for number in range(3):
        base = {"ph": "X", "cat": "user_annotation", "pid": 9, "args": {"External id": 1}}
        at = 5218930000000.963 + number * 50_000
        took = 20_000 * (rank + 1)
        events.append({**base, "name": "forward", "tid": 1, "ts": at, "dur": took})
        events.append({**base, "name": "gloo:all_reduce", "tid": 2, "ts": at + took, "dur": 41_000.0 - took})
        events.append({**base, "name": "c10d::allreduce_", "cat": "cpu_op", "tid": 1, "ts": at + took, "dur": 100.0})
    info = {"backend": "gloo", "rank": rank, "world_size": 2, "pg_config": [CONFIG[0], {**CONFIG[1], "pg_desc": "pp"}]}
    return {"distributedInfo": info, "host_name": "vm", "traceEvents": events}


def test_annotations_of_gloo(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"{rank}.json", gloo_profile(rank))
    waits = group_waits(find_recordings([tmp_path])[0])["pp"]
    assert waits.late[0][1] == pytest.approx(0.060)
    assert waits.phases["forward"] == pytest.approx(0.120)


def test_a_profile_without_collectives_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "rank0.json", {"traceEvents": [kernel("gemm", 0, 1)]})
    with pytest.raises(UsageError, match="has no collectives"):
        read_rank(path)


# ---- flight recorder


def entry(number: int, created: int, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 1,
        "process_group": ["1", "pp"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created,
        "state": "completed",
        "retired": True,
        "time_discovered_completed_ns": None,
        **more,
    }


def dump(entries: list[dict[str, Any]]) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}, "1": {"desc": "pp", "ranks": "[0, 1]"}}
    return {"version": "2.10", "entries": entries, "pg_config": config, "pg_status": {}}


def test_durations_where_they_were_recorded(tmp_path: Path) -> None:
    for rank, took in enumerate((30.0, 0.5)):
        entries = [entry(number, number * 10**9, duration_ms=took) for number in range(4)]
        write(tmp_path / f"fr_rank_{rank}.json", dump(entries))
    waits = group_waits(find_recordings([tmp_path])[0])["pp"]
    assert waits.late[0][1] == pytest.approx(4 * 0.0295)


def test_without_durations_the_clocks_tell(tmp_path: Path) -> None:
    for rank in range(2):
        entries = [entry(number, number * 10**9 + rank * 25_000_000) for number in range(4)]
        write(tmp_path / f"fr_rank_{rank}.json", dump(entries))
    recording = find_recordings([tmp_path])[0]
    waits = group_waits(recording)["pp"]
    assert waits.late[0][1] == pytest.approx(4 * 0.025)
    assert any("wall clocks" in note for note in recording.ranks[0].notes)


def test_a_hang_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    open_call = {"state": "started", "retired": False}
    write(tmp_path / "fr_rank_0.json", dump([entry(1, 10**9, duration_ms=2.0), entry(2, 2 * 10**9, **open_call)]))
    write(tmp_path / "fr_rank_1.json", dump([entry(1, 10**9, duration_ms=2.0)]))
    document = consensus_document(arms_of(find_recordings([tmp_path])))
    sentence = document["verdict"]["sentence"]
    assert sentence == "rank 0 is in PP collectives call 2 (allreduce), which rank 1 never entered"


def test_point_to_point_is_no_meeting(tmp_path: Path) -> None:
    entries = [entry(1, 5, is_p2p=True, profiling_name="nccl:send 0->1"), entry(2, 6, duration_ms=1.0)]
    assert len(read_rank(write(tmp_path / "fr_rank_0.json", dump(entries))).calls) == 1


def test_pickles_are_refused_and_not_read(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UsageError, match=r"is a pickle.*_dump_nccl_trace_json"):
        find_recordings([tmp_path])
    assert not (tmp_path / "sprung").exists()


def test_a_dump_whose_rank_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not say its rank"):
        read_rank(write(tmp_path / "dump.json", dump([entry(1, 5)])))


# ---- both


@pytest.mark.parametrize(
    ("described", "name", "expected"),
    [
        ("PIPELINE_MODEL_PARALLEL_GROUP", "3", "pp"),
        ("mesh_tp", "4", "tp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "5", "tp"),
        ("tp:0", "x", "tp"),
        ("pp", "1", "pp"),
        ("default_pg", "0", "world"),
        ("expert", "9", "expert"),
        ("", "9", "group 9"),
        ("happy", "9", "happy"),
    ],
)
def test_names_of_groups(described: str, name: str, expected: str) -> None:
    assert group_name(described, name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nccl:all_reduce", "allreduce"),
        ("nccl:_all_gather_base", "allgather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)", "reducescatter"),
        ("gloo:barrier", "barrier"),
        ("allreduce", "allreduce"),
        ("nccl:mystery", "mystery"),
    ],
)
def test_names_of_calls(name: str, expected: str) -> None:
    assert call_name(name) == expected


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"{}", b"\x1f\x8bbroken", b'{"traceEvents": 3}', b"\x7fELF"])
def test_what_is_of_no_format(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"rank0\.json"):
        find_recordings([path])


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
event_fields = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.just("X") | any_json,
        "name": st.just("nccl:all_reduce") | any_json,
        **dict.fromkeys(("ts", "dur", "cat", "tid", "args"), any_json),
        **dict.fromkeys(("process_group", "collective_seq_id", "time_created_ns", "duration_ms", "state"), any_json),
        "profiling_name": st.just("nccl:barrier") | any_json,
    },
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(("traceEvents", "entries")), st.lists(event_fields | any_json, max_size=5), any_json)
@example("traceEvents", [{"ph": "X", "name": "nccl:all_reduce", "ts": 10**400, "dur": 1}], None)
@example("entries", [{"profiling_name": "nccl:barrier", "time_created_ns": 5, "duration_ms": 10**400}], {})
def test_hostile_json(tmp_path: Path, key: str, events: list[Any], more: Any) -> None:
    """Either a trace, or one line that says why it is none."""
    value = {key: events, "pg_config": more, "distributedInfo": more}
    try:
        trace = read_rank(write(tmp_path / "rank0.json", value))
    except UsageError:
        return
    assert all(call.exit is None or call.exit >= call.enter for call in trace.calls)
