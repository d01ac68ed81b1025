"""The class of an arm's failure, with the line that shows it: `functional` (its code), `transport` (bytes did not get
through), `agreement` (ranks did not agree), `infrastructure` (the machine, the image, the build), or `performance gate`
(all requests are fine, a limit is not met).

The class comes from evidence alone: how far the run came, the errors of its requests, and the server's log. What is
known better by the program itself (an exception's name) goes before what a word in a log suggests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from atom.bench.records import Outcome, read_records
from atom.bench.regular_file import read_tail
from atom.bench.rundir import RunDirectory
from atom.diag.compare.arm_problem import one_line, telling_line
from atom.diag.compare.model import RunResult
from atom.recipes.errors import AtomError

__all__ = ["Failure", "FailureClass", "failure_of"]


class FailureClass(StrEnum):
    FUNCTIONAL = "functional"
    TRANSPORT = "transport"
    AGREEMENT = "agreement"
    INFRASTRUCTURE = "infrastructure"
    PERFORMANCE = "performance gate"


@dataclass(frozen=True, slots=True)
class Failure:
    kind: FailureClass
    line: str
    """The evidence."""


_LONGEST: Final = 240

_PATTERNS: Final[tuple[tuple[FailureClass, re.Pattern[str]], ...]] = (
    (
        FailureClass.AGREEMENT,
        re.compile(
            r"\b(?:Agreement\w*|Vote|ModeMismatch)Error\b|\bconsensus\b.{0,60}\b(?:fail|mismatch|diverge|stall|timeout)"
            r"|\b(?:ranks?|participants?) (?:do not|did not|disagree)|\bagreement\b.{0,60}\b(?:fail|mismatch|stall)",
            re.I,
        ),
    ),
    (
        FailureClass.INFRASTRUCTURE,
        re.compile(
            r"out of memory|cannot allocate memory|bad_alloc|OOM-?kill|No space left|Too many open files"
            r"|Permission denied|Address already in use|its port is taken"
            r"|driver version is insufficient|no kernel image is available|\bNVML\b|no CUDA-capable device"
            r"|undefined symbol|cannot open shared object file|version `?\S+'? not found|No module named"
            r"|\b(?:docker|podman): |\bimage\b.{0,60}\bnot found|pull access denied|SIGKILL|SIGBUS"
            r"|Network is unreachable",
            re.I,
        ),
    ),
    (
        FailureClass.TRANSPORT,
        re.compile(
            r"\bNCCL\b.{0,80}\b(?:error|timeout|timed out|abort|unhandled)|\bUCX?\b.{0,60}\berror|\bNIXL\w*\b.{0,80}"
            r"\b(?:error|fail)|(?:KV|cache|context) transfer.{0,80}\b(?:fail|timed? ?out|abort)"
            r"|Connection (?:reset|refused|aborted)|Broken pipe|BrokenPipeError|ConnectionResetError|peer closed",
            re.I,
        ),
    ),
)
"""In this order: the first that a line matches."""

_TRANSPORT_ERRORS: Final = frozenset(("connect", "connection", "protocol", "truncated"))
"""Classes of errors of requests whose connection failed. A server that lets a request wait is another thing."""


def failure_of(
    result: RunResult, run: Path, *, censored: Sequence[str] = (), gate: str | None = None
) -> Failure | None:
    """Of one run in directory `run`; None if nothing failed. `censored`: why its score is. `gate`: the limit that it
    does not meet, in words: named only where everything else went well."""
    if not result.has_records:
        return _not_started(result, run)
    errors = _errors(run)
    if not censored and result.problem is None:
        return None if gate is None else Failure(FailureClass.PERFORMANCE, _short(gate))
    log = _matching(run)
    if log is not None and log.kind is FailureClass.AGREEMENT:
        return log
    if errors is not None and (own := _of_text(errors.line)) is not None and own.kind is FailureClass.AGREEMENT:
        return own
    if result.problem is not None and "died" in result.problem:
        return log or _of_text(result.problem) or Failure(FailureClass.FUNCTIONAL, _short(result.problem))
    if log is not None and errors is None:
        return log
    if errors is not None:
        # That its log says why the bytes did not come is worth more than that they did not.
        return log if errors.kind is FailureClass.TRANSPORT and log is not None else errors
    line = result.problem or (censored[0] if censored else "no reason known")
    return _of_text(line) or Failure(FailureClass.FUNCTIONAL, _short(line))


def _not_started(result: RunResult, run: Path) -> Failure:
    """What is built or started and does not come up. A build belongs to the machine and its images; a server that
    raises at its start does what its code says, unless its line speaks of the machine."""
    line = result.problem or "nothing was recorded"
    found = _of_text(line)
    if found is None and (log := _matching(run)) is not None:
        found = log
    if found is not None:
        return Failure(found.kind, _short(line))
    kind = FailureClass.INFRASTRUCTURE if result.stage == "prepare" else FailureClass.FUNCTIONAL
    return Failure(kind, _short(line))


def _errors(run: Path) -> Failure | None:
    """The class of error that most failed requests have, with its most frequent message."""
    try:
        failed = [one for one in read_records(RunDirectory.open(run)) if one.outcome == Outcome.FAILED]
    except AtomError:
        return None
    if not failed:
        return None
    kinds = Counter(one.error_class or "error" for one in failed)
    kind, count = kinds.most_common(1)[0]
    messages = Counter(one.error_message or "" for one in failed if (one.error_class or "error") == kind)
    line = f"{count} × {kind}: {messages.most_common(1)[0][0]}"
    transport = kind in _TRANSPORT_ERRORS
    return Failure(FailureClass.TRANSPORT if transport else FailureClass.FUNCTIONAL, _short(line))


def _matching(run: Path) -> Failure | None:
    """The line of the server's log that says most, if it is of a class that its words tell."""
    lines = read_tail(run / "server" / "server.log")
    for kind, pattern in _PATTERNS:
        if kind is FailureClass.AGREEMENT and (found := next((x for x in lines if pattern.search(x)), None)):
            return Failure(kind, _short(found.strip()))
    line = telling_line(lines)
    return None if line is None else _of_text(line)


def _of_text(line: str) -> Failure | None:
    return next((Failure(kind, _short(line)) for kind, pattern in _PATTERNS if pattern.search(line)), None)


def _short(text: str) -> str:
    return one_line(text, _LONGEST)
