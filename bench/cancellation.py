"""Which requests a load cancels on purpose, and what their records say."""

from __future__ import annotations

from typing import Final

from atom.bench.records import Outcome, RequestRecord

__all__ = ["is_cancelled", "mark_cancelled"]

_MASK: Final = (1 << 64) - 1
_STREAM: Final = 5


def is_cancelled(rate: float, seed: int, index: int) -> bool:
    """Whether request `index` is one of the share `rate`: by (seed, index) alone, in whatever process.

    SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014) of a counter: uniform enough to choose by, and a few
    hundred nanoseconds.
    """
    if not rate:
        return False
    z = (seed * 0x9E3779B97F4A7C15 + _STREAM) & _MASK
    z = (z ^ (index * 0xD1342543DE82EF95)) & _MASK
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z < rate * 2.0**64


def mark_cancelled(record: RequestRecord, delay_s: float) -> None:
    """The client gave up on `record` after `delay_s` seconds as planned: no failure of the server's."""
    if record.outcome == Outcome.FAILED and record.error_class == "timeout":
        record.outcome = Outcome.CANCELLED
        record.error_class = "cancelled"
        record.error_message = f"cancelled on purpose {delay_s:g} s after it was sent"
