"""AMD GPUs as `diag/gpu_telemetry.py` samples them, through ROCm's amdsmi. Tested against a fake of the library alone,
never on hardware. Values that a card does not have come as the text "N/A"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final

from atom.diag.gpu_device import GpuDevice, Values, nonnegative, text

__all__ = ["open_amdsmi"]

_MEGABYTE: Final = 1 << 20
_NO_SUCH_VALUE: Final = ("NOT_SUPPORTED", "NOT_YET_IMPLEMENTED", "UNEXPECTED_DATA")


def open_amdsmi(amdsmi: ModuleType) -> list[GpuDevice]:
    """Every GPU, in the library's order. Raises what the library raises (no driver, mostly)."""
    amdsmi.amdsmi_init()
    return [_device(amdsmi, index, handle) for index, handle in enumerate(amdsmi.amdsmi_get_processor_handles())]


def _device(amdsmi: Any, index: int, handle: Any) -> GpuDevice:
    def fact(function: str, *names: str) -> Any:
        try:
            found = getattr(amdsmi, function)(handle)
        except Exception:
            return None
        return _field(found, *names) if names else found

    memory = nonnegative(fact("amdsmi_get_gpu_vram_usage", "vram_total"))
    return GpuDevice(
        index=index,
        uuid=text(fact("amdsmi_get_gpu_device_uuid")),
        facts={
            "source": "amdsmi",
            "name": text(fact("amdsmi_get_gpu_asic_info", "market_name")),
            "memory_total_bytes": None if memory is None else memory * _MEGABYTE,
            "power_limit_w": None,
        },
        calls=_Calls(amdsmi, handle).table(),
        is_unsupported=partial(_is_unsupported, amdsmi),
    )


def _is_unsupported(amdsmi: Any, error: Exception) -> bool:
    """The card has no such value, or this version of the library no such function."""
    kind = getattr(amdsmi, "AmdSmiLibraryException", None)
    said = str(error).upper().replace(" ", "_")
    library = isinstance(kind, type) and isinstance(error, kind) and any(code in said for code in _NO_SUCH_VALUE)
    return library or isinstance(error, AttributeError)


def _field(found: Any, *names: str) -> Any:
    """The first of these fields that is a value."""
    values = (found.get(name) for name in names) if isinstance(found, Mapping) else ()
    return next((value for value in values if value not in (None, "N/A", "")), None)


@dataclass(frozen=True, slots=True)
class _Calls:
    amdsmi: Any
    handle: Any

    def table(self) -> Mapping[str, Callable[[], Values]]:
        return {
            "amdsmi_get_gpu_activity": self.activity,
            "amdsmi_get_gpu_vram_usage": self.memory,
            "amdsmi_get_power_info": self.power,
            "amdsmi_get_energy_count": self.energy,
            "amdsmi_get_temp_metric": self.temperature,
            "amdsmi_get_clock_info": self.clock,
        }

    def activity(self) -> Values:
        busy = nonnegative(_field(self.amdsmi.amdsmi_get_gpu_activity(self.handle), "gfx_activity"))
        return {"utilization": None if busy is None else busy / 100}

    def memory(self) -> Values:
        used = nonnegative(_field(self.amdsmi.amdsmi_get_gpu_vram_usage(self.handle), "vram_used"))
        return {"memory_used_bytes": None if used is None else used * _MEGABYTE}

    def power(self) -> Values:
        # MI300 has the current power, older cards an average, and newer versions of the library one field for both.
        found = self.amdsmi.amdsmi_get_power_info(self.handle)
        names = ("current_socket_power", "average_socket_power", "socket_power")
        return {"power_w": nonnegative(_field(found, *names))}

    def energy(self) -> Values:
        found = self.amdsmi.amdsmi_get_energy_count(self.handle)
        ticks = nonnegative(_field(found, "energy_accumulator", "power"))
        microjoules = nonnegative(_field(found, "counter_resolution"))
        return {"energy_j": None if ticks is None or microjoules is None else ticks * microjoules / 1e6}

    def temperature(self) -> Values:
        kinds, metric = self.amdsmi.AmdSmiTemperatureType, self.amdsmi.AmdSmiTemperatureMetric.CURRENT
        found = self.amdsmi.amdsmi_get_temp_metric(self.handle, kinds.JUNCTION, metric)
        return {"temperature_c": nonnegative(found)}

    def clock(self) -> Values:
        found = self.amdsmi.amdsmi_get_clock_info(self.handle, self.amdsmi.AmdSmiClkType.GFX)
        return {"sm_clock_mhz": nonnegative(_field(found, "clk", "cur_clk"))}
