"""One `atom bench` run from choices to exit status: session, load, summary, outputs. Which loads there are, and their
options, is in `cli/bench.py`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from atom.bench.load import Api, Endpoint, LoadSpec
from atom.bench.provenance import command_line, provenance
from atom.bench.random_load import RandomSource
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.runner import LoadOutcome, run_in_loop, run_load
from atom.bench.summary import summarize
from atom.bench.target import Target, ask_server
from atom.cli.outputs import describe_os_error
from atom.cli.progress import LoadProgress, StatusLine, launch_progress
from atom.cli.publish import Output, publish, show
from atom.cli.run_place import RunPlace
from atom.cli.server_side import server_side_figures
from atom.cli.signals import ending_signals, note, status_of
from atom.diag.session import MeasuredSession, ServerUnderTest, UrlTarget
from atom.recipes.errors import ExitStatus, RunError, UsageError
from atom.recipes.launcher import LaunchOptions
from atom.recipes.resolve import resolve_recipe

__all__ = ["BenchRun", "LoadFactory", "ServerChoice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerChoice:
    """Which server, and how to speak to it."""

    recipe: str | None
    base_url: str
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
    """A load as far as the command line says it; the server's model and vocabulary complete it."""

    source: RandomSource
    options: Mapping[str, Any]

    def spec(self, name: str, endpoint: Endpoint, target: Target | None) -> LoadSpec:
        source = self.source
        if target is not None:
            vocab = source.vocab_size if source.vocab_size is not None else target.vocab_size
            source = replace(source, model=endpoint.model, vocab_size=vocab)
            limit = target.max_model_len
            if limit is not None and source.api is Api.COMPLETIONS and source.max_total_len > limit:
                raise UsageError(
                    f"prompt and output can reach {source.max_total_len} tokens, the server's context is {limit}: "
                    "lower --random-input-len, --random-prefix-len, --random-output-len or --random-range-ratio"
                )
        return LoadSpec(name=name, endpoint=endpoint, source=source, **self.options)


@dataclass(kw_only=True, slots=True)
class BenchRun:
    name: str
    server: ServerChoice
    load: LoadFactory
    output: Output
    _line: StatusLine = field(default_factory=lambda: StatusLine(sys.stderr), init=False)
    _signal: int | None = field(default=None, init=False)
    _server_died: bool = field(default=False, init=False)
    _started: bool = field(default=False, init=False)
    """Whether the load began: only then is there something to keep."""

    def run(self) -> int:
        """Everything, to the exit status."""
        self.load.spec(
            self.name, self.server.endpoint(self.server.base_url, self.server.model or ""), None
        )  # validates
        target = UrlTarget(base_url=self.server.base_url)
        recipe = resolve_recipe(self.server.recipe) if self.server.recipe is not None else None
        place = RunPlace(self.output.directory, self.name)
        run_dir = place.run_dir
        try:
            run_dir.write_run_json({"name": f"bench {self.name}", **provenance(command_line())})
            with launch_progress(self._line, quiet=self.output.quiet) as on_launch:
                session = MeasuredSession(recipe or target, run_dir, options=self.server.launch, on_progress=on_launch)
                result = session.run(lambda server: self._load(server, run_dir), judge=lambda _: self._judge(run_dir))
        except UsageError:
            if not self._started:
                place.give_back()
            raise
        except (RunError, OSError) as error:
            if not self._started and recipe is None:  # a recipe's server left its log, which says why
                place.give_back()
            elif self._started:
                self._show_measured(run_dir)
            if self._signal is None:
                raise
            _complain(error)
            return status_of(self._signal)
        except (KeyboardInterrupt, SystemExit):
            # A session seals what it was in; this is for the moments before it and after.
            with contextlib.suppress(UsageError, OSError):
                if not run_dir.sealed:
                    run_dir.seal(Validity.INTERRUPTED, ["interrupted before the load began"])
            raise
        self._server_died = result.server_died
        return self._report(run_dir)

    def _load(self, server: ServerUnderTest, run_dir: RunDirectory) -> LoadOutcome:
        choice = self.server
        target = ask_server(
            server.base_url,
            model=choice.model if choice.recipe is None else None,
            api_key=choice.api_key,
            headers=choice.headers,
            verify_tls=choice.verify_tls,
        )
        run_dir.write_run_json({"target": target.as_dict(), "backend": choice.backend})
        spec = self.load.spec(self.name, choice.endpoint(server.base_url, target.model), target)
        self._started = True
        with LoadProgress(self._line, quiet=self.output.quiet) as progress:
            return run_in_loop(self._run_load(spec, run_dir, progress, server))

    async def _run_load(
        self, spec: LoadSpec, run_dir: RunDirectory, progress: LoadProgress, server: ServerUnderTest
    ) -> LoadOutcome:
        """The load, ended early by Ctrl-C, SIGTERM, SIGHUP, or the server's death."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        numbers = ending_signals()
        previous = [signal.getsignal(number) for number in numbers]

        def interrupt(number: int) -> None:
            note()
            self._signal = self._signal or number
            stop.set()

        for number in numbers:
            loop.add_signal_handler(number, interrupt, number)
        server.call_when_dead(partial(_set_from_thread, loop, stop))
        try:
            return await run_load(spec, run_dir, progress, stop)
        finally:
            server.forget_callbacks()
            for number, handler in zip(numbers, previous, strict=True):
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _judge(self, run_dir: RunDirectory) -> tuple[Validity, list[str]]:
        summary = self._summarize(run_dir)
        return Validity(summary["validity"]), list(summary["reasons"])

    def _summarize(self, run_dir: RunDirectory) -> dict[str, Any]:
        extra = server_side_figures(run_dir)
        return summarize(run_dir, percentiles=self.output.percentiles, extra=extra, write=False)

    def _report(self, run_dir: RunDirectory) -> int:
        summary = self._summarize(run_dir)  # again: now it carries the verdict the run was sealed with
        try:
            publish(run_dir, summary, self.output)
        except RunError as error:
            if self._signal is None:
                raise
            _complain(error)
        return self._status(summary)

    def _show_measured(self, run_dir: RunDirectory) -> None:
        """The recording broke (a full disk, for instance): show what there is, before the error says why."""
        with contextlib.suppress(RunError, OSError, UsageError):
            show(self._summarize(run_dir), self.output)

    def _status(self, summary: Mapping[str, Any]) -> int:
        if self._signal is not None:
            return status_of(self._signal)
        validity = summary["validity"]
        if validity in (Validity.NOT_VALID, Validity.FAILED, Validity.INTERRUPTED) and self.output.quiet:
            print(f"{validity}: {'; '.join(summary['reasons'])}", file=sys.stderr)
        if validity == Validity.FAILED or self._server_died:
            return ExitStatus.FAILED
        return ExitStatus.OK if validity == Validity.VALID else ExitStatus.INVALID


def _complain(error: Exception) -> None:
    """For a run that a signal ended: its exit status says that."""
    with contextlib.suppress(OSError):
        print(f"error: {describe_os_error(error) if isinstance(error, OSError) else error}", file=sys.stderr)


def _set_from_thread(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the load ended just now, and its loop with it
        loop.call_soon_threadsafe(stop.set)
