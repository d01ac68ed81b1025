"""Between the clock of the records (CLOCK_MONOTONIC) and the wall clock, for files of others that have the latter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from time import monotonic_ns, time_ns
from typing import Any

from atom.bench.records import is_count

__all__ = ["WallClock"]


@dataclass(frozen=True, slots=True)
class WallClock:
    """The wall clock as it stood at one moment. Steps that it takes later are not followed: times of one run keep their
    distances."""

    monotonic_ns: int
    unix_ns: int

    @classmethod
    def now(cls) -> WallClock:
        """Read between two readings of the other clock, the closest of a few pairs."""
        best: tuple[int, int, int] | None = None
        for _ in range(5):
            before, unix, after = monotonic_ns(), time_ns(), monotonic_ns()
            if best is None or after - before < best[0]:
                best = (after - before, (before + after) // 2, unix)
        assert best is not None
        return cls(best[1], best[2])

    @classmethod
    def of_run(cls, run: Mapping[str, Any]) -> WallClock:
        """As run.json has it; to the second where it is of an older version."""
        start, unix = run.get("start_ns"), run.get("start_unix_ns")
        if is_count(start) and is_count(unix):
            return cls(int(start or 0), int(unix or 0))
        try:
            when = datetime.fromisoformat(str(run.get("start_time")))
        except ValueError:
            return cls(0, 0)
        return cls(start if isinstance(start, int) else 0, int(when.timestamp()) * 10**9)

    def wall_ns(self, moment_ns: int) -> int:
        """`time.monotonic_ns` → nanoseconds since 1970."""
        return self.unix_ns + moment_ns - self.monotonic_ns

    def monotonic(self, wall_ns: int) -> int:
        """Nanoseconds since 1970 → `time.monotonic_ns`."""
        return self.monotonic_ns + wall_ns - self.unix_ns
