"""The record of one request: one line of `requests/<worker>.jsonl`. Field meanings: docs/run_directory.md."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from atom.bench.clocks import ClockOffset, clock_offsets
from atom.bench.rundir import JsonlFile, RunDirectory, check_schema_version

__all__ = ["MEASURED", "UNFINISHED", "WARMUP", "Outcome", "RequestRecord", "is_count", "read_records"]

MEASURED = "measured"
WARMUP = "warmup"
UNFINISHED = "unfinished"
"""Error class of a request that the end of `--grace-period` cut."""


class Outcome(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Ended by this client on purpose: Ctrl-C, `--duration`."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request. Times are `time.monotonic_ns`; what did not happen is None, never 0."""

    index: int
    phase: str = MEASURED
    worker: str = "0"
    lane: int | None = None
    session: str | None = None
    turn: int | None = None
    server: int | None = None
    """Which of several base URLs it went to, from 0; None where there is one."""
    outcome: str = Outcome.FAILED
    status: int | None = None
    """HTTP status."""
    error_class: str | None = None
    error_message: str | None = None
    scheduled_ns: int | None = None
    """When the arrival schedule wanted it sent; None in a load without a schedule."""
    ready_ns: int | None = None
    """When it could have been sent at the earliest: its scheduled time, or later if it had to wait for one of the
    `--max-concurrency` slots. `sent_ns - ready_ns` is this client's own lateness."""
    sent_ns: int | None = None
    connect_ns: int | None = None
    """Duration of the connect (and TLS handshake) before `sent_ns`; None on a reused connection."""
    first_ns: int | None = None
    last_ns: int | None = None
    """First and last token-bearing chunk."""
    end_ns: int | None = None
    """Last byte read, or the moment of the failure."""
    chunk_ns: Sequence[int] = ()
    """Arrival of each token-bearing chunk; equal values came in one read."""
    chunk_tokens: Sequence[int] | None = None
    """Tokens of each of these chunks; None where the server does not say."""
    input_len: int | None = None
    """Prompt tokens as planned."""
    output_len: int | None = None
    """max_tokens as asked for."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """From the server's usage; `output_tokens` see `tokens_from`."""
    tokens_from: str | None = None
    """`usage`, `token_ids`, or `chunks` (one token per chunk assumed)."""
    finish_reason: str | None = None
    retries: int = 0
    """1 if the first attempt hit a keep-alive connection that the server had closed."""
    anomalies: Mapping[str, int] = field(default_factory=dict)
    text: str | None = None
    tags: Mapping[str, Any] | None = None
    """What the load knew of the request beforehand (`PlannedRequest.tags`)."""

    def to_line(self) -> str:
        error = None
        if self.error_class is not None:
            error = {"class": self.error_class, "message": self.error_message}
        return json.dumps(
            {
                "index": self.index,
                "phase": self.phase,
                "worker": self.worker,
                "lane": self.lane,
                "session": self.session,
                "turn": self.turn,
                "server": self.server,
                "outcome": self.outcome,
                "status": self.status,
                "error": error,
                "scheduled_ns": self.scheduled_ns,
                "ready_ns": self.ready_ns,
                "sent_ns": self.sent_ns,
                "connect_ns": self.connect_ns,
                "first_ns": self.first_ns,
                "last_ns": self.last_ns,
                "end_ns": self.end_ns,
                "input_len": self.input_len,
                "output_len": self.output_len,
                "prompt_tokens": self.prompt_tokens,
                "output_tokens": self.output_tokens,
                "cached_tokens": self.cached_tokens,
                "tokens_from": self.tokens_from,
                "finish_reason": self.finish_reason,
                "retries": self.retries,
                "anomalies": dict(self.anomalies),
                "text": self.text,
                "tags": None if self.tags is None else dict(self.tags),
                "chunk_ns": list(self.chunk_ns),
                "chunk_tokens": None if self.chunk_tokens is None else list(self.chunk_tokens),
            },
            separators=(",", ":"),
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> RequestRecord:
        """The record of a line; ValueError if the line is none. Unknown fields are ignored (newer minor versions)."""
        error = line.get("error")
        if not isinstance(error, dict | None):
            raise ValueError("error must be an object or null")
        error = error or {}
        fields = {name: line[name] for name in _FIELDS if name in line}
        if not is_count(fields.get("index")) or fields.get("outcome") not in tuple(Outcome):
            raise ValueError("not a request record")
        for name in _NUMBERS & fields.keys():
            if fields[name] is not None and not is_count(fields[name]):
                raise ValueError(f"{name} must be a whole number from 0 or null, got {fields[name]!r}")
        for name, value in [*((name, fields.get(name)) for name in _TEXTS), *error.items()]:
            if not isinstance(value, str | None):
                raise ValueError(f"{name} must be a string or null, got {value!r}")
        if not all(isinstance(fields.get(name, ""), str) for name in ("phase", "worker")):
            raise ValueError("phase and worker must be strings")
        fields["retries"] = fields.get("retries") or 0
        chunks, tokens = fields.get("chunk_ns", []), fields.get("chunk_tokens")
        if not _counts(chunks) or not (tokens is None or (_counts(tokens) and len(tokens) == len(chunks))):
            raise ValueError("chunk_ns and chunk_tokens must be lists of whole numbers of one length")
        anomalies = fields.setdefault("anomalies", {})
        if not isinstance(anomalies, dict) or not _counts(list(anomalies.values())):
            raise ValueError("anomalies must be an object of whole numbers")
        if not isinstance(fields.get("tags"), dict | None):
            raise ValueError("tags must be an object or null")
        # A long run has tens of millions of these, at 8 bytes in an array and 40 in a list.
        fields["chunk_ns"] = array("q", chunks)
        fields["chunk_tokens"] = None if tokens is None else array("q", tokens)
        record = cls(**fields, error_class=error.get("class"), error_message=error.get("message"))
        record._check_order()
        return record

    def shift(self, offset: ClockOffset) -> None:
        """Move all times to another clock, by what is right for this request's beginning: its durations stay."""
        moments = [name for name in _MOMENTS if getattr(self, name) is not None]
        if moments:
            by_ns = offset.at(min(getattr(self, name) for name in moments))
            for name in moments:
                setattr(self, name, getattr(self, name) + by_ns)
            self.chunk_ns = [moment + by_ns for moment in self.chunk_ns]

    def _check_order(self) -> None:
        """ValueError if what happened did not happen in this order, or a completed request lacks a part of it."""
        moments = [self.sent_ns, self.first_ns, self.last_ns, self.end_ns]
        if self.outcome == Outcome.COMPLETED and None in moments:
            raise ValueError("a completed request must have sent_ns, first_ns, last_ns and end_ns")
        known = [moment for moment in moments if moment is not None]
        chunks = list(self.chunk_ns)
        if known != sorted(known) or chunks != sorted(chunks):
            raise ValueError("sent_ns, first_ns, last_ns, end_ns and chunk_ns must ascend")


_FIELDS = frozenset(RequestRecord.__dataclass_fields__) - {"error_class", "error_message"}
_NUMBERS = frozenset(
    (
        *(name for name in _FIELDS if name.endswith("_ns") and name != "chunk_ns"),
        *("lane", "turn", "server", "status", "retries"),
        *("input_len", "output_len", "prompt_tokens", "output_tokens", "cached_tokens"),
    )
)
_MOMENTS = ("scheduled_ns", "ready_ns", "sent_ns", "first_ns", "last_ns", "end_ns")
_TEXTS = ("phase", "worker", "session", "tokens_from", "finish_reason", "text")
_MOST: Final = 1 << 62
"""Beyond any time or count, and small enough for a difference of two in 64 bits."""


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(map(is_count, values))


def read_records(
    run_dir: RunDirectory, phase: str | None = MEASURED, *, damaged: Counter[str] | None = None
) -> Iterator[RequestRecord]:
    """The records of all workers, of one phase or (None) of all, on one clock (`bench/clocks.py`).

    Lines that are torn or no record are skipped, and counted in `damaged` by file (`requests/0.jsonl`). UsageError for
    a line of a newer major schema version, which says something that this version cannot know.
    """
    offsets = clock_offsets(run_dir.read_run_json())
    for path in run_dir.request_files():
        file, bad, offset = JsonlFile(path), 0, offsets.get(path.stem)
        for line in file:
            if "schema_version" in line:
                check_schema_version(line["schema_version"], f"{path}, line {file.line}")
            try:
                record = RequestRecord.from_json(line)
            except ValueError:
                bad += 1
                continue
            if phase is None or record.phase == phase:
                if offset is not None:
                    record.shift(offset)
                yield record
        if damaged is not None and bad + file.damaged:  # a torn last line is what a kill leaves, no damage
            damaged[f"{path.parent.name}/{path.name}"] += bad + file.damaged
