"""The measured phase in slices of equal width (`--slice-duration`): how rates and latencies went over time.

One entry per slice in each column; the last slice ends with the phase. Bounded: a phase with more than `MAX_SLICES` of
them is cut into wider ones. Latencies are defined as in `bench/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.metrics import FloatArray, Samples
from atom.bench.records import Outcome, RequestRecord

__all__ = [
    "DEFAULT_SLICE_S",
    "LEAST_SLICE_S",
    "MAX_SLICES",
    "ByPlace",
    "IntArray",
    "Slices",
    "slice_width_s",
    "slices_of",
    "stream_arrivals",
]

DEFAULT_SLICE_S: Final = 1.0
LEAST_SLICE_S: Final = 1e-3
MAX_SLICES: Final = 3600

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ByPlace:
    """Values, each with the slice that it belongs to."""

    values: FloatArray
    places: IntArray

    def percentiles(self, q: float, count: int) -> list[float | None]:
        """Of each of `count` slices; None where it has no value."""
        order = np.argsort(self.places, kind="stable")
        bounds = np.searchsorted(self.places[order], np.arange(count + 1))
        parts = (self.values[order[low:high]] for low, high in pairwise(bounds))
        return [round(float(np.percentile(part, q)), 4) if len(part) else None for part in parts]


@dataclass(frozen=True, slots=True)
class Slices:
    """Columns over the slices [i · width, (i + 1) · width) from the start."""

    width_ns: int
    begins_ns: IntArray
    """From the start."""
    seconds: FloatArray
    """How long each is: the last may be shorter."""
    started: IntArray
    """Requests sent in it."""
    completed: IntArray
    failed: IntArray
    """Requests that ended in it, also those that never got a connection."""
    running: FloatArray
    """Requests between sent and ended, averaged over the slice."""
    output_tokens_per_s: FloatArray
    ttft_ms: ByPlace
    """By the slice in which the request was sent."""
    itl_ms: ByPlace
    """By the slice in which the later chunk arrived."""

    def __len__(self) -> int:
        return len(self.begins_ns)

    def as_dict(self) -> dict[str, Any]:
        """For summary.json; the columns are described in docs/run_directory.md."""
        return {
            "width_s": self.width_ns / 1e9,
            "start_s": (self.begins_ns / 1e9).round(6).tolist(),
            "started": self.started.tolist(),
            "completed": self.completed.tolist(),
            "failed": self.failed.tolist(),
            "running": self.running.round(3).tolist(),
            "output_tokens_per_s": self.output_tokens_per_s.round(3).tolist(),
            "ttft_p50_ms": self.ttft_ms.percentiles(50, len(self)),
            "itl_p50_ms": self.itl_ms.percentiles(50, len(self)),
        }


def slice_width_s(said: object) -> float:
    """The width that a run's run.json says, which may be anything."""
    usable = isinstance(said, int | float) and not isinstance(said, bool) and LEAST_SLICE_S <= said < 1e9
    return float(said) if usable else DEFAULT_SLICE_S  # type: ignore[arg-type]


def slices_of(records: Sequence[RequestRecord], samples: Samples, start_ns: int, end_ns: int, width_s: float) -> Slices:
    """Cut [start_ns, end_ns) up. `samples`: of the completed ones among the `records`. What lies outside counts to the
    first or the last slice."""
    wall_ns = max(0, end_ns - start_ns)
    widened = max(1, -(-wall_ns // round(width_s * 1e9 * MAX_SLICES)))
    width_ns = round(width_s * 1e9) * widened
    count = -(-wall_ns // width_ns)
    edges = np.minimum(np.arange(count + 1, dtype=np.int64) * width_ns, wall_ns)
    seconds = np.diff(edges) / 1e9

    def places(moments_ns: IntArray) -> IntArray:
        return np.clip((moments_ns - start_ns) // width_ns, 0, max(count - 1, 0))

    def counted(moments: list[int]) -> IntArray:
        return np.bincount(places(np.array(moments, dtype=np.int64)), minlength=count)[:count].astype(np.int64)

    sent = [record for record in records if record.sent_ns is not None]
    spans = np.array([(one.sent_ns, one.end_ns) for one in sent if one.end_ns is not None], dtype=np.int64)
    ended = [(one.outcome, one.end_ns) for one in records if one.end_ns is not None]
    arrivals_ns, tokens, gaps_ms, later_ns = stream_arrivals(samples)
    first = [(one.sent_ns, one.first_ns) for one in sent if one.outcome == Outcome.COMPLETED and one.first_ns]
    ttft = np.array(first, dtype=np.int64).reshape(-1, 2)
    per_slice = np.bincount(places(arrivals_ns), weights=tokens, minlength=count)[:count]
    return Slices(
        width_ns=width_ns,
        begins_ns=edges[:-1],
        seconds=seconds,
        started=counted([one.sent_ns for one in sent if one.sent_ns is not None]),
        completed=counted([end for outcome, end in ended if outcome == Outcome.COMPLETED]),
        failed=counted([end for outcome, end in ended if outcome == Outcome.FAILED]),
        running=_busy_ns(spans.reshape(-1, 2) - start_ns, edges) / 1e9 / seconds,
        output_tokens_per_s=per_slice / seconds,
        ttft_ms=ByPlace((ttft[:, 1] - ttft[:, 0]) / 1e6, places(ttft[:, 0])),
        itl_ms=ByPlace(gaps_ms, places(later_ns)),
    )


def stream_arrivals(samples: Samples) -> tuple[IntArray, FloatArray, FloatArray, IntArray]:
    """Arrival times and tokens of all streams, and their gaps in ms with the time of the later arrival."""
    if not samples.tokens_at:
        nothing, no_time = np.array([]), np.array([], dtype=np.int64)
        return no_time, nothing, nothing, no_time
    lengths = [len(times) for times, _ in samples.tokens_at]
    times_ns = np.rint(np.concatenate([times for times, _ in samples.tokens_at]) * 1e9).astype(np.int64)
    tokens = np.concatenate([tokens for _, tokens in samples.tokens_at])
    within = np.ones(len(times_ns), dtype=bool)
    within[np.cumsum([0, *lengths[:-1]])] = False  # the first of a stream has no gap before it
    later = times_ns[within]
    gaps: FloatArray = np.diff(times_ns, prepend=times_ns[:1])[within] / 1e6
    return times_ns, tokens, gaps, later


def _busy_ns(spans: IntArray, edges: IntArray) -> FloatArray:
    """Σ over `spans` [n, 2] of the time that each covers, between consecutive `edges`."""

    def since(moments: IntArray) -> FloatArray:
        """Σ max(0, edge − moment) at each edge."""
        moments = np.sort(moments)
        before = np.searchsorted(moments, edges)
        sums = np.concatenate([[0.0], np.cumsum(moments, dtype=np.float64)])
        result: FloatArray = before * edges.astype(np.float64) - sums[before]
        return result

    return np.diff(since(spans[:, 0]) - since(spans[:, 1]))
