"""Times of a trace, made the arrivals of a load."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from atom.recipes.errors import UsageError

__all__ = ["check_time_scale", "schedule_ns"]

_MAX_NS: Final = 10 * 365 * 86_400 * 1_000_000_000


def check_time_scale(scale: float) -> None:
    if not (scale > 0 and math.isfinite(scale)):
        raise UsageError(
            f"--time-scale must be positive, got {scale:g}: 2 makes the gaps twice as long (half the load), 0.5 half "
            "as long"
        )


def schedule_ns(times_ns: npt.NDArray[np.int64], scale: float) -> npt.NDArray[np.int64]:
    """[n] ascending times → [n] offsets of a load that begins with the first; gaps are multiplied by `scale`."""
    check_time_scale(scale)
    if not len(times_ns):
        return times_ns
    offsets: npt.NDArray[np.int64] = times_ns - times_ns[0]
    if int(offsets[-1]) * scale > _MAX_NS:
        raise UsageError("the times of the trace, times --time-scale, make a schedule of more than ten years")
    return offsets if scale == 1 else np.rint(offsets * scale).astype(np.int64)
