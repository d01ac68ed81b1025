"""What the processes of one load tell each other: JSON Lines of bounded length over pipes, and over MPI.

A process reports `progress`, that it is `ready` for a phase, and at its end `outcome` or `failed`; it is told `begin`
and `stop`.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, Final

from atom.bench.runner import LoadOutcome, Progress
from atom.recipes.errors import AtomError, RunError, UsageError

__all__ = [
    "MAX_LINE",
    "decode",
    "encode",
    "error_of",
    "failure",
    "merge_outcomes",
    "merge_progress",
    "outcome_of",
    "outcome_report",
    "progress_of",
    "progress_report",
]

MAX_LINE: Final = 1 << 16
_MAX_TEXT: Final = 1_000
_MAX_TRACEBACK: Final = 8_000
_PHASES: Final = ("preparing", "warmup", "measured", "done")


def encode(message: Mapping[str, Any]) -> bytes:
    text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
    line = text.encode("utf-8", "replace") + b"\n"
    assert len(line) <= MAX_LINE, f"a message of {len(line)} bytes"
    return line


def decode(line: bytes) -> dict[str, Any]:
    """ValueError if it is no message."""
    message = json.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("not a message")
    return message


def progress_report(progress: Progress) -> dict[str, Any]:
    return {"kind": "progress", **_bounded(asdict(progress))}


def progress_of(message: Mapping[str, Any]) -> Progress:
    return Progress(**{field.name: message[field.name] for field in fields(Progress)})


def outcome_report(outcome: LoadOutcome) -> dict[str, Any]:
    return {"kind": "outcome", **_bounded(asdict(outcome))}


def outcome_of(message: Mapping[str, Any]) -> LoadOutcome:
    return LoadOutcome(**{field.name: message[field.name] for field in fields(LoadOutcome)})


def failure(error: BaseException) -> dict[str, Any]:
    """Why a process cannot go on. What is no error of ours is a fault, and keeps its traceback."""
    report: dict[str, Any] = {"kind": "failed", "usage": isinstance(error, UsageError)}
    if isinstance(error, AtomError):
        report["message"] = str(error)[:_MAX_TEXT]
    elif isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        report["message"] = f"{name}{error.strerror or error}"[:_MAX_TEXT]
    else:
        report["message"] = f"{type(error).__name__}: {error} (this is a fault in atom; --traceback shows where)"[
            :_MAX_TEXT
        ]
        report["traceback"] = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]
    return report


def error_of(report: Mapping[str, Any], who: str) -> AtomError:
    """The error that `failure` reported. `who` names the process where it matters: a flag is wrong for all of them."""
    message = str(report["message"])
    if report.get("usage") is True:
        return UsageError(message)
    error = RunError(f"{who}: {message}")
    if report.get("traceback"):
        error.add_note(str(report["traceback"]))  # shown with --traceback
    return error


def merge_progress(parts: Iterable[Progress], into: Progress) -> None:
    """Sums; the phase is that of the process that is furthest behind."""
    parts = list(parts)
    into.phase = min((part.phase for part in parts), key=_PHASES.index)
    totals = [part.total for part in parts]
    into.total = None if None in totals else sum(total for total in totals if total is not None)
    for name in ("started", "sent", "completed", "failed", "cancelled", "running", "output_tokens"):
        setattr(into, name, sum(getattr(part, name) for part in parts))
    into.ttft_sum_ms = sum(part.ttft_sum_ms for part in parts)
    into.ttft_count = sum(part.ttft_count for part in parts)
    into.elapsed_s = max(part.elapsed_s for part in parts)
    into.first_error = into.first_error or next((part.first_error for part in parts if part.first_error), None)


def merge_outcomes(parts: Iterable[LoadOutcome]) -> LoadOutcome:
    """One load of its shares: from the first start to the last end."""
    parts = list(parts)
    return LoadOutcome(
        started_ns=min(part.started_ns for part in parts),
        ended_ns=max(part.ended_ns for part in parts),
        started=sum(part.started for part in parts),
        sent=sum(part.sent for part in parts),
        completed=sum(part.completed for part in parts),
        failed=sum(part.failed for part in parts),
        cancelled=sum(part.cancelled for part in parts),
        interrupted=any(part.interrupted for part in parts),
        first_error=next((part.first_error for part in parts if part.first_error), None),
    )


def _bounded(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in report.items()}
