"""Panels over one time axis as a single SVG that needs no script: each panel has its own scale and legend, and columns
show their values as titles when pointed at. Nothing here knows what is plotted.

Names come from run directories: they are escaped here, and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from atom.bench.report.axis import short, ticks

__all__ = ["Line", "Panel", "Span", "draw"]

WIDTH: Final = 1120
LEFT: Final = 58
RIGHT: Final = 12
PANEL: Final = 84
HEAD: Final = 26
GAP: Final = 12
AXIS: Final = 38
COLUMNS: Final = 120
LONGEST_NAME: Final = 40

_Y = Callable[[float], float]
Point = Sequence[float | None]
"""[time in s, value or None: not known]."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[Point]
    """In the order of time."""
    kind: str = "line"
    """`line`, `area` (filled to zero), `stems` (from zero up), `band` (points have a third value: shaded between)."""
    color: int | None = None
    """Of the style sheet; None: by its place in the panel."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    lines: Sequence[Line]
    most: float | None = None
    """Top of the scale; None: by the values."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time to tell apart, shaded."""

    begin: float
    end: float
    name: str


def draw(panels: Sequence[Panel], begin: float, end: float, spans: Sequence[Span]) -> str:
    """The SVG; "" without panels. Times in seconds."""
    assert end > begin
    if not panels:
        return ""
    height = len(panels) * (HEAD + PANEL + GAP) + AXIS
    scale = _Scale(begin, end)
    parts = [
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline of the run">',
        *_shades(scale, spans, height),
        *_axis(scale, height),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, scale, number * (HEAD + PANEL + GAP))
    parts += _columns(panels, scale, height)
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class _Scale:
    begin: float
    end: float

    def x(self, moment: float) -> float:
        share = (moment - self.begin) / (self.end - self.begin)
        return LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def has(self, moment: float | None) -> bool:
        return moment is not None and self.begin <= moment <= self.end


def _shades(scale: _Scale, spans: Sequence[Span], height: int) -> Iterator[str]:
    for span in spans:
        x, end = scale.x(span.begin), scale.x(span.end)
        base = height - AXIS
        yield f'<rect class="shade" x="{x:.1f}" y="0" width="{end - x:.1f}" height="{base}"/>'
        yield f'<line class="phase" x1="{end:.1f}" x2="{end:.1f}" y1="0" y2="{base}"/>'
        yield f'<text x="{x + 4:.1f}" y="{height - 4}">{escape(span.name)}</text>'


def _axis(scale: _Scale, height: int) -> Iterator[str]:
    base = height - AXIS
    for moment in ticks(scale.begin, scale.end, 12):
        x = scale.x(moment)
        yield f'<line class="gridline" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{base}"/>'
        yield f'<text x="{x:.1f}" y="{base + 15}" text-anchor="middle">{short(moment)}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{height - 4}" text-anchor="end">seconds since the measured phase began</text>'


def _panel(panel: Panel, scale: _Scale, top: int) -> Iterator[str]:
    base = top + HEAD + PANEL
    most = panel.most or _most(panel, scale)

    def y(value: float) -> float:
        return base - min(max(value / most, 0.0), 1.0) * PANEL

    for value in ticks(0, most, 3):
        at = y(value)
        yield f'<line class="gridline" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{short(value)}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
    unit = f' <tspan class="unit">{escape(panel.unit)}</tspan>' if panel.unit else ""
    yield f'<text class="title" x="{LEFT}" y="{top + HEAD - 8}">{escape(panel.title)}{unit}</text>'
    yield from _legend(panel, top + HEAD - 8)
    for number, line in enumerate(panel.lines):
        drawn = {"stems": _stems, "band": _band}.get(line.kind, _path)
        yield from drawn(line, number if line.color is None else line.color, scale, y, base)


def _legend(panel: Panel, y: int) -> Iterator[str]:
    """At the right, in the order of the lines."""
    if len(panel.lines) == 1 and not panel.lines[0].name:
        return
    x = WIDTH - RIGHT - sum(_legend_width(line) for line in panel.lines)
    for number, line in enumerate(panel.lines):
        color = number if line.color is None else line.color
        faint = ' fill-opacity=".3"' if line.kind == "band" else ""
        yield f'<rect class="f{color}" x="{x:.0f}" y="{y - 8}" width="9" height="9" rx="2"{faint}/>'
        yield f'<text x="{x + 13:.0f}" y="{y}">{escape(line.name[:LONGEST_NAME])}</text>'
        x += _legend_width(line)


def _legend_width(line: Line) -> float:
    return 6.0 * len(line.name[:LONGEST_NAME]) + 27


def _runs(line: Line, scale: _Scale) -> Iterator[list[tuple[float, ...]]]:
    """The points inside, broken where a value is not known."""
    run: list[tuple[float, ...]] = []
    for point in line.points:
        if not scale.has(point[0]):
            continue
        if any(value is None for value in point):
            if run:
                yield run
            run = []
        else:
            run.append(tuple(float(value) for value in point if value is not None))
    if run:
        yield run


def _path(line: Line, number: int, scale: _Scale, y: _Y, base: int) -> Iterator[str]:
    for run in _runs(line, scale):
        path = "L".join(f"{scale.x(point[0]):.1f} {y(point[1]):.1f}" for point in run)
        if line.kind == "area":
            first, last = scale.x(run[0][0]), scale.x(run[-1][0])
            yield f'<path class="fill" d="M{first:.1f} {base}L{path}L{last:.1f} {base}Z"/>'
        yield f'<path class="s{number}" d="M{path}"/>'
        if len(run) < 3:  # a line of one point cannot be seen
            yield from (
                f'<circle class="f{number}" cx="{scale.x(point[0]):.1f}" cy="{y(point[1]):.1f}" r="2"/>'
                for point in run
            )


def _stems(line: Line, number: int, scale: _Scale, y: _Y, base: int) -> Iterator[str]:
    found = [point for run in _runs(line, scale) for point in run]
    path = "".join(f"M{scale.x(point[0]):.1f} {base}V{min(y(point[1]), base - 1):.1f}" for point in found)
    if path:
        yield f'<path class="s{number}" d="{path}"/>'


def _band(line: Line, number: int, scale: _Scale, y: _Y, base: int) -> Iterator[str]:
    del base
    for run in _runs(line, scale):
        there = [f"{scale.x(point[0]):.1f} {y(point[1]):.1f}" for point in run]
        back = [f"{scale.x(point[0]):.1f} {y(point[2]):.1f}" for point in reversed(run)]
        yield f'<path class="band f{number}" d="M{"L".join([*there, *back])}Z"/>'


def _columns(panels: Sequence[Panel], scale: _Scale, height: int) -> Iterator[str]:
    """Over everything: what each line says there."""
    width = (scale.end - scale.begin) / COLUMNS
    tables = [(panel, line, _by_column(line, scale, width)) for panel in panels for line in panel.lines]
    for column in range(COLUMNS):
        begin = scale.begin + column * width
        said = [f"{short(begin)} to {short(begin + width)} s"]
        for panel, line, values in tables:
            if (value := values.get(column)) is not None:
                name = f" {line.name[:LONGEST_NAME]}" if line.name else ""
                said.append(f"{panel.title}{name}: {short(value)} {panel.unit}".rstrip())
        if len(said) > 1:
            x, end = scale.x(begin), scale.x(begin + width)
            title = escape("\n".join(said))
            yield (
                f'<rect class="column" x="{x:.1f}" y="0" width="{end - x:.2f}" height="{height - AXIS}">'
                f"<title>{title}</title></rect>"
            )


def _by_column(line: Line, scale: _Scale, width: float) -> dict[int, float]:
    """The largest value in each column."""
    found: dict[int, float] = {}
    for point in line.points:
        moment, value = point[0], point[-1]
        if moment is None or value is None or not scale.has(moment):
            continue
        column = min(int((moment - scale.begin) / width), COLUMNS - 1)
        found[column] = max(value, found.get(column, value))
    return found


def _most(panel: Panel, scale: _Scale) -> float:
    values = [value for line in panel.lines for run in _runs(line, scale) for point in run for value in point[1:]]
    most = max(values, default=0.0)
    return most * 1.08 if most > 0 else 1.0
