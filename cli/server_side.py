"""What a session captured at the server, in the shape that summaries and tables take."""

from __future__ import annotations

from typing import Any

from atom.bench.rundir import RunDirectory
from atom.diag.measured_phase import MeasuredPhase
from atom.diag.server_figures import server_figures

__all__ = ["server_side_figures"]


def server_side_figures(run_dir: RunDirectory) -> dict[str, dict[str, Any]]:
    """Figures of the measured phase from `server/`, for `bench.summary.summarize(extra=…)`; of a killed run up to the
    clients' last sign of life."""
    phase = MeasuredPhase.read(run_dir)
    start, end = phase.start_ns, phase.end_ns if phase.end_ns is not None else phase.last_line_ns
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
            "part": figure.part,
            "role": figure.role,
            "detail": figure.detail,
            "side": "server",
        }
        for figure in server_figures(run_dir.server, start, end)
    }
