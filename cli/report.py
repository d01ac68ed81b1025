"""`atom report`: tables and report page from a run directory, again, also of a run that was killed, of a sweep
and of a comparison."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from atom.bench.agentic.aiperf_records import take_over
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.sweep_index import is_sweep
from atom.cli import options as opt
from atom.cli.ab_publish import publish_comparison
from atom.cli.publish import Output, publish
from atom.cli.server_side import summed_up
from atom.cli.sweep_publish import republish_sweep
from atom.diag.compare.document import is_comparison
from atom.recipes.errors import ExitStatus

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to compute.")] = "50,90,95,99",
    json_path: opt.JsonOption = None,
    markdown: opt.MarkdownOption = None,
    junit: opt.JunitOption = None,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Per-request lists in the JSON.", rich_help_panel=opt.OUTPUT)
    ] = False,
    quiet: opt.QuietOption = False,
) -> int:
    """Sum up a run directory again: summary.json, report.html and the tables.

    Works on whatever was recorded, so also on a run that was killed; a sealed run keeps its verdict. The exit status is
    what the run is worth: 0 if it is valid, 1 if it failed, 4 if it is no valid evidence. A sweep
    has its own, and a comparison, with its gates.

    Example: atom report atom-runs/20261130-120000-random --markdown table.md
    """
    opt.check_outputs(json_path, markdown, junit)
    percentiles = opt.parse_percentiles(metric_percentiles)
    run_dir = RunDirectory.open(run)
    output = Output(
        json=[json_path] if json_path is not None else [],
        markdown=markdown,
        junit=junit,
        step_summary=opt.step_summary(),
        detailed=save_detailed,
        percentiles=percentiles,
        quiet=quiet,
    )
    if is_sweep(run_dir):
        return republish_sweep(run_dir, output)
    if is_comparison(run_dir):
        return publish_comparison(run_dir, output)
    take_over(run_dir)
    summary = summed_up(run_dir, percentiles)
    publish(run_dir, summary, output)
    return _status(summary, quiet=output.quiet or output.owns_stdout)


def _status(summary: Mapping[str, Any], *, quiet: bool) -> int:
    validity = summary["validity"]
    if validity == Validity.VALID:
        return ExitStatus.OK
    if quiet:
        print(f"{validity}: {'; '.join(summary['reasons'])}", file=sys.stderr)
    return ExitStatus.FAILED if validity == Validity.FAILED else ExitStatus.INVALID
