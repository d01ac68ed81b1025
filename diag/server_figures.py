"""The server's side of a run as figures: what its captures say about a window of time.

Every figure has its unit, its definition and how many observations it rests on; None where nothing was observed (a
server measured by its URL alone has no GC record, say). Formatting lives in `cli/`, the client's figures in `bench/`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from atom.bench.rundir import JsonlFile
from atom.diag.gc_records import GcPass, GcProcess, check_books, read_gc_records

__all__ = ["ServerFigure", "server_figures", "server_self_checks"]

MEGABYTE: Final = 1 << 20
_TOTALS_SLACK_NS: Final = 6_000_000_000
"""A hook writes totals every 2 s: a record that ends this much before the window's end did not see it all."""


@dataclass(frozen=True, slots=True)
class ServerFigure:
    """One figure of the table."""

    key: str
    label: str
    value: float | None
    unit: str
    definition: str
    n: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def server_figures(server: Path, start_ns: int, end_ns: int) -> list[ServerFigure]:
    """Figures of the window [start_ns, end_ns) (CLOCK_MONOTONIC) from a run's `server/` directory."""
    assert end_ns > start_ns
    return [
        *_gc_figures(read_gc_records(server), start_ns, end_ns),
        *_metrics_figures(_in_window(server / "metrics-api.jsonl", "sent_ns", start_ns, end_ns)),
        *_process_figures(_in_window(server / "process.jsonl", "t_ns", start_ns, end_ns)),
    ]


def server_self_checks(server: Path) -> list[str]:
    """What does not add up in the captures; empty if all does."""
    return [problem for process in read_gc_records(server) for problem in check_books(process)]


def _in_window(path: Path, key: str, start_ns: int, end_ns: int) -> list[dict[str, Any]]:
    return [line for line in JsonlFile(path) if _well_formed(line, key) and start_ns <= line[key] < end_ns]


def _well_formed(line: dict[str, Any], key: str) -> bool:
    """A line with values of other types than a capture writes is none of a capture's."""
    numbers = (line.get(name, 0) for name in (key, "latency_ns", "body_bytes", "series", "cpu_s", "rss_bytes"))
    values = line.get("values", {})
    return (
        type(line.get(key)) is int
        and all(number is None or (type(number) in (int, float) and abs(number) < 2.0**62) for number in numbers)
        and isinstance(line.get("pid", 0), int)
        and isinstance(values, dict | None)
        and all(type(value) not in (int, float) or abs(value) < 2.0**62 for value in (values or {}).values())
    )


# ---- garbage collection ------------------------------------------------------------------------------------------


def _gc_figures(processes: list[GcProcess], start_ns: int, end_ns: int) -> list[ServerFigure]:
    api = [one for one in processes if one.role == "api" and _observed(one, start_ns, end_ns)]
    passes = [one for process in api for one in process.passes if one.stop_ns > start_ns and one.start_ns < end_ns]
    begun = [one for one in passes if one.start_ns >= start_ns]
    window = (end_ns - start_ns) * len(api)
    share = sum(_overlap(one, start_ns, end_ns) for one in passes) / window if api else None
    mean = statistics.fmean(one.pause_ns for one in begun) / 1e6 if begun else None
    what = _old_object_passes(api)
    return [
        ServerFigure(
            "gen2_share",
            "gen-2 share",
            share,
            "fraction",
            f"Σ pause of {what} in the API process within the window / window length",
            len(passes),
        ),
        ServerFigure(
            "gen2_mean_pause_ms",
            "mean gen-2 pause",
            mean,
            "ms",
            f"mean pause of {what} that began in the window, API process",
            len(begun),
        ),
    ]


def _observed(process: GcProcess, start_ns: int, end_ns: int) -> bool:
    return process.installed_ns < end_ns and process.last_seen_ns >= max(end_ns - _TOTALS_SLACK_NS, start_ns)


def _overlap(one: GcPass, start_ns: int, end_ns: int) -> int:
    return max(0, min(one.stop_ns, end_ns) - max(one.start_ns, start_ns))


def _old_object_passes(processes: Iterable[GcProcess]) -> str:
    """What counts as a pass over old objects for these interpreters, in words."""
    names = {
        "generational": "gen-2 passes",
        "incremental": "incremental collector's increments and full passes",
        "free-threaded": "passes (free-threaded build: each is over all objects)",
    }
    kinds = {process.collector for process in processes} or {"generational"}
    return " and ".join(sorted(names.get(kind, f"passes of a {kind} collector") for kind in kinds))


# ---- /metrics ----------------------------------------------------------------------------------------------------


def _metrics_figures(lines: list[dict[str, Any]]) -> list[ServerFigure]:
    good = [line for line in lines if line.get("error") is None and isinstance(line.get("latency_ns"), int)]
    latencies = [line["latency_ns"] / 1e6 for line in good]
    running = [value for line in good if isinstance(value := (line.get("values") or {}).get("running"), int | float)]
    failed = f"; {len(lines) - len(good)} of {len(lines)} scrapes failed" if len(lines) > len(good) else ""
    return [
        ServerFigure(
            "metrics_p50_ms",
            "/metrics p50",
            statistics.median(latencies) if latencies else None,
            "ms",
            f"median time of a full scrape at 1 Hz, first byte sent to last byte read{failed}",
            len(latencies),
        ),
        ServerFigure(
            "metrics_body_bytes",
            "/metrics body",
            good[-1].get("body_bytes") if good else None,
            "bytes",
            "size of the last scrape's body in the window",
            len(good),
        ),
        ServerFigure(
            "metrics_series",
            "/metrics series",
            good[-1].get("series") if good else None,
            "series",
            "sample lines in the last scrape of the window",
            len(good),
        ),
        ServerFigure(
            "running_requests_mean",
            "running requests",
            statistics.fmean(running) if running else None,
            "requests",
            "mean over the window's scrapes of the requests in the engine",
            len(running),
        ),
    ]


# ---- processes ---------------------------------------------------------------------------------------------------


def _process_figures(lines: list[dict[str, Any]]) -> list[ServerFigure]:
    api = [line for line in lines if line.get("role") == "api" and isinstance(line.get("rss_bytes"), int)]
    times = sorted({line["t_ns"] for line in api})
    last = [line for line in api if line["t_ns"] == times[-1]] if times else []
    return [
        ServerFigure(
            "rss_mb",
            "API RSS",
            sum(line["rss_bytes"] for line in last) / MEGABYTE if last else None,
            "MB",
            "resident memory of the API process at the window's last sample, MB = 2^20 bytes",
            len(times),
        ),
        ServerFigure(
            "api_cpu",
            "API CPU",
            _cpu_share(api),
            "cores",
            "CPU seconds of the API process per second between the window's first and last sample",
            len(times),
        ),
    ]


def _cpu_share(lines: list[dict[str, Any]]) -> float | None:
    """Sum over processes of CPU seconds used / seconds between a process's first and last sample."""
    by_pid: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if line.get("cpu_s") is not None and line.get("pid") is not None:
            by_pid.setdefault(line["pid"], []).append(line)
    shares = [
        (samples[-1]["cpu_s"] - samples[0]["cpu_s"]) / ((samples[-1]["t_ns"] - samples[0]["t_ns"]) / 1e9)
        for samples in by_pid.values()
        if samples[-1]["t_ns"] > samples[0]["t_ns"]
    ]
    return sum(shares) if shares else None
