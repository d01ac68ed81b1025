"""A run directory summed up with what its session captured at the server, as summaries and tables take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atom.bench.rundir import RunDirectory
from atom.bench.summary import DEFAULT_PERCENTILES, summarize
from atom.diag.measured_phase import MeasuredPhase
from atom.diag.metrics_notes import metrics_notes
from atom.diag.server_figures import server_figures

__all__ = ["summed_up"]


def summed_up(run_dir: RunDirectory, percentiles: Sequence[float] = DEFAULT_PERCENTILES) -> dict[str, Any]:
    """The summary, not written yet, with figures of the measured phase from `server/`; of a killed run up to the
    clients' last sign of life."""
    phase = MeasuredPhase.read(run_dir)
    start, end = phase.start_ns, phase.end_ns if phase.end_ns is not None else phase.last_line_ns
    if start is None or end is None or end <= start:
        return summarize(run_dir, percentiles=percentiles, write=False)
    return summarize(
        run_dir,
        percentiles=percentiles,
        extra=_figures(run_dir, start, end),
        more_notes=metrics_notes(run_dir.server, start, end),
        write=False,
    )


def _figures(run_dir: RunDirectory, start_ns: int, end_ns: int) -> dict[str, dict[str, Any]]:
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
        for figure in server_figures(run_dir.server, start_ns, end_ns)
    }
