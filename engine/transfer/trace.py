"""What a rank writes about its transfers and its agreement: `rank-N.jsonl`, one JSON object a line.

The first line is a header, then come events {"t": monotonic ns, "e": name, …}, and the last line is an `end` with
totals; it is missing after a kill. `FIELDS` has every event and its fields. An event costs the rank an append to a
bounded ring; a thread writes the ring out, and events that found it full are counted in a `dropped` event at their
place. What cannot be written never disturbs the rank. `traced.py` writes the events of an agreement's calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from atom.engine.transfer.ledger import Counters
from atom.engine.transfer.outcome import Outcome

__all__ = [
    "FIELDS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "Trace",
    "TraceEnd",
    "TraceHeader",
    "TraceMode",
    "TraceWriter",
    "trace_path",
]

SCHEMA: Final = "atom-agreement-trace"
SCHEMA_VERSION: Final = 1
"""Fields and events may be added within a version."""
TraceMode = Literal["async", "blocking", "local-only", "none"]
"""`none`: ranks that agree on nothing and make no calls, as before there was an agreement."""

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    # A request: r its id, p its epoch, o an outcome
    "enqueue": ("r", "p"),
    "activate": ("r", "p"),
    "forward_start": ("r", "p"),
    "forward_end": ("r", "p"),
    "send_submit": ("r", "p"),
    "transfer_done": ("r", "p"),  # t: when it ended, which may be before the line above
    "vote": ("r", "p", "o"),
    "timeout": ("r", "p"),
    "commit": ("r", "p", "q", "o"),  # q: the commit's sequence number; without an agreement the rank's own
    "apply": ("r", "p"),
    "release": ("r", "p", "b"),  # b: blocks given back
    "cleanup": ("r", "p"),
    # A call of the agreement: g "pp" or "tp", k "outcome" or "readiness", q its number among the calls of that group,
    # n votes said, d commits got. A blocking agreement writes every call, the others those that did something.
    "agree_enter": ("g", "k", "q"),
    "agree_exit": ("g", "k", "q", "n", "d"),
    # What the rank does between: w "forward", "receive" (waits for the stage before), "transfer_wait", "schedule" or
    # "other"
    "work_start": ("w",),
    "work_end": ("w",),
    "held": ("b",),  # KV blocks held from now on
    "dropped": ("n",),  # events lost here
}
"""Event → its fields after `t` and `e`."""
_TEXTS: Final = frozenset({"g", "k", "w", "o"})
_TEMPLATES: Final = {
    name: '{"t":%d,"e":"'
    + name
    + '"'
    + "".join(f',"{f}":"%s"' if f in _TEXTS else f',"{f}":%d' for f in fields)
    + "}\n"
    for name, fields in FIELDS.items()
}
_OUTCOMES: Final = {outcome: outcome.name.lower() for outcome in Outcome}
_RING: Final = 65_536
_EVERY_S: Final = 0.1
_BATCH: Final = 512
"""Events that are formatted in one piece: what runs in between waits for no more than that."""


def trace_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceHeader:
    """The first line of a rank's file. Ranks are numbered `stage · tp + shard`."""

    run: str
    arm: str
    mode: TraceMode
    rank: int
    size: int
    pp: int
    tp: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else belongs to the run: its seed, its stage-time model."""

    def line(self) -> str:
        fields = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "run": self.run,
            "arm": self.arm,
            "mode": self.mode,
            "rank": self.rank,
            "size": self.size,
            "stage": self.rank // self.tp,
            "shard": self.rank % self.tp,
            "pp": self.pp,
            "tp": self.tp,
            "host": socket.gethostname(),
            "boot_id": _boot_id(),
            "pid": os.getpid(),
            "start_ns": time.monotonic_ns(),
            "facts": dict(self.facts),
        }
        return json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEnd:
    """The last line: what a rank counted, whether or not every event of it was written. None: it never came to it."""

    counters: Counters | None = None
    """None where no agreement ran."""
    digest: str | None = None
    """Of the applied commits in their order."""
    abandoned: int | None = None
    pending_sends: int | None = None
    cpu_s: float | None = None
    wall_s: float | None = None
    wait_s: Mapping[str, float] = field(default_factory=dict)
    """Group → seconds inside calls of its agreement."""
    released_before_commit: int | None = None
    """Requests whose blocks were given back before an authoritative commit."""
    completed: int | None = None
    """Requests that this rank applied as completed."""
    total: int | None = None
    error: str | None = None

    def line(self) -> str:
        fields = {"e": "end", "t": time.monotonic_ns(), **asdict(self), "wait_s": dict(self.wait_s)}
        return json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"


class Trace:
    """Records nothing: what an engine uses that does not trace."""

    def emit(self, event: str, *values: Any) -> None:
        """Record an event now, with the values of `FIELDS[event]` in their order."""

    def emit_at(self, t_ns: int, event: str, *values: Any) -> None:
        """Record one of an earlier time."""

    def close(self, end: TraceEnd | None = None) -> None:
        """Write out what is left, and the end line."""


class TraceWriter(Trace):
    """One rank's file. Events come from one thread of the rank; an event whose values do not fit its fields is an error
    of the caller's, and appears as a dropped one."""

    def __init__(self, path: Path, header: TraceHeader, *, ring: int = _RING) -> None:
        """OSError if the file cannot be made; FileExistsError if there is one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._ring: deque[tuple[int, str, tuple[Any, ...]]] = deque()
        self._capacity = ring
        self._lost = 0
        self.dropped = 0
        """Events that are not in the file."""
        self.error: str | None = None
        """Why the file ends early."""
        self._stop = threading.Event()
        self._write(header.line())
        self._thread = threading.Thread(target=self._run, name="agreement-trace", daemon=True)
        self._thread.start()

    def emit(self, event: str, *values: Any) -> None:
        self.emit_at(time.monotonic_ns(), event, *values)

    def emit_at(self, t_ns: int, event: str, *values: Any) -> None:
        ring = self._ring
        if len(ring) >= self._capacity:
            self._lost += 1
            return
        if self._lost:
            ring.append((t_ns, "dropped", (self._lost,)))
            self._lost = 0
        ring.append((t_ns, event, values))

    def close(self, end: TraceEnd | None = None) -> None:
        if self._fd < 0:
            return
        self._stop.set()
        self._thread.join()
        self._drain()
        if self._lost:
            self._write(_line((time.monotonic_ns(), "dropped", (self._lost,))))
            self.dropped += self._lost
        if end is not None:
            self._write(end.line())
        os.close(self._fd)
        self._fd = -1

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._drain()

    def _drain(self) -> None:
        ring = self._ring
        while ring:
            lines = [self._formatted(ring.popleft()) for _ in range(min(len(ring), _BATCH))]
            self._write("".join(lines), events=len(lines))

    def _formatted(self, event: tuple[int, str, tuple[Any, ...]]) -> str:
        try:
            line = _line(event)
        except (KeyError, TypeError):
            self.dropped += 1
            return _line((event[0], "dropped", (1,)))
        if event[1] == "dropped":
            self.dropped += event[2][0]
        return line

    def _write(self, text: str, events: int = 0) -> None:
        """After the first failure nothing is written any more: a hole in the middle would look like silence."""
        if self.error is None:
            data = memoryview(text.encode())
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
                return
            except OSError as error:
                self.error = error.strerror or str(error)
        self.dropped += events


def _line(event: tuple[int, str, tuple[Any, ...]]) -> str:
    t_ns, name, values = event
    return _TEMPLATES[name] % (t_ns, *(_OUTCOMES[v] if isinstance(v, Outcome) else v for v in values))


def _boot_id() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None
