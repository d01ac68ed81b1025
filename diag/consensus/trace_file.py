"""Reads `rank-N.jsonl`, the trace that this engine's ranks write and others may (docs/trace_consensus.md).

A file may be cut off anywhere, and comes from anywhere: every field is checked, lines of another form are counted and
skipped, and no more than a bound of events is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from atom.bench.rundir import JsonlFile
from atom.diag.consensus.model import OUTCOMES, Call, End, Held, RankTrace, RequestEvent, Round, Work
from atom.recipes.errors import UsageError

__all__ = ["MOST_EVENTS", "SCHEMA", "SCHEMA_VERSION", "is_trace", "printable", "read_trace"]

SCHEMA: Final = "atom-agreement-trace"
SCHEMA_VERSION: Final = 1
MODES: Final = ("async", "blocking", "local-only", "none")
MOST_EVENTS: Final = 5_000_000
"""Of one rank; more are counted and not kept."""
MOST_RANKS: Final = 1 << 16
_MOST: Final = 1 << 62
_LONGEST: Final = 200
"""Characters of a text from a file."""
_DEEPEST: Final = 8
"""Levels of the facts."""


def is_trace(head: bytes) -> bool:
    """Whether a file that begins like this is one."""
    return SCHEMA.encode() in head.partition(b"\n")[0]


def read_trace(path: Path, *, most_events: int = MOST_EVENTS) -> RankTrace:
    """UsageError if it is none, or of a newer schema."""
    file = JsonlFile(path)
    lines = iter(file)
    header = next(lines, None)
    if header is None or header.get("schema") != SCHEMA:
        raise UsageError(f"{path}: its first line is no header of an {SCHEMA} (docs/trace_consensus.md)")
    reader = _Reader(_header(path, header), most_events, _domains(path, header))
    bad = 0
    for line in lines:
        try:
            reader.take(line)
        except (KeyError, TypeError, ValueError):
            bad += 1
    trace = reader.finish()
    trace.damaged = bad + file.damaged
    return trace


def _header(path: Path, header: Mapping[str, Any]) -> RankTrace:
    version = header.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(f"{path}: schema_version must be a number such as {SCHEMA_VERSION}, got {version!r}")
    if version > SCHEMA_VERSION:
        raise UsageError(f"{path}: schema_version {version} is newer than this atom reads ({SCHEMA_VERSION})")
    try:
        if (mode := header["mode"]) not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {str(mode)[:40]!r}")
        size = _count(header["size"], 1, MOST_RANKS)
        tp = _count(header.get("tp", 1), 1, size)
        rank = _count(header["rank"], 0, size - 1)
        facts = header.get("facts")
        return RankTrace(
            source=path,
            format="agreement trace",
            rank=rank,
            size=size,
            run=_text(header.get("run", "")),
            arm=_text(header.get("arm", "")),
            mode=str(mode),
            stage=_count(header.get("stage", rank // tp), 0, MOST_RANKS),
            shard=_count(header.get("shard", rank % tp), 0, MOST_RANKS),
            pp=_count(header.get("pp", size // tp), 1, MOST_RANKS),
            tp=tp,
            host=_text(header.get("host") or ""),
            clock=_text(header["boot_id"]) if header.get("boot_id") else None,
            start=_count(header["start_ns"]),
            stop=_count(header["start_ns"]),
            facts=_plain_facts(facts) if isinstance(facts, dict) else {},
            ends=True,
        )
    except KeyError as error:
        raise UsageError(f"{path}: its header has no {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: its header: {error}") from None


def _domains(path: Path, header: Mapping[str, Any]) -> dict[str, str]:
    """`domains` of the header: group → name of this rank's communicator, where there are several."""
    given = header.get("domains")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UsageError(f"{path}: its header: domains must be an object of group and name")
    try:
        return {_text(name): _text(one) for name, one in given.items()}
    except ValueError as error:
        raise UsageError(f"{path}: its header: domains must have a name for each group: {error}") from None


class _Reader:
    """Puts a file's events in their places."""

    def __init__(self, trace: RankTrace, most: int, domains: Mapping[str, str]) -> None:
        self._trace, self._most, self._domains = trace, most, domains
        self._kept = 0
        self._open: dict[tuple[str, str, int], int] = {}
        self._working: dict[str, int] = {}
        self._takers: dict[str, Callable[[int, Mapping[str, Any]], None]] = {
            "agree_enter": self._enter,
            "agree_exit": self._exit,
            "work_start": self._work_start,
            "work_end": self._work_end,
            "held": self._held,
            "dropped": self._dropped,
            "end": self._end,
            **dict.fromkeys(
                ("enqueue", "activate", "forward_start", "forward_end", "send_submit", "transfer_done"), self._plain
            ),
            **dict.fromkeys(("timeout", "apply", "cleanup"), self._plain),
            "vote": self._plain,
            "commit": self._plain,
            "release": self._plain,
        }

    def take(self, line: Mapping[str, Any]) -> None:
        """KeyError, TypeError or ValueError if it is of another form. Events of unknown names are a later writer's."""
        name, t = line["e"], _count(line["t"])
        if not isinstance(name, str):
            raise TypeError("an event's name is a text")
        taker = self._takers.get(name)
        if taker is None:
            return
        if self._kept >= self._most and name not in ("end", "dropped"):
            self._trace.unread += 1
        else:
            self._kept += 1
            taker(t, line)
        if name != "end" or self._trace.stop == self._trace.start:
            self._trace.stop = max(self._trace.stop, t)

    def finish(self) -> RankTrace:
        """What began and has no end: calls that were never left; work counts up to the last event."""
        trace = self._trace
        for (group, kind, number), enter in self._open.items():
            trace.calls.append(Call(group, self._domain(group), kind, number, enter, None))
        for what, start in self._working.items():
            trace.work.append(Work(what, start, max(trace.stop, start)))
        trace.calls.sort(key=lambda call: call.enter)
        return trace

    def _domain(self, group: str) -> str:
        """Which communicator of the group: as the header says; else the shards of a stage for `tp`, the stages of a
        shard for `pp`, and one for any other."""
        if group in self._domains:
            return self._domains[group]
        return {"tp": f"stage {self._trace.stage}", "pp": f"shard {self._trace.shard}"}.get(group, "")

    def _plain(self, t: int, line: Mapping[str, Any]) -> None:
        name = str(line["e"])
        outcome = _outcome(line["o"]) if name in ("vote", "commit") else None
        value = _count(line["q"]) if name == "commit" else _count(line["b"]) if line.get("b") is not None else None
        self._trace.requests.append(
            RequestEvent(t, name, Round(_id(line["r"]), _count(line.get("p", 0))), outcome, value)
        )

    def _enter(self, t: int, line: Mapping[str, Any]) -> None:
        key = (_text(line["g"]), _text(line["k"]), _count(line["q"]))
        if (left := self._open.pop(key, None)) is not None:
            self._trace.calls.append(Call(key[0], self._domain(key[0]), key[1], key[2], left, None))
        self._open[key] = t

    def _exit(self, t: int, line: Mapping[str, Any]) -> None:
        key = (_text(line["g"]), _text(line["k"]), _count(line["q"]))
        votes, commits = _count(line.get("n", 0)), _count(line.get("d", 0))
        enter = self._open.pop(key, None)
        if enter is None or t < enter:
            raise ValueError("an exit from a call that was not entered")  # its other half was dropped
        self._trace.calls.append(Call(key[0], self._domain(key[0]), key[1], key[2], enter, t, votes, commits))

    def _work_start(self, t: int, line: Mapping[str, Any]) -> None:
        self._working[_text(line["w"])] = t

    def _work_end(self, t: int, line: Mapping[str, Any]) -> None:
        start = self._working.pop(_text(line["w"]))
        if t < start:
            raise ValueError("work that ends before it starts")
        self._trace.work.append(Work(_text(line["w"]), start, t))

    def _held(self, t: int, line: Mapping[str, Any]) -> None:
        self._trace.held.append(Held(t, _count(line["b"])))

    def _dropped(self, t: int, line: Mapping[str, Any]) -> None:
        self._trace.dropped += _count(line["n"])

    def _end(self, t: int, line: Mapping[str, Any]) -> None:
        counters, wait, digest = line.get("counters"), line.get("wait_s"), line.get("digest")
        numbers = counters.items() if isinstance(counters, dict) else ()
        waits = wait.items() if isinstance(wait, dict) else ()
        self._trace.end = End(
            t=t,
            counters={_text(name): value for name, one in numbers if (value := _amount(one)) is not None},
            digest=_text(digest) if isinstance(digest, str) else None,
            abandoned=_optional(line.get("abandoned")),
            pending_sends=_optional(line.get("pending_sends")),
            cpu_s=_amount(line.get("cpu_s")),
            wall_s=_amount(line.get("wall_s")),
            wait_s={_text(name): value for name, one in waits if (value := _amount(one)) is not None},
            released_before_commit=_optional(line.get("released_before_commit")),
            total=_optional(line.get("total")),
            error=_text(line["error"]) if isinstance(line.get("error"), str) else None,
        )


def _count(value: Any, least: int = 0, most: int = _MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"not a whole number from {least} to {most}: {str(value)[:40]!r}")
    return value


def _optional(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST else None


def _amount(value: Any) -> float | None:
    """A number that is not negative, and not absurd."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST:
        return None
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError("not a text of a reasonable length")
    return printable(value)


def printable(value: str) -> str:
    """Without what a terminal would obey."""
    return value if value.isprintable() else "".join(one if one.isprintable() else "?" for one in value)


def _plain_facts(value: Any, depth: int = 0) -> Any:
    """The texts printable, and what JSON cannot hold or is nested without sense left out."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not isinstance(value, dict | list):
        return value
    if depth >= _DEEPEST:
        return None
    if isinstance(value, list):
        return [_plain_facts(one, depth + 1) for one in value]
    return {printable(name): _plain_facts(one, depth + 1) for name, one in value.items()}


def _id(value: Any) -> int | str:
    return _text(value) if isinstance(value, str) else _count(value)


def _outcome(value: Any) -> str:
    """By name, or by the number that it has on the wire."""
    if type(value) is int and 1 <= value <= len(OUTCOMES):
        return OUTCOMES[value - 1]
    if value not in OUTCOMES:
        raise ValueError("no outcome")
    return str(value)
