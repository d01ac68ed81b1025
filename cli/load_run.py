"""A load as the command line says it, and its run against a server under test: `atom bench` and `atom gc-profile` load
with the same machinery. Options become choices in `cli/load_choices.py`; the load itself is `bench/runner.py`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from atom.bench.load import Api, Endpoint, LoadSpec, Shard, Workload
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.runner import LoadOutcome, OnProgress, run_in_loop, run_load
from atom.bench.summary import summarize
from atom.bench.target import Target, ask_server
from atom.bench.workers import run_workers
from atom.cli.progress import LoadProgress, StatusLine
from atom.cli.server_side import server_side_figures
from atom.cli.signals import ending_signals, note
from atom.diag.session import ServerUnderTest
from atom.recipes.launcher import LaunchOptions

__all__ = ["Afterwards", "LoadFactory", "LoadRunner", "ServerChoice"]

Afterwards = Callable[[Endpoint, RunDirectory], None]
RunLoad = Callable[[LoadSpec, RunDirectory, OnProgress | None, asyncio.Event], Coroutine[Any, Any, LoadOutcome]]
"""As `bench/runner.run_load`."""
"""What else to do with the server when a load is over, before it is stopped. In no figure of the load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerChoice:
    """Which server, and how to speak to it."""

    recipe: str | None
    base_url: str
    more_urls: tuple[str, ...] = ()
    """Further replicas of the same server, for `--base-url` several times."""
    model: str | None
    backend: str
    api: Api
    path: str
    api_key: str | None
    headers: Mapping[str, str]
    verify_tls: bool
    request_timeout: float

    launch: LaunchOptions
    """For a recipe."""

    def endpoint(self, base_url: str, model: str) -> Endpoint:
        return Endpoint(
            base_url=base_url,
            more_urls=self.more_urls,
            path=self.path,
            api=self.api,
            model=model,
            api_key=self.api_key,
            headers=self.headers,
            verify_tls=self.verify_tls,
            request_timeout=self.request_timeout,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFactory:
    """A load as far as the command line says it; the server's model, vocabulary and context complete it."""

    make: Callable[[Endpoint, Target | None], Workload]
    """The workload; without a target everything is checked that can be known before a server is there."""
    options: Mapping[str, Any]
    """The rest of the `LoadSpec`."""
    workers: int = 1
    run: RunLoad | None = None
    """What runs it in place of this project's client."""

    def spec(self, name: str, endpoint: Endpoint, target: Target | None) -> LoadSpec:
        workload = self.make(endpoint, target)
        return LoadSpec(name=name, endpoint=endpoint, workload=workload, shard=Shard(0, self.workers), **self.options)


@dataclass(kw_only=True, slots=True)
class LoadRunner:
    """One load in one session. `ended_by` and `started` say afterwards what became of it."""

    name: str
    server: ServerChoice
    load: LoadFactory
    line: StatusLine
    quiet: bool
    afterwards: Afterwards | None = None
    ended_by: int | None = field(default=None, init=False)
    """The signal that ended the load early."""
    started: bool = field(default=False, init=False)
    """Whether the load began: only then is there something to keep."""

    def judge(self, run_dir: RunDirectory, outcome: LoadOutcome) -> tuple[Validity, list[str]]:
        """What the load is worth as evidence, and why not more: from its records, not from `outcome`."""
        del outcome
        summary = summarize(run_dir, extra=server_side_figures(run_dir), write=False)
        return Validity(summary["validity"]), list(summary["reasons"])

    def check(self) -> None:
        """UsageError for a load that cannot be, before any server starts."""
        self.load.spec(self.name, self.server.endpoint(self.server.base_url, self.server.model or ""), None)

    def run(self, server: ServerUnderTest, run_dir: RunDirectory) -> LoadOutcome:
        choice = self.server
        target = ask_server(
            server.base_url,
            model=choice.model if choice.recipe is None else None,
            api_key=choice.api_key,
            headers=choice.headers,
            verify_tls=choice.verify_tls,
        )
        for url in choice.more_urls:  # every one of them has to be there, and to serve the same model
            ask_server(
                url,
                model=target.model,
                api_key=choice.api_key,
                headers=choice.headers,
                verify_tls=choice.verify_tls,
            )
        run_dir.write_run_json({"target": target.as_dict(), "backend": choice.backend})
        spec = self.load.spec(self.name, choice.endpoint(server.base_url, target.model), target)
        self.started = True
        with LoadProgress(self.line, quiet=self.quiet) as progress:
            outcome = run_in_loop(self._run(spec, run_dir, progress, server))
        if self.afterwards is not None and self.ended_by is None:
            self.afterwards(spec.endpoint, run_dir)
        return outcome

    async def _run(
        self, spec: LoadSpec, run_dir: RunDirectory, progress: LoadProgress, server: ServerUnderTest
    ) -> LoadOutcome:
        """The load, ended early by Ctrl-C, SIGTERM, SIGHUP, or the server's death."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        numbers = ending_signals()
        previous = [signal.getsignal(number) for number in numbers]

        def interrupt(number: int) -> None:
            note()
            self.ended_by = self.ended_by or number
            stop.set()

        for number in numbers:
            loop.add_signal_handler(number, interrupt, number)
        server.call_when_dead(partial(_set_from_thread, loop, stop))
        try:
            if self.load.run is not None:
                return await self.load.run(spec, run_dir, progress, stop)
            if spec.shard.of == 1:
                return await run_load(spec, run_dir, progress, stop)
            return await run_workers(spec, run_dir, progress, stop)
        finally:
            server.forget_callbacks()
            for number, handler in zip(numbers, previous, strict=True):
                loop.remove_signal_handler(number)
                signal.signal(number, handler)


def _set_from_thread(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the load ended just now, and its loop with it
        loop.call_soon_threadsafe(stop.set)
