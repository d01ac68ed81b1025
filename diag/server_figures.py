"""The server's side of a run as figures: what its captures say about a window of time.

Every figure has its unit, its definition and how many observations it rests on; None where nothing was observed (a
server measured by its URL alone has no GC record, say). Reading the captures is `diag/server_captures.py`, formatting
lives in `cli/`, the client's figures in `bench/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from atom.diag.engine_figures import engine_figures, tokens_per_s
from atom.diag.gc_records import GcProcess, check_books, read_gc_records
from atom.diag.gpu_figures import gpu_figures
from atom.diag.server_captures import FloatArray, Passes, ProcessSamples, Scrapes, ServerCaptures
from atom.diag.server_figure import ServerFigure

__all__ = ["ServerFigure", "figures_of", "old_object_passes", "server_figures", "server_self_checks"]


def server_figures(server: Path, start_ns: int, end_ns: int) -> list[ServerFigure]:
    """Figures of the window [start_ns, end_ns) (CLOCK_MONOTONIC) from a run's `server/` directory."""
    captures = ServerCaptures.read(server)
    api = figures_of(
        captures.api_passes(start_ns, end_ns),
        captures.scrapes,
        captures.api_samples(start_ns, end_ns),
        start_ns,
        end_ns,
    )
    engines = engine_figures(captures.scrapes, start_ns, end_ns)
    for role, scrapes in captures.others.items():
        engines += engine_figures(scrapes, start_ns, end_ns, role)
    gpus = gpu_figures(captures.gpus, start_ns, end_ns, _tokens_per_s(captures, start_ns, end_ns))
    return [*api, *engines, *gpus]


def _tokens_per_s(captures: ServerCaptures, start_ns: int, end_ns: int) -> float | None:
    """As the loaded server says; where it only passes requests on, the sum of the instances that decode."""
    own = tokens_per_s(captures.scrapes, start_ns, end_ns)
    if own:
        return own
    decoding = [one for role, one in captures.others.items() if not role.startswith(("prefill", "context"))]
    found = [tokens_per_s(one, start_ns, end_ns) for one in decoding]
    return sum(one for one in found if one is not None) or None


def figures_of(
    passes: Passes | None, scrapes: Scrapes, samples: ProcessSamples | None, start_ns: int, end_ns: int
) -> list[ServerFigure]:
    """Figures of the window [start_ns, end_ns) of the API process whose passes and samples these are."""
    assert end_ns > start_ns
    return [
        *_gc_figures(passes, start_ns, end_ns),
        *_metrics_figures(scrapes, start_ns, end_ns),
        *_process_figures(samples, start_ns, end_ns),
    ]


def server_self_checks(server: Path) -> list[str]:
    """What does not add up in the captures; empty if all does."""
    return [problem for process in read_gc_records(server) for problem in check_books(process)]


def old_object_passes(processes: Iterable[GcProcess]) -> str:
    """What counts as a pass over old objects for these interpreters, in words."""
    names = {
        "generational": "gen-2 passes",
        "incremental": "incremental collector's increments and full passes",
        "free-threaded": "passes (free-threaded build: each is over all objects)",
    }
    kinds = {process.collector for process in processes} or {"generational"}
    return " and ".join(sorted(names.get(kind, f"passes of a {kind} collector") for kind in kinds))


# ---- garbage collection ------------------------------------------------------------------------------------------


def _gc_figures(passes: Passes | None, start_ns: int, end_ns: int) -> list[ServerFigure]:
    watched = passes.watched_ns(start_ns, end_ns) if passes is not None else 0
    seen = passes if watched else None
    pauses = seen.pauses_ms(start_ns, end_ns) if seen is not None else np.array([])
    what = old_object_passes([seen.process] if seen is not None else [])
    return [
        ServerFigure(
            "gen2_share",
            "gen-2 share",
            None if seen is None else seen.seconds(start_ns, end_ns) / (watched / 1e9),
            "fraction",
            f"Σ pause of {what} in the API process within the window / the time watched",
            0 if seen is None else seen.overlapping(start_ns, end_ns),
        ),
        ServerFigure(
            "gen2_mean_pause_ms",
            "mean gen-2 pause",
            float(pauses.mean()) if len(pauses) else None,
            "ms",
            f"mean pause of {what} that began in the window, API process",
            len(pauses),
        ),
    ]


# ---- /metrics ----------------------------------------------------------------------------------------------------


def _metrics_figures(scrapes: Scrapes, start_ns: int, end_ns: int) -> list[ServerFigure]:
    part = scrapes.window(start_ns, end_ns)
    latencies = _known(scrapes.latency_ms[part])
    lines = len(scrapes.sent_ns[part])
    running = _known(scrapes.values["running"][part]) if "running" in scrapes.values else np.array([])
    failed = f"; {lines - len(latencies)} of {lines} scrapes failed" if lines > len(latencies) else ""
    return [
        ServerFigure(
            "metrics_p50_ms",
            "/metrics p50",
            float(np.median(latencies)) if len(latencies) else None,
            "ms",
            f"median time of a full scrape at 1 Hz, first byte sent to last byte read{failed}",
            len(latencies),
        ),
        ServerFigure(
            "metrics_body_bytes",
            "/metrics body",
            _whole(_last(scrapes.body_bytes[part])),
            "bytes",
            "size of the last scrape's body in the window",
            len(latencies),
        ),
        ServerFigure(
            "metrics_series",
            "/metrics series",
            _whole(_last(scrapes.series[part])),
            "series",
            "sample lines in the last scrape of the window",
            len(latencies),
        ),
        ServerFigure(
            "running_requests_mean",
            "running requests",
            float(running.mean()) if len(running) else None,
            "requests",
            "mean over the window's scrapes of the requests in the engine",
            len(running),
            "mean",
        ),
    ]


# ---- processes ---------------------------------------------------------------------------------------------------


def _process_figures(samples: ProcessSamples | None, start_ns: int, end_ns: int) -> list[ServerFigure]:
    rss = np.array([]) if samples is None else _known(samples.rss_mb[samples.window(start_ns, end_ns)])
    return [
        ServerFigure(
            "rss_mb",
            "API RSS",
            _last(rss),
            "MB",
            "resident memory of the API process (of several, the busiest) at the window's last sample, MB = 2^20 bytes",
            len(rss),
        ),
        ServerFigure(
            "api_cpu",
            "API CPU",
            None if samples is None else samples.cpu_share(start_ns, end_ns),
            "cores",
            "CPU seconds of the API process per second between the window's first and last sample",
            len(rss),
        ),
    ]


def _known(values: FloatArray) -> FloatArray:
    return values[~np.isnan(values)]


def _last(values: FloatArray) -> float | None:
    known = _known(values)
    return float(known[-1]) if len(known) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
