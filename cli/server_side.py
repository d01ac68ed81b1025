"""What a session captured at the server, in the shape that summaries and tables take; and the launch's progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from atom.bench.rundir import RunDirectory, read_jsonl
from atom.diag.server_figures import server_figures
from atom.recipes.launcher import LaunchProgress

__all__ = ["launch_progress", "server_side_figures"]


def server_side_figures(run_dir: RunDirectory) -> dict[str, dict[str, Any]]:
    """Figures of the measured phase from `server/`, for `bench.summary.summarize(extra=…)`."""
    start, end = _measured_phase(run_dir)
    if start is None or end is None or end <= start:
        return {}
    return {
        figure.key: {
            "value": figure.value,
            "unit": figure.unit,
            "n": figure.n,
            "definition": figure.definition,
            "supported": True,
            "label": figure.label,
            "side": "server",
        }
        for figure in server_figures(run_dir.server, start, end)
    }


def _measured_phase(run_dir: RunDirectory) -> tuple[int | None, int | None]:
    """[start, end) of the load's measured phase; of a killed run, up to the clients' last sign of life."""
    start = run_dir.read_run_json().get("measured_start_ns")
    times = [line["t_ns"] for path in run_dir.client.glob("*.jsonl") for line in read_jsonl(path) if "t_ns" in line]
    ends = [
        line["t_ns"]
        for path in run_dir.client.glob("*.jsonl")
        for line in read_jsonl(path)
        if line.get("kind") == "measured_end"
    ]
    return start, max(ends or times, default=None)


@contextmanager
def launch_progress(*, quiet: bool) -> Iterator[Callable[[LaunchProgress], None] | None]:
    """Shows what a starting server is waited for: a spinner on a terminal, a plain line every ten seconds elsewhere."""
    if quiet:
        yield None
        return
    console = Console(stderr=True)
    status = console.status("starting the server …") if console.is_terminal else None
    last = -10.0

    def show(progress: LaunchProgress) -> None:
        nonlocal last
        text = f"server starting: {progress.elapsed_s:.0f} s, waiting for {progress.waiting_for}"
        if status is not None:
            status.update(text)
            status.start()
        elif progress.elapsed_s - last >= 10:
            last = progress.elapsed_s
            console.print(text, highlight=False)

    try:
        yield show
    finally:
        if status is not None:
            status.stop()
