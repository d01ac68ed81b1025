"""One rank's recording, whoever wrote it, and recordings of several ranks. Times are nanoseconds of the rank's own
clock unless `clock` says that it is shared. No behaviour beyond simple sums lives here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = [
    "LIFECYCLE",
    "OUTCOMES",
    "Call",
    "End",
    "Held",
    "RankTrace",
    "Recording",
    "RequestEvent",
    "Round",
    "Work",
]

LIFECYCLE: Final = (
    *("enqueue", "activate", "forward_start", "forward_end", "send_submit", "transfer_done", "vote", "timeout"),
    *("commit", "apply", "release", "cleanup"),
)
"""Events of a request, in the order of its life."""
OUTCOMES: Final = ("completed", "failed", "cancelled")


class Round(NamedTuple):
    """One use of a request id."""

    request: int | str
    epoch: int

    def __str__(self) -> str:
        return f"request {self.request}" + (f" epoch {self.epoch}" if self.epoch else "")


class RequestEvent(NamedTuple):
    """Something that happened to a request on this rank. `value`: the commit's sequence number, or the blocks freed."""

    t: int
    name: str
    round: Round
    outcome: str | None = None
    value: int | None = None


class Call(NamedTuple):
    """One call of an agreement, or one collective. `domain` tells apart communicators of one group: the pipeline of a
    shard, the shards of a stage. Calls of ranks that meet have the same group, domain, kind and number."""

    group: str
    domain: str
    kind: str
    number: int
    enter: int
    exit: int | None
    """None: never left, or not recorded."""
    votes: int = 0
    commits: int = 0


class Work(NamedTuple):
    """What the rank did between its calls."""

    what: str
    start: int
    end: int


class Held(NamedTuple):
    t: int
    blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """What a rank said when it came to its end."""

    t: int
    counters: Mapping[str, float] = field(default_factory=dict)
    digest: str | None = None
    abandoned: int | None = None
    pending_sends: int | None = None
    cpu_s: float | None = None
    wall_s: float | None = None
    wait_s: Mapping[str, float] = field(default_factory=dict)
    """By group: all calls, whether or not they were recorded as events."""
    released_before_commit: int | None = None
    total: int | None = None
    """Requests that the rank was to handle."""
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class RankTrace:
    """What one rank recorded."""

    source: Path
    """The file."""
    format: str
    """`agreement trace`, `profiler trace`, `flight recorder`, …"""
    rank: int
    size: int
    run: str = ""
    arm: str = ""
    mode: str = "collectives"
    """`async`, `blocking`, `local-only`, `none` (no agreement), or `collectives` for what is no agreement trace."""
    stage: int = 0
    shard: int = 0
    pp: int = 1
    tp: int = 1
    host: str = ""
    clock: str | None = None
    """Ranks of one value share a clock. None: nothing is known."""
    start: int = 0
    stop: int = 0
    """First and last time in the record."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    requests: list[RequestEvent] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    dropped: int = 0
    """Events that the rank could not record."""
    damaged: int = 0
    """Lines that could not be read; a torn last line, which a kill leaves, is none."""
    unread: int = 0
    """Events beyond what is read of one file."""
    end: End | None = None
    """None: killed, or a format that says nothing of it."""
    ends: bool = False
    """Whether the format has an end, so that a missing one means a kill."""
    killed_by: str | None = None
    """The signal, where something saw it."""
    notes: list[str] = field(default_factory=list)
    """What limits this record's evidence."""

    @property
    def meets(self) -> bool:
        """Whether calls of one number are one meeting of all ranks: polls of an asynchronous agreement are not."""
        return self.mode in ("blocking", "collectives")

    @property
    def wall_s(self) -> float:
        if self.end is not None and self.end.wall_s is not None:
            return self.end.wall_s
        return max(self.stop - self.start, 0) / 1e9


@dataclass(frozen=True, slots=True)
class Recording:
    """One run of one arm: its ranks, in order."""

    label: str
    """The arm's name."""
    ranks: Sequence[RankTrace]
    place: Path
    """Where it was read from."""
    repeat: int = 0
    """Runs of one number were made one after the other, under the same seed."""
    problems: tuple[str, ...] = ()
    """Ranks that are missing, files that are none."""

    @property
    def mode(self) -> str:
        return self.ranks[0].mode

    @property
    def size(self) -> int:
        return max(self.ranks[0].size, *(one.rank + 1 for one in self.ranks))

    @property
    def one_clock(self) -> bool:
        """Whether times of all ranks can be compared."""
        clocks = {one.clock for one in self.ranks}
        return len(clocks) == 1 and None not in clocks

    @property
    def wall_s(self) -> float:
        return max(one.wall_s for one in self.ranks)
