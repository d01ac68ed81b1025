"""Where a summary goes: report page, terminal, JSON, Markdown, JUnit, the step summary of a CI job."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from atom.bench.aiperf_export import export_aiperf
from atom.bench.export import junit, vllm_result
from atom.bench.gsm8k.questions import write_questions
from atom.bench.report.page import write_report
from atom.bench.rundir import RunDirectory
from atom.cli.accuracy_tables import accuracy_tables
from atom.cli.agentic_tables import agentic_tables
from atom.cli.outputs import describe_os_error, write_output
from atom.cli.render import Table, bench_tables, markdown, print_tables
from atom.recipes.errors import RunError

__all__ = [
    "Attempts",
    "Output",
    "TableConsole",
    "append_step_summary",
    "publish",
    "show",
    "show_tables",
    "write_or_print",
]

LOG_WIDTH: Final = 100
"""Cells; where no terminal says how wide it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What was asked for."""

    directory: Path | None = None
    """Run directory; None: a new one under atom-runs/."""
    json: Sequence[str | Path] = ()
    markdown: str | None = None
    junit: Path | None = None
    step_summary: Path | None = None
    detailed: bool = False
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    percentiles: Sequence[float] = (50.0, 90.0, 95.0, 99.0)
    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    quiet: bool = False
    aiperf: Path | None = None
    """Where AIPerf's files go; a run that replayed sessions has them in any case."""

    @property
    def owns_stdout(self) -> bool:
        """Whether standard output is for a format of its own, so that no table may go there."""
        return "-" in (*map(str, self.json), self.markdown, str(self.junit))


def publish(run_dir: RunDirectory, summary: Mapping[str, Any], output: Output) -> None:
    """Write summary.json, report.html and everything in `output`. What cannot be written keeps nothing else from being
    written or shown; RunError names it at the end."""
    attempt = Attempts()
    attempt(lambda: run_dir.write_summary(summary))
    attempt(lambda: write_report(run_dir, summary, _result_tables(summary)))
    if "accuracy" in summary:
        attempt(partial(write_questions, run_dir))
    for directory in _aiperf_directories(run_dir, summary, output):
        attempt(partial(export_aiperf, run_dir, summary, directory))
    tables = _tables(summary, str(run_dir.report_html))
    if output.json:
        text = _result_json(run_dir, summary, output)
        for path in output.json:
            attempt(partial(write_or_print, path, text))
    if output.markdown is not None:
        attempt(partial(write_or_print, output.markdown, markdown(tables)))
    if output.junit is not None:
        attempt(partial(write_or_print, output.junit, junit(summary)))
    if output.step_summary is not None:
        append_step_summary(output.step_summary, markdown(tables) + "\n")
    attempt(lambda: show(summary, output, str(run_dir.report_html)))
    attempt.raise_failures()


def show(summary: Mapping[str, Any], output: Output, location: str | None = None) -> None:
    """Print the tables, unless standard output is for something else. RunError if it takes none."""
    if output.quiet or output.owns_stdout:
        return
    show_tables(_tables(summary, location), TableConsole())


def _aiperf_directories(run_dir: RunDirectory, summary: Mapping[str, Any], output: Output) -> list[Path]:
    """What AIPerf itself wrote stays as it is."""
    own = "agentic" in summary and summary["load"].get("client") != "aiperf"
    return [path for path in (run_dir.path / "aiperf" if own else None, output.aiperf) if path is not None]


def _tables(summary: Mapping[str, Any], location: str | None) -> list[Table]:
    return [*_result_tables(summary), *bench_tables(summary, location)]


def _result_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Of what the load is about, beyond what any load has."""
    return [*accuracy_tables(summary), *agentic_tables(summary)]


class Attempts:
    """Writes, one after the other: one that fails keeps none of the others from being made."""

    def __init__(self) -> None:
        self._failures: list[str] = []

    def __call__(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BrokenPipeError:
            raise
        except (RunError, OSError) as error:
            self._failures.append(describe_os_error(error) if isinstance(error, OSError) else str(error))

    def raise_failures(self) -> None:
        """RunError that names everything that could not be written."""
        if self._failures:
            raise RunError("; ".join(self._failures))


class TableConsole(Console):
    """Standard output as wide as its terminal or COLUMNS says; a log of a CI job has more room than rich takes."""

    def __init__(self) -> None:
        told = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
        super().__init__(width=None if told else LOG_WIDTH)

    def on_broken_pipe(self) -> None:
        """Rich would end the process with a status of its own."""
        raise BrokenPipeError


def show_tables(tables: Sequence[Table], console: TableConsole) -> None:
    """Print tables. A reader that has gone is none of our business; RunError if standard output takes no more."""
    try:
        print_tables(tables, console)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read them has seen enough; the run is worth what it is
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise RunError(f"cannot write standard output: {error.strerror}") from None


def _result_json(run_dir: RunDirectory, summary: Mapping[str, Any], output: Output) -> str:
    result = vllm_result(
        run_dir,
        summary,
        backend=str(run_dir.read_run_json().get("backend") or "openai"),
        label=output.label,
        metadata=output.metadata,
        metrics=output.metrics,
        percentiles=tuple(output.percentiles),
        detailed=output.detailed,
    )
    return json.dumps(result, indent=2, allow_nan=False) + "\n"


def append_step_summary(path: Path, text: str) -> None:
    """A page of the CI job, not of the run: a run is as good without it."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        print(f"warning: GITHUB_STEP_SUMMARY {path}: {error.strerror}", file=sys.stderr)


def write_or_print(path: str | Path, text: str) -> None:
    """Into the file, or to standard output for `-`. RunError if either takes no more."""
    if str(path) != "-":
        write_output(path, text)
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"cannot write standard output: {error.strerror}") from None
