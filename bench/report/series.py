"""The series that report.html plots, from a run directory: bounded in size whatever the run's length.

Times in the output are seconds since the start of the measured phase. Server-side series are there when the session
captured them; lines that are not what they should be are skipped, because a run directory is input like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np

from atom.bench.clocks import clock_offsets
from atom.bench.engine_window import EngineWindow, IntArray, acceptance, step_times
from atom.bench.metrics import FloatArray, Samples
from atom.bench.records import MEASURED, Outcome, RequestRecord
from atom.bench.rundir import RunDirectory, read_jsonl

__all__ = ["collect_series"]

MAX_POINTS: Final = 4000
HISTOGRAM_BINS: Final = 60
GAUGES: Final = ("running", "waiting", "kv_usage")

Point = list[float | None]


def collect_series(
    run_dir: RunDirectory, records: Sequence[RequestRecord], start_ns: int, end_ns: int
) -> dict[str, Any]:
    """Everything the page draws; empty lists where nothing was recorded. `records`: of all phases."""
    samples = Samples()
    requests: list[Point] = []
    failed: list[Point] = []
    for record in records:
        if record.sent_ns is None or record.phase != MEASURED:
            continue
        if record.outcome == Outcome.COMPLETED:
            samples.add(record, {})
            requests.append(_request_point(record, start_ns))
        elif record.outcome == Outcome.FAILED:
            failed.append([_seconds(record.sent_ns, start_ns), _ms(record.end_ns, record.sent_ns)])
    return {
        "wall_s": max((end_ns - start_ns) / 1e9, 1e-9),
        "ttft": histogram(np.asarray(samples.ttft)),
        "itl": histogram(np.asarray(samples.itl)),
        "requests": thin(requests),
        "failed": thin(failed),
        "gc": _gc(run_dir.server, start_ns),
        "metrics": _metrics(run_dir.server, start_ns),
        "process": _processes(run_dir.server, start_ns),
        "gpu": _gpus(run_dir.server, start_ns),
        "client": _client(run_dir, start_ns),
    }


def histogram(values: FloatArray) -> dict[str, Any] | None:
    """Equal bins from the least value to the 99.5th percentile (or all, where that loses little); what lies beyond is
    counted in `beyond`."""
    if len(values) == 0:
        return None
    low, high, most = float(values.min()), float(np.percentile(values, 99.5)), float(values.max())
    if most <= 1.5 * high:
        high = most
    if high <= low:
        high = low + max(abs(low) * 0.01, 0.01)
    counts, edges = np.histogram(values, bins=HISTOGRAM_BINS, range=(low, high))
    marks = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
    return {
        "low": low,
        "high": high,
        "counts": counts.tolist(),
        "width": float(edges[1] - edges[0]),
        "beyond": int(np.count_nonzero(values > high)),
        "max": most,
        "n": len(values),
        **marks,
    }


def thin(points: list[Point]) -> list[Point]:
    """Every k-th point, at most MAX_POINTS, the last included."""
    step = -(-len(points) // MAX_POINTS)
    return points if step <= 1 else [*points[:-1:step], points[-1]]


def _request_point(record: RequestRecord, start_ns: int) -> Point:
    return [
        _seconds(record.sent_ns, start_ns),
        _ms(record.first_ns, record.sent_ns),
        _ms(record.last_ns, record.sent_ns),
        record.prompt_tokens if record.prompt_tokens is not None else record.input_len,
        record.output_tokens,
    ]


def _seconds(moment: int | None, start_ns: int) -> float | None:
    return None if moment is None else round((moment - start_ns) / 1e9, 4)


def _ms(moment: int | None, since: int | None) -> float | None:
    return None if moment is None or since is None else round((moment - since) / 1e6, 3)


def _lines(folder: Path, pattern: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path in sorted(folder.glob(pattern)):
        for line in read_jsonl(path):
            yield path.stem, line


def _number(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    return float(value) if _is_number(value) else None


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether it can be plotted: neither NaN nor beyond what a clock in nanoseconds can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -(2.0**63) < value < 2.0**63


def _gc(server: Path, start_ns: int) -> dict[str, list[Point]]:
    """Per hooked process: [when, pause in ms] of each pass over old objects."""
    found: dict[str, list[Point]] = {}
    for name, line in _lines(server, "gc-*.jsonl"):
        begin, end = _number(line, "start_ns"), _number(line, "stop_ns")
        if line.get("type") == "pass" and begin is not None and end is not None:
            found.setdefault(name.removeprefix("gc-"), []).append([(begin - start_ns) / 1e9, (end - begin) / 1e6])
        elif line.get("type") == "hook":
            found.setdefault(name.removeprefix("gc-"), [])
    return {name: thin(points) for name, points in found.items()}


def _metrics(server: Path, start_ns: int) -> dict[str, dict[str, list[Point]]]:
    """Per scraped role: time of a scrape in ms, gauges as they are, and what follows from the totals of two scrapes, at
    the later one: `preemptions_per_s`, `step_ms`, `acceptance_length`."""
    lines: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for name, line in _lines(server, "metrics-*.jsonl"):
        sent = _number(line, "sent_ns")
        if sent is not None and 0 <= sent < 2**62:
            lines.setdefault(name.removeprefix("metrics-"), []).append((int(sent), line))
    return {role: _of_role(sorted(found, key=lambda one: one[0]), start_ns) for role, found in lines.items()}


def _of_role(lines: Sequence[tuple[int, Mapping[str, Any]]], start_ns: int) -> dict[str, list[Point]]:
    said = [line["values"] if _is_table(line.get("values")) else {} for _, line in lines]
    words = {word for values in said for word in values}
    window = EngineWindow(
        np.array([sent for sent, _ in lines], dtype=np.int64),
        {word: np.array([_or_nan(_number(values, word)) for values in said]) for word in words},
        lines[0][0],
        lines[-1][0] + 1,
    )
    seconds: FloatArray = (window.sent_ns - start_ns) / 1e9

    def points(values: FloatArray, rows: IntArray) -> list[Point]:
        pairs = zip(seconds[rows].tolist(), values.tolist(), strict=True)
        return [[at, value] for at, value in pairs if isfinite(value)]  # a ratio of damaged lines may be anything

    latency = np.array([_or_nan(None if line.get("error") else _number(line, "latency_ns")) for _, line in lines]) / 1e6
    columns = {"scrape_ms": latency, **{word: window.values[word] for word in GAUGES if word in words}}
    found = {name: points(column[known], known) for name, column in columns.items() if len(known := _known(column))}
    preempted, steps, accepted = window.growth("preemptions"), step_times(window), acceptance(window)
    if preempted is not None:
        later = preempted.seconds_between > 0
        rates: FloatArray = preempted.steps[later] / preempted.seconds_between[later]
        found["preemptions_per_s"] = points(rates, preempted.rows[1:][later])
    found["step_ms"] = points(steps.each_s * 1e3, steps.rows)
    found["acceptance_length"] = points(accepted.each, accepted.rows)
    return {name: thin(series) for name, series in found.items() if series}


def _known(column: FloatArray) -> IntArray:
    return np.flatnonzero(~np.isnan(column))


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def _is_table(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _gpus(server: Path, start_ns: int) -> dict[str, dict[str, list[Point]]]:
    """Per device: `utilization` (0..1), `power_w`, `memory_mb` (2^20 bytes)."""
    found: dict[str, dict[str, list[Point]]] = {}
    for _, line in _lines(server, "gpu.jsonl"):
        moment, index = _number(line, "t_ns"), _number(line, "index")
        if moment is None or index is None:
            continue
        series = found.setdefault(f"GPU {index:.0f}", {})
        memory = _number(line, "memory_used_bytes")
        values = {key: _number(line, key) for key in ("utilization", "power_w")}
        for key, value in {**values, "memory_mb": None if memory is None else memory / 2**20}.items():
            series.setdefault(key, []).append([(moment - start_ns) / 1e9, value])
    return {name: {key: thin(points) for key, points in series.items()} for name, series in found.items()}


def _processes(server: Path, start_ns: int) -> dict[str, dict[str, list[Point]]]:
    """Per process: resident MB, and cores in use between samples."""
    found: dict[str, dict[str, list[Point]]] = {}
    last: dict[str, tuple[float, float]] = {}
    for _, line in _lines(server, "process.jsonl"):
        moment, rss, cpu = _number(line, "t_ns"), _number(line, "rss_bytes"), _number(line, "cpu_s")
        if moment is None or rss is None:
            continue
        at = (moment - start_ns) / 1e9
        key = f"{line.get('role') or line.get('name') or 'process'} {line.get('pid')}"
        series = found.setdefault(key, {"rss_mb": [], "cores": []})
        series["rss_mb"].append([at, rss / 2**20])
        if cpu is not None:
            if key in last and at > last[key][0]:
                series["cores"].append([at, (cpu - last[key][1]) / (at - last[key][0])])
            last[key] = (at, cpu)
    return {key: {name: thin(points) for name, points in series.items()} for key, series in found.items()}


def _client(run_dir: RunDirectory, start_ns: int) -> dict[str, list[Point]]:
    """The load generator itself: worst lag of an event loop per second, and its share of a CPU; of several workers the
    worst and the busiest in that second."""
    offsets = clock_offsets(run_dir.read_run_json())
    windows: list[tuple[float, float | None, float | None]] = []
    for worker, line in _lines(run_dir.client, "*.jsonl"):
        moment, lags, share = _number(line, "t_ns"), line.get("lag_ms"), _number(line, "cpu_share")
        if line.get("kind") != "window" or moment is None or not isinstance(lags, list):
            continue
        by_ns = offsets[worker].at(int(moment)) if worker in offsets else 0
        worst = max((float(v) for v in lags if _is_number(v)), default=None)
        windows.append(((moment + by_ns - start_ns) / 1e9, worst, share))
    if sum(path.is_file() for path in run_dir.client.glob("*.jsonl")) > 1:
        windows = _worst_per_second(windows)
    lag: list[Point] = [[at, worst] for at, worst, _ in windows]
    cpu: list[Point] = [[at, share] for at, _, share in windows]
    return {"lag_ms": thin(lag), "cpu_share": thin(cpu)}


def _worst_per_second(
    windows: Sequence[tuple[float, float | None, float | None]],
) -> list[tuple[float, float | None, float | None]]:
    seconds: dict[int, tuple[float, float | None, float | None]] = {}
    for at, *values in windows:
        _, *before = seconds.get(round(at), (at, None, None))
        lag, share = (
            max((v for v in pair if v is not None), default=None) for pair in zip(before, values, strict=True)
        )
        seconds[round(at)] = (float(round(at)), lag, share)
    return [seconds[second] for second in sorted(seconds)]
