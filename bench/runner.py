"""Runs one process's share of a load: has its driver prepare, warm up and measure, sends what the driver asks for, and
appends a record per request to the run directory. No statistics here: `bench/summary.py` makes them from the run
directory. Several processes: `bench/workers.py`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Any, TypeVar

from atom.bench.cancellation import is_cancelled, mark_cancelled
from atom.bench.driver import Rendezvous
from atom.bench.exchange import Exchange
from atom.bench.load import LoadSpec, PlannedRequest
from atom.bench.pools import open_pools
from atom.bench.records import MEASURED, UNFINISHED, WARMUP, Outcome, RequestRecord
from atom.bench.rundir import JsonlWriter, RunDirectory
from atom.bench.selfwatch import SelfWatch
from atom.bench.server_gone import REFUSED_PAUSE_S, ServerGone
from atom.bench.stream import StreamReader
from atom.bench.work_queue import WorkQueue
from atom.recipes.errors import RunError

__all__ = ["LoadOutcome", "OnProgress", "Progress", "run_in_loop", "run_load"]

PROGRESS_PERIOD_S = 0.25
_T = TypeVar("_T")


@dataclass(slots=True)
class Progress:
    """Live counters; one object for the whole run, updated in place. Read it, keep nothing of it."""

    phase: str = "preparing"
    """`preparing`, `warmup`, `measured` or `done`."""
    total: int | None = 0
    """Measured requests; None where the load ends by its duration."""
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
        """Answered; a request that was cancelled is not."""
        return self.completed + self.failed

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
    spec: LoadSpec,
    run_dir: RunDirectory,
    on_progress: OnProgress | None,
    stop: asyncio.Event,
    rendezvous: Rendezvous | None = None,
) -> LoadOutcome:
    """Run the share of `spec.shard` against the endpoint and append one record per request to `run_dir`.

    With a `rendezvous`, each phase begins when the other processes of the load are ready for it too, and run.json is
    left to whoever started them.

    `on_progress` is called about four times a second from the event loop and must return at once. Setting `stop` ends
    the load early: open requests are cancelled, their partial records kept, and `interrupted` is True. Failures of
    requests are records, not exceptions; RunError if the records cannot be written.
    """
    _raise_file_limit()
    with run_dir.requests_writer(spec.worker) as requests, run_dir.client_writer(spec.worker) as client:
        run = _Run(spec, requests, client, on_progress, rendezvous)
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
        self,
        spec: LoadSpec,
        requests: JsonlWriter,
        client: JsonlWriter,
        on_progress: OnProgress | None,
        rendezvous: Rendezvous | None,
    ) -> None:
        self._spec = spec
        self._driver = spec.workload.driver(spec)
        self._rendezvous = rendezvous
        self._requests = requests
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._work = WorkQueue(self._loop, self._fail)
        self._pool = open_pools(spec.endpoint, self._work)
        self._watch = SelfWatch(client, self._counters, self._fail)
        self._ticker: asyncio.TimerHandle | None = None
        self._progress = Progress(total=self._driver.total)
        self._phase = WARMUP
        self._met_ns: int | None = None
        """When all processes of the load began the phase that they met for."""
        self._started_ns = monotonic_ns()
        self._integral_before_ns = 0
        self._reaction_ns = 0
        """Σ over requests of the time from the end of a response until its lane took note: a closed loop's server waits
        for that."""
        self._sent_before = 0
        self._gone = ServerGone()
        self._grace_over = False
        self.closed = False
        """No further request is started (`--duration`)."""

    @property
    def started_ns(self) -> int:
        return self._started_ns

    def event(self, name: str, **fields: Any) -> None:
        self._watch.event(name, **fields)

    async def run(self, run_dir: RunDirectory, stop: asyncio.Event) -> LoadOutcome:
        interrupted = asyncio.ensure_future(stop.wait())
        if self._rendezvous is None:
            run_dir.write_run_json({"load": self._spec.describe()})
        self._watch.start()
        self._tick()
        try:
            if await self._until(self._prepare(), interrupted):
                if await self._until(self._warm_up(), interrupted):
                    with _frozen_heap():
                        if await self._until(self._meet(MEASURED), interrupted):
                            self._begin_measured(run_dir)
                            await self._until(self._measured(), interrupted)
                        else:
                            self._begin_measured(run_dir)
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
        stop = threading.Event()
        # A thread cannot be cancelled, and one that is left behind holds up the end of the process: it is asked to
        # stop, and waited for.
        making = self._loop.run_in_executor(None, self._driver.prepare, stop.is_set)
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            stop.set()
            with contextlib.suppress(RunError):
                await making
            raise

    async def _meet(self, phase: str) -> None:
        """Wait until every process of the load is ready for `phase`."""
        self._met_ns = None
        if self._rendezvous is not None:
            begin = await self._rendezvous.ready(phase)
            while (wait := begin - monotonic_ns()) > 0:  # noqa: ASYNC110 (a timer may fire early)
                await asyncio.sleep(wait / 1e9)
            self._met_ns = begin

    async def _warm_up(self) -> None:
        await self._meet(WARMUP)
        self._started_ns = self._met_ns or monotonic_ns()
        await self._driver.warm_up(self)

    def _begin_measured(self, run_dir: RunDirectory) -> None:
        self._watch.restart()
        self._phase = self._progress.phase = MEASURED
        self._reaction_ns, self._sent_before = 0, self._pool.sent
        self._integral_before_ns = self._pool.in_flight.integral_ns()
        self._started_ns = self._met_ns or monotonic_ns()
        self._watch.event("measured_start", start_ns=self._started_ns, requests=self._driver.total)
        if self._rendezvous is None:
            run_dir.write_run_json({"measured_start_ns": self._started_ns})

    async def _measured(self) -> None:
        measuring = asyncio.ensure_future(self._driver.measure(self))
        timers: list[asyncio.TimerHandle] = []
        if (duration := self._spec.duration) is not None:
            timers.append(self._loop.call_later(self._until_s(duration), self._close_entry))
            if (grace := self._spec.grace_period) is not None:
                timers.append(self._loop.call_later(self._until_s(duration + grace), self._out_of_grace, measuring))
        try:
            await measuring
        except asyncio.CancelledError:
            if not self._grace_over:
                measuring.cancel()
                await asyncio.wait({measuring})
                raise
        finally:
            for timer in timers:
                timer.cancel()

    def _until_s(self, offset_s: float) -> float:
        """Seconds until `offset_s` after the phase's start, which lies back by how late this process woke for it."""
        return max(0.0, offset_s - (monotonic_ns() - self._started_ns) / 1e9)

    def _close_entry(self) -> None:
        self.closed = True

    def _out_of_grace(self, measuring: asyncio.Future[None]) -> None:
        """Cancel what is still open; the records say so."""
        self._grace_over = True
        measuring.cancel()

    async def send(
        self,
        plan: PlannedRequest,
        *,
        index: int,
        lane: int,
        scheduled_ns: int | None = None,
        ready_ns: int | None = None,
    ) -> RequestRecord:
        return await (await self.perform(plan, index=index, lane=lane, scheduled_ns=scheduled_ns, ready_ns=ready_ns))

    async def perform(
        self,
        plan: PlannedRequest,
        *,
        index: int,
        lane: int,
        scheduled_ns: int | None = None,
        ready_ns: int | None = None,
    ) -> asyncio.Future[RequestRecord]:
        exchange = Exchange(StreamReader(self._spec.endpoint.api, keep_text=self._spec.keep_text), self._loop)
        record = RequestRecord(
            index=index,
            phase=self._phase,
            worker=self._spec.worker,
            lane=lane,
            session=plan.session,
            turn=plan.turn,
            scheduled_ns=scheduled_ns,
            ready_ns=monotonic_ns() if ready_ns is None else ready_ns,
            input_len=plan.input_len,
            output_len=plan.output_len,
            tags=plan.tags,
        )
        recorded: asyncio.Future[RequestRecord] = self._loop.create_future()
        spec = self._spec
        timeout = spec.endpoint.request_timeout
        given_up = (
            spec.cancellation_delay < timeout
            and self._phase == MEASURED
            and is_cancelled(spec.cancellation_rate, spec.seed, index)
        )
        progress = self._progress
        progress.running += 1
        progress.phase = self._phase
        progress.started += self._phase == MEASURED
        cancelled = True
        try:
            await self._pool.perform(exchange, plan.body, spec.cancellation_delay if given_up else timeout)
            cancelled = False
            if exchange.refused and self._gone.refused(self._pool.sent, self._pool.in_flight.count):
                self._close_entry()
        finally:
            progress.running -= 1
            if self._phase == MEASURED and exchange.sent_ns is not None:
                noticed = monotonic_ns()
                self._reaction_ns += noticed - (noticed if exchange.end_ns is None else exchange.end_ns)
            self._work.later(partial(self._record, record, exchange, recorded, cancelled, given_up))
        if exchange.sent_ns is None:
            await asyncio.sleep(REFUSED_PAUSE_S)
        return recorded

    def _record(
        self,
        record: RequestRecord,
        exchange: Exchange,
        recorded: asyncio.Future[RequestRecord],
        cancelled: bool,
        given_up: bool,
    ) -> None:
        record.sent_ns, record.end_ns = exchange.sent_ns, exchange.end_ns
        record.connect_ns, record.retries = exchange.connect_ns, exchange.retries
        if self._spec.endpoint.more_urls:
            record.server = exchange.server
        if cancelled:
            exchange.reader.fail("cancelled", "cancelled by the client")
        exchange.reader.fill(record)
        if cancelled and self._grace_over:
            grace = self._spec.grace_period or 0.0
            record.error_class = UNFINISHED
            record.error_message = f"still running {grace:g} s after the end of --duration"
        if cancelled:
            record.outcome = Outcome.CANCELLED
        elif given_up:
            mark_cancelled(record, self._spec.cancellation_delay)
        elif self._spec.ignore_eos and record.outcome == Outcome.COMPLETED:
            _check_length(record)
        self._requests.append_line(record.to_line())
        if record.phase == MEASURED:
            self._count(record)
        if not recorded.done():
            recorded.set_result(record)

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
            running_integral_ns=self._pool.in_flight.integral_ns() - self._integral_before_ns,
            reaction_ns=self._reaction_ns,
            stamps=self._pool.stamps,
            max_backlog_bytes=self._work.max_backlog,
            connections=self._pool.opened,
            interrupted=interrupted,
            server_gone=self._gone.reason,
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
        self._driver.close()
        self._failure.cancel()

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

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
