"""A chart of few points as SVG text, readable without a script: axes, lines, marked points, limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from atom.bench.report.axis import short, ticks

__all__ = ["Chart", "ChartLine", "ChartPoint"]

LEFT, RIGHT, TOP, BOTTOM = 56.0, 18.0, 14.0, 36.0
LIMIT_SHOWN: Final = 3.0
"""A limit that lies this many times above all points would press them down to the axis."""


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """One point. `shape`: `dot`, `cross` (too much) or `ring` (no valid evidence)."""

    x: float
    y: float
    shape: str = "dot"
    label: str = ""
    """Stands beside it."""
    title: str = ""
    """Shown when the pointer rests on it."""
    knee: bool = False


@dataclass(frozen=True, slots=True)
class ChartLine:
    name: str
    color: str
    marks: Sequence[ChartPoint]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """`limits`: (value of y, text), drawn across. `log_x`: powers of two are equally far apart."""

    lines: Sequence[ChartLine]
    x_label: str
    limits: Sequence[tuple[float, str]] = ()
    log_x: bool = False
    width: int = 560
    height: int = 280

    def svg(self) -> str:
        xs = [mark.x for line in self.lines for mark in line.marks]
        if not xs:
            return ""
        ys = [mark.y for line in self.lines for mark in line.marks]
        limits = [(limit, text) for limit, text in self.limits if limit <= LIMIT_SHOWN * max(ys)]
        ys += [limit for limit, _ in limits]
        x_axis = _Axis.of(xs, LEFT, self.width - RIGHT, log=self.log_x, zero=not self.log_x)
        y_axis = _Axis.of(ys, self.height - BOTTOM, TOP, log=False, zero=True)
        parts = [f'<svg viewBox="0 0 {self.width} {self.height}" role="img">']
        parts += self._frame(x_axis, y_axis)
        for value, text in limits:
            y = y_axis.at(value)
            parts.append(_line(LEFT, self.width - RIGHT, y, y, "limit"))
            parts.append(_text(self.width - RIGHT, y - 4, text, "end", "limit-text"))
        labels = _Labels()
        for line in self.lines:
            parts += _drawn(line, x_axis, y_axis, labels, self.width)
        return "".join([*parts, "</svg>"])

    def _frame(self, x_axis: _Axis, y_axis: _Axis) -> list[str]:
        base, parts = self.height - BOTTOM, list[str]()
        for value in y_axis.ticks(5):
            y = y_axis.at(value)
            parts.append(_line(LEFT, self.width - RIGHT, y, y, "gridline"))
            parts.append(_text(LEFT - 7, y + 4, short(value), "end"))
        for value in x_axis.ticks(8):
            x = x_axis.at(value)
            parts.append(_line(x, x, base, base + 4, "axis"))
            parts.append(_text(x, base + 16, short(value), "middle"))
        parts.append(_line(LEFT, self.width - RIGHT, base, base, "axis"))
        parts.append(_text((LEFT + self.width - RIGHT) / 2, self.height - 3, self.x_label, "middle"))
        return parts


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    begin: float
    end: float
    """Pixels of `low` and `high`."""
    log: bool

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float, *, log: bool, zero: bool) -> _Axis:
        low, high = min(values), max(values)
        if log:
            return cls(low / 1.15, max(high, low) * 1.15, begin, end, log)
        low = min(0.0, low) if zero else low
        high = low + (high - low or abs(high) or 1.0) * 1.1
        return cls(low, high, begin, end, log)

    def at(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, count: int) -> list[float]:
        """Round values: of 1, 2 or 5 times a power of ten apart; powers of two on a logarithmic axis."""
        if self.log:
            exponents = range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)
            every = max(1, -(-len(exponents) // (count + 2)))
            found = [2.0**exponent for exponent in exponents[::every]]
            return found if len(found) > 1 else [self.low * 1.15, self.high / 1.15]
        return ticks(self.low, self.high, count)


CHARACTER_WIDTH: Final = 6.3
LINE_HEIGHT: Final = 12.0


class _Labels:
    """Texts that stand somewhere already: another one finds a place where it covers none of them."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float, float, float]] = []

    def place(self, x: float, y: float, text: str, width: float) -> tuple[float, float] | None:
        """Left end and baseline; None where everything around the point is taken."""
        wide = len(text) * CHARACTER_WIDTH
        for left, base in ((x + 8, y - 6), (x - 8 - wide, y - 6), (x + 8, y + 15), (x - 8 - wide, y + 15)):
            box = (left, base - LINE_HEIGHT, left + wide, base)
            inside = box[0] >= LEFT - 20 and box[2] <= width
            if inside and not any(_overlap(box, other) for other in self._taken):
                self._taken.append(box)
                return left, base
        return None


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _drawn(line: ChartLine, x_axis: _Axis, y_axis: _Axis, labels: _Labels, width: float) -> list[str]:
    places = [(x_axis.at(mark.x), y_axis.at(mark.y), mark) for mark in line.marks]
    path = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y, _) in enumerate(places))
    parts = [f'<path d="{path}" fill="none" stroke="{line.color}" stroke-width="1.6" stroke-linejoin="round"/>']
    for x, y, mark in places:
        shapes = {
            "dot": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{line.color}"/>',
            "ring": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="var(--card)" stroke="{line.color}"/>',
            "cross": f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="var(--bad)" stroke-width="1.8"/>',
        }
        parts.append(f"<g><title>{escape(mark.title)}</title>")
        if mark.knee:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" class="knee" stroke-width="2"/>')
        parts.append(f"{shapes[mark.shape]}</g>")
    for x, y, mark in sorted(places, key=lambda place: not place[2].knee):  # over the shapes, the knee's first
        if mark.label and (place := labels.place(x, y, mark.label, width)) is not None:
            parts.append(_text(*place, mark.label, "start", "mark"))
    return parts


def _line(x1: float, x2: float, y1: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _text(x: float, y: float, content: str, anchor: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}>{escape(content)}</text>'
