"""Clocks of several machines: what to add to the times that a worker noted to have them on the clock of rank 0.

Times in a run directory are those of the machine that noted them. run.json has the measured offsets (`ranks[].clock`),
and whoever reads times of several workers together adds them. Processes of one boot share a clock and need none.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atom.recipes.errors import UsageError
from atom.recipes.processes import boot_id

__all__ = ["ClockOffset", "OffsetMeasurement", "clock_identity", "clock_notes", "clock_offsets"]


@dataclass(frozen=True, slots=True)
class OffsetMeasurement:
    """One burst of questions and answers between two machines."""

    at_ns: int
    """When, by the clock that is off."""
    offset_ns: int
    """To be added to its times."""
    uncertainty_ns: int
    """±: half the shortest round trip; the answer was given somewhere within it."""

    @classmethod
    def best_of(cls, exchanges: Sequence[tuple[int, int, int]]) -> OffsetMeasurement:
        """Of (asked, answered, heard): asked and heard by the clock of rank 0, answered by the other one. The shortest
        round trip says most, since whatever made another one longer may have done so on one way only."""
        asked, answered, heard = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
        return cls(answered, (asked + heard) // 2 - answered, (heard - asked + 1) // 2)

    def as_dict(self) -> dict[str, int]:
        return {"at_ns": self.at_ns, "offset_ns": self.offset_ns, "uncertainty_ns": self.uncertainty_ns}


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Of one machine: measured before the load and after it, in a straight line between, since clocks drift."""

    measured: tuple[OffsetMeasurement, ...]

    def at(self, moment_ns: int) -> int:
        points = self.measured
        after = bisect_right([point.at_ns for point in points], moment_ns)
        if after == 0:
            return points[0].offset_ns
        if after == len(points):
            return points[-1].offset_ns
        left, right = points[after - 1], points[after]
        span = right.at_ns - left.at_ns
        return left.offset_ns + (right.offset_ns - left.offset_ns) * (moment_ns - left.at_ns) // span

    @property
    def uncertainty_ns(self) -> int:
        return max(point.uncertainty_ns for point in self.measured)


def clock_identity() -> str:
    """The same for processes that share CLOCK_MONOTONIC: those of one boot and one time namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/time")  # noqa: PTH115 (it leads nowhere)
    except OSError:
        namespace = ""
    return f"{boot_id()} {namespace}".strip()


def clock_offsets(run: Mapping[str, Any]) -> dict[str, ClockOffset]:
    """Worker → offset, from a run.json; only of workers whose clock is another one. UsageError if it says it wrong."""
    offsets: dict[str, ClockOffset] = {}
    for rank in run.get("ranks") or ():
        try:
            points = [
                OffsetMeasurement(_time(point["at_ns"]), _offset(point["offset_ns"]), _time(point["uncertainty_ns"]))
                for point in rank.get("clock") or ()
            ]
            workers = [str(worker) for worker in rank["workers"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UsageError("run.json: ranks must be objects with workers, and clock as it was measured") from None
        if points:
            points.sort(key=lambda point: point.at_ns)
            offsets |= dict.fromkeys(workers, ClockOffset(tuple(points)))
    return offsets


def clock_notes(run: Mapping[str, Any]) -> list[str]:
    """What a reader of figures has to know of the clocks they are of."""
    offsets = clock_offsets(run)
    if not offsets:
        return []
    worst = max(offset.uncertainty_ns for offset in offsets.values()) / 1e6
    workers = "worker " + next(iter(offsets)) if len(offsets) == 1 else f"{len(offsets)} workers"
    return [f"times of {workers} are of another machine's clock, put on that of rank 0 to within ±{worst:.3f} ms"]


def _time(value: object) -> int:
    if _offset(value) < 0:
        raise ValueError("not a time")
    return _offset(value)


def _offset(value: object) -> int:
    if type(value) is not int or abs(value) >= 1 << 62:
        raise ValueError("not a whole number of nanoseconds")
    return value
