"""Records of the PMPI recorder, well-formed and not."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.diag.consensus.pmpi_build import SOURCE
from atom.diag.consensus.pmpi_file import KINDS, PICKLED, read_pmpi_record
from atom.diag.consensus.sources import read_rank
from atom.recipes.errors import UsageError

HEADER = {"magic": b"ATOMPMPI", "version": 1, "header_bytes": 256, "record_bytes": 32, "pid": 7, "rank": 1, "size": 4}
TIMES = {"start": 1000, "end": 0, "dropped": 0, "nonblocking": 0, "cpu": 0, "host": b"node", "boot": b"b0"}


def head(order: str = "<", **changed: Any) -> bytes:
    return struct.pack(order + "8sIIIIiiQQQQQ64s40s80x", *{**HEADER, **TIMES, **changed}.values())


def row(enter: int, exit_: int, number: int, communicator: int, kind: int, order: str = "<") -> bytes:
    return struct.pack(order + "QQIIHHI", enter, exit_, number, communicator, kind, 0, 0)


def world(order: str = "<", name: bytes = b"MPI_COMM_WORLD", size: int = 4) -> bytes:
    return row(0xABC, 0, size, 0, 0xFFFF, order) + name.ljust(32, b"\0")


def write(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def test_kinds_are_those_of_the_recorder() -> None:
    [enum] = re.findall(r"enum kind \{(.*?)KINDS", SOURCE.read_text(), re.DOTALL)
    assert tuple(one.lower() for one in re.findall(r"\w+", enum)) == KINDS


@pytest.mark.parametrize("order", ["<", ">"])
def test_calls_of_either_byte_order(tmp_path: Path, order: str) -> None:
    rows = [row(2000, 5000, 0, 0, 0, order), row(6000, 0, 1, 0, 3, order), bytes(320)]
    trace = read_rank(write(tmp_path / "rank-1.pmpi", head(order), world(order), *rows))
    assert [(call.group, call.kind, call.number, call.enter, call.exit) for call in trace.calls] == [
        ("world", "barrier", 0, 2000, 5000),
        ("world", "allreduce", 1, 6000, None),
    ]
    assert (trace.rank, trace.size, trace.host, trace.clock, trace.mode) == (1, 4, "node", "b0", "collectives")
    assert (trace.ends, trace.end, trace.damaged, trace.stop) == (True, None, 0, 6000)


def test_the_end_and_what_is_not_in_the_record(tmp_path: Path) -> None:
    data = head(end=2_000_001_000, cpu=500_000_000, dropped=3, nonblocking=9)
    trace = read_pmpi_record(write(tmp_path / "rank-1.pmpi", data))
    assert trace.end is not None
    assert (trace.end.wall_s, trace.end.cpu_s, trace.dropped, trace.calls) == (2.0, 0.5, 3, [])
    assert trace.notes == ["9 non-blocking collectives are not in the record, nor waits for them", PICKLED]


@pytest.mark.parametrize(
    ("name", "size", "group"),
    [
        (b"", 4, "world"),
        (b"MPI COMMUNICATOR 3 DUP FROM 0", 4, "world"),
        (b"", 2, "communicators of 2"),
        (b"pp_group", 2, "pp"),
        (b"mine", 4, "mine"),
    ],
)
def test_groups_by_the_names_of_communicators(tmp_path: Path, name: bytes, size: int, group: str) -> None:
    data = write(tmp_path / "rank-1.pmpi", head(), world(name=name, size=size), row(2000, 3000, 0, 0, 0))
    assert read_pmpi_record(data).calls[0].group == group


def test_communicators_of_the_same_ranks_are_told_apart(tmp_path: Path) -> None:
    second = row(0xABC, 1, 4, 1, 0xFFFF) + bytes(32)
    data = [head(), world(), row(2000, 2100, 0, 0, 0), second, row(2200, 2300, 0, 1, 0), row(2400, 2500, 1, 0, 0)]
    calls = read_pmpi_record(write(tmp_path / "rank-1.pmpi", *data)).calls
    assert [(call.domain, call.number) for call in calls] == [
        (f"{0xABC:016x}/0", 0),
        (f"{0xABC:016x}/1", 0),
        (f"{0xABC:016x}/0", 1),
    ]


def test_records_that_cannot_be_are_counted_and_skipped(tmp_path: Path) -> None:
    bad = [
        row(2000, 1999, 0, 0, 0),
        row(2000, 2100, 0, 9, 0),
        row(2000, 2100, 0, 0, len(KINDS)),
        row(1 << 63, 0, 0, 0, 0),
    ]
    trace = read_pmpi_record(write(tmp_path / "rank-1.pmpi", head(), world(), *bad, row(2000, 2100, 1, 0, 0), b"torn"))
    assert (trace.damaged, len(trace.calls)) == (4, 1)


def test_more_than_is_read_is_counted(tmp_path: Path) -> None:
    rows = [row(2000 + n, 2001 + n, n, 0, 0) for n in range(20)]
    trace = read_pmpi_record(write(tmp_path / "rank-1.pmpi", head(), world(), *rows), most_events=12)
    assert (len(trace.calls), trace.unread) == (10, 10)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"ATOMPMPI", "8 bytes are no record"),
        (head(magic=b"OTHERONE"), "is no record of the PMPI recorder"),
        (head(version=2), "version 2 of the record; this atom reads 1"),
        (head(header_bytes=64), "a header of 64 and records of 32 bytes"),
        (head(record_bytes=0), "a header of 256 and records of 0 bytes"),
        (head(rank=4), "rank 4 of 4 ranks"),
        (head(rank=-1), "rank -1 of 4 ranks"),
        (head(size=1 << 20), "rank 1 of 1048576 ranks"),
        (head(start=0), "it starts at 0 ns"),
        (head(end=5), "ends at 5 ns"),
    ],
)
def test_headers_that_cannot_be_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_pmpi_record(write(tmp_path / "rank-1.pmpi", data))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_read_or_refused(tmp_path: Path, data: bytes, whole: bool) -> None:
    path = write(tmp_path / "rank-1.pmpi", head() + world() if whole else b"ATOMPMPI", data)
    try:
        trace = read_pmpi_record(path)
    except UsageError:
        assert not whole
    else:
        assert all(call.exit is None or call.exit >= call.enter for call in trace.calls)
