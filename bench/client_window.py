"""The measured phase as the workers of a load noted it, each in its `client/<worker>.jsonl`, and put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atom.bench.clocks import ClockOffset, clock_offsets
from atom.bench.records import is_count
from atom.bench.rundir import JsonlFile, RunDirectory, check_schema_version

__all__ = ["ClientWindow", "WorkerWindow", "read_client_window"]

LEAST_CPU_NS: Final = 100_000_000
"""A shorter time says nothing about how busy a process was."""


@dataclass(slots=True)
class WorkerWindow:
    """As one worker noted it."""

    start_ns: int | None = None
    end_ns: int | None = None
    """None: it did not write its end; it was killed."""
    started: int = 0
    sent: int = 0
    busy_ns: int | None = 0
    """Σ over requests of the time between sent and ended, counted live; None: the client did not count it."""
    reaction_ns: int = 0
    """Σ over requests of the time from the end of a response until the worker took note of it."""
    kernel_stamps: int = 0
    read_stamps: int = 0
    """Reads whose time of arrival is the kernel's, and those that were stamped when they were read."""
    server_gone: str | None = None
    """Why it gave up on the server."""
    interrupted: bool = False
    lag_ms: list[float] = field(default_factory=list)
    _cpu_ns: float = 0.0
    _cpu_of_ns: float = 0.0

    @property
    def cpu_share(self) -> float | None:
        """None where too short a time was looked at: of a worker that sends nothing it is all start and end."""
        return self._cpu_ns / self._cpu_of_ns if self._cpu_of_ns >= LEAST_CPU_NS else None

    def take(self, line: Mapping[str, Any], offset: ClockOffset | None) -> None:
        """KeyError, TypeError or ValueError if the line is not what its kind says, and then nothing of it is taken."""

        def shift(moment: int) -> int:
            return moment if offset is None else moment + offset.at(moment)

        kind = line.get("kind")
        if kind == "measured_start":
            self.start_ns = shift(_whole(line.get("start_ns", line["t_ns"])))
        elif kind == "measured_end":
            sent = _whole(line["sent"])
            started, integral = _whole(line.get("started", sent)), line["running_integral_ns"]
            busy = None if integral is None else _whole(integral)
            stamps = line.get("stamps") or {}
            kernel, read = _whole(stamps.get("kernel", 0)), _whole(stamps.get("read", 0))
            reaction = _whole(line.get("reaction_ns", 0))
            gone = line.get("server_gone")
            if not isinstance(gone, str | None):
                raise ValueError("server_gone must be a string or null")
            self.end_ns = shift(_whole(line["t_ns"]))
            self.server_gone = gone or self.server_gone
            self.kernel_stamps, self.read_stamps = self.kernel_stamps + kernel, self.read_stamps + read
            self.reaction_ns += reaction
            self.started, self.sent = self.started + started, self.sent + sent
            self.busy_ns = None if busy is None or self.busy_ns is None else self.busy_ns + busy
            self.interrupted |= line["interrupted"] is True
        elif kind == "window" and line.get("phase") == "measured":
            duration = _whole(line["t_ns"]) - _whole(line["start_ns"])
            lags, share = [_real(lag) for lag in line["lag_ms"]], _real(line["cpu_share"])
            if duration < 0:
                raise ValueError("a window must not end before it starts")
            self.lag_ms += lags
            self._cpu_ns += share * duration
            self._cpu_of_ns += duration


@dataclass(frozen=True, slots=True)
class ClientWindow:
    """Of all workers. What only all of them together can say is None unless each wrote its end."""

    workers: Mapping[str, WorkerWindow]
    expected: int
    """Workers that the load had."""

    @property
    def ended(self) -> bool:
        return len(self._ended) >= max(1, self.expected) and len(self._ended) == len(self.workers)

    @property
    def _ended(self) -> list[WorkerWindow]:
        return [worker for worker in self.workers.values() if worker.end_ns is not None]

    @property
    def start_ns(self) -> int | None:
        return _least(worker.start_ns for worker in self.workers.values())

    @property
    def end_ns(self) -> int | None:
        """The last of their ends, though others may be missing."""
        return max((worker.end_ns for worker in self._ended if worker.end_ns is not None), default=None)

    @property
    def started(self) -> int | None:
        return sum(worker.started for worker in self._ended) if self.ended else None

    @property
    def sent(self) -> int | None:
        return sum(worker.sent for worker in self._ended) if self.ended else None

    @property
    def busy_ns(self) -> int | None:
        counted = [worker.busy_ns for worker in self._ended if worker.busy_ns is not None]
        return sum(counted) if self.ended and len(counted) == len(self._ended) else None

    @property
    def reaction_ns(self) -> int | None:
        return sum(worker.reaction_ns for worker in self._ended) if self.busy_ns is not None else None

    @property
    def stamps(self) -> tuple[int, int]:
        """Reads with the kernel's time of arrival, and without it."""
        return sum(w.kernel_stamps for w in self._ended), sum(w.read_stamps for w in self._ended)

    @property
    def server_gone(self) -> str | None:
        """Why all of them gave up on the server."""
        reasons = [worker.server_gone for worker in self._ended]
        return reasons[0] if reasons and all(reasons) else None

    @property
    def interrupted(self) -> bool:
        return any(worker.interrupted for worker in self.workers.values())


def read_client_window(run_dir: RunDirectory, run: Mapping[str, Any], damaged: Counter[str]) -> ClientWindow:
    """`run`: run.json. Lines that say it wrong are counted in `damaged` by file, and otherwise left out."""
    offsets = clock_offsets(run)
    workers: dict[str, WorkerWindow] = {}
    for path in sorted(run_dir.client.glob("*.jsonl"), key=_by_number):
        offset = offsets.get(path.stem)
        worker = workers[path.stem] = WorkerWindow()
        file, bad = JsonlFile(path), 0
        for line in file:
            if "schema_version" in line:
                check_schema_version(line["schema_version"], f"{path}, line {file.line}")
            try:
                worker.take(line, offset)
            except (KeyError, TypeError, ValueError):
                bad += 1
        if bad + file.malformed:
            damaged[f"{path.parent.name}/{path.name}"] += bad + file.malformed
    load = run.get("load") or {}
    return ClientWindow(workers, load.get("workers") or 1)


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.stem) if path.stem.isdecimal() else 1 << 62, path.stem)


def _least(moments: Iterable[int | None]) -> int | None:
    return min((moment for moment in moments if moment is not None), default=None)


def _whole(value: object) -> int:
    if not is_count(value):
        raise ValueError("not a whole number")
    assert isinstance(value, int)
    return value


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ValueError("not a number")
    return float(value)
