"""The observed span cut into windows, and the figures of each and of the whole.

Figures of the server come from `diag/server_figures.py`, those of requests from their records by the definitions of
`bench/metrics.py`. A pass that straddles a border counts in each window by its part inside; counts, means and maxima
are over what began there. A request counts where it was complete, its TTFT and its prompt where its first token came,
a chunk gap and output tokens where the chunk arrived.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

import numpy as np

from atom.diag.gc_profile.evidence import Evidence
from atom.diag.gc_profile.model import Totals, Window
from atom.diag.server_captures import FloatArray
from atom.diag.server_figures import figures_of
from atom.recipes.errors import UsageError

__all__ = ["default_window_s", "totals", "windows"]

MOST_WINDOWS: Final = 1000
REST: Final = 0.5
"""A last window shorter than this share of the others is joined to the one before, whoever chose their length."""
_READABLE_S: Final = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 14400, 43200, 86400)


def default_window_s(duration_s: float) -> float:
    """About a sixth of the span, as a length that people use: 5 minutes for 29."""
    sixth = duration_s / 6
    if sixth >= _READABLE_S[-1]:
        return float(math.ceil(sixth / _READABLE_S[-1]) * _READABLE_S[-1])
    return float(min(_READABLE_S, key=lambda length: abs(math.log(length / max(sixth, 1e-9)))))


def edges_s(duration_s: float, window_s: float) -> list[float]:
    """Borders of the windows, from 0 to the duration. UsageError if they would be too many."""
    count = duration_s / window_s
    if count > MOST_WINDOWS:
        raise UsageError(
            f"--window {window_s:g}s would cut {duration_s:.0f} s into {count:.0f} windows; at most {MOST_WINDOWS}"
        )
    borders = [i * window_s for i in range(math.ceil(count - 1e-9))]
    if len(borders) > 1 and duration_s - borders[-1] < REST * window_s:
        borders.pop()
    return [*borders, duration_s]


def windows(evidence: Evidence, window_s: float) -> tuple[Window, ...]:
    if evidence.duration_s <= 0:
        return ()
    borders = edges_s(evidence.duration_s, window_s)
    return tuple(
        Window(start_s=start, end_s=end, **_figures(evidence, start, end)) for start, end in itertools.pairwise(borders)
    )


def totals(evidence: Evidence) -> Totals:
    if evidence.duration_s <= 0:
        return Totals(duration_s=0.0)
    figures = _figures(evidence, 0.0, evidence.duration_s)
    kept = {name: figures.get(name) for name in Totals.__dataclass_fields__ if name in figures}
    requests = evidence.requests
    passes = evidence.passes
    return Totals(
        duration_s=evidence.duration_s,
        **kept,
        gen2_seconds=None if passes is None else passes.seconds(evidence.start_ns, evidence.end_ns),
        metrics_scrapes=_scrapes(evidence),
        requests_failed=None if requests is None else requests.failed,
        **_counted(evidence),
    )


def _scrapes(evidence: Evidence) -> int | None:
    part = evidence.captures.scrapes.window(evidence.start_ns, evidence.end_ns)
    return (part.stop - part.start) or None


def _counted(evidence: Evidence) -> dict[str, Any]:
    """From the hook's running totals: how much they rose within the span."""
    passes = evidence.passes
    if passes is None:
        return {}
    history = passes.process.history
    before = [line for line in history if line["t_ns"] <= evidence.start_ns]
    until = [line for line in history if line["t_ns"] <= evidence.end_ns]
    watched_s = passes.watched_ns(evidence.start_ns, evidence.end_ns) / 1e9
    if not until or watched_s <= 0:
        return {}

    def rise(key: str) -> float | None:
        last, first = until[-1].get(key), before[-1].get(key) if before else 0
        if not isinstance(last, int | float) or not isinstance(first, int | float) or not 0 <= last - first < 2.0**62:
            return None
        return last - first

    young_ns, hook_ns, young = rise("young_ns"), rise("hook_cpu_ns"), rise("young_passes")
    return {
        "young_passes": None if young is None else int(young),
        "young_seconds": None if young_ns is None else young_ns / 1e9,
        "hook_cpu_share": None if hook_ns is None else hook_ns / 1e9 / watched_s,
    }


# ---- one window --------------------------------------------------------------------------------------------------


def _figures(evidence: Evidence, start_s: float, end_s: float) -> dict[str, Any]:
    """Everything that a `Window` has, by its name."""
    start_ns = evidence.start_ns + round(start_s * 1e9)
    end_ns = evidence.start_ns + round(end_s * 1e9)
    server = {
        figure.key: figure.value
        for figure in figures_of(evidence.passes, evidence.captures.scrapes, evidence.samples, start_ns, end_ns)
    }
    server["running_mean"] = server.pop("running_requests_mean")
    return {
        **server,
        **_passes(evidence, start_ns, end_ns),
        **_metrics(evidence, start_ns, end_ns),
        **_threads(evidence, start_ns, end_ns),
        **_health(evidence, start_ns, end_ns),
        **_requests(evidence, start_s, end_s),
    }


def _passes(evidence: Evidence, start_ns: int, end_ns: int) -> dict[str, Any]:
    passes = evidence.passes
    if passes is None or not passes.watched_ns(start_ns, end_ns):
        return {}
    pauses = passes.pauses_ms(start_ns, end_ns)
    return {"gen2_passes": len(pauses), "gen2_max_pause_ms": float(pauses.max()) if len(pauses) else None}


def _metrics(evidence: Evidence, start_ns: int, end_ns: int) -> dict[str, Any]:
    scrapes = evidence.captures.scrapes
    part = scrapes.window(start_ns, end_ns)
    if part.start == part.stop:
        return {}
    figures: dict[str, Any] = {"metrics_failed": int(np.isnan(scrapes.latency_ms[part]).sum())}
    if evidence.requests is None:
        for name, key in (("prompt_tokens", "prompt_tok_per_s"), ("generation_tokens", "output_tok_per_s")):
            figures[key] = _rate(scrapes.sent_ns[part] / 1e9, scrapes.values.get(name), part)
    return figures


def _rate(times_s: FloatArray, counter: FloatArray | None, part: slice) -> float | None:
    """How fast a counter of the server rose between the first and the last scrape of the window."""
    if counter is None:
        return None
    known = ~np.isnan(counter[part])
    values, times = counter[part][known], times_s[known]
    if len(values) < 2 or times[-1] <= times[0] or values[-1] < values[0]:
        return None
    return float((values[-1] - values[0]) / (times[-1] - times[0]))


def _threads(evidence: Evidence, start_ns: int, end_ns: int) -> dict[str, Any]:
    if evidence.samples is None:
        return {}
    threads = evidence.samples.threads[evidence.samples.window(start_ns, end_ns)]
    known = threads[~np.isnan(threads)]
    return {"threads": int(known[-1])} if len(known) else {}


def _health(evidence: Evidence, start_ns: int, end_ns: int) -> dict[str, Any]:
    health = evidence.captures.health
    latency = health.latency_ms[health.window(start_ns, end_ns)]
    known = latency[~np.isnan(latency)]
    if not len(known):
        return {}
    return {"health_p50_ms": float(np.median(known)), "health_max_ms": float(known.max())}


def _requests(evidence: Evidence, start_s: float, end_s: float) -> dict[str, Any]:
    requests, length = evidence.requests, end_s - start_s
    if requests is None:
        return {}
    last = end_s >= evidence.duration_s  # what came with the very end belongs to the last window

    def inside(times: FloatArray) -> Any:
        return (times >= start_s) & ((times <= end_s) if last else (times < end_s))

    begun = inside(requests.first_s)
    ttft = requests.ttft_ms[begun]
    arrived = inside(requests.gap_to_s)
    gaps = (requests.gap_to_s[arrived] - requests.gap_from_s[arrived]) * 1e3
    completed = int(np.count_nonzero(inside(requests.end_s)))
    return {
        "requests": completed,
        "requests_per_s": completed / length,
        "ttft_mean_ms": float(ttft.mean()) if len(ttft) else None,
        "ttft_p99_ms": _percentile(ttft, 99),
        "ttft_n": len(ttft),
        "itl_p50_ms": _percentile(gaps, 50),
        "itl_p99_ms": _percentile(gaps, 99),
        "prompt_tok_per_s": float(requests.prompt_tokens[begun].sum()) / length,
        "output_tok_per_s": float(requests.arrived_tokens[inside(requests.arrived_s)].sum()) / length,
    }


def _percentile(values: FloatArray, q: float) -> float | None:
    return float(np.percentile(values, q)) if len(values) else None
