"""When a run was measured, by its run.json and what the clients of its load, or its observer, wrote down.

Times of CLOCK_MONOTONIC in ns. A run that was killed has no end; what else it left behind is the reader's to look at.
"""

from __future__ import annotations

from dataclasses import dataclass

from atom.bench.clocks import clock_offsets
from atom.bench.records import is_count
from atom.bench.run_facts import checked_run
from atom.bench.rundir import RunDirectory, read_jsonl

__all__ = ["MeasuredPhase"]


@dataclass(frozen=True, slots=True)
class MeasuredPhase:
    start_ns: int | None
    end_ns: int | None
    last_line_ns: int | None
    """The clients' last sign of life."""

    @classmethod
    def read(cls, run_dir: RunDirectory) -> MeasuredPhase:
        """RunError if run.json is no description of a run; a client file that cannot be read is left out."""
        run = checked_run(run_dir)
        offsets = clock_offsets(run)
        lines = [
            (line.get("kind"), line["t_ns"] + (offsets[path.stem].at(line["t_ns"]) if path.stem in offsets else 0))
            for path in sorted(run_dir.client.glob("*.jsonl"))
            if path.is_file()
            for line in read_jsonl(path)
            if is_count(line.get("t_ns"))
        ]
        starts = [moment for kind, moment in lines if kind == "measured_start"]
        noted = run.get("measured_start_ns")
        return cls(
            start_ns=noted if noted is not None else min(starts, default=None),
            end_ns=max((moment for kind, moment in lines if kind == "measured_end"), default=None),
            last_line_ns=max((moment for _, moment in lines), default=None),
        )
