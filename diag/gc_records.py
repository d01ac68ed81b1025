"""Reads what `diag/gc_hook/` recorded: one `GcProcess` per hooked process, and whether its books balance."""

from __future__ import annotations

from collections import Counter
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
    """When the hook was installed; `last_thresholds` are those last seen."""
    installed_ns: int
    python: str | None = None
    start_ticks: int | None = None
    """Start of the process in clock ticks since boot: tells it from others of the same pid, and is the same seen from
    inside a container, where the pid is another."""
    callback_ns: int | None = None
    """Measured cost of the hook's two calls per collection."""
    attached: bool = False
    """Put into a running process, so that what came before is not known."""
    passes: list[GcPass] = field(default_factory=list)
    end: str | None = None
    """Why the record ended: `exit`, `stopped` (detached), `abandoned`; None after a kill."""
    passes_at_totals: int = 0
    """How many passes were recorded before the last totals."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """All running totals, `t_ns` and counters that only rise, for what happened within a part of the run."""

    @property
    def totals(self) -> dict[str, Any] | None:
        """The last running totals; None if the process was killed before the first."""
        return self.history[-1] if self.history else None

    @property
    def frozen(self) -> int | None:
        """Objects in `gc.freeze`, last seen."""
        return self._last_count("frozen")

    @property
    def last_thresholds(self) -> tuple[int, ...]:
        last = (self.totals or {}).get("thresholds")
        return tuple(last) if isinstance(last, list) and all(map(is_count, last)) else self.thresholds

    @property
    def enabled(self) -> bool | None:
        """Whether automatic collection is on, last seen."""
        enabled = (self.totals or {}).get("enabled")
        return enabled if isinstance(enabled, bool) else None

    @property
    def action(self) -> str | None:
        """The what-if action, if it was started."""
        return next((str(totals["action"]) for totals in self.history if totals.get("action")), None)

    @property
    def hook_cpu_ns(self) -> int | None:
        """CPU time of the hook itself, from its installation to the last totals."""
        return self._last_count("hook_cpu_ns")

    @property
    def hook_cpu_share(self) -> float | None:
        """The same per elapsed time, 0..1."""
        if self.totals is None or self.hook_cpu_ns is None:
            return None
        elapsed = int(self.totals["t_ns"]) - self.installed_ns
        return self.hook_cpu_ns / elapsed if elapsed > 0 else None

    def _last_count(self, name: str) -> int | None:
        value = (self.totals or {}).get(name)
        return value if is_count(value) else None

    @property
    def last_seen_ns(self) -> int:
        """Up to when the record is complete."""
        seen = self.installed_ns if self.totals is None else int(self.totals["t_ns"])
        return max(seen, self.passes[-1].stop_ns if self.passes else 0)


def read_gc_records(server: Path, *, damaged: Counter[str] | None = None) -> list[GcProcess]:
    """All hooked processes of a run's `server/` directory; empty if none was hooked. `damaged` is filled as by
    `read_gc_file`."""
    paths = sorted(server.glob("gc-*.jsonl"))
    return [process for path in paths for process in read_gc_file(path, damaged=damaged)]


def read_gc_file(path: Path, *, damaged: Counter[str] | None = None) -> Iterator[GcProcess]:
    """The processes in one file: more than one if a process replaced itself by exec, or was hooked twice.

    Lines that cannot be read, or are of another form than the hook's, are skipped, and counted in `damaged` by file
    (`server/gc-api-7.jsonl`); a torn last line, which a kill leaves, is not.
    """
    file, bad = JsonlFile(path), 0
    role = path.stem.removeprefix("gc-").rpartition("-")[0]
    process: GcProcess | None = None
    for line in file:
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
            else:
                bad += 1  # of a process whose first line is lost
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            bad += 1
    if process is not None:
        yield process
    if damaged is not None and bad + file.damaged:
        damaged[f"{path.parent.name}/{path.name}"] += bad + file.damaged


def _process(line: dict[str, Any], role: str) -> GcProcess:
    return GcProcess(
        pid=int(line["pid"]),
        role=role or str(line["role"]),  # the file is renamed when the role becomes known, its first line is not
        command=str(line["command"]),
        collector=str(line["collector"]),
        old_generations=tuple(map(int, line["old_generations"])),
        thresholds=tuple(map(int, line["thresholds"])),
        installed_ns=int(line["installed_ns"]),
        python=str(line["python"]) if "python" in line else None,
        start_ticks=line["start_ticks"] if is_count(line.get("start_ticks")) else None,
        callback_ns=line["callback_ns"] if is_count(line.get("callback_ns")) else None,
        attached=bool(line.get("attached")),
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
        process.history.append({key: value for key, value in line.items() if key != "type"})
        process.passes_at_totals = len(process.passes)
    elif line["type"] == "end":
        process.end = str(line["reason"])


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
