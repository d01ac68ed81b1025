"""The run on one time axis, requests and server together: which panels there are, and what each shows.

What the client saw comes from the request records, warm-up included, cut into slices; the server's side from the series
of `bench/report/series.py`. Drawing is `bench/report/panels.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from atom.bench.metrics import collect
from atom.bench.records import WARMUP, RequestRecord
from atom.bench.report.panels import Line, Panel, Span, draw
from atom.bench.slices import ByPlace, Slices, slices_of

__all__ = ["timeline_svg"]

BINS: Final = 160
LEAST_BIN_S: Final = 0.25
FEWEST_BINS: Final = 20
"""A short run has narrower bins than `LEAST_BIN_S`, so that there are this many."""
MOST_LINES: Final = 5
"""Of one panel: more devices are drawn as their mean, shaded from the least to the most; more processes are cut."""
MOST_POINTS: Final = 600

Points = list[list[float | None]]
Series = Mapping[str, Mapping[str, Points]]


def timeline_svg(records: Sequence[RequestRecord], series: Mapping[str, Any], start_ns: int, end_ns: int) -> str:
    """The SVG of [warm-up, end of the measured phase]; "" for a run without length. Bounded in size."""
    if end_ns <= start_ns:
        return ""
    warmups = [one.sent_ns for one in records if one.phase == WARMUP and one.sent_ns is not None]
    begin_ns = min([start_ns, *warmups])
    wall_s = (end_ns - begin_ns) / 1e9
    bins = int(min(BINS, max(wall_s / LEAST_BIN_S, FEWEST_BINS)))
    width_ns = -(-(end_ns - begin_ns) // bins)  # all of one width: a sliver at the end would have a wild rate
    slices = slices_of(records, collect(records, {}), begin_ns, end_ns, width_ns / 1e9)
    begin, end = (begin_ns - start_ns) / 1e9, (end_ns - start_ns) / 1e9
    client = _Client(slices, begin)
    panels = [*_load(client, series), *_engine(series), *_hardware(series)]
    kept = (_with_data(panel, begin, end) for panel in panels)
    spans = [Span(begin, 0.0, "warm-up")] if warmups else []
    return draw([panel for panel in kept if panel is not None], begin, end, spans)


class _Client:
    """Columns of the slices as points in the middle of each."""

    def __init__(self, slices: Slices, begin: float) -> None:
        self.slices = slices
        self._at = (begin + slices.begins_ns / 1e9 + slices.seconds / 2).tolist()

    def points(self, values: Sequence[float | None]) -> Points:
        return [[at, value] for at, value in zip(self._at, values, strict=True)]

    def rate(self, counts: np.ndarray[Any, Any]) -> Points:
        return self.points((counts / self.slices.seconds).tolist())

    def percentile(self, values: ByPlace, q: float) -> Points:
        return self.points(values.percentiles(q, len(self.slices)))


def _load(client: _Client, series: Mapping[str, Any]) -> Iterator[Panel]:
    slices, metrics = client.slices, series["metrics"]
    own = Line("client", client.points(slices.running.tolist()), "area")
    yield Panel("Requests running", "", [own, *_roles(metrics, "running", "server")])
    ends = [Line("started", client.rate(slices.started)), Line("completed", client.rate(slices.completed))]
    if slices.failed.any():
        ends.append(Line("failed", client.rate(slices.failed)))
    yield Panel("Requests", "/s", ends)
    yield Panel("Output", "tok/s", [Line("", client.points(slices.output_tokens_per_s.tolist()), "area")])
    ttft, itl = slices.ttft_ms, slices.itl_ms
    yield Panel("TTFT", "ms", [Line(f"p{q}", client.percentile(ttft, q)) for q in (50, 90)])
    gaps = [Line(f"p{q}", client.percentile(itl, q)) for q in (50, 99)]
    yield Panel("ITL", "ms", [*gaps, *_roles(metrics, "step_ms", "server step")])


def _engine(series: Mapping[str, Any]) -> Iterator[Panel]:
    metrics = series["metrics"]
    yield Panel("Server queue", "requests", _roles(metrics, "waiting", ""))
    usage = [replace(line, points=_scaled(line.points, 100)) for line in _roles(metrics, "kv_usage", "")]
    yield Panel("KV cache in use", "%", usage, most=100)
    preempted = _roles(metrics, "preemptions_per_s", "", kind="stems")
    if any(point[1] for line in preempted for point in line.points):
        yield Panel("Preemptions", "/s", preempted)
    yield Panel("Acceptance length", "tokens", _roles(metrics, "acceptance_length", ""))


def _hardware(series: Mapping[str, Any]) -> Iterator[Panel]:
    gpus = series["gpu"]
    busy = _each(gpus, "utilization")
    yield Panel("GPU busy", "%", [replace(one, points=_scaled(one.points, 100)) for one in busy], most=100)
    yield Panel("GPU power", "W", _each(gpus, "power_w"))
    yield Panel("GPU memory", "MB", _each(gpus, "memory_mb"))
    yield Panel("Resident memory", "MB", _largest(series["process"], "rss_mb"))
    pauses = {name: {"pause": points} for name, points in series["gc"].items()}
    yield Panel("Pauses of old-object passes", "ms", _largest(pauses, "pause", kind="stems"))


def _roles(metrics: Series, key: str, name: str, kind: str = "line") -> list[Line]:
    """A line per scraped endpoint; the role is named where there are several."""
    found = [(role, one[key]) for role, one in metrics.items() if one.get(key)]
    several = len(found) > 1
    return [
        Line(" ".join(part for part in (name, role if several else "") if part), _thin(points), kind)
        for role, points in found[:MOST_LINES]
    ]


def _each(gpus: Series, key: str) -> list[Line]:
    known = [(name, one[key]) for name, one in gpus.items() if any(point[1] is not None for point in one.get(key, ()))]
    if len(known) <= MOST_LINES:
        return [Line(name, _thin(points)) for name, points in known]
    least, mean, most = _together([points for _, points in known])
    band: Points = [[low[0], low[1], high[1]] for low, high in zip(least, most, strict=True)]
    return [Line(f"mean of {len(known)} GPUs", mean), Line("least to most", band, "band", color=0)]


def _together(series: Sequence[Points]) -> tuple[Points, Points, Points]:
    """Least, mean and most over devices that were sampled one after the other, each second or so."""
    count = min(MOST_POINTS, max(map(len, series)))
    flat = np.array([point[:2] for points in series for point in points if None not in point], dtype=np.float64)
    begin, end = flat[:, 0].min(), flat[:, 0].max()
    places = np.minimum(((flat[:, 0] - begin) / max(end - begin, 1e-9) * count).astype(np.int64), count - 1)
    results: tuple[Points, Points, Points] = ([], [], [])
    for place in range(count):
        inside = flat[places == place]
        if len(inside):
            at, values = float(inside[:, 0].mean()), inside[:, 1]
            for result, value in zip(results, (values.min(), values.mean(), values.max()), strict=True):
                result.append([at, float(value)])
    return results


def _largest(series: Series, key: str, kind: str = "line") -> list[Line]:
    """Those with the largest values, the largest first."""
    known = [(name, one[key]) for name, one in series.items() if one.get(key)]
    known.sort(key=lambda one: -max(point[1] or 0.0 for point in one[1]))
    return [Line(name, _thin(points), kind) for name, points in known[:MOST_LINES]]


def _scaled(points: Sequence[Sequence[float | None]], factor: float) -> Points:
    return [[at, *(None if value is None else value * factor for value in values)] for at, *values in points]


def _thin(points: Points) -> Points:
    """Of neighbours the one with the largest value: peaks are what such a plot is looked at for."""
    step = -(-len(points) // MOST_POINTS)
    if step <= 1:
        return points
    groups = (points[i : i + step] for i in range(0, len(points), step))
    return [max(group, key=lambda point: -1.0 if point[1] is None else point[1]) for group in groups]


def _with_data(panel: Panel, begin: float, end: float) -> Panel | None:
    """Without lines that have nothing to show in this time; None if no line has."""
    lines = [line for line in panel.lines if any(_inside(point, begin, end) for point in line.points)]
    return replace(panel, lines=lines) if lines else None


def _inside(point: Sequence[float | None], begin: float, end: float) -> bool:
    return point[0] is not None and begin <= point[0] <= end and point[1] is not None
