"""Reads `rank-N.pmpi`, which the recorder in `pmpi/recorder.c` writes: when a rank of any MPI program entered and left
its blocking collectives.

The structures and the order of the kinds are those of the recorder. A file may be of a rank that was killed, or come
from anywhere: sizes and every record are checked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from atom.diag.consensus.foreign_json import group_name
from atom.diag.consensus.model import Call, End, RankTrace
from atom.recipes.errors import UsageError

__all__ = ["KINDS", "MAGIC", "MOST_EVENTS", "VERSION", "is_pmpi_record", "read_pmpi_record"]

MAGIC: Final = b"ATOMPMPI"
VERSION: Final = 1
KINDS: Final = (
    *("barrier", "bcast", "reduce", "allreduce", "gather", "gatherv", "scatter", "scatterv", "allgather", "allgatherv"),
    *("alltoall", "alltoallv", "alltoallw", "reduce_scatter", "reduce_scatter_block", "scan", "exscan"),
)
MOST_EVENTS: Final = 5_000_000
"""Of one rank; more are counted and not kept."""
MOST_RANKS: Final = 1 << 16
_COMMUNICATOR: Final = 0xFFFF
_HEADER: Final = "8sIIIIiiQQQQQ64s40s80x"
_FIELDS: Final = (
    *(("enter", "u8"), ("exit", "u8"), ("number", "u4"), ("communicator", "u4")),
    *(("kind", "u2"), ("reserved", "u2"), ("spare", "u4")),
)
_RECORD_BYTES: Final = 32
_MOST_NS: Final = 1 << 62
PICKLED: Final = "mpi4py's lower-case collectives (of pickles) may run as point-to-point messages, which are not seen"
_UNNAMED: Final = ("MPI_COMM", "MPI COMM")
"""What the names of communicators begin with that nobody named."""


class _Header(NamedTuple):
    magic: bytes
    version: int
    header_bytes: int
    record_bytes: int
    pid: int
    rank: int
    size: int
    start_ns: int
    end_ns: int
    dropped: int
    nonblocking: int
    cpu_ns: int
    host: bytes
    boot_id: bytes


@dataclass(frozen=True, slots=True)
class _Communicator:
    group: str
    domain: str


def is_pmpi_record(head: bytes) -> bool:
    """Whether a file that begins like this is one."""
    return head.startswith(MAGIC)


def read_pmpi_record(path: Path, *, most_events: int = MOST_EVENTS) -> RankTrace:
    """UsageError if it is none, or of another version."""
    header, order = _header(path)
    trace = RankTrace(
        source=path,
        format="PMPI record",
        rank=header.rank,
        size=header.size,
        host=_text(header.host),
        clock=_text(header.boot_id) or None,
        start=header.start_ns,
        stop=header.start_ns,
        dropped=header.dropped,
        ends=True,
    )
    dtype = np.dtype([(name, order + kind) for name, kind in _FIELDS])
    assert dtype.itemsize == _RECORD_BYTES
    records = np.fromfile(path, dtype=dtype, count=most_events + 1, offset=header.header_bytes)
    written = np.flatnonzero(records["enter"])  # what comes behind is room for more
    records = records[: written[-1] + 1] if written.size else records[:0]
    if len(records) > most_events:
        trace.unread = _records_in(path, header) - most_events
        records = records[:most_events]
    _read_calls(trace, records)
    if header.end_ns:
        wall_s = (header.end_ns - header.start_ns) / 1e9
        trace.end = End(t=header.end_ns, cpu_s=header.cpu_ns / 1e9, wall_s=wall_s)
        trace.stop = max(trace.stop, header.end_ns)
    if header.nonblocking:
        trace.notes.append(f"{header.nonblocking} non-blocking collectives are not in the record, nor waits for them")
    trace.notes.append(PICKLED)
    return trace


def _header(path: Path) -> tuple[_Header, str]:
    """And the byte order of the machine that wrote the file."""
    with path.open("rb") as file:
        data = file.read(struct.calcsize("<" + _HEADER))
    if len(data) < struct.calcsize("<" + _HEADER):
        raise UsageError(f"{path}: {len(data)} bytes are no record of the PMPI recorder")
    order, header = "<", _Header._make(struct.unpack("<" + _HEADER, data))
    if header.header_bytes == int.from_bytes(len(data).to_bytes(4, "big"), "little"):
        order, header = ">", _Header._make(struct.unpack(">" + _HEADER, data))
    if header.magic != MAGIC:
        raise UsageError(f"{path} is no record of the PMPI recorder")
    if header.version != VERSION:
        raise UsageError(f"{path}: version {header.version} of the record; this atom reads {VERSION}")
    if header.header_bytes != len(data) or header.record_bytes != _RECORD_BYTES:
        raise UsageError(f"{path}: a header of {header.header_bytes} and records of {header.record_bytes} bytes")
    if not 0 <= header.rank < header.size <= MOST_RANKS:
        raise UsageError(f"{path}: rank {header.rank} of {header.size} ranks")
    if not 0 < header.start_ns < _MOST_NS or not (header.end_ns == 0 or header.start_ns <= header.end_ns < _MOST_NS):
        raise UsageError(f"{path}: it starts at {header.start_ns} ns and ends at {header.end_ns} ns")
    return header, order


def _records_in(path: Path, header: _Header) -> int:
    """With the room behind the last one, of which a file that is too long has at most a chunk."""
    return (path.stat().st_size - header.header_bytes) // _RECORD_BYTES


def _read_calls(trace: RankTrace, records: npt.NDArray[Any]) -> None:
    known: dict[int, _Communicator] = {}
    names = records.tobytes()
    rows = iter(enumerate(records.tolist()))
    for place, (enter, exit_, number, communicator, kind, _, _) in rows:
        if kind == _COMMUNICATOR:
            named, _ = next(rows, (place, None))
            name = _text(names[named * _RECORD_BYTES : (named + 1) * _RECORD_BYTES]) if named > place else ""
            known[communicator] = _communicator(name, enter, exit_, number, trace.size)
        elif kind >= len(KINDS) or communicator not in known or not _possible(enter, exit_):
            trace.damaged += 1
        else:
            one = known[communicator]
            trace.calls.append(Call(one.group, one.domain, KINDS[kind], number, enter, exit_ or None))
            trace.stop = max(trace.stop, exit_ or enter)
    trace.calls.sort(key=lambda call: call.enter)


def _possible(enter: int, exit_: int) -> bool:
    """`exit_` is 0 for a call that was never left."""
    return 0 < enter < _MOST_NS and (exit_ == 0 or enter <= exit_ < _MOST_NS)


def _communicator(name: str, members: int, instance: int, size: int, world: int) -> _Communicator:
    """Grouped by the name that the program gave; without one, communicators of all ranks are the world."""
    if not name or name.startswith(_UNNAMED):
        group = "world" if size == world else f"communicators of {size}"
    else:
        group = group_name(name, "")
    return _Communicator(group, f"{members:016x}/{instance}")


def _text(data: bytes) -> str:
    said = data.partition(b"\0")[0].decode("utf-8", errors="replace")
    return "".join(one if one.isprintable() else "?" for one in said)
