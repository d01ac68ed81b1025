"""Samples the GPUs of this host once a second beside a load: utilisation, memory, power, temperature, clock.

Runs in the capture process. One line per device and sample in `server/gpu.jsonl`; null for what a card does not have.
The vendor's library may raise, or hang in its driver: that costs samples, is written down, and never costs the run.
"""

from __future__ import annotations

import importlib
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from atom.diag.gpu_amdsmi import open_amdsmi
from atom.diag.gpu_device import GPU_VALUES, GpuDevice, nonnegative
from atom.diag.gpu_nvml import open_nvml

__all__ = ["GpuSampler", "telemetry_modules"]

PERIOD_S: Final = 1.0
PATIENCE_S: Final = 5.0
"""A call that has not returned after this is said to hang."""
_LOOK_S: Final = 0.25
_LONGEST_ERROR: Final = 200

_LIBRARIES: Final[Mapping[str, Callable[[ModuleType], list[GpuDevice]]]] = {"pynvml": open_nvml, "amdsmi": open_amdsmi}

Record = Callable[[Mapping[str, Any]], None]


def telemetry_modules() -> list[str]:
    """The installed libraries that GPUs can be asked through; whether there is a GPU is not known by that."""
    return [name for name in _LIBRARIES if find_spec(name) is not None]


class GpuSampler:
    """Samples the chosen devices (indices, or beginnings of UUIDs; none: all) until it is stopped."""

    def __init__(
        self,
        chosen: Sequence[str] = (),
        *,
        required: bool = False,
        period_s: float = PERIOD_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.problem: str | None = None
        """What kept it from sampling all that was asked for; None if nothing did. That there is no GPU is a problem
        only where one is `required`."""
        self._required = required
        self._chosen = tuple(chosen)
        self.period_s = period_s
        self.patience_s = patience_s
        self._call: tuple[str, int | None, float] | None = None
        """The call under way: function, device, since when."""
        self._lock = threading.Lock()
        self._unsupported: set[tuple[int, str]] = set()

    def run(self, record: Record, stop: threading.Event) -> None:
        """Sample and hand each line to `record` until `stop` is set. Calls are made on a thread of their own, which is
        left behind if one never returns."""

        def write(line: Mapping[str, Any]) -> None:
            with self._lock:
                record(line)

        worker = threading.Thread(target=self._work, args=(write, stop), daemon=True, name="atom-gpu-calls")
        worker.start()
        told: tuple[str, int | None, float] | None = None
        while worker.is_alive() and not stop.is_set():
            worker.join(_LOOK_S)
            call = self._call
            if call is not None and call is not told and time.monotonic() - call[2] > self.patience_s:
                told = call
                self.problem = f"{self._place(call)} did not return within {self.patience_s:g} s: samples are missing"
                write(_error_line(call[1], f"{call[0]} did not return within {self.patience_s:g} s"))
        worker.join(_LOOK_S)

    def _place(self, call: tuple[str, int | None, float]) -> str:
        return call[0] if call[1] is None else f"{call[0]} of GPU {call[1]}"

    def _work(self, write: Record, stop: threading.Event) -> None:
        devices = self._choose(self._open())
        for device in devices:
            if stop.is_set():
                return
            write(self._sample(device) | {"uuid": device.uuid, **device.facts})
        due = time.monotonic() + self.period_s
        while devices and not stop.wait(max(due - time.monotonic(), 0.0)):
            for device in devices:
                line = self._sample(device)
                if stop.is_set():
                    return
                write(line)
            # Samples that a slow one covered are left out.
            due = max(due + self.period_s, time.monotonic())

    def _open(self) -> list[GpuDevice]:
        """The devices of the first library that has some."""
        why = "no library for it is installed"
        for name in telemetry_modules():
            self._call = (name, None, time.monotonic())
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    module = importlib.import_module(name)
                devices = _LIBRARIES[name](module)
                why = f"{name} knows of none"
            except Exception as error:  # no driver, no permission: this host has no GPU of that kind
                devices, why = [], f"{name}: {error}"[:_LONGEST_ERROR]
            finally:
                self._call = None
            if devices:
                return devices
        if self._required:
            self.problem = f"no GPU to sample ({why})"
        return []

    def _choose(self, devices: list[GpuDevice]) -> list[GpuDevice]:
        if not devices or not self._chosen:
            return devices
        found: dict[int, GpuDevice] = {}
        missing: list[str] = []
        for name in self._chosen:
            named = [one for one in devices if _is_named(one, name)]
            if len(named) == 1:
                found[named[0].index] = named[0]
            else:
                missing.append(name)
        if missing:
            self.problem = f"no GPU is called {', '.join(missing)}: it is not sampled"
        return list(found.values())

    def _sample(self, device: GpuDevice) -> dict[str, Any]:
        line: dict[str, Any] = {"t_ns": time.monotonic_ns(), "index": device.index, **dict.fromkeys(GPU_VALUES)}
        errors: list[str] = []
        for function, call in device.calls.items():
            if (device.index, function) in self._unsupported:
                continue
            self._call = (function, device.index, time.monotonic())
            try:
                line |= {name: nonnegative(value) for name, value in call().items()}
            except Exception as error:  # whatever a library raises: the run goes on
                if device.is_unsupported(error):
                    self._unsupported.add((device.index, function))
                else:
                    errors.append(f"{function}: {error}"[:_LONGEST_ERROR])
            finally:
                self._call = None
        line["error"] = errors[0] if errors else None
        if errors:
            self.problem = self.problem or f"GPU {device.index}: {errors[0]}"
        return line


def _is_named(device: GpuDevice, name: str) -> bool:
    if name.isdecimal():
        return device.index == int(name)
    return bool(name) and device.uuid is not None and device.uuid.casefold().startswith(name.casefold())


def _error_line(index: int | None, error: str) -> dict[str, Any]:
    return {"t_ns": time.monotonic_ns(), "index": index, **dict.fromkeys(GPU_VALUES), "error": error}
