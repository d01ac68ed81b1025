"""A rank but 0 of a load that several ranks send: does as rank 0 (`bench/rank_leader.py`) says, with workers of its own
for its shards. Records go to the run directory where this machine sees it, else to a temporary one, and from there to
rank 0 at the end."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from typing import Any, Final

from atom.bench.load import LoadSpec
from atom.bench.mpi_ranks import MAX_PAYLOAD, Message, Ranks
from atom.bench.rank_leader import POLL_S, shards_of
from atom.bench.rundir import RunDirectory
from atom.bench.runner import Progress, run_in_loop
from atom.bench.worker_messages import failure, outcome_report, progress_report
from atom.bench.workers import run_workers

__all__ = ["RankFollower"]

_PING_S: Final = 10.0
"""How long a question about the clock is waited for."""


class RankFollower:
    """`spec_of`: makes the load of what rank 0 says about it; any error of its is told to rank 0. `identity` (of the
    clock) and `host` are this machine's, `clock` shows what workers here take as times."""

    def __init__(
        self,
        ranks: Ranks,
        spec_of: Callable[[Mapping[str, Any]], LoadSpec],
        *,
        identity: str,
        host: str,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._ranks = ranks
        self._spec_of = spec_of
        self._identity = identity
        self._host = host
        self._clock = clock

    def follow(self) -> int:
        """Take part in every load until rank 0 ends the command; returns its exit status."""
        self._ranks.tell(0, {"kind": "checked"})
        while self._ranks.end_status is None:
            message = self._ranks.poll()
            if message is None:
                sleep(POLL_S)
            elif message.kind == "load":
                share = _Share(self._ranks, self._clock)
                run_in_loop(share.run(message.fields, self._spec_of, {"host": self._host, "identity": self._identity}))
        return self._ranks.end_status


class _Share:
    """This rank's part in one load. It is the rendezvous of its workers."""

    def __init__(self, ranks: Ranks, clock: Callable[[], int]) -> None:
        self._ranks = ranks
        self._clock = clock
        self._stop = asyncio.Event()
        self._done = asyncio.Event()
        self._begin: asyncio.Future[int] | None = None
        self._taken: asyncio.Future[bool] | None = None
        self._run_dir: RunDirectory | None = None
        self._files: list[str] = []
        self._temporary: Path | None = None
        self._delivering: asyncio.Task[None] | None = None
        self._delivered = False

    async def run(
        self, order: Mapping[str, Any], spec_of: Callable[[Mapping[str, Any]], LoadSpec], facts: Mapping[str, Any]
    ) -> None:
        pump = asyncio.ensure_future(self._pump())
        try:
            try:
                await self._send_share(order, spec_of(order["load"]), facts)
            except Exception as error:  # rank 0 ends the load, and says why
                self._tell(failure(error))
            await pump
        finally:
            pump.cancel()
            if self._temporary is not None and self._delivered:
                shutil.rmtree(self._temporary, ignore_errors=True)

    async def _send_share(self, order: Mapping[str, Any], spec: LoadSpec, facts: Mapping[str, Any]) -> None:
        shards = shards_of(self._ranks.rank, self._ranks.size, spec.shard.of)
        self._files = [f"{folder}/{shard.index}.jsonl" for folder in ("requests", "client") for shard in shards]
        run_dir = self._run_dir = self._place(Path(order["token"]), order["content"])
        kept = None if self._temporary is None else str(self._temporary)
        self._tell({"kind": "joined", **facts, "pid": os.getpid(), "run_dir": kept})
        outcome = await run_workers(spec, run_dir, self._report, self._stop, shards=shards, rendezvous=self)
        self._tell(outcome_report(outcome))

    def _place(self, token: Path, content: str) -> RunDirectory:
        """Rank 0's run directory, if what it just wrote there can be read here."""
        try:
            shared = token.read_text(encoding="ascii") == content
        except (OSError, ValueError):
            shared = False
        if shared:
            return RunDirectory.open(token.parent)
        self._temporary = Path(tempfile.mkdtemp(prefix="atom-rank-"))
        return RunDirectory(self._temporary)

    async def ready(self, phase: str) -> int:
        self._begin = asyncio.get_running_loop().create_future()
        self._tell({"kind": "ready", "phase": phase})
        return await self._begin

    def _report(self, progress: Progress) -> None:
        self._tell(progress_report(progress))

    def _tell(self, fields: Mapping[str, Any]) -> None:
        self._ranks.tell(0, fields)

    async def _pump(self) -> None:
        while not self._done.is_set():  # what comes after that is of the next load
            message = self._ranks.poll()
            if message is not None:
                self._hear(message)
            else:
                await asyncio.sleep(POLL_S)

    def _hear(self, message: Message) -> None:
        if message.kind == "begin" and self._begin is not None and not self._begin.done():
            self._begin.set_result(int(message.fields["at_ns"]))
        elif message.kind == "stop":
            self._stop.set()
        elif message.kind == "clock":
            self._answer_pings(int(message.fields["count"]))
        elif message.kind == "deliver":
            self._delivering = asyncio.ensure_future(self._deliver())
        elif message.kind == "taken" and self._taken is not None and not self._taken.done():
            self._taken.set_result(message.fields["ok"] is True)
        elif message.kind in ("done", "end"):
            self._stop.set()
            self._done.set()

    def _answer_pings(self, count: int) -> None:
        """Nothing is being timed now: answer at once, which polling with pauses would not."""
        deadline = monotonic() + _PING_S
        while count and monotonic() < deadline:
            message = self._ranks.poll()
            if message is None:
                continue
            if message.kind == "ping":
                self._tell({"kind": "pong", "t_ns": self._clock()})
                count -= 1
            else:
                self._hear(message)

    async def _deliver(self) -> None:
        """One piece after the other, each when the one before it has been written."""
        assert self._run_dir is not None
        try:
            for name in self._files:
                path = self._run_dir.path / name
                if not path.exists():
                    continue
                with path.open("rb") as file:
                    while piece := file.read(MAX_PAYLOAD):
                        self._taken = asyncio.get_running_loop().create_future()
                        self._ranks.tell(0, {"kind": "piece", "file": name}, piece)
                        if not await self._taken:
                            return
        except OSError as error:
            self._tell(failure(error))
            return
        self._delivered = True
        self._tell({"kind": "delivered"})
