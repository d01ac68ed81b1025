"""Reading what is wanted of a Prometheus text body, fast: a body can have 40,000 lines and is read once a second.

A full parser would cost more than the scrape. This one counts sample lines, groups them by metric name, and reads the
numbers of chosen metrics; lines that are no samples are counted as malformed. The body is whatever a server sent: names
are bounded in length and number, and nothing needs it to be UTF-8.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from atom.diag.dialects import COMBINED, Combine

__all__ = ["MetricsText", "parse_metrics"]

_SAMPLE: Final = re.compile(
    rb"([a-zA-Z_:][a-zA-Z0-9_:]{0,199})(?:[ \t]*\{.*\})?[ \t]+([-+]?(?:[0-9.][0-9.eE+-]*|[iI]nf|NaN|nan))(?=[ \t\r#]|$)"
)
"""Name, labels, value; what may follow (a timestamp, an exemplar) is not looked at."""
_LARGEST: Final = 5
_MOST_NAMES: Final = 20_000
_CHILDREN: Final = (b"_bucket", b"_count", b"_sum", b"_created", b"_total")


@dataclass(frozen=True, slots=True)
class MetricsText:
    """What one body said."""

    series: int
    """Sample lines: every label combination, histogram buckets included."""
    families: int
    """Distinct metric names; a histogram's buckets, sum and count are one."""
    by_family: dict[str, int] = field(default_factory=dict)
    """Series of each, those with most first; of a body with absurdly many names, the first 20,000."""
    values: dict[str, float | None] = field(default_factory=dict)
    malformed: int = 0

    @property
    def largest(self) -> dict[str, int]:
        """The families with the most series."""
        return dict(list(self.by_family.items())[:_LARGEST])


def parse_metrics(body: bytes, wanted: Mapping[str, tuple[str, ...]]) -> MetricsText:
    """Count the series of `body` and read the `wanted` values; None for a value without a finite sample."""
    chosen = {name.encode() for names in wanted.values() for name in names}
    counts: dict[bytes, int] = {}
    samples: dict[bytes, _Tally] = {}
    malformed = series = 0
    sample = _SAMPLE.match
    for line in body.split(b"\n"):
        if not line or line[0] == 35 or line.isspace():  # 35: '#'
            continue
        match = sample(line)
        if match is None:
            malformed += 1
            continue
        series += 1
        name = match[1]
        if name in counts:
            counts[name] += 1
        elif len(counts) < _MOST_NAMES:
            counts[name] = 1
        if name in chosen and (value := _value(match[2])) is not None:
            tally = samples.get(name)
            if tally is None:
                tally = samples[name] = _Tally()
            tally.add(value)
    families: Counter[bytes] = Counter()
    for name, count in counts.items():
        families[_family(name)] += count
    return MetricsText(
        series=series,
        families=len(families),
        by_family={name.decode(): count for name, count in families.most_common()},
        values={word: _combine(word, names, samples) for word, names in wanted.items()},
        malformed=malformed,
    )


def _value(text: bytes) -> float | None:
    """None if it is no number, or not finite."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _family(name: bytes) -> bytes:
    for child in _CHILDREN:
        if name.endswith(child):
            return name[: -len(child)]
    return name


@dataclass(slots=True)
class _Tally:
    """The samples of one metric, added up: some metrics have a series for every request served."""

    count: int = 0
    total: float = 0.0
    most: float = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.most = max(self.most, value)


def _combine(word: str, names: tuple[str, ...], samples: Mapping[bytes, _Tally]) -> float | None:
    for name in names:
        found = samples.get(name.encode())
        if found is not None:
            how = COMBINED.get(word, Combine.SUM)
            if how is Combine.MEAN:
                return found.total / found.count
            return {Combine.SUM: found.total, Combine.MOST: found.most, Combine.COUNT: float(found.count)}[how]
    return None
