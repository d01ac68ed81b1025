"""Where a summary goes: report page, terminal, JSON, Markdown, JUnit, the step summary of a CI job."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from atom.bench.export import junit, vllm_result
from atom.bench.report.page import write_report
from atom.bench.rundir import RunDirectory, write_text
from atom.cli.render import bench_tables, markdown, print_tables

__all__ = ["Output", "publish"]


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

    @property
    def owns_stdout(self) -> bool:
        """Whether standard output is for a format of its own, so that no table may go there."""
        return "-" in (*map(str, self.json), self.markdown)


def publish(run_dir: RunDirectory, summary: Mapping[str, Any], output: Output) -> None:
    """Write report.html, then everything in `output`."""
    write_report(run_dir, summary)
    tables = bench_tables(summary, str(run_dir.report_html))
    if output.json:
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
        text = json.dumps(result, indent=2, allow_nan=False) + "\n"
        for path in output.json:
            _write(path, text)
    if output.markdown is not None:
        _write(output.markdown, markdown(tables))
    if output.junit is not None:
        _write(output.junit, junit(summary))
    if output.step_summary is not None:
        with output.step_summary.open("a", encoding="utf-8") as file:
            file.write(markdown(tables) + "\n")
    if not output.quiet and not output.owns_stdout:
        print_tables(tables, Console())


def _write(path: str | Path, text: str) -> None:
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_text(Path(path), text)
