"""Reads what `diag/gc_hook.py` recorded: one `GcProcess` per hooked process, and whether its books balance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atom.bench.records import is_count
from atom.bench.rundir import JsonlFile, check_schema_version

__all__ = ["GcPass", "GcProcess", "check_books", "read_gc_file", "read_gc_records"]


@dataclass(frozen=True, slots=True)
class GcPass:
    """One pass over old objects, in nanoseconds of CLOCK_MONOTONIC."""

    start_ns: int
    stop_ns: int
    generation: int
    collected: int
    uncollectable: int

    @property
    def pause_ns(self) -> int:
        return self.stop_ns - self.start_ns


@dataclass(slots=True)
class GcProcess:
    """What one process's hook recorded."""

    pid: int
    role: str
    command: str
    collector: str
    """`generational`, `incremental` or `free-threaded`."""
    old_generations: tuple[int, ...]
    thresholds: tuple[int, ...]
    installed_ns: int
    passes: list[GcPass] = field(default_factory=list)
    totals: dict[str, Any] | None = None
    """The last running totals; None if the process was killed before the first."""
    passes_at_totals: int = 0
    """How many passes were recorded before the last totals."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """All running totals, `t_ns` and counters that only rise, for what happened within a part of the run."""

    @property
    def last_seen_ns(self) -> int:
        """Up to when the record is complete."""
        seen = self.installed_ns if self.totals is None else int(self.totals["t_ns"])
        return max(seen, self.passes[-1].stop_ns if self.passes else 0)


def read_gc_records(server: Path) -> list[GcProcess]:
    """All hooked processes of a run's `server/` directory; empty if none was hooked."""
    return [process for path in sorted(server.glob("gc-*.jsonl")) for process in read_gc_file(path)]


def read_gc_file(path: Path) -> Iterator[GcProcess]:
    """The processes in one file: more than one if a process replaced itself by exec, or its pid was reused."""
    role = path.stem.removeprefix("gc-").rpartition("-")[0]
    process: GcProcess | None = None
    for line in JsonlFile(path):
        is_hook = line.get("type") == "hook"
        if is_hook:
            check_schema_version(line.get("schema_version"), path)
        try:
            if is_hook:
                if process is not None:
                    yield process
                process = _process(line, role)
            elif process is not None:
                _add(process, line)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue  # a line of another form than ours: the books will show what is missing
    if process is not None:
        yield process


def _process(line: dict[str, Any], role: str) -> GcProcess:
    return GcProcess(
        pid=int(line["pid"]),
        role=role or str(line["role"]),  # the file is renamed when the role becomes known, its first line is not
        command=str(line["command"]),
        collector=str(line["collector"]),
        old_generations=tuple(map(int, line["old_generations"])),
        thresholds=tuple(map(int, line["thresholds"])),
        installed_ns=int(line["installed_ns"]),
    )


def _add(process: GcProcess, line: dict[str, Any]) -> None:
    if line["type"] == "pass":
        names = ("start_ns", "stop_ns", "generation", "collected", "uncollectable")
        values = [line[name] for name in names]
        if not all(map(is_count, values)) or line["stop_ns"] < line["start_ns"]:
            raise ValueError("not a pass")
        process.passes.append(GcPass(*values))
    elif line["type"] == "totals":
        if not all(is_count(line[name]) for name in ("t_ns", "recorded", "dropped", "old_passes", "old_ns")):
            raise ValueError("not totals")
        process.totals = {key: value for key, value in line.items() if key != "type"}
        process.history.append(process.totals)
        process.passes_at_totals = len(process.passes)


def check_books(process: GcProcess) -> list[str]:
    """What does not add up between the hook's running totals and its recorded lines; empty if all does."""
    totals = process.totals
    if totals is None:
        return []
    who = f"GC hook of pid {process.pid} ({process.role})"
    recorded = process.passes[: process.passes_at_totals]
    problems = []
    if totals["dropped"]:
        problems.append(f"{who}: {totals['dropped']} passes were not recorded, its buffer was full")
    # Totals count passes as they happen, lines follow when the buffer is drained: a pass between the two is in order.
    if len(recorded) != totals["recorded"]:
        problems.append(f"{who}: {totals['recorded']} passes were written, {len(recorded)} are readable")
    elif totals["old_passes"] - totals["dropped"] == len(recorded):
        pause = sum(one.pause_ns for one in recorded)
        if not totals["dropped"] and pause != totals["old_ns"]:
            problems.append(f"{who}: its passes take {pause} ns, its totals say {totals['old_ns']} ns")
    return problems
