"""Reading what is wanted of a Prometheus text body, fast: a body can have 40,000 lines and is read once a second.

A full parser would cost more than the scrape. This one counts sample lines, groups them by metric name, and reads the
numbers of chosen metrics; lines that are no samples are counted as malformed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from atom.diag.dialects import AVERAGED

__all__ = ["MetricsText", "parse_metrics"]

_NAME: Final = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LARGEST: Final = 5
_CHILDREN: Final = (b"_bucket", b"_count", b"_sum", b"_created", b"_total")


@dataclass(frozen=True, slots=True)
class MetricsText:
    """What one body said."""

    series: int
    """Sample lines: every label combination, histogram buckets included."""
    families: int
    """Distinct metric names; a histogram's buckets, sum and count are one."""
    largest: dict[str, int] = field(default_factory=dict)
    """The families with the most series."""
    values: dict[str, float | None] = field(default_factory=dict)
    malformed: int = 0


def parse_metrics(body: bytes, wanted: Mapping[str, tuple[str, ...]]) -> MetricsText:
    """Count the series of `body` and read the `wanted` values; None for a value without a finite sample."""
    chosen = {name.encode() for names in wanted.values() for name in names}
    counts: Counter[bytes] = Counter()
    samples: dict[bytes, list[float]] = {}
    malformed = 0
    for line in body.split(b"\n"):
        if not line or line[0] == 35 or line.isspace():  # 35: '#'
            continue
        match = _NAME.match(line)
        if match is None or match.end() == len(line) or line[match.end()] not in b"{ \t":
            malformed += 1
            continue
        name = match[0]
        counts[name] += 1
        if name in chosen and (value := _value(line, match.end())) is not None:
            samples.setdefault(name, []).append(value)
    families: Counter[bytes] = Counter()
    for name, count in counts.items():
        families[_family(name)] += count
    return MetricsText(
        series=counts.total(),
        families=len(families),
        largest={name.decode(): count for name, count in families.most_common(_LARGEST)},
        values={word: _combine(word, names, samples) for word, names in wanted.items()},
        malformed=malformed,
    )


def _value(line: bytes, at: int) -> float | None:
    """The number after the labels; a timestamp may follow it. None if it is none, or not finite."""
    rest = line[line.rfind(b"}") + 1 :] if line[at] == 123 else line[at:]  # 123: '{'
    fields = rest.split()
    try:
        value = float(fields[0])
    except (IndexError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _family(name: bytes) -> bytes:
    for child in _CHILDREN:
        if name.endswith(child):
            return name[: -len(child)]
    return name


def _combine(word: str, names: tuple[str, ...], samples: Mapping[bytes, list[float]]) -> float | None:
    for name in names:
        found = samples.get(name.encode())
        if found:
            return sum(found) / len(found) if word in AVERAGED else sum(found)
    return None
