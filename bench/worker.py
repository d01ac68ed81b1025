"""The process of one worker: runs the share of one shard for the process that started it (`bench/workers.py`).

`python -m atom.bench.worker SETTINGS`. The load comes as a pickle in an inherited, anonymous file that only the parent
can have written; words go back and forth over two inherited pipes (`bench/worker_messages.py`).
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from atom.bench.load import LoadSpec, Shard
from atom.bench.rundir import RunDirectory
from atom.bench.runner import LoadOutcome, Progress, run_in_loop, run_load
from atom.bench.worker_messages import MAX_LINE, decode, encode, failure, outcome_report, progress_report

__all__ = ["main"]

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    settings = json.loads(sys.argv[1])
    _belong_to(settings["parent"])
    for descriptor in (settings["spec"], settings["control"], settings["report"]):
        os.set_inheritable(descriptor, False)
    try:
        run_in_loop(_work(settings))
    except BaseException as error:
        os.set_blocking(settings["report"], True)
        os.write(settings["report"], encode(failure(error)))
        sys.exit(1)


def _belong_to(parent: int) -> None:
    """End with the parent and only by its word: what a terminal or a job's end sends to all is for it to weigh."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


async def _work(settings: Mapping[str, Any]) -> None:
    shard = Shard(*settings["shard"])
    spec = replace(_read_spec(settings["spec"]), shard=shard, worker=settings["worker"])
    link = _Link()
    await link.open(settings["control"], settings["report"])
    try:
        link.tell(outcome_report(await link.run(spec, RunDirectory.open(settings["run_dir"]))))
    except Exception as error:  # the parent decides what it means
        link.tell(failure(error))
    await link.close()


def _read_spec(descriptor: int) -> LoadSpec:
    """The parent's file is shared by all its workers, so each reads at its own offset."""
    data, size = bytearray(), os.fstat(descriptor).st_size
    while len(data) < size:
        piece = os.pread(descriptor, size - len(data), len(data))
        assert piece
        data += piece
    os.close(descriptor)
    spec = pickle.loads(data)  # noqa: S301 (written by the parent, into a file without a name)
    assert isinstance(spec, LoadSpec)
    return spec


class _Link:
    """Both pipes. It is the rendezvous of the runner too: the parent says when all are ready."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._begin: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._latest: Progress | None = None

    async def open(self, control: int, report: int) -> None:
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader(limit=MAX_LINE)
        protocol = asyncio.StreamReaderProtocol(self._reader)
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(control, "rb", 0))
        self._transport, flow = await loop.connect_write_pipe(_Flow, os.fdopen(report, "wb", 0))
        self._flow: _Flow = flow
        self._listening = asyncio.ensure_future(self._listen())

    async def run(self, spec: LoadSpec, run_dir: RunDirectory) -> LoadOutcome:
        outcome = await run_load(spec, run_dir, self._progress, self._stop, self)
        if self._latest is not None:
            self.tell(progress_report(self._latest))
        return outcome

    async def ready(self, phase: str) -> int:
        self._begin = asyncio.get_running_loop().create_future()
        self.tell({"kind": "ready", "phase": phase})
        return await self._begin

    def tell(self, message: Mapping[str, Any]) -> None:
        self._transport.write(encode(message))

    def _progress(self, progress: Progress) -> None:
        self._latest = progress
        if not self._transport.get_write_buffer_size():  # a parent that does not keep up gets the next one
            self.tell(progress_report(progress))

    async def _listen(self) -> None:
        while line := await self._reader.readline():
            message = decode(line)
            if message["kind"] == "stop":
                self._stop.set()
            elif message["kind"] == "begin" and not self._begin.done():
                self._begin.set_result(message["at_ns"])
        os._exit(1)  # the parent is gone

    async def close(self) -> None:
        """Returns when the parent has been told everything."""
        self._listening.cancel()
        self._transport.close()
        await self._flow.closed


class _Flow(asyncio.BaseProtocol):
    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


if __name__ == "__main__":
    main()
