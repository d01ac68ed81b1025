"""A load as the command line says it, and its run against a server under test: `atom bench` and `atom gc-profile` load
with the same machinery. Options become choices in `cli/load_choices.py`; the load itself is `bench/runner.py`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from atom.bench.load import Api, Endpoint, LoadSpec, Shard, Workload
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.runner import LoadOutcome, OnProgress, run_in_loop, run_load
from atom.bench.target import Target, ask_server
from atom.bench.workers import run_workers
from atom.cli.progress import PLAIN_PERIOD_S, LoadProgress, StatusLine
from atom.cli.rank_run import leader, rank_count
from atom.cli.server_side import summed_up
from atom.cli.signals import ending_signals, note
from atom.cli.start_gate import StartGate, start_gate
from atom.diag.metrics_target import MetricsTarget
from atom.diag.session import ServerUnderTest
from atom.recipes.errors import UsageError
from atom.recipes.launcher import LaunchOptions

__all__ = ["Afterwards", "LoadFactory", "LoadRunner", "ServerChoice"]

Afterwards = Callable[[Endpoint, RunDirectory], None]
"""What else to do with the server when a load is over, before it is stopped. In no figure of the load."""
RunLoad = Callable[[LoadSpec, RunDirectory, OnProgress | None, asyncio.Event], Coroutine[Any, Any, LoadOutcome]]
"""As `bench/runner.run_load`."""


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
    extra_metrics: tuple[MetricsTarget, ...] = ()
    """Further endpoints to scrape."""
    gpu_telemetry: bool | None = None
    """None: where the server runs on this host."""

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
    stats_interval: float = PLAIN_PERIOD_S
    """Seconds between lines of progress where there is no terminal."""
    nonce: str = ""
    """Drawn for this run and part of its prompts."""
    with_nonce: Callable[[str], LoadFactory] | None = None
    """The same load with another one: every rank takes rank 0's. None: prompts have none."""

    def spec(self, name: str, endpoint: Endpoint, target: Target | None) -> LoadSpec:
        workload, processes = self.make(endpoint, target), self.workers * rank_count()
        return LoadSpec(name=name, endpoint=endpoint, workload=workload, shard=Shard(0, processes), **self.options)


@dataclass(kw_only=True, slots=True)
class LoadRunner:
    """One load in one session. `ended_by` and `started` say afterwards what became of it."""

    name: str
    server: ServerChoice
    load: LoadFactory
    line: StatusLine
    quiet: bool
    afterwards: Afterwards | None = None
    variant: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON that tells the loads of one command apart."""
    ended_by: int | None = field(default=None, init=False)
    """The signal that ended the load early."""
    started: bool = field(default=False, init=False)
    """Whether the load began: only then is there something to keep."""
    gate: StartGate | None = field(default_factory=start_gate, init=False)
    """Where another load has to begin at the same moment."""

    def judge(self, run_dir: RunDirectory, outcome: LoadOutcome) -> tuple[Validity, list[str]]:
        """What the load is worth as evidence, and why not more: from its records, not from `outcome`."""
        del outcome
        summary = summed_up(run_dir)
        return Validity(summary["validity"]), list(summary["reasons"])

    def check(self) -> None:
        """UsageError for a load that cannot be, before any server starts: on this rank, or on another one."""
        self.load.spec(self.name, self.server.endpoint(self.server.base_url, self.server.model or ""), None)
        if rank_count() > 1 and self.load.run is not None:
            raise UsageError("this load has a client of its own, which cannot be shared by MPI ranks: run it on one")
        if (lead := leader()) is not None:
            lead.await_checked()

    def spec_of(self, load: Mapping[str, Any]) -> LoadSpec:
        """The load that rank 0 means, made here."""
        target, factory = Target(**load["target"]), self.load
        if factory.with_nonce is not None:
            factory = factory.with_nonce(load["nonce"])
        return factory.spec(self.name, self.server.endpoint(load["base_url"], target.model), target)

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
        if self.gate is not None:
            died = threading.Event()
            server.call_when_dead(died.set)
            self.gate.pass_through(died)
        self.started = True
        with LoadProgress(self.line, quiet=self.quiet, plain_period_s=self.load.stats_interval) as progress:
            on_progress = progress if self.gate is None else self.gate.reporting(progress)
            outcome = run_in_loop(self._run(spec, target, run_dir, on_progress, server))
        if self.gate is not None:
            self.gate.loaded()
        if self.afterwards is not None and self.ended_by is None:
            self.afterwards(spec.endpoint, run_dir)
        return outcome

    async def _run(
        self, spec: LoadSpec, target: Target, run_dir: RunDirectory, progress: OnProgress, server: ServerUnderTest
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
            if (lead := leader()) is not None:
                load = {
                    "base_url": spec.endpoint.base_url,
                    "target": target.as_dict(),
                    "variant": dict(self.variant),
                    "nonce": self.load.nonce,
                }
                here_only = self.server.recipe is not None
                return await lead.run(spec, run_dir, progress, stop, load=load, here_only=here_only)
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
