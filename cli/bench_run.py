"""One `atom bench` run from choices to exit status: session, load, summary, outputs. Which loads there are, and their
options, is in `cli/bench.py`; the load's own run is `cli/load_run.py`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atom.bench.provenance import command_line, provenance
from atom.bench.rundir import RunDirectory, Validity
from atom.cli.load_run import Afterwards, LoadFactory, LoadRunner, ServerChoice
from atom.cli.outputs import complain
from atom.cli.progress import StatusLine, launch_progress
from atom.cli.publish import Output, publish, show
from atom.cli.rank_run import follow, follows
from atom.cli.run_place import RunPlace
from atom.cli.server_side import summed_up
from atom.cli.signals import status_of
from atom.diag.session import MeasuredSession, UrlTarget
from atom.recipes.errors import ExitStatus, RunError, UsageError
from atom.recipes.resolve import resolve_recipe

__all__ = ["BenchRun"]


@dataclass(kw_only=True, slots=True)
class BenchRun:
    name: str
    server: ServerChoice
    load: LoadFactory
    output: Output
    afterwards: Afterwards | None = None
    _runner: LoadRunner = field(init=False)
    _server_died: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        line = StatusLine(sys.stderr)
        self._runner = LoadRunner(
            name=self.name,
            server=self.server,
            load=self.load,
            line=line,
            quiet=self.output.quiet,
            afterwards=self.afterwards,
        )

    def check(self) -> int:
        """UsageError for a load that cannot be. Nothing is started, and nothing is written."""
        self._runner.check()
        return ExitStatus.OK

    def run(self) -> int:
        """Everything, to the exit status."""
        runner = self._runner
        runner.check()
        if follows():
            return follow(runner.spec_of)
        target = UrlTarget(base_url=self.server.base_url)
        recipe = resolve_recipe(self.server.recipe) if self.server.recipe is not None else None
        place = RunPlace(self.output.directory, self.name)
        run_dir = place.run_dir
        try:
            run_dir.write_run_json({"name": f"bench {self.name}", **provenance(command_line())})
            with launch_progress(runner.line, quiet=self.output.quiet) as on_launch:
                session = MeasuredSession(
                    recipe or target,
                    run_dir,
                    options=self.server.launch,
                    health_probe=False,  # a benchmark sends its load and nothing else but the scrapes
                    extra_metrics=self.server.extra_metrics,
                    gpu_telemetry=self.server.gpu_telemetry,
                    on_progress=on_launch,
                )
                result = session.run(
                    lambda server: runner.run(server, run_dir), judge=lambda outcome: runner.judge(run_dir, outcome)
                )
        except UsageError:
            if not runner.started:
                place.give_back()
            raise
        except (RunError, OSError) as error:
            if not runner.started and recipe is None:  # a recipe's server left its log, which says why
                place.give_back()
            elif runner.started:
                self._show_measured(run_dir)
            if runner.ended_by is None:
                raise
            complain(error)
            return status_of(runner.ended_by)
        except (KeyboardInterrupt, SystemExit):
            # A session seals what it was in; this is for the moments before it and after.
            with contextlib.suppress(UsageError, OSError):
                if not run_dir.sealed:
                    run_dir.seal(Validity.INTERRUPTED, ["interrupted before the load began"])
            raise
        self._server_died = result.server_died
        return self._report(run_dir)

    def _summarize(self, run_dir: RunDirectory) -> dict[str, Any]:
        return summed_up(run_dir, self.output.percentiles)

    def _report(self, run_dir: RunDirectory) -> int:
        summary = self._summarize(run_dir)  # again: now it carries the verdict the run was sealed with
        try:
            publish(run_dir, summary, self.output)
        except RunError as error:
            if self._runner.ended_by is None:
                raise
            complain(error)
        return self._status(summary)

    def _show_measured(self, run_dir: RunDirectory) -> None:
        """The recording broke (a full disk, for instance): show what there is, before the error says why."""
        with contextlib.suppress(RunError, OSError, UsageError):
            show(self._summarize(run_dir), self.output)

    def _status(self, summary: Mapping[str, Any]) -> int:
        if self._runner.ended_by is not None:
            return status_of(self._runner.ended_by)
        validity = summary["validity"]
        if validity in (Validity.NOT_VALID, Validity.FAILED, Validity.INTERRUPTED) and self.output.quiet:
            print(f"{validity}: {'; '.join(summary['reasons'])}", file=sys.stderr)
        if validity == Validity.FAILED or self._server_died:
            return ExitStatus.FAILED
        return ExitStatus.OK if validity == Validity.VALID else ExitStatus.INVALID
