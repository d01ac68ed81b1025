"""`atom get`: one figure of a run, for scripts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from atom.bench.rundir import RunDirectory
from atom.bench.sweep_index import is_sweep
from atom.cli.server_side import summed_up
from atom.cli.sweep_publish import read_sweep_summary
from atom.diag.compare.document import document, is_comparison
from atom.recipes.errors import RunError, UsageError

__all__ = ["get"]


def get(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    metric: Annotated[str, typer.Argument(metavar="METRIC", help="A figure of summary.json, or validity.")],
    with_unit: Annotated[bool, typer.Option("--unit", help="Print the unit after the value.")] = False,
) -> int:
    """Print one figure of a run, as a plain number.

    METRIC is a name in summary.json (p99_ttft_ms, output_throughput, gen2_share, …); ttft_p99 is understood too, and
    so is any field of its head, such as validity. Fractions are 0..1. Exit status 1 if it was not measured.

    Of a comparison: verdict, or LOAD.METRIC_delta_pct (_base, _head, _ci_low_pct, _ci_high_pct, _noise_floor_pct);
    LOAD. may be left out where there is one.

    Example: test $(atom get RUN failed) -eq 0
    """
    run_dir = RunDirectory.open(run)
    if is_sweep(run_dir):
        summary = read_sweep_summary(run_dir)
    elif is_comparison(run_dir):
        summary = document(run_dir.path)
    elif run_dir.summary_json.is_file() and metric != "validity":  # the directory may have been damaged since
        summary = run_dir.read_summary()
    else:
        summary = summed_up(run_dir)
    if isinstance(summary.get(metric), str):
        typer.echo(summary[metric])
        return 0
    name = _resolve(metric, summary["figures"])
    figure = summary["figures"][name]
    if figure["value"] is None:
        raise RunError(f"{name} was not measured in {run}")
    value = figure["value"]
    text = str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)
    typer.echo(f"{text} {figure['unit']}" if with_unit else text)
    return 0


def _near(metric: str, names: list[str]) -> list[str]:
    """Names that were perhaps meant: those with all its words, the most usual statistics first; else similar ones."""
    words = [word for word in re.split(r"[^a-z0-9.]+", metric) if word]
    holding = [name for name in names if words and all(word in name.split("_") for word in words)]
    usual = ("median", "p50", "mean", "p99")
    holding.sort(key=lambda name: next((i for i, start in enumerate(usual) if name.startswith(start)), len(usual)))
    return holding[:4] or difflib.get_close_matches(metric, names, n=4, cutoff=0.4)


def _resolve(metric: str, figures: Mapping[str, Any]) -> str:
    """The figure's name: as it is, without its unit, or with the statistic at the end."""
    statistic = re.fullmatch(r"(\w+?)_(mean|median|std|p[\d.]+)(_ms)?", metric)
    names = [metric, f"{metric}_ms"]
    if statistic is not None:
        names.append(f"{statistic[2]}_{statistic[1]}_ms")
    for name in names:
        if name in figures:
            return name
    close = _near(metric.lower(), list(figures))
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    raise UsageError(f"METRIC {metric!r} is no figure of this run{hint} (all of them: summary.json)")
