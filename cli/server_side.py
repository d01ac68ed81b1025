"""What a session captured at the server, in the shape that summaries and tables take."""

from __future__ import annotations

from typing import Any

from atom.bench.records import is_count
from atom.bench.run_facts import checked_run
from atom.bench.rundir import RunDirectory, read_jsonl
from atom.diag.server_figures import server_figures

__all__ = ["server_side_figures"]


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
    start = checked_run(run_dir).get("measured_start_ns")
    lines = [line for path in run_dir.client.glob("*.jsonl") for line in read_jsonl(path) if is_count(line.get("t_ns"))]
    ends = [line["t_ns"] for line in lines if line.get("kind") == "measured_end"]
    return start, max(ends or [line["t_ns"] for line in lines], default=None)
