"""Rank 0 of a load that several ranks send: hands out the load, has everybody begin together, collects the records.

Its own share is sent by workers like everybody's (`bench/workers.py`), so that MPI is in no process that takes times.
The other side is `bench/rank_follower.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from typing import Any, Final

from atom.bench.clocks import ClockOffset, OffsetMeasurement
from atom.bench.load import LoadSpec, Shard
from atom.bench.mpi_ranks import Message, Ranks
from atom.bench.records import MEASURED
from atom.bench.rundir import RunDirectory
from atom.bench.runner import LoadOutcome, OnProgress, Progress
from atom.bench.worker_messages import error_of, merge_outcomes, merge_progress, outcome_of, progress_of
from atom.bench.workers import run_workers
from atom.recipes.errors import AtomError, RunError, UsageError

__all__ = ["POLL_S", "RankLeader", "shards_of"]

POLL_S: Final = 0.005
"""How often messages are looked for, on both sides."""
BEGIN_AHEAD_NS: Final = 150_000_000
"""How long before a phase its start is announced: some polls, and the way to every worker."""
PINGS: Final = 64
_PONG_S: Final = 10.0
SILENCE_S: Final = 60.0
"""How long nothing may be heard of ranks that were told to stop; their workers are given less."""


def shards_of(rank: int, ranks: int, processes: int) -> list[Shard]:
    """The shares of one rank's workers, of `processes` workers on all ranks."""
    workers = processes // ranks
    return [Shard(rank * workers + worker, processes) for worker in range(workers)]


@dataclass(slots=True)
class _Member:
    """Another rank, as far as it has told."""

    rank: int
    workers: list[str]
    host: str = ""
    identity: str = ""
    pid: int = 0
    run_dir: str | None = None
    """Where it keeps its records until they are delivered; None: in the run directory."""
    joined: bool = False
    ready: str | None = None
    progress: Progress = field(default_factory=lambda: Progress(total=None))
    outcome: LoadOutcome | None = None
    error: AtomError | None = None
    delivered: bool = False
    undeliverable: bool = False
    clock: list[OffsetMeasurement] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def over(self) -> bool:
        return self.outcome is not None or self.error is not None

    @property
    def files(self) -> set[str]:
        """What it may deliver."""
        return {f"{folder}/{worker}.jsonl" for folder in ("requests", "client") for worker in self.workers}

    def own_ns(self, moment_ns: int) -> int:
        """A moment of rank 0's clock, on this member's."""
        return moment_ns - self.clock[-1].offset_ns if self.clock else moment_ns


class RankLeader:
    """Leads the ranks through any number of loads, one after the other. `identity` (of the clock) and `host` are this
    machine's."""

    def __init__(self, ranks: Ranks, *, identity: str, host: str) -> None:
        self._ranks = ranks
        self._identity = identity
        self._host = host
        self._unchecked = set(ranks.peers)
        self._members: dict[int, _Member] = {peer: _Member(peer, []) for peer in ranks.peers}
        self._pongs: dict[int, int] = {}
        self._heard_s = 0.0
        self._run_dir: RunDirectory | None = None
        self._stop: asyncio.Event | None = None
        self._pumping: asyncio.Task[None] | None = None

    def await_checked(self) -> None:
        """Wait until every rank has found its command line in order; raises what one has against it."""
        while self._unchecked:
            if not self._take():
                sleep(POLL_S)
            self._raise_errors()

    async def run(
        self,
        spec: LoadSpec,
        run_dir: RunDirectory,
        on_progress: OnProgress | None,
        stop: asyncio.Event,
        *,
        load: Mapping[str, Any],
        here_only: bool,
    ) -> LoadOutcome:
        """`run_workers` with the workers of all ranks, `spec.shard.of` in all.

        `load`: what the others make the same `spec` of. `here_only`: the server can be reached from this machine alone.
        UsageError or RunError, from whichever rank it comes; the message says which.
        """
        self._run_dir, self._stop = run_dir, stop
        size = self._ranks.size
        self._members = {
            peer: _Member(peer, [str(shard.index) for shard in shards_of(peer, size, spec.shard.of)])
            for peer in self._ranks.peers
        }
        pump = self._pumping = asyncio.ensure_future(self._pump())
        try:
            return await self._run(spec, run_dir, on_progress, load, here_only=here_only)
        finally:
            self._stop = self._pumping = None
            pump.cancel()
            self._ranks.tell_all({"kind": "done"})

    async def _run(
        self,
        spec: LoadSpec,
        run_dir: RunDirectory,
        on_progress: OnProgress | None,
        load: Mapping[str, Any],
        *,
        here_only: bool,
    ) -> LoadOutcome:
        try:
            await self._admit(run_dir, load, here_only=here_only)
            run_dir.write_run_json({"load": spec.describe(), "ranks": self._describe(spec)})
            own = await self._lead(spec, run_dir, on_progress)
        except BaseException:
            self._ranks.tell_all({"kind": "stop"})
            with contextlib.suppress(AtomError):  # the first error is the one to tell
                await self._until(lambda: all(member.over for member in self._members.values()), stopping=True)
                await self._collect(spec, run_dir)
            raise
        await self._collect(spec, run_dir)
        self._raise_errors()
        return merge_outcomes([own, *(_on_own_clock(member) for member in self._members.values())])

    async def _admit(self, run_dir: RunDirectory, load: Mapping[str, Any], *, here_only: bool) -> None:
        """Everybody has the load, a place for records, and a known clock."""
        token = secrets.token_hex(16)
        path = run_dir.path / f".shared-{token[:8]}"
        try:
            path.write_text(token, encoding="ascii")
            order = {"kind": "load", "load": dict(load), "token": str(path.absolute()), "content": token}
            self._ranks.tell_all(order)
            await self._until(lambda: all(member.joined for member in self._members.values()))
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}") from None
        finally:
            path.unlink(missing_ok=True)
        for member in self._members.values():
            if member.identity == self._identity:
                continue
            if here_only and member.host != self._host:
                raise UsageError(
                    f"{member.name} cannot reach the server that --recipe starts on {self._host}: start it by itself "
                    "(atom serve) and give an address that all hosts reach with --base-url"
                )
            self._measure_clock(member)

    async def _lead(self, spec: LoadSpec, run_dir: RunDirectory, on_progress: OnProgress | None) -> LoadOutcome:
        assert self._stop is not None
        stop, merged, members = self._stop, Progress(total=None), self._members.values()
        latest = Progress(total=None)

        def report(progress: Progress) -> None:
            nonlocal latest
            latest = progress
            merge_progress([latest, *(member.progress for member in members)], merged)
            if on_progress is not None:
                on_progress(merged)

        shards = shards_of(0, self._ranks.size, spec.shard.of)
        own = asyncio.ensure_future(run_workers(spec, run_dir, report, stop, shards=shards, rendezvous=self))
        passing_on = asyncio.ensure_future(self._pass_on(stop))
        try:
            await asyncio.wait({own})
            if own.exception() is not None:
                stop.set()
            await self._until(lambda: all(member.over for member in members), failing=False)
        finally:
            passing_on.cancel()
            own.cancel()
            await asyncio.wait({own})
        outcome = own.result()
        self._raise_errors()
        report(latest)
        return outcome

    async def ready(self, phase: str) -> int:
        """The workers of this rank are ready; returns when everybody's begin."""
        await self._until(lambda: all(member.ready == phase for member in self._members.values()), failing=False)
        at_ns = monotonic_ns() + BEGIN_AHEAD_NS
        for member in self._members.values():
            self._ranks.tell(member.rank, {"kind": "begin", "at_ns": member.own_ns(at_ns)})
        if phase == MEASURED and self._run_dir is not None:
            self._run_dir.write_run_json({"measured_start_ns": at_ns})
        return at_ns

    async def _pass_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._ranks.tell_all({"kind": "stop"})

    async def _collect(self, spec: LoadSpec, run_dir: RunDirectory) -> None:
        """What is only known after the load: how far clocks have drifted, and the records that are elsewhere."""
        for member in self._members.values():
            if member.clock:
                self._measure_clock(member)
        for member in self._members.values():
            if member.run_dir is not None:
                self._ranks.tell(member.rank, {"kind": "deliver"})
        away = [member for member in self._members.values() if member.run_dir is not None]
        try:
            await self._until(lambda: all(member.delivered or member.undeliverable for member in away), failing=False)
        finally:
            if away or any(member.clock for member in self._members.values()):
                run_dir.write_run_json({"ranks": self._describe(spec)})

    def _measure_clock(self, member: _Member) -> None:
        """Nothing is being timed now: questions and answers follow each other without a pause."""
        self._ranks.tell(member.rank, {"kind": "clock", "count": PINGS})
        exchanges = []
        for _ in range(PINGS):
            self._pongs.clear()
            asked, deadline = monotonic_ns(), monotonic() + _PONG_S
            self._ranks.tell(member.rank, {"kind": "ping"})
            while member.rank not in self._pongs:
                self._take()
                if monotonic() > deadline:
                    raise RunError(f"{member.name} does not say what its clock shows")
            exchanges.append((asked, self._pongs[member.rank], monotonic_ns()))
        member.clock.append(OffsetMeasurement.best_of(exchanges))

    async def _until(self, condition: Callable[[], bool], *, failing: bool = True, stopping: bool = False) -> None:
        """`failing`: raise the error of a rank that has one. Once the load is being stopped (or `stopping`) somebody
        has to say something now and then: RunError names a rank that does not."""
        since = monotonic()
        while not condition():
            if self._pumping is not None and self._pumping.done():
                self._pumping.result()  # raises: what came cannot be understood
            if failing and not stopping:
                self._raise_errors()
            if not stopping and (self._stop is None or not self._stop.is_set()):
                since = monotonic()
            elif monotonic() - max(since, self._heard_s) > SILENCE_S:
                silent = next((m for m in self._members.values() if not m.over), None)
                raise RunError(f"{silent.name if silent else 'a rank'} has not been heard of for {SILENCE_S:g} s")
            await asyncio.sleep(POLL_S)

    def _raise_errors(self) -> None:
        for member in self._members.values():
            if member.error is not None:
                raise member.error

    async def _pump(self) -> None:
        while True:
            while self._take():
                pass
            await asyncio.sleep(POLL_S)

    def _take(self) -> bool:
        """Take note of one message, if there is one."""
        message = self._ranks.poll()
        if message is None:
            return False
        self._heard_s = monotonic()
        member, fields = self._members[message.peer], message.fields
        if message.kind == "checked":
            self._unchecked.discard(member.rank)
        elif message.kind == "joined":
            member.host, member.identity = str(fields["host"])[:255], str(fields["identity"])[:255]
            member.pid, member.run_dir, member.joined = int(fields["pid"]), fields["run_dir"], True
        elif message.kind == "progress":
            member.progress = progress_of(fields)
        elif message.kind == "ready":
            member.ready = fields["phase"]
        elif message.kind == "outcome":
            member.outcome = outcome_of(fields)
        elif message.kind == "failed":
            member.undeliverable = member.over
            member.error = member.error or error_of(fields, member.name)
            if self._stop is not None:
                self._stop.set()
        elif message.kind == "pong":
            self._pongs[member.rank] = int(fields["t_ns"])
        elif message.kind == "piece":
            self._keep(member, message)
        elif message.kind == "delivered":
            member.delivered = True
        return True

    def _keep(self, member: _Member, message: Message) -> None:
        """Append a piece of a file that lies elsewhere. What cannot be kept stays where it is."""
        name, taken = str(message.fields["file"]), True
        assert self._run_dir is not None
        path = self._run_dir.path / name
        try:
            if name not in member.files:
                raise RunError(f"{member.name} sent a file that is none of its own: {name[:100]!r}")
            _append(path, message.payload)
        except OSError as error:
            taken, member.error = False, RunError(f"cannot write {path}: {error.strerror}")
        except RunError as error:
            taken, member.error = False, error
        member.undeliverable = not taken
        self._ranks.tell(member.rank, {"kind": "taken", "ok": taken})

    def _describe(self, spec: LoadSpec) -> list[dict[str, Any]]:
        """The ranks as run.json keeps them."""
        own = _Member(0, [str(shard.index) for shard in shards_of(0, self._ranks.size, spec.shard.of)])
        own.host, own.identity, own.pid = self._host, self._identity, os.getpid()
        return [
            {
                "rank": member.rank,
                "host": member.host,
                "pid": member.pid,
                "workers": member.workers,
                "clock_identity": member.identity,
                "clock": [measured.as_dict() for measured in member.clock],
                "run_dir": None if member.delivered else member.run_dir,
            }
            for member in (own, *self._members.values())
        ]


def _on_own_clock(member: _Member) -> LoadOutcome:
    assert member.outcome is not None
    if not member.clock:
        return member.outcome
    offset, outcome = ClockOffset(tuple(member.clock)), member.outcome
    return replace(
        outcome,
        started_ns=outcome.started_ns + offset.at(outcome.started_ns),
        ended_ns=outcome.ended_ns + offset.at(outcome.ended_ns),
    )


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
