"""Distributions of a comparison's page: gaps between tokens and times to first token of both arms, all runs of a load
pooled, each in the window that it was scored in.

Values are counted in fine logarithmic bins while runs are read one after the other, so that memory does not grow with
them; what is drawn is put together from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.metrics import collect
from atom.bench.records import Outcome
from atom.bench.report.axis import short, ticks
from atom.bench.report.numbers import number
from atom.bench.slices import stream_arrivals
from atom.diag.compare.recorded import read_recorded
from atom.diag.compare.window import Window
from atom.recipes.errors import AtomError

__all__ = ["Pooled", "density_card", "distribution_cards"]

FloatArray = npt.NDArray[np.float64]

LEAST_MS: Final = 1e-3
DECADES: Final = 10
PER_DECADE: Final = 1000
"""0.23% from one bin to the next."""
LEAST_COLUMNS: Final = 16
MOST_COLUMNS: Final = 96
"""Few values are drawn in wide columns."""
SHOWN: Final = (0.005, 0.995)
"""Quantiles between which the curves are drawn; what lies beyond them is in the tables."""
LOGARITHMIC: Final = 5.0
"""Ends of the axis that are further apart than this, as a ratio, have a logarithmic one."""
NARROWEST: Final = 1.1
_EDGES_MS: Final[FloatArray] = LEAST_MS * 10 ** (np.arange(DECADES * PER_DECADE + 1) / PER_DECADE)
_MIDDLES_MS: Final[FloatArray] = np.sqrt(_EDGES_MS[1:] * _EDGES_MS[:-1])
_TITLES: Final = {
    "itl": ("ITL", "gaps between arrivals of one stream (ms)"),
    "ttft": ("TTFT", "time to first token of requests sent in the window (ms)"),
}


class Pooled:
    """Counts of one quantity of one arm."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(len(_MIDDLES_MS), dtype=np.int64)

    def add(self, values_ms: npt.ArrayLike) -> None:
        """Values that are not above zero have no place on a logarithmic axis: they count in its first bin."""
        values = np.clip(np.asarray(values_ms, dtype=np.float64), _EDGES_MS[0], _EDGES_MS[-1] * 0.999)
        places = np.clip(np.searchsorted(_EDGES_MS, values, side="right") - 1, 0, len(self.counts) - 1)
        self.counts += np.bincount(places, minlength=len(self.counts))

    @property
    def n(self) -> int:
        return int(self.counts.sum())

    def quantile(self, q: float) -> float:
        """To the width of a bin."""
        return float(_MIDDLES_MS[min(int(np.searchsorted(np.cumsum(self.counts), q * self.n)), len(_MIDDLES_MS) - 1)])


def distribution_cards(out: Path, load: Mapping[str, Any]) -> str:
    """A card for each quantity; a sentence instead where no run can be read."""
    pooled = {name: (Pooled(), Pooled()) for name in _TITLES}
    unread: list[str] = []
    for side, run, window in _runs(load):
        try:
            values = _values(out / run, window)
        except (AtomError, OSError) as error:
            unread.append(str(error).partition("\n")[0])
            continue
        for name, found in values.items():
            pooled[name][side].add(found)
    cards = [density_card(*_TITLES[name], (load["base"], load["head"]), arms) for name, arms in pooled.items()]
    if unread:
        cards.append(f'<p class="cap">not in these curves: {escape("; ".join(unread[:3]))}</p>')
    return "".join(cards)


def _runs(load: Mapping[str, Any]) -> Iterator[tuple[int, str, Window]]:
    for pair in load["pairs"]:
        for run in pair["runs"]:
            for side, one in enumerate((run["base"], run["head"])):
                if one["window"] is not None:
                    window = one["window"]
                    yield side, one["run"], Window(window["start_ns"], window["end_ns"], window["steady"])


def _values(path: Path, window: Window) -> dict[str, FloatArray]:
    """Of completed requests, in ms."""
    completed = [one for one in read_recorded(path).records if one.outcome == Outcome.COMPLETED]
    _, _, gaps, later = stream_arrivals(collect(completed, {}))
    sent = [one for one in completed if one.first_ns is not None and window.holds(one.sent_ns)]
    first = [((one.first_ns or 0) - (one.sent_ns or 0)) / 1e6 for one in sent]
    return {
        "itl": gaps[(later >= window.start_ns) & (later < window.end_ns)],
        "ttft": np.array(first, dtype=np.float64),
    }


# ---- drawing


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, arms: Sequence[Pooled]) -> _Scale:
        low, high = min(one.quantile(SHOWN[0]) for one in arms), max(one.quantile(SHOWN[1]) for one in arms)
        middle = (low * high) ** 0.5
        low, high = min(low, middle / NARROWEST**0.5), max(high, middle * NARROWEST**0.5)
        log = high / low > LOGARITHMIC
        room = (high / low) ** 0.03 if log else 0.03 * (high - low)
        return cls(low / room, high * room, True) if log else cls(max(low - room, 0.0), high + room, False)

    def share(self, values: FloatArray) -> FloatArray:
        if self.log:
            return np.asarray(np.log(values / self.low) / np.log(self.high / self.low))
        return np.asarray((values - self.low) / (self.high - self.low))

    def value(self, shares: FloatArray) -> FloatArray:
        """The inverse of `share`."""
        if self.log:
            return np.asarray(self.low * (self.high / self.low) ** shares)
        return np.asarray(self.low + shares * (self.high - self.low))

    def at(self, value: float) -> float:
        return float(self.share(np.array([value]))[0])

    @property
    def ticks(self) -> list[float]:
        if not self.log:
            return ticks(self.low, self.high, 6)
        powers = range(int(np.floor(np.log10(self.low))), int(np.ceil(np.log10(self.high))) + 1)
        factors = (1, 2, 5) if self.high / self.low < 1e3 else (1,)
        marks = [factor * 10.0**power for power in powers for factor in factors]
        return [mark for mark in marks if self.low <= mark <= self.high]


def density_card(title: str, caption: str, labels: tuple[str, str], arms: tuple[Pooled, Pooled]) -> str:
    """Both arms' shares over one axis, their medians and 99th percentiles. "" where one has no values."""
    if not all(one.n for one in arms):
        return ""
    scale = _Scale.of(arms)
    count = int(min(MOST_COLUMNS, max(LEAST_COLUMNS, 3 * min(one.n for one in arms) ** (1 / 3))))
    shares = [_columns(one, scale, count) for one in arms]
    most = max(float(one.max()) for one in shares) or 1.0
    curves = "".join(_curve(share / most, index) for index, share in enumerate(shares))
    marks = "".join(_mark(scale, one, q, index, kind) for index, one in enumerate(arms) for q, kind in _MARKS)
    axis = "".join(
        f'<line class="gridline" x1="{100 * scale.at(tick):.2f}%" x2="{100 * scale.at(tick):.2f}%" y1="4" y2="180"/>'
        f'<text x="{100 * scale.at(tick):.2f}%" y="198" text-anchor="middle">{short(tick)}</text>'
        for tick in scale.ticks
    )
    keys = "".join(
        f'<span><i style="background:var(--{"ab"[index]})"></i>{escape(label)}: p50 {number(one.quantile(0.5))}, '
        f"p99 {number(one.quantile(0.99))}, n {one.n:,}</span>"
        for index, (label, one) in enumerate(zip(labels, arms, strict=True))
    )
    return (
        f'<div class="card"><h3>{escape(title)}: distribution</h3><p class="cap">{escape(caption)}</p>'
        f'<svg class="density" width="100%" role="img">{axis}'
        f'<svg y="4" width="100%" height="176" viewBox="0 0 {count} 100" preserveAspectRatio="none">{curves}</svg>'
        f'{marks}<line class="axis" x1="0" x2="100%" y1="180" y2="180"/></svg>'
        f'<div class="legend">{keys}<span>dashed: p50; dotted: p99{"; logarithmic axis" if scale.log else ""}</span>'
        "</div></div>"
    )


_MARKS: Final = ((0.5, "median"), (0.99, "tail"))


def _columns(one: Pooled, scale: _Scale, count: int) -> FloatArray:
    """Share of the values in each column of the drawing; a bin that two columns cut is shared between them."""
    ends = scale.value(np.linspace(0.0, 1.0, count + 1))
    below = np.concatenate([[0.0], np.cumsum(one.counts)])
    return np.asarray(np.diff(np.interp(ends, _EDGES_MS, below)) / one.n)


def _curve(share: FloatArray, index: int) -> str:
    """Steps, from 0 to 1 of the height, filled below."""
    steps = "".join(f"V{100 - 97 * value:.2f}H{column + 1}" for column, value in enumerate(share))
    return f'<path class="under f{index}" d="M0 100{steps}V100z"/><path class="s{index}" d="M0 100{steps}V100"/>'


def _mark(scale: _Scale, one: Pooled, q: float, index: int, kind: str) -> str:
    x = 100 * scale.at(one.quantile(q))
    return f'<line class="{kind} s{index}" x1="{x:.2f}%" x2="{x:.2f}%" y1="4" y2="180"/>' if 0 <= x <= 100 else ""
