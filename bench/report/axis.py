"""Ticks of an axis and how its numbers are written."""

from __future__ import annotations

import math

__all__ = ["short", "ticks"]


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round steps of 1, 2 or 5 that give about `count` of them."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, int(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.4g}" if size >= 1e-9 else "0"
