"""One load by several processes of this machine: starts them, has them begin together, and merges what they say.

Each worker is an interpreter of its own that runs `bench/runner.py` for one shard and writes its own files in the run
directory (`bench/worker.py`). Several machines: `bench/rank_leader.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import subprocess
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Final

from atom.bench.driver import Rendezvous
from atom.bench.load import LoadSpec, Shard
from atom.bench.records import MEASURED
from atom.bench.rundir import RunDirectory
from atom.bench.runner import PROGRESS_PERIOD_S, LoadOutcome, OnProgress, Progress
from atom.bench.worker_messages import (
    MAX_LINE,
    decode,
    encode,
    error_of,
    merge_outcomes,
    merge_progress,
    outcome_of,
    progress_of,
)
from atom.recipes.errors import RunError
from atom.recipes.spawn import module_command

__all__ = ["BEGIN_AHEAD_NS", "run_workers"]

BEGIN_AHEAD_NS: Final = 30_000_000
"""How long before a phase its start is announced: every worker has to have read it by then."""
STOP_S: Final = 30.0
"""What workers may take to end when they are told to."""
_EXIT_S: Final = 5.0


async def run_workers(
    spec: LoadSpec,
    run_dir: RunDirectory,
    on_progress: OnProgress | None,
    stop: asyncio.Event,
    *,
    shards: Sequence[Shard] | None = None,
    rendezvous: Rendezvous | None = None,
) -> LoadOutcome:
    """`run_load` by one process per shard; `shards`: those of this machine, all `spec.shard.of` if not given.

    With a `rendezvous` these are part of a larger load: phases begin when it says so, and run.json is left alone.
    A worker that dies ends the load, because its share is lost: RunError that names it, after the others have stopped.
    So does one that fails.
    """
    mine = shards if shards is not None else [Shard(index, spec.shard.of) for index in range(spec.shard.of)]
    if rendezvous is None:
        run_dir.write_run_json({"load": spec.describe()})
    crew = _Crew(spec, run_dir, on_progress, rendezvous)
    try:
        crew.start(mine)
        return await crew.run(stop)
    finally:
        await crew.close()


@dataclass(slots=True)
class _Worker:
    name: str
    process: subprocess.Popen[bytes]
    control: int
    """Our end of the pipe to it; non-blocking."""
    report: int
    progress: Progress = field(default_factory=lambda: Progress(total=None))
    ready: str | None = None
    """The phase it waits for."""
    outcome: LoadOutcome | None = None
    overdue: bool = False

    def tell(self, message: Mapping[str, Any]) -> None:
        """A handful of short lines is all that ever goes to a worker: the pipe takes them at once."""
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # its end is noticed where it is listened to
            os.write(self.control, encode(message))

    async def fate(self) -> str:
        """How it ended, now that it says nothing more. One that stays nevertheless is killed."""
        who = f"worker {self.name} (pid {self.process.pid})"
        try:
            status = await asyncio.to_thread(self.process.wait, _EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
            return f"{who} said no more, did not end within {_EXIT_S:g} s and was killed"
        if self.overdue:
            return f"{who} did not stop within {STOP_S:g} s and was killed"
        if status < 0:
            hint = ": out of memory, or killed by somebody" if status == -signal.SIGKILL else ""
            return f"{who} died of {signal.Signals(-status).name}{hint}"
        return f"{who} ended early, with exit status {status}"


class _Crew:
    def __init__(
        self, spec: LoadSpec, run_dir: RunDirectory, on_progress: OnProgress | None, rendezvous: Rendezvous | None
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._on_progress = on_progress
        self._rendezvous = rendezvous
        self._workers: list[_Worker] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._progress = Progress(total=None)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, shards: Sequence[Shard]) -> None:
        """Start the processes. The load is written once, into memory that all of them inherit and that has no name."""
        descriptor = os.memfd_create("atom-load")
        with os.fdopen(descriptor, "wb", closefd=True) as file:
            pickle.dump(self._spec, file, pickle.HIGHEST_PROTOCOL)
            file.flush()
            for shard in shards:
                self._workers.append(self._spawn(shard, descriptor))

    def _spawn(self, shard: Shard, spec: int) -> _Worker:
        control_in, control_out = os.pipe()
        report_in, report_out = os.pipe()
        settings = {
            "parent": os.getpid(),
            "worker": str(shard.index),
            "shard": [shard.index, shard.of],
            "run_dir": str(self._run_dir.path),
            "spec": spec,
            "control": control_in,
            "report": report_out,
        }
        try:
            process = subprocess.Popen(
                [*module_command("atom.bench.worker"), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output may be for a format of its own
                pass_fds=(spec, control_in, report_out),
                start_new_session=True,  # Ctrl-C reaches us, and we decide
            )
        except OSError as error:
            os.close(control_out)
            os.close(report_in)
            raise RunError(f"worker {shard.index} cannot be started: {error.strerror}") from None
        finally:
            os.close(control_in)
            os.close(report_out)
        os.set_blocking(control_out, False)
        return _Worker(str(shard.index), process, control_out, report_in)

    async def run(self, stop: asyncio.Event) -> LoadOutcome:
        listeners = [self._start_task(self._listen(worker)) for worker in self._workers]
        self._start_task(self._tick())
        self._start_task(self._stop_when(stop))
        everybody = asyncio.gather(*listeners)
        ends: list[asyncio.Future[Any]] = [everybody, self._failure]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            stop.set()
            await asyncio.wait(listeners)  # the others write down what they have; those who hang are killed
            await asyncio.gather(everybody, return_exceptions=True)
            self._failure.result()
        self._merge()
        return merge_outcomes(worker.outcome for worker in self._workers if worker.outcome is not None)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """The first task that fails ends the load."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._note_failure)
        self._tasks.append(task)
        return task

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _listen(self, worker: _Worker) -> None:
        """Everything that one worker says, to its end."""
        reader = asyncio.StreamReader(limit=MAX_LINE)
        pipe = os.fdopen(worker.report, "rb", 0)
        worker.report = -1
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await reader.readline():
                if not line.endswith(b"\n"):
                    break  # it died in the middle of a word
                self._hear(worker, decode(line))
        finally:
            transport.close()
        if worker.outcome is None:
            raise RunError(f"{await worker.fate()}; its share of the load is lost")

    def _hear(self, worker: _Worker, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "progress":
            worker.progress = progress_of(message)
        elif kind == "ready":
            worker.ready = message["phase"]
            if all(other.ready == worker.ready for other in self._workers):
                self._start_task(self._begin(message["phase"]))
        elif kind == "outcome":
            worker.outcome = outcome_of(message)
        elif kind == "failed":
            raise error_of(message, f"worker {worker.name}")

    async def _begin(self, phase: str) -> None:
        """All are ready for it."""
        if self._rendezvous is not None:
            at_ns = await self._rendezvous.ready(phase)
        else:
            at_ns = monotonic_ns() + BEGIN_AHEAD_NS
        for worker in self._workers:
            worker.tell({"kind": "begin", "at_ns": at_ns})
        if phase == MEASURED and self._rendezvous is None:
            self._run_dir.write_run_json({"measured_start_ns": at_ns})

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for worker in self._workers:
            worker.tell({"kind": "stop"})
        await asyncio.sleep(STOP_S)
        for worker in self._workers:
            worker.overdue = worker.process.poll() is None
            if worker.overdue:
                worker.process.kill()

    async def _tick(self) -> None:
        while True:
            self._merge()
            await asyncio.sleep(PROGRESS_PERIOD_S)

    def _merge(self) -> None:
        merge_progress((worker.progress for worker in self._workers), self._progress)
        if self._on_progress is not None:
            self._on_progress(self._progress)

    async def close(self) -> None:
        """Whatever happened, no process is left behind."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._failure.cancel()
        for worker in self._workers:
            os.close(worker.control)
            if worker.report >= 0:
                os.close(worker.report)
            if worker.outcome is None:
                worker.process.kill()
        for worker in self._workers:
            try:
                worker.process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
