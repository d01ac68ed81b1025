"""Readers of request traces: when requests came, how long they were, and which blocks of tokens they had in common.

| format | a row |
|---|---|
| `mooncake` | JSONL {timestamp (ms), input_length, output_length, hash_ids (of 512 tokens)} |
| `bailian` | the same with seconds, blocks of 16 tokens and chat_id |
| `burstgpt` | CSV Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type |
| `azure` | CSV TIMESTAMP (a date and a time), ContextTokens, GeneratedTokens |

Rows are read one by one and kept as columns; what is wrong with one is said with file, line and field.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from atom.bench.datasets.items import MAX_ITEMS, FileFacts, open_data_file, quoted, read_lines
from atom.recipes.errors import UsageError

__all__ = ["BLOCK_SIZES", "FORMATS", "Trace", "TraceWindow", "read_trace"]

FORMATS: Final = ("mooncake", "bailian", "burstgpt", "azure")
BLOCK_SIZES: Final = {"mooncake": 512, "bailian": 16}
"""Tokens of a block of `hash_ids`."""
MAX_TOKENS: Final = 16_000_000
"""Of one prompt or output."""
MAX_BLOCKS: Final = 400_000_000
"""Of a whole trace: 3 GiB."""
_MAX_NS: Final = 2**62
_CSV_COLUMNS: Final = {
    "burstgpt": ("timestamp", "request tokens", "response tokens"),
    "azure": ("timestamp", "contexttokens", "generatedtokens"),
}
_ISO: Final = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))? ?(Z|[+-]\d\d:?\d\d)?", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_FAILED: Final = "no input or no output tokens"
_LONG_INPUT: Final = "input beyond --max-input-len"
_LONG_OUTPUT: Final = "output beyond --max-output-len"


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceWindow:
    """Which rows of a trace are taken."""

    start: float | None = None
    """Seconds after the file's first row; rows before are left out."""
    end: float | None = None
    """Seconds after the file's first row; this row and later ones are left out."""
    max_input_len: int | None = None
    max_output_len: int | None = None
    clip: bool = False
    """Rows beyond these lengths are shortened, not dropped."""
    num_prompts: int | None = None
    """The first so many of those that are taken."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--num-prompts", self.num_prompts),
            ("--max-input-len", self.max_input_len),
            ("--max-output-len", self.max_output_len),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{flag} must be at least 1, got {value}")
        if self.start is not None and not 0 <= self.start < 1e9:
            raise UsageError(f"--trace-start must be seconds after the first request, got {self.start:g}")
        if self.end is not None and not (self.start or 0) < self.end < 1e9:
            raise UsageError(f"--trace-end must be seconds after --trace-start, got {self.end:g}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """The taken rows as columns, by time."""

    format: str
    facts: FileFacts
    time_ns: npt.NDArray[np.int64]
    """[rows] ascending."""
    input_len: npt.NDArray[np.int64]
    """[rows] tokens."""
    output_len: npt.NDArray[np.int64]
    """[rows] tokens."""
    hash_ids: npt.NDArray[np.uint64]
    """[blocks] of all rows, in a row's order; empty where the format has none."""
    first_block: npt.NDArray[np.int64]
    """[rows] where a row's blocks begin in `hash_ids`."""
    num_blocks: npt.NDArray[np.int64]
    """[rows]"""
    block_size: int | None
    """Tokens of a block; None where the format has no blocks."""
    dropped: dict[str, int] = field(default_factory=dict)
    clipped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.time_ns)

    def blocks(self, row: int) -> npt.NDArray[np.uint64]:
        first = int(self.first_block[row])
        return self.hash_ids[first : first + int(self.num_blocks[row])]


@dataclass(frozen=True, slots=True)
class _Row:
    time_ns: int
    input_len: int
    output_len: int
    hash_ids: Sequence[int] = ()


class _Place:
    """Where the reader is, for its complaints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 1

    def refuse(self, what: str) -> NoReturn:
        raise UsageError(f"{self.path}:{self.line}: {what}")


def read_trace(path: Path, window: TraceWindow, *, format: str | None = None, block_size: int | None = None) -> Trace:
    """Read the rows of `window`. `format`: one of FORMATS, or None to tell it from the first line. `block_size`: of
    `hash_ids`, where it is not the format's own.

    UsageError with file and line for a row that is none, and if no row is left.
    """
    place = _Place(path)
    with open_data_file(path) as file:
        status = path.stat()
        digest = hashlib.sha256()
        lines = read_lines(file, path, digest)
        head = next(lines, None)
        if head is None:
            raise UsageError(f"{path}: no requests in it")
        place.line = head[0]
        name, row_of = _reader(place, head[2], format)
        size = block_size or BLOCK_SIZES.get(name)
        columns = _Columns(window, place, size)
        if name in BLOCK_SIZES:
            columns.add(row_of(head[2]))
        for number, _, line in lines:
            if columns.full:
                break
            place.line = number
            columns.add(row_of(line))
        whole = file.read(1) == b"" and not columns.full
    facts = FileFacts(str(path), status.st_size, status.st_mtime_ns, digest.hexdigest() if whole else None)
    return columns.trace(name, facts)


class _Columns:
    """Rows as they are taken."""

    def __init__(self, window: TraceWindow, place: _Place, block_size: int | None) -> None:
        self._window = window
        self._place = place
        self._block_size = block_size
        self._origin: int | None = None
        self._start = None if window.start is None else round(window.start * 1e9)
        self._end = None if window.end is None else round(window.end * 1e9)
        self._times, self._inputs, self._outputs = array("q"), array("q"), array("q")
        self._counts, self._blocks = array("q"), array("Q")
        self._dropped: Counter[str] = Counter()
        self._clipped: Counter[str] = Counter()

    @property
    def full(self) -> bool:
        return self._window.num_prompts is not None and len(self._times) >= self._window.num_prompts

    def add(self, row: _Row) -> None:
        window = self._window
        if self._origin is None:
            self._origin = row.time_ns
        since = row.time_ns - self._origin
        if (self._start is not None and since < self._start) or (self._end is not None and since >= self._end):
            self._dropped["outside --trace-start and --trace-end"] += 1
            return
        if row.input_len < 1 or row.output_len < 1:
            self._dropped[_FAILED] += 1
            return
        self._check_blocks(row)
        over = [
            (reason, limit)
            for reason, limit, length in (
                (_LONG_INPUT, window.max_input_len, row.input_len),
                (_LONG_OUTPUT, window.max_output_len, row.output_len),
            )
            if limit is not None and length > limit
        ]
        if over and not window.clip:
            self._dropped[over[0][0]] += 1
            return
        self._clipped.update(reason for reason, _ in over)
        if len(self._times) >= MAX_ITEMS:
            self._place.refuse(f"more than {MAX_ITEMS:,} requests: take a part with --num-prompts or --trace-end")
        input_len = min(row.input_len, window.max_input_len or row.input_len)
        blocks = row.hash_ids[: -(-input_len // self._block_size)] if self._block_size else ()
        if len(self._blocks) + len(blocks) > MAX_BLOCKS:
            self._place.refuse(f"more than {MAX_BLOCKS:,} blocks: take a part with --num-prompts or --trace-end")
        self._times.append(row.time_ns)
        self._inputs.append(input_len)
        self._outputs.append(min(row.output_len, window.max_output_len or row.output_len))
        self._counts.append(len(blocks))
        self._blocks.extend(blocks)

    def _check_blocks(self, row: _Row) -> None:
        """A prompt has a block for each `block_size` tokens; the last one may be cut, or left out."""
        size = self._block_size
        if size is None or not row.hash_ids:
            return
        if len(row.hash_ids) not in (row.input_len // size, -(-row.input_len // size)):
            self._place.refuse(
                f"field 'hash_ids' has {len(row.hash_ids)} blocks, an input of {row.input_len} tokens would have "
                f"{-(-row.input_len // size)} of {size}: give the trace's own --block-size"
            )

    def trace(self, name: str, facts: FileFacts) -> Trace:
        if not self._times:
            reasons = "; ".join(f"{count:,}: {reason}" for reason, count in self._dropped.items())
            raise UsageError(f"{facts.path}: no request is left" + (f" ({reasons})" if reasons else ""))
        times = np.array(self._times, dtype=np.int64)
        counts = np.array(self._counts, dtype=np.int64)
        by_time = np.argsort(times, kind="stable")
        return Trace(
            format=name,
            facts=facts,
            time_ns=times[by_time],
            input_len=np.array(self._inputs, dtype=np.int64)[by_time],
            output_len=np.array(self._outputs, dtype=np.int64)[by_time],
            hash_ids=np.array(self._blocks, dtype=np.uint64),
            first_block=(np.cumsum(counts) - counts)[by_time],
            num_blocks=counts[by_time],
            block_size=self._block_size if len(self._blocks) else None,
            dropped=dict(self._dropped),
            clipped=dict(self._clipped),
        )


# ---- one reader per format


def _reader(place: _Place, head: bytes, format: str | None) -> tuple[str, Callable[[bytes], _Row]]:
    """(format, a function from line to row), from the first line."""
    if format is not None and format not in FORMATS:
        raise UsageError(f"--trace-format must be one of {', '.join(FORMATS)}; got {format!r}")
    if head.lstrip()[:1] == b"{":
        name = format or ("bailian" if "chat_id" in _object(place, head) else "mooncake")
        if name not in BLOCK_SIZES:
            place.refuse(f"is JSON, but --trace-format is {name}, a CSV file")
        unit = 1_000_000 if name == "mooncake" else 1_000_000_000
        return name, lambda line: _json_row(place, line, unit)
    columns = [cell.strip().lower() for cell in _cells(place, head)]
    names = [name for name, wanted in _CSV_COLUMNS.items() if set(wanted) <= set(columns)]
    if format in _CSV_COLUMNS:
        missing = [column for column in _CSV_COLUMNS[format] if column not in columns]
        if missing:
            place.refuse(f"the header has no column {missing[0]!r}, which --trace-format {format} needs")
        names = [format]
    if not names or format in BLOCK_SIZES:
        place.refuse(
            f"no trace of a known format ({', '.join(FORMATS)}): JSON objects, or a header with the columns "
            + " or ".join(", ".join(wanted) for wanted in _CSV_COLUMNS.values())
        )
    positions = [columns.index(column) for column in _CSV_COLUMNS[names[0]]]
    time_of = _iso_ns if names[0] == "azure" else _seconds_ns
    return names[0], lambda line: _csv_row(place, line, columns, positions, time_of)


def _object(place: _Place, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        place.refuse(f"no JSON ({error})")
    if not isinstance(value, dict):
        place.refuse(f"must be a JSON object, got {type(value).__name__}")
    return value


def _json_row(place: _Place, line: bytes, unit_ns: int) -> _Row:
    fields = _object(place, line)
    hash_ids = fields.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(h) is int and 0 <= h < 2**64 for h in hash_ids):
        place.refuse("field 'hash_ids' must be a list of whole numbers from 0 to 2⁶⁴ − 1")
    time = fields.get("timestamp")
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time * unit_ns < _MAX_NS:
        place.refuse(f"field 'timestamp' must be a time, not negative, got {quoted(time)}")
    time_ns = time * unit_ns if isinstance(time, int) else round(time * unit_ns)
    input_len, output_len = (_length(place, name, fields.get(name)) for name in ("input_length", "output_length"))
    return _Row(time_ns, input_len, output_len, hash_ids)


def _csv_row(
    place: _Place, line: bytes, columns: list[str], positions: list[int], time_of: Callable[[_Place, str, str], int]
) -> _Row:
    cells = _cells(place, line)
    if len(cells) != len(columns):
        place.refuse(f"has {len(cells)} columns, the header {len(columns)}")
    time, input_len, output_len = (cells[position].strip() for position in positions)
    names = [columns[position] for position in positions]
    return _Row(
        time_of(place, names[0], time),
        _length(place, names[1], _number(input_len)),
        _length(place, names[2], _number(output_len)),
    )


def _cells(place: _Place, line: bytes) -> list[str]:
    try:
        text = line.decode().strip("\r\n")
        return next(csv.reader([text], strict=True)) if '"' in text else text.split(",")
    except (ValueError, csv.Error, StopIteration) as error:
        place.refuse(f"no line of a CSV file ({error})")


def _number(cell: str) -> float | int | str:
    try:
        return int(cell) if cell.isdigit() else float(cell)
    except ValueError:
        return cell


def _length(place: _Place, name: str, value: Any) -> int:
    """Tokens; 0 for a request that failed."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS or value % 1:
        place.refuse(f"field {name!r} must be tokens from 0 to {MAX_TOKENS:,}, got {quoted(value)}")
    return int(value)


def _seconds_ns(place: _Place, name: str, cell: str) -> int:
    value = _number(cell)
    if isinstance(value, str) or not 0 <= value < _MAX_NS / 1e9:
        place.refuse(f"field {name!r} must be seconds, not negative, got {quoted(cell)}")
    return value * 1_000_000_000 if isinstance(value, int) else round(value * 1e9)


def _iso_ns(place: _Place, name: str, cell: str) -> int:
    """A date and a time to the nanosecond; `datetime` alone has microseconds. Without a zone it is UTC."""
    match = _ISO.fullmatch(cell)
    try:
        if match is None:
            raise ValueError
        day, hour, minute, second, fraction, zone = match.groups()
        if int(hour) > 23 or int(minute) > 59 or int(second) > 60:
            raise ValueError
        seconds = _day_seconds(day) + 3600 * int(hour) + 60 * int(minute) + int(second) - _zone_seconds(zone)
    except ValueError:
        place.refuse(f"field {name!r} must be a time such as 2023-11-16 18:15:46.6805900, got {quoted(cell)}")
    return seconds * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))


@lru_cache(maxsize=64)
def _day_seconds(day: str) -> int:
    return (datetime.fromisoformat(day).replace(tzinfo=UTC) - _EPOCH) // timedelta(seconds=1)


def _zone_seconds(zone: str | None) -> int:
    if zone is None or zone == "Z":
        return 0
    hours, minutes = int(zone[1:3]), int(zone[-2:])
    return (3600 * hours + 60 * minutes) * (-1 if zone[0] == "-" else 1)
