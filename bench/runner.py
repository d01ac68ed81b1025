"""Drives a load: makes its requests ready, warms up, runs the measured phase, and appends a record per request to the
run directory. No statistics here: `bench/summary.py` makes them from the run directory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import resource
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from atom.bench.arrivals import arrival_offsets_ns
from atom.bench.connection import ConnectionPool, Exchange, WorkQueue
from atom.bench.http1 import request_head
from atom.bench.load import Endpoint, LoadSpec, PlannedRequest
from atom.bench.records import MEASURED, WARMUP, Outcome, RequestRecord
from atom.bench.rundir import JsonlWriter, RunDirectory
from atom.bench.selfwatch import SelfWatch
from atom.bench.spool import RequestSpool
from atom.bench.stream import StreamReader
from atom.recipes.errors import RunError

__all__ = ["LoadOutcome", "OnProgress", "Progress", "run_in_loop", "run_load"]

PROGRESS_PERIOD_S = 0.25
_T = TypeVar("_T")


@dataclass(slots=True)
class Progress:
    """Live counters; one object for the whole run, updated in place. Read it, keep nothing of it."""

    phase: str = "preparing"
    """`preparing`, `warmup`, `measured` or `done`."""
    total: int = 0
    started: int = 0
    sent: int = 0
    """Of those started, the ones that had a connection to go out on."""
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    running: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0
    ttft_sum_ms: float = 0.0
    ttft_count: int = 0
    first_error: str | None = None

    @property
    def done(self) -> int:
        return self.completed + self.failed + self.cancelled

    @property
    def ttft_ms(self) -> float | None:
        """Mean over the requests completed so far."""
        return self.ttft_sum_ms / self.ttft_count if self.ttft_count else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOutcome:
    """What happened, before any statistics."""

    started_ns: int
    """`time.monotonic_ns` at the start of the measured phase."""
    ended_ns: int
    started: int
    sent: int
    """Of those started, the ones whose bytes went out."""
    completed: int
    failed: int
    cancelled: int
    interrupted: bool
    """`stop` was set before the load was done."""
    first_error: str | None


OnProgress = Callable[[Progress], None]


async def run_load(
    spec: LoadSpec, run_dir: RunDirectory, on_progress: OnProgress | None, stop: asyncio.Event
) -> LoadOutcome:
    """Run `spec` against its endpoint and append one record per request to `run_dir`.

    `on_progress` is called about four times a second from the event loop and must return at once. Setting `stop` ends
    the load early: open requests are cancelled, their partial records kept, and `interrupted` is True. Failures of
    requests are records, not exceptions; RunError if the records cannot be written.
    """
    _raise_file_limit()
    with run_dir.requests_writer(spec.worker) as requests, run_dir.client_writer(spec.worker) as client:
        run = _Run(spec, requests, client, on_progress)
        try:
            return await run.run(run_dir, stop)
        finally:
            run.close()


def run_in_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the fastest event loop installed: uvloop, or asyncio's own."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


class _Run:
    def __init__(
        self, spec: LoadSpec, requests: JsonlWriter, client: JsonlWriter, on_progress: OnProgress | None
    ) -> None:
        self._spec = spec
        self._requests = requests
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._work = WorkQueue(self._loop, self._fail)
        self._pool = _open_pool(spec.endpoint, self._work)
        self._head = _request_head(spec.endpoint)
        self._watch = SelfWatch(client, self._counters, self._fail)
        self._ticker: asyncio.TimerHandle | None = None
        self._progress = Progress(total=len(spec.source))
        self._phase = WARMUP
        self._started_ns = monotonic_ns()
        self._busy_ns = 0
        """Time-weighted number of requests on the server, for Little's law: for each request that was sent, from then
        until its lane took note of its end."""
        self._sent_before = 0
        self._closed = False
        """No further request is started (`--duration`)."""

    async def run(self, run_dir: RunDirectory, stop: asyncio.Event) -> LoadOutcome:
        interrupted = asyncio.ensure_future(stop.wait())
        run_dir.write_run_json({"load": self._spec.describe()})
        self._watch.start()
        self._tick()
        try:
            if await self._until(self._prepare(), interrupted):
                if await self._until(self._warm_up(), interrupted):
                    with _frozen_heap():
                        self._begin_measured(run_dir)
                        await self._until(self._measured(), interrupted)
                else:
                    self._begin_measured(run_dir)
            return self._end(interrupted=stop.is_set())
        finally:
            interrupted.cancel()

    async def _until(self, work: Coroutine[Any, Any, None], interrupted: asyncio.Future[Any]) -> bool:
        """Run `work` unless interrupted before or meanwhile; True if it came to its end."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, interrupted, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        finished = task.done()
        if not finished:
            task.cancel()
            await asyncio.wait({task})
        if self._failure.done():
            await self._failure
        if finished:
            await task
        return finished and not interrupted.done()

    async def _prepare(self) -> None:
        spec, stop = self._spec, threading.Event()

        def requests() -> Iterator[PlannedRequest]:
            for index in range(len(spec.source)):
                if stop.is_set():
                    return
                yield spec.source.request(index)

        # A thread cannot be cancelled, and one that is left behind holds up the end of the process: it is asked to
        # stop, and waited for.
        making = self._loop.run_in_executor(None, RequestSpool, requests())
        try:
            self._plans = await asyncio.shield(making)
            self._offsets = await asyncio.to_thread(
                arrival_offsets_ns, len(spec.source), spec.request_rate, spec.burstiness, spec.seed
            )
        except asyncio.CancelledError:
            stop.set()
            with contextlib.suppress(RunError):
                (await making).close()
            raise

    async def _warm_up(self) -> None:
        count = self._spec.num_warmups
        self._progress.phase = WARMUP
        if count:
            width = min(count, self._spec.max_concurrency or count)
            plans = map(self._spec.source.warmup, range(count))
            await self._lanes(enumerate(plans), width)

    def _begin_measured(self, run_dir: RunDirectory) -> None:
        self._watch.restart()
        self._phase = self._progress.phase = MEASURED
        self._busy_ns, self._sent_before = 0, self._pool.sent
        self._started_ns = monotonic_ns()
        self._watch.event("measured_start", requests=len(self._spec.source))
        run_dir.write_run_json({"measured_start_ns": self._started_ns})

    async def _measured(self) -> None:
        timer = None
        if self._spec.duration is not None:
            timer = self._loop.call_later(self._spec.duration, self._close_entry)
        try:
            if self._offsets is None:
                width = min(len(self._plans), self._spec.max_concurrency or len(self._plans))
                await self._lanes(((i, self._plans[i]) for i in range(len(self._plans))), width)
            else:
                await self._scheduled(self._offsets)
        finally:
            if timer is not None:
                timer.cancel()

    async def _lanes(self, plans: Iterator[tuple[int, PlannedRequest]], width: int) -> None:
        """Closed loop: `width` lanes, each sends its next request when its last one has ended."""

        async def lane(number: int) -> None:
            for index, plan in plans:
                if self._closed:
                    return
                await self._request(index, plan, number, None, monotonic_ns())

        async with asyncio.TaskGroup() as group:
            for number in range(width):
                group.create_task(lane(number))

    async def _scheduled(self, offsets_ns: npt.NDArray[np.int64]) -> None:
        """Open loop: each request at its time, or when a slot is free if `--max-concurrency` holds it back."""
        limit = self._spec.max_concurrency or len(offsets_ns)
        slots = asyncio.Semaphore(limit)
        free: list[int] = []

        async def send(index: int, lane: int, due: int, ready: int) -> None:
            try:
                await self._request(index, self._plans[index], lane, due, ready)
            finally:
                heapq.heappush(free, lane)
                slots.release()

        async with asyncio.TaskGroup() as group:
            lanes = 0
            released = 0  # when the limit last let a request through: those behind it could not go before
            for index, offset in enumerate(offsets_ns.tolist()):
                due = self._started_ns + offset
                while (wait := due - monotonic_ns()) > 0:  # noqa: ASYNC110 (a timer may fire early)
                    await asyncio.sleep(wait / 1e9)
                held_back = slots.locked()
                await slots.acquire()
                if held_back:
                    released = monotonic_ns()
                ready = max(due, released)
                if self._closed:
                    return
                if free:
                    lane = heapq.heappop(free)
                else:
                    lane, lanes = lanes, lanes + 1
                group.create_task(send(index, lane, due, ready))

    async def _request(self, index: int, plan: PlannedRequest, lane: int, due: int | None, ready: int) -> None:
        exchange = Exchange(StreamReader(self._spec.endpoint.api, keep_text=self._spec.keep_text), self._loop)
        record = RequestRecord(
            index=index,
            phase=self._phase,
            worker=self._spec.worker,
            lane=lane,
            session=plan.session,
            turn=plan.turn,
            scheduled_ns=due,
            ready_ns=ready,
            input_len=plan.input_len,
            output_len=plan.output_len,
        )
        progress = self._progress
        progress.running += 1
        progress.started += self._phase == MEASURED
        cancelled = True
        try:
            data = b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(plan.body), plan.body)
            await self._pool.perform(exchange, data, self._spec.endpoint.request_timeout)
            cancelled = False
        finally:
            progress.running -= 1
            if self._phase == MEASURED and exchange.sent_ns is not None:
                self._busy_ns += monotonic_ns() - exchange.sent_ns
            self._work.later(partial(self._record, record, exchange, cancelled))

    def _record(self, record: RequestRecord, exchange: Exchange, cancelled: bool) -> None:
        record.sent_ns, record.end_ns = exchange.sent_ns, exchange.end_ns
        record.connect_ns, record.retries = exchange.connect_ns, exchange.retries
        if cancelled:
            exchange.reader.fail("cancelled", "cancelled by the client")
        exchange.reader.fill(record)
        if cancelled:
            record.outcome = Outcome.CANCELLED
        elif self._spec.ignore_eos and record.outcome == Outcome.COMPLETED:
            _check_length(record)
        self._requests.append_line(record.to_line())
        if record.phase == MEASURED:
            self._count(record)

    def _count(self, record: RequestRecord) -> None:
        progress = self._progress
        if record.outcome == Outcome.COMPLETED:
            progress.completed += 1
            progress.output_tokens += record.output_tokens or 0
            if record.first_ns is not None and record.sent_ns is not None:
                progress.ttft_sum_ms += (record.first_ns - record.sent_ns) / 1e6
                progress.ttft_count += 1
        elif record.outcome == Outcome.FAILED:
            progress.failed += 1
            progress.first_error = progress.first_error or f"{record.error_class}: {record.error_message}"
        else:
            progress.cancelled += 1

    def _end(self, *, interrupted: bool) -> LoadOutcome:
        ended = monotonic_ns()
        self._work.drain()
        if self._failure.done():
            self._failure.result()
        self._watch.stop()
        progress = self._progress
        progress.phase = "done"
        progress.elapsed_s = (ended - self._started_ns) / 1e9
        self._watch.event(
            "measured_end",
            start_ns=self._started_ns,
            running_integral_ns=self._busy_ns,
            max_backlog_bytes=self._work.max_backlog,
            connections=self._pool.opened,
            interrupted=interrupted,
            **self._counters(),
        )
        return LoadOutcome(
            started_ns=self._started_ns,
            ended_ns=ended,
            started=progress.started,
            sent=progress.sent,
            completed=progress.completed,
            failed=progress.failed,
            cancelled=progress.cancelled,
            interrupted=interrupted,
            first_error=progress.first_error,
        )

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._watch.cancel()
        self._pool.close()
        if hasattr(self, "_plans"):
            self._plans.close()
        self._failure.cancel()

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _close_entry(self) -> None:
        self._closed = True

    def _tick(self) -> None:
        if self._phase == MEASURED:
            self._progress.elapsed_s = (monotonic_ns() - self._started_ns) / 1e9
        if self._on_progress is not None:
            self._on_progress(self._progress)
        self._ticker = self._loop.call_later(PROGRESS_PERIOD_S, self._tick)

    def _counters(self) -> dict[str, Any]:
        progress = self._progress
        if self._phase == MEASURED:
            progress.sent = self._pool.sent - self._sent_before
        return {
            "phase": progress.phase,
            "started": progress.started,
            "sent": progress.sent,
            "completed": progress.completed,
            "failed": progress.failed,
            "cancelled": progress.cancelled,
            "running": progress.running,
            "output_tokens": progress.output_tokens,
        }


def _check_length(record: RequestRecord) -> None:
    """With --ignore-eos every request has to reach its max_tokens."""
    if record.output_tokens is not None and record.output_len is not None and record.output_tokens < record.output_len:
        record.anomalies = {**record.anomalies, "short_output": 1}


def _open_pool(endpoint: Endpoint, work: WorkQueue) -> ConnectionPool:
    url = urlsplit(endpoint.base_url)
    tls: ssl.SSLContext | None = None
    if url.scheme == "https":
        tls = ssl.create_default_context()
        if not endpoint.verify_tls:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
    assert url.hostname is not None
    port = url.port or (443 if tls else 80)
    return ConnectionPool(url.hostname, port, work, tls=tls, connect_timeout=endpoint.connect_timeout)


def _request_head(endpoint: Endpoint) -> bytes:
    url = urlsplit(endpoint.base_url)
    headers = {
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": "atom-bench",
    }
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    lower = {name.lower() for name in endpoint.headers}
    headers = {name: value for name, value in headers.items() if name.lower() not in lower}
    host = url.netloc.rpartition("@")[2]
    return request_head("POST", host, url.path.rstrip("/") + endpoint.path, {**headers, **endpoint.headers})


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the collector away from what is already there: a full pass over it would make stamps late."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
