"""Loads whose requests are known beforehand: in a closed loop, or at the times of an arrival schedule."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.arrivals import Arrivals
from atom.bench.driver import Sender
from atom.bench.load import LoadSpec, PlannedRequest, RequestSource
from atom.bench.spool import RequestSpool
from atom.recipes.errors import UsageError

__all__ = ["StaticLoad"]

CLOSED_CHECK_S: Final = 0.25
"""A pause of the schedule, however long, ends this soon after the load may start nothing more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticLoad:
    """The requests of `source`, each once, in its order: at the source's own times where it has them, else as
    `arrivals` says."""

    source: RequestSource
    arrivals: Arrivals = field(default_factory=Arrivals)
    concurrency_ramp_s: float | None = None
    """A closed loop starts its lanes evenly over this many seconds."""
    duration_s: float | None = None
    """The load's `--duration`: a schedule is made for the requests that are due in it, so that it has the rate asked
    for. A random part of a longer one would have another."""

    def __post_init__(self) -> None:
        if len(self.source) < 1:
            raise UsageError("--num-prompts must be at least 1")
        self.arrivals.check(len(self.source))
        if self.size() < 1:
            raise UsageError(f"--duration {self.duration_s:g} is over before the first request of the rate is due")

    def size(self) -> int:
        total = len(self.source)
        if self.duration_s is None or self.source.offsets_ns() is not None:
            return total
        due = self.arrivals.due_within(self.duration_s)
        return total if due is None else min(total, due)

    def describe(self) -> dict[str, Any]:
        return {
            **self.arrivals.describe(),
            "concurrency_ramp_s": self.concurrency_ramp_s,
            "source": self.source.describe(),
        }

    def driver(self, spec: LoadSpec) -> StaticDriver:
        return StaticDriver(self, spec)


class StaticDriver:
    """The requests of one shard: made ready and kept in a spool before the load, so that none is encoded during it."""

    def __init__(self, load: StaticLoad, spec: LoadSpec) -> None:
        self._load = load
        self._spec = spec
        self._owned = range(spec.shard.index, load.size(), spec.shard.of)
        limit = spec.max_concurrency
        self._limit = len(self._owned) if limit is None else max(1, spec.shard.share(limit))
        self._plans: RequestSpool | None = None
        self._offsets: npt.NDArray[np.int64] | None = None

    @property
    def total(self) -> int:
        return len(self._owned)

    def prepare(self, stopped: Callable[[], bool]) -> None:
        source, spec = self._load.source, self._spec

        def requests() -> Iterator[PlannedRequest]:
            for index in self._owned:
                if stopped():
                    return
                yield source.request(index)

        self._plans = RequestSpool(requests())
        if not stopped():
            offsets = source.offsets_ns()
            if offsets is None:
                offsets = self._load.arrivals.offsets_ns(self._load.size(), spec.seed)
            self._offsets = None if offsets is None else offsets[self._owned.start :: self._owned.step]

    async def warm_up(self, sender: Sender) -> None:
        if (duration := self._spec.warmup_duration) is not None:
            end = sender.started_ns + round(duration * 1e9)
            numbers = itertools.count(self._spec.shard.index, self._spec.shard.of)
            endless = ((index, self._load.source.warmup(index)) for index in numbers)
            await self._lanes(sender, itertools.takewhile(lambda _: monotonic_ns() < end, endless), self._limit)
            return
        mine = range(self._spec.shard.index, self._spec.num_warmups, self._spec.shard.of)
        if mine:
            plans = ((index, self._load.source.warmup(index)) for index in mine)
            await self._lanes(sender, plans, min(len(mine), self._limit))

    async def measure(self, sender: Sender) -> None:
        assert self._plans is not None
        if not self._owned:
            return
        if self._offsets is None:
            plans = ((index, self._plans[i]) for i, index in enumerate(self._owned))
            ramp = self._load.concurrency_ramp_s or 0.0
            await self._lanes(sender, plans, min(len(self._plans), self._limit), ramp_s=ramp)
        else:
            await self._scheduled(sender, self._plans, self._offsets)

    def close(self) -> None:
        if self._plans is not None:
            self._plans.close()

    def _lane(self, number: int) -> int:
        """Lanes are numbered over all processes."""
        return number * self._spec.shard.of + self._spec.shard.index

    async def _lanes(
        self, sender: Sender, plans: Iterator[tuple[int, PlannedRequest]], width: int, *, ramp_s: float = 0.0
    ) -> None:
        """Closed loop: `width` lanes, each sends its next request when its last one has ended. They begin together, or
        evenly over `ramp_s` seconds."""
        total = self._spec.max_concurrency or width * self._spec.shard.of

        async def lane(number: int) -> None:
            await _until(sender.started_ns + round(ramp_s * 1e9 * number / total), sender)
            for index, plan in plans:
                if sender.closed:
                    return
                await sender.perform(plan, index=index, lane=number)

        async with asyncio.TaskGroup() as group:
            for number in range(width):
                group.create_task(lane(self._lane(number)))

    async def _scheduled(self, sender: Sender, plans: RequestSpool, offsets_ns: npt.NDArray[np.int64]) -> None:
        """Open loop: each request at its time, or when a slot is free if `--max-concurrency` holds it back."""
        slots = asyncio.Semaphore(self._limit)
        free: list[int] = []

        async def send(at: int, lane: int, due: int, ready: int) -> None:
            try:
                await sender.perform(
                    plans[at], index=self._owned[at], lane=self._lane(lane), scheduled_ns=due, ready_ns=ready
                )
            finally:
                heapq.heappush(free, lane)
                slots.release()

        async with asyncio.TaskGroup() as group:
            lanes = 0
            released = 0  # when the limit last let a request through: those behind it could not go before
            for at, offset in enumerate(offsets_ns.tolist()):
                due = sender.started_ns + offset
                await _until(due, sender)
                held_back = slots.locked()
                await slots.acquire()
                if held_back:
                    released = monotonic_ns()
                ready = max(due, released)
                if sender.closed:
                    return
                if free:
                    lane = heapq.heappop(free)
                else:
                    lane, lanes = lanes, lanes + 1
                group.create_task(send(at, lane, due, ready))


async def _until(moment_ns: int, sender: Sender) -> None:
    """Wait for the moment, or until nothing may be started any more."""
    while not sender.closed and (wait := moment_ns - monotonic_ns()) > 0:  # noqa: ASYNC110 (a timer may fire early)
        await asyncio.sleep(min(wait / 1e9, CLOSED_CHECK_S))
