"""One GPU behind a vendor's library: what can be asked of it. The libraries are `diag/gpu_nvml.py` and
`diag/gpu_amdsmi.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["GPU_VALUES", "GpuDevice", "Values", "nonnegative", "text"]

Values = Mapping[str, float | None]

GPU_VALUES: Final = (
    "utilization",
    "memory_used_bytes",
    "power_w",
    "energy_j",
    "temperature_c",
    "sm_clock_mhz",
    "nvlink_tx_bytes",
    "nvlink_rx_bytes",
)
"""Of every sample. utilization: share of the driver's last sampling period in which a kernel ran, 0..1. energy_j and
nvlink_*: totals since the driver's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuDevice:
    index: int
    """In the library's order."""
    uuid: str | None
    facts: Mapping[str, Any]
    """What does not change: `source`, `name`, `memory_total_bytes`, `power_limit_w`."""
    calls: Mapping[str, Callable[[], Values]]
    """Function of the library → the values that it gives."""
    is_unsupported: Callable[[Exception], bool]
    """Whether an error of a call says that this card does not have the value."""


def nonnegative(value: object) -> float | None:
    """A number that a sensor can say, or None: some libraries write "N/A", or all ones, for a value they lack."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) and 0 <= value < 2**63 else None


def text(value: object) -> str | None:
    """A short text, which some versions give as bytes."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value[:200] if isinstance(value, str) and value not in ("", "N/A") else None
