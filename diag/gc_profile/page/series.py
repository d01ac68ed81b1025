"""The series that the page plots, from a profile's run directory: bounded in size whatever the run's length.

Times are seconds since the start of the observed span, values rounded to what a chart can show. Thinning keeps what the
page is about: of each group of neighbours the least and the greatest stay, so no stall disappears.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from atom.bench.rundir import RunDirectory
from atom.diag.gc_profile.evidence import Evidence, read_evidence
from atom.diag.gc_profile.model import Profile
from atom.diag.server_captures import FloatArray
from atom.recipes.errors import UsageError

__all__ = ["MAX_POINTS", "arm_series", "thin"]

MAX_POINTS: Final = 2400
"""Of one series."""

Point = tuple[float, float]


def arm_series(profile: Profile, name: str) -> dict[str, Any]:
    """Everything the page draws of one arm, which it calls `name`; empty lists where nothing was recorded, or the
    directory is gone."""
    head: dict[str, Any] = {"label": name, "duration_s": profile.totals.duration_s, "why_empty": None}
    try:
        evidence = read_evidence(RunDirectory.open(Path(profile.directory)))
    except (UsageError, OSError) as error:
        return {**head, "why_empty": str(error), **_series(None)}
    return {**head, **_series(evidence)}


def _series(evidence: Evidence | None) -> dict[str, list[Point]]:
    names = ("ttft_ms", "passes_ms", "metrics_ms", "series", "rss_mb", "health_ms")
    series: dict[str, list[Point]] = {name: [] for name in names}
    if evidence is None or evidence.duration_s <= 0:
        return series
    scrapes, health, samples = evidence.captures.scrapes, evidence.captures.health, evidence.samples
    if evidence.requests is not None:
        series["ttft_ms"] = _points(evidence, evidence.requests.sent_s, evidence.requests.ttft_ms)
    if evidence.passes is not None:
        pauses = (evidence.passes.stop_ns - evidence.passes.start_ns) / 1e6
        series["passes_ms"] = _points(evidence, evidence.seconds(evidence.passes.start_ns), pauses)
    scraped = evidence.seconds(scrapes.sent_ns)
    series["metrics_ms"] = _points(evidence, scraped, scrapes.latency_ms)
    series["series"] = _points(evidence, scraped, scrapes.series)
    series["health_ms"] = _points(evidence, evidence.seconds(health.sent_ns), health.latency_ms)
    if samples is not None:
        series["rss_mb"] = _points(evidence, evidence.seconds(samples.t_ns), samples.rss_mb)
    return series


def _points(evidence: Evidence, at_s: FloatArray, values: FloatArray) -> list[Point]:
    """The points within the span, in the order of time."""
    inside = (at_s >= 0) & (at_s <= evidence.duration_s) & np.isfinite(values)
    order = np.argsort(at_s[inside], kind="stable")
    return thin(at_s[inside][order], values[inside][order])


def thin(at_s: FloatArray, values: FloatArray, most: int = MAX_POINTS) -> list[Point]:
    """At most `most` of the points, in their order: the least and the greatest of each group of neighbours."""
    kept = np.arange(len(values))
    if len(values) > most:
        groups = np.array_split(kept, most // 2)
        kept = np.unique([pick for g in groups for pick in (g[np.argmin(values[g])], g[np.argmax(values[g])])])
    return [(round(float(at_s[i]), 3), float(f"{values[i]:.5g}")) for i in kept]
