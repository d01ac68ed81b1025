"""What a run's `server/` directory holds, read once into columns: passes, scrapes, processes, health probes, GPUs.

The directory may come from anywhere: a line with values that no capture writes is left out, and counted. What the
columns mean for a window of time is `diag/server_figures.py`.

Several API processes (`--api-server-count`, data parallelism): each freezes its own event loop, so an average would
hide the one that stalls and a sum would be no share of time. Figures called "of the API process" are those of the
busiest: the one whose passes took longest, then the one with most CPU time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.records import is_count
from atom.bench.rundir import JsonlFile
from atom.diag.gc_records import GcProcess, read_gc_records
from atom.diag.gpu_device import GPU_VALUES
from atom.diag.gpu_figures import GpuSamples
from atom.diag.metrics_target import MAIN_ROLE

__all__ = [
    "MEGABYTE",
    "FloatArray",
    "HealthProbes",
    "IntArray",
    "Passes",
    "ProcessSamples",
    "ScrapeOutcome",
    "Scrapes",
    "ServerCaptures",
    "read_scrapes",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MEGABYTE: Final = 1 << 20
TOTALS_SLACK_NS: Final = 6_000_000_000
"""A hook writes totals every 2 s: a record that ends this much before its process did was cut, or says why."""
_MOST: Final = 2.0**62
_DAY_NS: Final = 86_400 * 10**9
_LIMITS: Final[Mapping[str, float]] = {
    "latency_ns": _DAY_NS,
    "body_bytes": 2.0**40,
    "series": 2.0**40,
    "rss_bytes": 2.0**46,
    "cpu_s": 1e12,
    "threads": 2.0**22,
}
"""What no server reaches; more, or less than nothing, is no measurement. (4 million threads are Linux's own limit.)"""
_LONGEST_ERROR: Final = 200
_MOST_ENDPOINTS: Final = 256
_MOST_GPUS: Final = 1024
_CUT: Final = "within"
"""In the error of a probe that was given up after its time limit."""


@dataclass(frozen=True, slots=True)
class Passes:
    """One process's passes over old objects in the order of their start, and when it was watched."""

    process: GcProcess
    start_ns: IntArray
    stop_ns: IntArray
    complete: bool
    """Whether every pass that the hook says it wrote can be read. If not, which are missing is not known, nor are the
    figures of any window."""

    @classmethod
    def of(cls, process: GcProcess) -> Passes:
        times = sorted((one.start_ns, one.stop_ns) for one in process.passes)
        both = np.array(times, dtype=np.int64).reshape(-1, 2)
        return cls(process, both[:, 0], both[:, 1], _all_readable(process))

    def watched_ns(self, start_ns: int, end_ns: int) -> int:
        """`seen_ns`, or 0 where that is less than half of the window: figures of the rest would be a guess."""
        watched = self.seen_ns(start_ns, end_ns)
        return watched if 2 * watched >= end_ns - start_ns else 0

    def seen_ns(self, start_ns: int, end_ns: int) -> int:
        """How much of [start, end) the record covers: from the hook's installation to the last that it wrote, never the
        time after a hook that left early. 0 for a record with holes."""
        if not self.complete:
            return 0
        until = min(self.process.last_seen_ns, end_ns)
        return max(0, until - max(start_ns, self.process.installed_ns))

    def seconds(self, start_ns: int, end_ns: int) -> float:
        """Σ pause within [start, end): a pass that straddles a border counts by its part inside."""
        inside = np.minimum(self.stop_ns, end_ns) - np.maximum(self.start_ns, start_ns)
        return float(inside[inside > 0].sum()) / 1e9

    def overlapping(self, start_ns: int, end_ns: int) -> int:
        return int(np.count_nonzero((self.stop_ns > start_ns) & (self.start_ns < end_ns)))

    def pauses_ms(self, start_ns: int, end_ns: int) -> FloatArray:
        """Pauses, whole, of the passes that began in [start, end)."""
        begun = (self.start_ns >= start_ns) & (self.start_ns < end_ns)
        pauses: FloatArray = (self.stop_ns[begun] - self.start_ns[begun]) / 1e6
        return pauses


@dataclass(frozen=True, slots=True)
class ScrapeOutcome:
    """How the scrapes of a window of time ended."""

    sent: int
    failed: int
    error: str
    """The most frequent one; empty where none failed."""

    @property
    def failure(self) -> str:
        """`none of 40 scrapes succeeded: HTTP 404`; empty where none failed."""
        if not self.failed:
            return ""
        if self.failed < self.sent:
            return f"{self.failed:,} of {self.sent:,} scrapes failed: {self.error}"
        one = self.sent == 1
        return f"{'the one scrape failed' if one else f'none of {self.sent:,} scrapes succeeded'}: {self.error}"


@dataclass(frozen=True, slots=True)
class Scrapes:
    """One row per scrape, in the order of sending; NaN where there was no usable answer."""

    sent_ns: IntArray
    latency_ms: FloatArray
    series: FloatArray
    body_bytes: FloatArray
    values: Mapping[str, FloatArray]
    families: tuple[tuple[int, Mapping[str, int]], ...]
    """Time and metric family → series, of the scrapes that say so: all families in the first, changes in the others."""
    errors: tuple[str, ...]
    """Why there was no usable answer; empty where there was one."""

    def outcome(self, start_ns: int, end_ns: int) -> ScrapeOutcome:
        part = self.window(start_ns, end_ns)
        errors = Counter(error for error in self.errors[part] if error)
        most = errors.most_common(1)
        return ScrapeOutcome(part.stop - part.start, errors.total(), most[0][0] if most else "")

    def window(self, start_ns: int, end_ns: int) -> slice:
        first, last = np.searchsorted(self.sent_ns, [start_ns, end_ns])
        return slice(int(first), int(last))


@dataclass(frozen=True, slots=True)
class ProcessSamples:
    """One process's samples; NaN where a value is missing."""

    pid: int
    role: str
    command: str
    t_ns: IntArray
    rss_mb: FloatArray
    cpu_s: FloatArray
    threads: FloatArray

    def window(self, start_ns: int, end_ns: int) -> slice:
        first, last = np.searchsorted(self.t_ns, [start_ns, end_ns])
        return slice(int(first), int(last))

    def rss_last_mb(self, start_ns: int, end_ns: int) -> float | None:
        """Resident memory at the window's last sample."""
        rss = self.rss_mb[self.window(start_ns, end_ns)]
        known = rss[~np.isnan(rss)]
        return float(known[-1]) if len(known) else None

    def cpu_share(self, start_ns: int, end_ns: int) -> float | None:
        """CPU seconds per second between the first and the last sample of the window."""
        part = self.window(start_ns, end_ns)
        known = ~np.isnan(self.cpu_s[part])
        cpu, times = self.cpu_s[part][known], self.t_ns[part][known]
        if len(times) < 2 or times[-1] <= times[0] or cpu[-1] < cpu[0]:
            return None
        return float((cpu[-1] - cpu[0]) / ((times[-1] - times[0]) / 1e9))


@dataclass(frozen=True, slots=True)
class HealthProbes:
    """One row per probe in the order of sending. A probe that was given up counts with the time until the next one."""

    sent_ns: IntArray
    latency_ms: FloatArray
    """NaN where the server could not be reached."""
    answered: npt.NDArray[np.bool_]
    """Whether an answer came, of whatever status."""

    def window(self, start_ns: int, end_ns: int) -> slice:
        first, last = np.searchsorted(self.sent_ns, [start_ns, end_ns])
        return slice(int(first), int(last))


@dataclass(frozen=True, slots=True)
class ServerCaptures:
    """Everything captured at a server."""

    passes: tuple[Passes, ...]
    """Of every hooked process."""
    scrapes: Scrapes
    processes: tuple[ProcessSamples, ...]
    health: HealthProbes
    damaged: Mapping[str, int]
    """File (`server/process.jsonl`) → lines that cannot be read or cannot be right, and are left out."""
    others: Mapping[str, Scrapes] = field(default_factory=dict)
    """By role: scrapes of further endpoints."""
    gpus: tuple[GpuSamples, ...] = ()

    @classmethod
    def read(cls, server: Path) -> ServerCaptures:
        damaged: Counter[str] = Counter()
        return cls(
            passes=tuple(Passes.of(process) for process in read_gc_records(server, damaged=damaged)),
            scrapes=read_scrapes(server, damaged),
            processes=tuple(_processes(_lines(server / "process.jsonl", "t_ns", damaged))),
            health=_health(_lines(server / "health.jsonl", "sent_ns", damaged)),
            others={
                path.stem.removeprefix("metrics-"): _scrapes(_lines(path, "sent_ns", damaged))
                for path in sorted(server.glob("metrics-*.jsonl"))[:_MOST_ENDPOINTS]
                if path.stem != f"metrics-{MAIN_ROLE}"
            },
            gpus=tuple(_gpus(_lines(server / "gpu.jsonl", "t_ns", damaged))),
            damaged=damaged,
        )

    def api_passes(self, start_ns: int, end_ns: int) -> Passes | None:
        """Of the busiest API process that was watched in the window; None if none was."""
        watched = [one for one in self.passes if one.process.role == "api" and one.watched_ns(start_ns, end_ns)]
        cpu = {one.pid: one.cpu_share(start_ns, end_ns) or 0.0 for one in self.processes}
        return max(
            watched,
            key=lambda one: (one.seconds(start_ns, end_ns), cpu.get(one.process.pid, 0.0), -one.process.pid),
            default=None,
        )

    def api_samples(self, start_ns: int, end_ns: int) -> ProcessSamples | None:
        """Of the same process; where its passes were not watched, of the API process with most CPU time."""
        seen = [one for one in self.processes if one.role == "api" and len(one.t_ns[one.window(start_ns, end_ns)])]
        passes = self.api_passes(start_ns, end_ns)
        same = [one for one in seen if passes is not None and one.pid == passes.process.pid]
        return max(same or seen, key=lambda one: (one.cpu_share(start_ns, end_ns) or 0.0, -one.pid), default=None)

    def last_sign_ns(self) -> int | None:
        """The latest moment of which anything is recorded."""
        ends = [one.process.last_seen_ns for one in self.passes]
        columns = [self.scrapes.sent_ns, self.health.sent_ns, *(one.t_ns for one in self.processes)]
        return max([*ends, *(int(column[-1]) for column in columns if len(column))], default=None)

    def first_sign_ns(self) -> int | None:
        columns = [self.scrapes.sent_ns, self.health.sent_ns, *(one.t_ns for one in self.processes)]
        starts = [int(column[0]) for column in columns if len(column)]
        return min(starts or [one.process.installed_ns for one in self.passes], default=None)


# ---- from lines to columns ---------------------------------------------------------------------------------------


def _all_readable(process: GcProcess) -> bool:
    totals = process.totals
    return totals is None or process.passes_at_totals >= totals["recorded"]


def read_scrapes(server: Path, damaged: Counter[str] | None = None) -> Scrapes:
    """Of the loaded server. Lines that cannot be read are counted in `damaged` by file."""
    return _scrapes(_lines(server / f"metrics-{MAIN_ROLE}.jsonl", "sent_ns", Counter() if damaged is None else damaged))


def _lines(path: Path, key: str, damaged: Counter[str]) -> list[dict[str, Any]]:
    """The lines that have a time under `key`, in its order; those that cannot be right are left out and counted."""
    file, bad, lines = JsonlFile(path), 0, list[dict[str, Any]]()
    try:
        for line in file:
            if is_count(line.get(key)) and all(_possible(line.get(name), most) for name, most in _LIMITS.items()):
                lines.append(line)
            else:
                bad += 1
    except OSError:
        bad += 1
    if bad + file.damaged:
        damaged[f"{path.parent.name}/{path.name}"] += bad + file.damaged
    return sorted(lines, key=lambda line: int(line[key]))


def _possible(value: object, most: float) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value <= most)  # type: ignore[operator]


def _number(value: object) -> float:
    """`value` if it is a number that a capture writes, else NaN."""
    fits = type(value) in (int, float) and -_MOST < value < _MOST  # type: ignore[operator]
    return float(value) if fits else np.nan  # type: ignore[arg-type]


def _times(lines: Iterable[Mapping[str, Any]], key: str) -> IntArray:
    return np.array([line[key] for line in lines], dtype=np.int64)


def _column(values: Iterable[object]) -> FloatArray:
    return np.array([_number(value) for value in values], dtype=np.float64)


def _scrapes(lines: list[dict[str, Any]]) -> Scrapes:
    good = [line.get("error") is None and is_count(line.get("latency_ns")) for line in lines]

    def column(key: str) -> FloatArray:
        return _column(line.get(key) if ok else None for line, ok in zip(lines, good, strict=True))

    values = [line["values"] if isinstance(line.get("values"), dict) else {} for line in lines]
    names = {name for value in values for name in value}
    return Scrapes(
        sent_ns=_times(lines, "sent_ns"),
        latency_ms=column("latency_ns") / 1e6,
        series=column("series"),
        body_bytes=column("body_bytes"),
        values={name: _column(value.get(name) for value in values) for name in sorted(names)},
        families=tuple(_families(line for line, ok in zip(lines, good, strict=True) if ok)),
        errors=tuple("" if ok else _error(line) for line, ok in zip(lines, good, strict=True)),
    )


def _error(line: Mapping[str, Any]) -> str:
    error = line.get("error")
    return error[:_LONGEST_ERROR] if isinstance(error, str) and error else "its record has no latency"


def _families(lines: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, int]]]:
    for line in lines:
        named = line.get("family_series", line.get("largest_families"))
        if isinstance(named, dict):
            yield line["sent_ns"], {str(name): count for name, count in named.items() if is_count(count)}


def _processes(lines: list[dict[str, Any]]) -> Iterator[ProcessSamples]:
    by_pid: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if is_count(line.get("pid")):
            by_pid.setdefault(line["pid"], []).append(line)
    for pid, own in sorted(by_pid.items()):
        roles = [line["role"] for line in own if isinstance(line.get("role"), str)]
        commands = [line["command"] for line in own if isinstance(line.get("command"), str)]
        yield ProcessSamples(
            pid=pid,
            role=roles[-1] if roles else "other",
            command=commands[-1] if commands else "",
            t_ns=_times(own, "t_ns"),
            rss_mb=_column(line.get("rss_bytes") for line in own) / MEGABYTE,
            cpu_s=_column(line.get("cpu_s") for line in own),
            threads=_column(line.get("threads") for line in own),
        )


def _gpus(lines: list[dict[str, Any]]) -> Iterator[GpuSamples]:
    by_index: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        index = line.get("index")  # null in a line that says what went wrong with all of them
        if is_count(index) and (index in by_index or len(by_index) < _MOST_GPUS):
            by_index.setdefault(line["index"], []).append(line)
    for index, own in sorted(by_index.items()):
        names = [line["name"] for line in own if isinstance(line.get("name"), str)]
        yield GpuSamples(
            index=index,
            name=names[0] if names else None,
            t_ns=_times(own, "t_ns"),
            values={name: _column(line.get(name) for line in own) for name in GPU_VALUES},
        )


def _health(lines: list[dict[str, Any]]) -> HealthProbes:
    sent = _times(lines, "sent_ns")
    latency = _column(line.get("latency_ns") for line in lines) / 1e6
    answered = ~np.isnan(latency)
    for i, line in enumerate(lines[:-1]):
        if np.isnan(latency[i]) and _CUT in str(line.get("error")):
            latency[i] = (sent[i + 1] - sent[i]) / 1e6
    return HealthProbes(sent, latency, answered)
