"""How a figure is written, in tables and pages alike. (The labels of an axis: `bench/report/axis.py`.)"""

from __future__ import annotations

__all__ = ["number", "signed_percent"]


def number(value: float | None, digits: int = 4) -> str:
    """About `digits` significant digits with thousands separators; what was not measured is "–"."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    magnitude = abs(value)
    decimals = next((d for limit, d in ((10, 2), (100, 1 if digits < 4 else 2), (1000, 1)) if magnitude < limit), 0)
    if magnitude < 0.1:
        return f"{value:.2g}"
    return f"{value:,.{decimals}f}"


def signed_percent(value: float | None) -> str:
    """A change with its sign (U+2212 for minus), without the unit; what is not known is "–"."""
    if value is None:
        return "–"
    return f"{value:+.{2 if abs(value) < 10 else 1}f}".replace("-", "−")
