"""Figures and counts as the sentences of a profile say them: short, and with as many digits as a reader can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from atom.diag.gc_profile.model import Growth

__all__ = ["PassWords", "amount", "counted", "duration", "ends", "figure", "joined", "pass_words", "per_cent"]


@dataclass(frozen=True, slots=True)
class PassWords:
    """What a pass over old objects is called in a sentence."""

    one: str
    many: str


_GEN2: Final = PassWords("gen-2 pass", "gen-2 passes")
_PASSES: Final = {
    "generational": _GEN2,
    "incremental": PassWords("increment or full pass", "increments and full passes"),
}


def pass_words(collector: str | None) -> PassWords:
    """By the kind of collector; None where no process was watched."""
    return _GEN2 if collector is None else _PASSES.get(collector, PassWords("pass", "passes"))


def counted(n: int, one: str, many: str | None = None) -> str:
    """`1 scrape`, `40 scrapes`."""
    return f"{n:,} {one if n == 1 else many if many is not None else f'{one}s'}"


def joined(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def duration(seconds: float) -> str:
    """`37 ms`, `4.53 s`, `244 s`."""
    if seconds < 0.9995:
        return f"{figure(seconds * 1e3)} ms"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def per_cent(share: float) -> str:
    """A share, 0..1: `11.7%`, `0.07%`."""
    if 0 < share < 0.00005:
        return "under 0.01%"
    return f"{share:.1%}" if share >= 0.001 else f"{share:.2%}" if share else "0%"


def figure(value: float) -> str:
    """Whole from 50 on, one decimal from 1 on, two digits below."""
    magnitude = abs(value)
    if magnitude >= 49.95:
        return f"{value:,.0f}"
    return f"{value:.1f}".removesuffix(".0") if magnitude >= 0.95 else f"{value:.2g}"


def amount(value: float, unit: str) -> str:
    """With its unit: `162 ms`, `54 KB`, `1.3%`, `601 series`."""
    if unit == "fraction":
        return per_cent(value)
    scaled, name = (value / 1024, "KB") if unit == "bytes" else (value, unit)
    return f"{figure(scaled)} {name}"


def ends(growth: Growth) -> str:
    """`11.4 to 162 ms`: what was seen at both ends."""
    assert growth.first is not None
    assert growth.last is not None
    first, last = amount(growth.first, growth.unit), amount(growth.last, growth.unit)
    unit = first.rpartition(" ")[2]
    return f"{first.removesuffix(f' {unit}')} to {last}" if last.endswith(f" {unit}") else f"{first} to {last}"
