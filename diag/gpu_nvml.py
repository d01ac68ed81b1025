"""NVIDIA GPUs as `diag/gpu_telemetry.py` samples them, through NVML (`nvidia-ml-py`, module pynvml)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final

from atom.diag.gpu_device import GpuDevice, Values, nonnegative, text

__all__ = ["open_nvml"]

_ALL_LINKS: Final = 0xFFFFFFFF
"""Scope of an NVLink field value: the sum over the links."""


def open_nvml(nvml: ModuleType) -> list[GpuDevice]:
    """Every GPU that the driver shows, in PCI order: NVML does not look at CUDA_VISIBLE_DEVICES. Raises what the
    library raises (no driver, mostly)."""
    nvml.nvmlInit()
    return [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _device(nvml: Any, index: int) -> GpuDevice:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def fact(function: str) -> Any:
        try:
            return getattr(nvml, function)(handle)
        except Exception:
            return None

    memory, limit = fact("nvmlDeviceGetMemoryInfo"), nonnegative(fact("nvmlDeviceGetEnforcedPowerLimit"))
    return GpuDevice(
        index=index,
        uuid=text(fact("nvmlDeviceGetUUID")),
        facts={
            "source": "nvml",
            "name": text(fact("nvmlDeviceGetName")),
            "memory_total_bytes": nonnegative(getattr(memory, "total", None)),
            "power_limit_w": None if limit is None else limit / 1e3,
        },
        calls=_Calls(nvml, handle).table(),
        is_unsupported=partial(_is_unsupported, nvml),
    )


def _is_unsupported(nvml: Any, error: Exception) -> bool:
    """The card has no such value, or this version of the library no such function."""
    known = (getattr(nvml, "NVMLError_NotSupported", ()), getattr(nvml, "NVMLError_FunctionNotFound", ()))
    return isinstance(error, (AttributeError, *(one for one in known if isinstance(one, type))))


@dataclass(frozen=True, slots=True)
class _Calls:
    nvml: Any
    handle: Any

    def table(self) -> Mapping[str, Callable[[], Values]]:
        return {
            "nvmlDeviceGetUtilizationRates": self.utilization,
            "nvmlDeviceGetMemoryInfo": self.memory,
            "nvmlDeviceGetPowerUsage": self.power,
            "nvmlDeviceGetTotalEnergyConsumption": self.energy,
            "nvmlDeviceGetTemperature": self.temperature,
            "nvmlDeviceGetClockInfo": self.clock,
            "nvmlDeviceGetFieldValues": self.nvlink,
        }

    def utilization(self) -> Values:
        return {"utilization": self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100}

    def memory(self) -> Values:
        return {"memory_used_bytes": self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used}

    def power(self) -> Values:
        return {"power_w": self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3}

    def energy(self) -> Values:
        return {"energy_j": self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3}

    def temperature(self) -> Values:
        return {"temperature_c": self.nvml.nvmlDeviceGetTemperature(self.handle, self.nvml.NVML_TEMPERATURE_GPU)}

    def clock(self) -> Values:
        return {"sm_clock_mhz": self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)}

    def nvlink(self) -> Values:
        """Totals since the driver's start; one call for both directions, which takes no time on the card. (PCIe's rates
        are left out: the driver watches for 20 ms to tell each.)"""
        fields = {
            "nvlink_tx_bytes": self.nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
            "nvlink_rx_bytes": self.nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        }
        found = self.nvml.nvmlDeviceGetFieldValues(self.handle, [(field, _ALL_LINKS) for field in fields.values()])
        return {
            name: value.value.ullVal * 1024 if value.nvmlReturn == 0 else None
            for name, value in zip(fields, found, strict=True)
        }
