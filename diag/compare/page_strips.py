"""Strips of a comparison's page: one row per pair, matched run or metric, drawn over a common axis. SVG without a view
box and with places in percent, so that texts keep their size at any width. No script is needed.

Labels come from refs, recipes and other people's files: all text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from atom.bench.report.axis import short, ticks
from atom.bench.report.numbers import number, signed_percent

__all__ = ["arrows_card", "kind_of", "metrics_card", "pairs_card"]

MOST_ROWS: Final = 48
"""Pairs or matched runs that are drawn; the tables count all."""
WIDEST: Final = 3.0
"""Metrics that spread wider than this many times the usual one run off the axis."""
_KINDS: Final = {"faster": "good", "slower": "bad", "equivalent": "dim", "within noise": "dim"}
_MIDDLE: Final = 15.0

Load = Mapping[str, Any]


def kind_of(word: str) -> str:
    """Colour of a verdict."""
    return _KINDS.get(word, "warn")


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> _Axis:
        low, high = min(values), max(values)
        room = 0.08 * ((high - low) or abs(high) or 1.0)
        return cls(low - room, high + room)

    def at(self, value: float) -> float:
        """Percent of the width, kept within it."""
        return 100 * min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def ticks(self) -> list[float]:
        return ticks(self.low, self.high, 5)


# ---- pairs of one metric


def pairs_card(load: Load, name: str) -> str:
    """Each pair's difference, the mean with its interval, the A/A pairs and their noise floor. "" without a pair."""
    metric = load["metrics"][name]
    pairs, control = _pair_effects(load["pairs"], name), _pair_effects((load["control"] or {}).get("pairs", ()), name)
    if not pairs or metric["delta_pct"] is None:
        return ""
    interval = _finite(metric["ci_pct"])
    floor, margin = metric["noise_floor_pct"], load["margin_pct"]
    shown = [0.0, metric["delta_pct"], *(x for one in (*pairs, *control) for x in one.all)]
    spread = max(map(abs, shown)) or 1.0
    shown += [min(max(one, -WIDEST * spread), WIDEST * spread) for one in interval or ()]
    shown += [x for limit in (floor, margin) if limit is not None and limit <= WIDEST * spread for x in (-limit, limit)]
    axis = _Axis.around(shown)
    under = [*_bands(axis, floor, margin)]
    kind = kind_of(metric["word"])
    rows = [
        _row(f"A/A {one.number}", _marks(axis, one, "control"), under, signed_percent(one.mean), "control")
        for one in control
    ]
    rows += [
        _row(f"pair {one.number}", _marks(axis, one, "dot"), under, signed_percent(one.mean))
        for one in pairs[:MOST_ROWS]
    ]
    rows.append('<div class="rule"></div>')
    mean = _mean(axis, metric["delta_pct"], interval)
    rows.append(
        _row("mean", mean, under, f"<b>{signed_percent(metric['delta_pct'])}</b>{_interval(interval)}", f"mean {kind}")
    )
    rows.append(_axis_row(axis, "%"))
    worse = ("faster", "slower") if metric["better"] == "lower" else ("slower", "faster")
    caption = f"{load['head']} against {load['base']} (%); left of zero is {worse[0]}, right is {worse[1]}"
    keys = [_key("dot", "pair"), _key("half", "its two matched runs"), _key("range", "mean, 95% CI")]
    if control:
        keys.append(_key("control", f"A/A: {load['base']} against itself"))
    keys += _limit_keys(floor, margin)
    return _card(f"{metric['title']}: pairs", caption, rows, keys)


@dataclass(frozen=True, slots=True)
class _PairEffect:
    number: int
    mean: float
    halves: tuple[float, ...]

    @property
    def all(self) -> tuple[float, ...]:
        return (self.mean, *self.halves)


def _pair_effects(pairs: Sequence[Mapping[str, Any]], name: str) -> list[_PairEffect]:
    """Percent, of the pairs that have the metric on both sides of a matched run."""
    found = []
    for pair in pairs:
        logs = [one for run in pair["runs"] if (one := _log_ratio(run, name)) is not None]
        if logs:
            halves = tuple(100 * math.expm1(one) for one in logs)
            found.append(_PairEffect(pair["pair"] + 1, 100 * math.expm1(math.fsum(logs) / len(logs)), halves))
    return found


def _log_ratio(run: Mapping[str, Any], name: str) -> float | None:
    base, head = (run[side]["metrics"].get(name) for side in ("base", "head"))
    return math.log(head / base) if base and head and base > 0 and head > 0 else None


def _marks(axis: _Axis, one: _PairEffect, kind: str) -> str:
    low, high = min(one.halves), max(one.halves)
    parts = [_line(axis.at(low), axis.at(high), "join")] if len(one.halves) > 1 else []
    parts += [_circle(axis.at(value), 3, "half") for value in one.halves if len(one.halves) > 1]
    parts.append(_circle(axis.at(one.mean), 4.2, kind))
    halves = ", ".join(f"{signed_percent(value)}%" for value in one.halves)
    return f"<g><title>{escape(f'{signed_percent(one.mean)}% (matched runs {halves})')}</title>{''.join(parts)}</g>"


def _mean(axis: _Axis, value: float, interval: tuple[float, float] | None) -> str:
    parts = []
    if interval is not None:
        low, high = interval
        parts.append(_line(axis.at(low), axis.at(high), "range"))
        parts += [_beyond(0 if end < axis.low else 100, end < axis.low) for end in interval if not axis.holds(end)]
    if axis.holds(value):
        parts.append(
            f'<svg x="{axis.at(value):.2f}%" overflow="visible"><path class="diamond" d="M0 8l6 7l-6 7l-6 -7z"/></svg>'
        )
    return "".join(parts)


# ---- metrics


def metrics_card(load: Load) -> str:
    """All metrics of a load over one axis: mean difference with interval and verdict. "" with a single one."""
    metrics = [one for _, one in _ordered(load) if one["delta_pct"] is not None]
    if len(metrics) < 2:
        return ""
    sizes = sorted(max(map(abs, [one["delta_pct"], *(_finite(one["ci_pct"]) or ())])) for one in metrics)
    limit = min(sizes[-1], WIDEST * sizes[len(sizes) // 2] or sizes[-1]) or 1.0
    axis = _Axis.around([-limit, limit])
    rows = []
    for one in metrics:
        interval, kind = _finite(one["ci_pct"]), kind_of(one["word"])
        marks = _mean(axis, one["delta_pct"], interval) or _beyond(
            0 if one["delta_pct"] < 0 else 100, one["delta_pct"] < 0
        )
        title = f"{one['title']}: {signed_percent(one['delta_pct'])}%{_interval(interval)}: {one['verdict']}"
        bands = [*_bands(axis, one["noise_floor_pct"], None)]
        better = "lower" if one["better"] == "lower" else "higher"
        rows.append(
            _row(
                one["title"],
                f"<g><title>{escape(title)}</title>{marks}</g>",
                bands,
                f"<b>{signed_percent(one['delta_pct'])}</b>%&ensp;{escape(one['word'])}",
                kind,
                f"{better} is better",
            )
        )
    rows.append(_axis_row(axis, "%"))
    repeated = "repeated " if any(one["repeated"] for one in metrics) else ""
    keys = [_key("range", f"mean over pairs, 95% {repeated}CI")]
    if any(one["noise_floor_pct"] is not None for one in metrics):
        keys.append('<span><i class="floor"></i>A/A noise floor of each</span>')
    caption = f"{load['head']} against {load['base']} (%); the first one was declared to decide"
    return _card("All metrics", caption, rows, keys, wide=True)


def _ordered(load: Load) -> list[tuple[str, Mapping[str, Any]]]:
    return sorted(load["metrics"].items(), key=lambda item: not item[1]["primary"])


# ---- arrows


def arrows_card(load: Load, name: str, *, concurrent: bool) -> str:
    """Each matched run as an arrow from base to head, by which half the base had, or which one was first. "" without
    any."""
    metric = load["metrics"][name]
    runs = [
        (pair["pair"] + 1, run, run["base"]["metrics"].get(name), run["head"]["metrics"].get(name))
        for pair in load["pairs"]
        for run in pair["runs"]
    ]
    known = [one for one in runs if one[2] is not None and one[3] is not None]
    if not known:
        return ""
    axis = _Axis.around([value for one in known for value in one[2:]])
    rows: list[str] = []
    for index, effect in enumerate([*metric["half_effects_pct"], None][:2]):
        some = [one for one in known if one[1]["index"] == index]
        if not some:
            continue
        if rows:
            rows.append('<div class="rule"></div>')
        for pair, run, base, head in some[: MOST_ROWS // 2]:
            text = f"pair {pair}: {load['base']} {number(base)}, {load['head']} {number(head)} {metric['unit']}"
            arrow = f"<g><title>{escape(text)}</title>{_arrow(axis, base, head, metric['better'])}</g>"
            rows.append(_row(f"pair {pair}", arrow, [], f"{number(base)} → {number(head)}", "", run["half"]))
        if effect is not None:
            rows.append(_row("", "", [], f"mean <b>{signed_percent(effect)}</b>%", "control"))
    rows.append(_axis_row(axis, metric["unit"]))
    by = "where each of them ran" if concurrent else "which of them was first"
    swapped = len({run["index"] for _, run, _, _ in known}) > 1
    caption = f"each matched run: {load['base']} → {load['head']} ({metric['unit']}){f', by {by}' if swapped else ''}"
    keys = [_key("base", load["base"]), _key("head", load["head"])]
    title = f"{'halves' if concurrent else 'order'} swapped" if swapped else "matched runs"
    return _card(f"{metric['title']}: {title}", caption, rows, keys)


def _arrow(axis: _Axis, base: float, head: float, better: str) -> str:
    x, end = axis.at(base), axis.at(head)
    kind = "tip-dim" if base == head else "tip-good" if (head < base) == (better == "lower") else "tip-bad"
    tip = "M-4 15l-9 -4.5v9z" if end >= x else "M4 15l9 -4.5v9z"
    arrowhead = f'<svg x="{end:.2f}%" overflow="visible"><path class="{kind}" d="{tip}"/></svg>'
    return f"{_line(x, end, 'shaft')}{_circle(x, 4, 'base')}{arrowhead}{_circle(end, 4, 'head')}"


# ---- parts


def _bands(axis: _Axis, floor: float | None, margin: float | None) -> Iterator[str]:
    if floor is not None:
        x, end = axis.at(-floor), axis.at(floor)
        yield f'<rect class="floor" x="{x:.2f}%" y="0" width="{end - x:.2f}%" height="100%"/>'
    for limit in () if margin is None else (-margin, margin):
        if axis.holds(limit):
            yield _upright(axis.at(limit), "margin")
    if axis.holds(0.0):
        yield _upright(axis.at(0.0), "zero")


def _limit_keys(floor: float | None, margin: float | None) -> Iterator[str]:
    if floor is not None:
        yield f'<span><i class="floor"></i>A/A noise floor ±{floor:.2f}%</span>'
    if margin is not None:
        yield f'<span><i class="dash"></i>equivalence margin ±{margin:g}%</span>'


def _row(name: str, marks: str, under: Sequence[str], said: str, kind: str = "", small: str = "") -> str:
    """`said` is markup; `name` and `small` are text."""
    more = f"<small>{escape(small)}</small>" if small else ""
    strip = f'<svg class="strip" width="100%" role="img">{"".join(under)}{marks}</svg>' if marks else "<span></span>"
    return (
        f'<div class="row"><span class="name {kind}">{escape(name)}{more}</span>'
        f'<span class="strip {kind}">{strip}</span><span class="said">{said}</span></div>'
    )


def _axis_row(axis: _Axis, unit: str) -> str:
    marks = "".join(
        f'<line class="axis" x1="{axis.at(one):.2f}%" x2="{axis.at(one):.2f}%" y1="0" y2="4"/>'
        f'<text x="{axis.at(one):.2f}%" y="15" text-anchor="middle">{short(one).replace("-", "−")}</text>'
        for one in axis.ticks
    )
    strip = f'<svg class="axis-strip" width="100%"><line class="axis" x1="0" x2="100%" y1="0" y2="0"/>{marks}</svg>'
    return (
        f'<div class="row"><span class="name"></span><span class="strip">{strip}</span>'
        f'<span class="said">{escape(unit)}</span></div>'
    )


def _interval(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"&ensp;{signed_percent(interval[0])} … {signed_percent(interval[1])}"


def _finite(interval: Sequence[float | None] | None) -> tuple[float, float] | None:
    low, high = interval or (None, None)
    return (low, high) if low is not None and high is not None and math.isfinite(low + high) else None


def _line(x: float, end: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.2f}%" x2="{end:.2f}%" y1="50%" y2="50%"/>'


def _upright(x: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="100%"/>'


def _circle(x: float, radius: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{x:.2f}%" cy="50%" r="{radius:g}"/>'


def _beyond(x: float, left: bool) -> str:
    """What lies off the axis."""
    path = "M1 15l8 -5v10z" if left else "M-1 15l-8 -5v10z"
    return f'<svg x="{x:.2f}%" overflow="visible"><path class="beyond" d="{path}"/></svg>'


def _key(kind: str, name: str) -> str:
    if kind == "range":
        drawn = '<line class="range" x1="0" x2="22" y1="6" y2="6"/><path class="diamond" d="M11 1l5 5l-5 5l-5 -5z"/>'
    else:
        drawn = f'<circle class="{kind}" cx="11" cy="6" r="4"/>'
    return f'<span><svg class="key" width="22" height="12">{drawn}</svg>{escape(name)}</span>'


def _card(title: str, caption: str, rows: Sequence[str], keys: Sequence[str], *, wide: bool = False) -> str:
    return (
        f'<div class="card{" wide" if wide else ""}"><h3>{escape(title)}</h3><p class="cap">{escape(caption)}</p>'
        f'<div class="rows">{"".join(rows)}</div><div class="legend keys">{"".join(keys)}</div></div>'
    )
