"""What the GPUs did in a window of time: `server/gpu.jsonl` as columns, and its figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from atom.diag.gpu_device import GPU_VALUES
from atom.diag.server_figure import ServerFigure

__all__ = ["GpuSamples", "gpu_figures"]

FloatArray = npt.NDArray[np.float64]

_MEGABYTE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuSamples:
    """One device's samples; NaN where a value is missing."""

    index: int
    name: str | None
    t_ns: npt.NDArray[np.int64]
    values: Mapping[str, FloatArray]
    """By the names of `GPU_VALUES`."""

    def __post_init__(self) -> None:
        assert set(self.values) == set(GPU_VALUES)

    def known(self, name: str, start_ns: int, end_ns: int) -> FloatArray:
        first, last = np.searchsorted(self.t_ns, [start_ns, end_ns])
        values = self.values[name][first:last]
        return values[~np.isnan(values)]

    def power_w(self, start_ns: int, end_ns: int) -> float | None:
        """Mean power: by the energy counter where the card has one that grew, else the mean of the samples."""
        first, last = np.searchsorted(self.t_ns, [start_ns, end_ns])
        energy, times = self.values["energy_j"][first:last], self.t_ns[first:last]
        known = ~np.isnan(energy)
        if np.count_nonzero(known) >= 2:
            joules, seconds = energy[known], times[known] / 1e9
            if joules[-1] > joules[0] and seconds[-1] > seconds[0]:
                return float((joules[-1] - joules[0]) / (seconds[-1] - seconds[0]))
        power = self.known("power_w", start_ns, end_ns)
        return float(power.mean()) if len(power) else None


def gpu_figures(
    gpus: Iterable[GpuSamples], start_ns: int, end_ns: int, tokens_per_s: float | None
) -> list[ServerFigure]:
    """Figures of [start_ns, end_ns) over these devices; none where nothing was sampled in it. `tokens_per_s`: that the
    server generated, for the energy of a token."""
    seen = [gpu for gpu in gpus if len(gpu.known("utilization", start_ns, end_ns)) or gpu.power_w(start_ns, end_ns)]
    many = f"{len(seen)} GPUs" if len(seen) != 1 else "the GPU"
    label = "GPU" if len(seen) == 1 else f"{len(seen)} GPUs"

    def pooled(name: str) -> tuple[list[FloatArray], int]:
        found = [values for gpu in seen if len(values := gpu.known(name, start_ns, end_ns))]
        return found, sum(map(len, found))

    busy, busy_n = pooled("utilization")
    memory, memory_n = pooled("memory_used_bytes")
    heat, heat_n = pooled("temperature_c")
    clock, clock_n = pooled("sm_clock_mhz")
    powers = [gpu.power_w(start_ns, end_ns) for gpu in seen]
    watts = [power for power in powers if power is not None]
    total = sum(watts) if seen and len(watts) == len(seen) else None
    power_n = pooled("power_w")[1]
    seconds = (end_ns - start_ns) / 1e9
    figures = [
        ServerFigure(
            "gpu_utilization_mean",
            label,
            float(np.mean([values.mean() for values in busy])) if busy else None,
            "fraction",
            f"share of the time in which a kernel ran, as the driver samples it, mean over the window and {many}",
            busy_n,
            "busy",
        ),
        ServerFigure(
            "gpu_power_w",
            label,
            total,
            "W",
            f"mean power of {many} together: by the energy counter where there is one, else by the samples",
            power_n,
        ),
        ServerFigure(
            "gpu_energy_j",
            label,
            None if total is None else total * seconds,
            "J",
            "that power × the length of the window",
            power_n,
            detail=True,
        ),
        ServerFigure(
            "energy_per_output_token_j",
            label,
            total / tokens_per_s if total is not None and tokens_per_s else None,
            "J/token",
            "that power ÷ tokens that the server generated per second, by its /metrics",
            power_n,
        ),
        ServerFigure(
            "gpu_memory_max_mb",
            label,
            max(float(values.max()) for values in memory) / _MEGABYTE if memory else None,
            "MB",
            "most memory in use on one GPU (MB = 2^20 bytes), of whatever process",
            memory_n,
            "most memory",
        ),
        ServerFigure(
            "gpu_temperature_max_c",
            label,
            max(float(values.max()) for values in heat) if heat else None,
            "°C",
            "highest temperature of one GPU",
            heat_n,
            "most",
            detail=True,
        ),
        ServerFigure(
            "gpu_sm_clock_mean_mhz",
            label,
            float(np.mean([values.mean() for values in clock])) if clock else None,
            "MHz",
            f"clock of the compute units, mean over the window and {many}",
            clock_n,
            detail=True,
        ),
    ]
    return [figure for figure in figures if figure.value is not None]
