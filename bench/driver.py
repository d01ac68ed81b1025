"""The seam between what a load does and how requests are sent: a driver decides what is sent when, the runner sends.

`bench/static_load.py` has the driver of loads whose requests are known beforehand; a load that depends on what came
before (sessions, turns) brings its own. `bench/runner.py` is the sender.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from atom.bench.load import PlannedRequest
from atom.bench.records import RequestRecord

__all__ = ["Driver", "Rendezvous", "Sender"]


class Sender(Protocol):
    """What the runner offers a driver."""

    @property
    def started_ns(self) -> int:
        """When the current phase began, `time.monotonic_ns`."""
        ...

    @property
    def closed(self) -> bool:
        """No further request may be started: the duration is over, or the run is being ended."""
        ...

    async def perform(
        self,
        plan: PlannedRequest,
        *,
        index: int,
        lane: int,
        scheduled_ns: int | None = None,
        ready_ns: int | None = None,
    ) -> asyncio.Future[RequestRecord]:
        """Send one request and return when its response is over, however it ended. The record, parsed and written,
        comes with the future: a lane that needs nothing of it goes on at once.

        `scheduled_ns`: when an arrival schedule wanted it sent. `ready_ns`: when it could have been sent at the
        earliest (now, if not given); what lies between that and the sending is the client's own lateness.
        """
        ...

    async def send(
        self,
        plan: PlannedRequest,
        *,
        index: int,
        lane: int,
        scheduled_ns: int | None = None,
        ready_ns: int | None = None,
    ) -> RequestRecord:
        """`perform`, and its record. Failures are records, never exceptions."""
        ...

    def event(self, name: str, **fields: Any) -> None:
        """A line of `client/<worker>.jsonl`: {"kind": name, "t_ns": now, **fields}."""
        ...


class Driver(Protocol):
    """Decides what this process sends, and when. Made in the process that runs it, used once."""

    @property
    def total(self) -> int | None:
        """Measured requests of this process; None where only the end of the load says."""
        ...

    def prepare(self, stopped: Callable[[], bool]) -> None:
        """Everything that takes time and needs no server. Called in a thread; looks at `stopped` now and then."""
        ...

    async def warm_up(self, sender: Sender) -> None:
        """Requests before the measured phase; their records say `warmup`."""
        ...

    async def measure(self, sender: Sender) -> None:
        """The measured phase: ends when this process's share is done, or after `sender.closed` when its lanes have
        ended."""
        ...

    def close(self) -> None:
        """Give back what `prepare` took. Called once, whatever happened."""
        ...


class Rendezvous(Protocol):
    """Where the processes of one load wait for each other before each phase."""

    async def ready(self, phase: str) -> int:
        """Say that this process is ready for `phase` (`warmup`, `measured`); returns when all begin with it
        (`time.monotonic_ns`), usually a moment ahead."""
        ...
