"""The series that report.html plots, from a run directory: bounded in size whatever the run's length.

Times in the output are seconds since the start of the measured phase. Server-side series are there when the session
captured them; lines that are not what they should be are skipped, because a run directory is input like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np

from atom.bench.metrics import FloatArray, Samples
from atom.bench.records import Outcome, RequestRecord, read_records
from atom.bench.rundir import RunDirectory, read_jsonl

__all__ = ["collect_series"]

MAX_POINTS: Final = 4000
HISTOGRAM_BINS: Final = 60
TIMELINE_BINS: Final = 240
MIN_BIN_S: Final = 0.05

Point = list[float | None]


def collect_series(run_dir: RunDirectory, start_ns: int, end_ns: int) -> dict[str, Any]:
    """Everything the page draws; empty lists where nothing was recorded."""
    samples = Samples()
    requests: list[Point] = []
    failed: list[Point] = []
    spans: list[tuple[int, int]] = []
    for record in read_records(run_dir):
        if record.sent_ns is None:
            continue
        if record.end_ns is not None:
            spans.append((record.sent_ns, record.end_ns))
        if record.outcome == Outcome.COMPLETED:
            samples.add(record, {})
            requests.append(_request_point(record, start_ns))
        elif record.outcome == Outcome.FAILED:
            failed.append([_seconds(record.sent_ns, start_ns), _ms(record.end_ns, record.sent_ns)])
    wall = max((end_ns - start_ns) / 1e9, 1e-9)
    return {
        "wall_s": wall,
        "ttft": histogram(np.asarray(samples.ttft)),
        "itl": histogram(np.asarray(samples.itl)),
        "requests": thin(requests),
        "failed": thin(failed),
        "timeline": _timeline(samples, spans, start_ns, wall),
        "gc": _gc(run_dir.server, start_ns),
        "metrics": _metrics(run_dir.server, start_ns),
        "process": _processes(run_dir.server, start_ns),
        "client": _client(run_dir.client, start_ns),
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


def _timeline(samples: Samples, spans: list[tuple[int, int]], start_ns: int, wall: float) -> dict[str, Any]:
    """Output tok/s and running requests per bin of equal width; the last one, and the only one of a short run, is as
    wide as what the run covers of it."""
    width = max(wall / TIMELINE_BINS, MIN_BIN_S)
    bins = max(1, int(np.ceil(wall / width - 1e-6)))
    tokens = np.zeros(bins)
    for times, counts in samples.tokens_at:
        at = np.clip(((times - start_ns / 1e9) / width).astype(np.int64), 0, bins - 1)
        np.add.at(tokens, at, counts)
    edges = np.minimum(np.arange(bins + 1) * width, wall)
    edges[-1] = wall
    covered = np.diff(edges)
    busy = np.zeros(bins)
    for begin, end in spans:
        left, right = (begin - start_ns) / 1e9, (end - start_ns) / 1e9
        busy += np.clip(np.minimum(edges[1:], right) - np.maximum(edges[:-1], left), 0, None)
    return {
        "width": width,
        "tokens_per_s": (tokens / covered).round(2).tolist(),
        "running": (busy / covered).round(3).tolist(),
    }


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
    """Per scraped role: time of a scrape in ms, body bytes, and the values that were picked out."""
    found: dict[str, dict[str, list[Point]]] = {}
    for name, line in _lines(server, "metrics-*.jsonl"):
        sent = _number(line, "sent_ns")
        if sent is None:
            continue
        at = (sent - start_ns) / 1e9
        role = found.setdefault(name.removeprefix("metrics-"), {})
        latency = _number(line, "latency_ns")
        if latency is not None and line.get("error") is None:
            role.setdefault("scrape_ms", []).append([at, latency / 1e6])
        values = line.get("values")
        for key in ("running", "waiting", "kv_usage"):
            value = _number(values, key) if isinstance(values, dict) else None
            if value is not None:
                role.setdefault(key, []).append([at, value])
    return {role: {key: thin(points) for key, points in series.items()} for role, series in found.items()}


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


def _client(client: Path, start_ns: int) -> dict[str, list[Point]]:
    """The load generator itself: worst lag of its event loop per second, and its share of a CPU."""
    lag: list[Point] = []
    cpu: list[Point] = []
    for _, line in _lines(client, "*.jsonl"):
        moment, lags, share = _number(line, "t_ns"), line.get("lag_ms"), _number(line, "cpu_share")
        if line.get("kind") != "window" or moment is None or not isinstance(lags, list):
            continue
        at = (moment - start_ns) / 1e9
        lag.append([at, max((float(v) for v in lags if _is_number(v)), default=None)])
        cpu.append([at, share])
    return {"lag_ms": thin(lag), "cpu_share": thin(cpu)}
