"""The record of one request: one line of `requests/<worker>.jsonl`. Field meanings: docs/run_directory.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from atom.bench.rundir import JsonlFile, RunDirectory

__all__ = ["MEASURED", "WARMUP", "Outcome", "RequestRecord", "read_records"]

MEASURED = "measured"
WARMUP = "warmup"


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
                "chunk_ns": list(self.chunk_ns),
                "chunk_tokens": None if self.chunk_tokens is None else list(self.chunk_tokens),
            },
            separators=(",", ":"),
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> RequestRecord:
        """The record of a line; ValueError if the line is none. Unknown fields are ignored (newer minor versions)."""
        error = line.get("error") or {}
        fields = {name: line[name] for name in _FIELDS if name in line}
        if not isinstance(fields.get("index"), int) or not isinstance(error, dict):
            raise ValueError("not a request record")
        for name in _NUMBERS:
            if not isinstance(fields.get(name), int | None):
                raise ValueError(f"{name} must be an integer or null, got {fields[name]!r}")
        chunks, tokens = fields.get("chunk_ns", []), fields.get("chunk_tokens")
        if not _integers(chunks) or not (tokens is None or (_integers(tokens) and len(tokens) == len(chunks))):
            raise ValueError("chunk_ns and chunk_tokens must be lists of integers of one length")
        return cls(**fields, error_class=error.get("class"), error_message=error.get("message"))


_FIELDS = frozenset(RequestRecord.__dataclass_fields__) - {"error_class", "error_message"}
_NUMBERS = (
    *sorted(name for name in _FIELDS if name.endswith("_ns") and name != "chunk_ns"),
    *("lane", "turn", "status", "retries"),
    *("input_len", "output_len", "prompt_tokens", "output_tokens", "cached_tokens"),
)


def _integers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def read_records(run_dir: RunDirectory, phase: str | None = MEASURED) -> Iterator[RequestRecord]:
    """The records of all workers, of one phase or (None) of all. Torn and foreign lines are skipped."""
    for path in run_dir.request_files():
        for line in JsonlFile(path):
            try:
                record = RequestRecord.from_json(line)
            except (ValueError, TypeError):
                continue
            if phase is None or record.phase == phase:
                yield record
