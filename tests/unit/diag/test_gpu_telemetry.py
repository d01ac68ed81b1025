"""GPU telemetry against fakes of both vendors' libraries: cards that lack values, get lost, or hang in the driver."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from atom.diag import gpu_choice
from atom.diag.gpu_choice import check_telemetry, gpus_to_sample
from atom.diag.gpu_device import GPU_VALUES
from atom.diag.gpu_telemetry import GpuSampler
from atom.diag.server_under_test import ServerUnderTest
from atom.recipes.errors import UsageError
from atom.recipes.recipe import Recipe

WAIT_S = 30.0


class NvmlError(Exception):
    pass


class NotSupported(NvmlError):
    pass


def nvml(count: int = 2, **functions: Any) -> ModuleType:
    """A pynvml with `count` cards that answer; `functions` override what it does."""
    module = ModuleType("pynvml")
    field = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=5))
    vars(module).update(
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX=138,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX=139,
        NVMLError=NvmlError,
        NVMLError_NotSupported=NotSupported,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}f00-bar",
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=100 << 30, used=(handle + 1) << 30),
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=75, memory=40),
        nvmlDeviceGetPowerUsage=lambda handle: 412_500,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 9_000_000,
        nvmlDeviceGetTemperature=lambda handle, sensor: 61,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetFieldValues=lambda handle, fields: [field] * len(fields),
    )
    vars(module).update(functions)
    return module


class AmdError(Exception):
    pass


def amdsmi(**functions: Any) -> ModuleType:
    """An amdsmi with one card, its answers as that library words them."""
    module = ModuleType("amdsmi")
    vars(module).update(
        AmdSmiLibraryException=AmdError,
        AmdSmiTemperatureType=SimpleNamespace(JUNCTION=1),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
        AmdSmiClkType=SimpleNamespace(GFX=0),
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["card"],
        amdsmi_get_gpu_device_uuid=lambda handle: "d5ff74b5-0000-1000",
        amdsmi_get_gpu_asic_info=lambda handle: {"market_name": "AMD Instinct MI355X"},
        amdsmi_get_gpu_vram_usage=lambda handle: {"vram_total": 294_896, "vram_used": 1024},
        amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": 93, "umc_activity": 20, "mm_activity": "N/A"},
        amdsmi_get_power_info=lambda handle: {"current_socket_power": 880, "average_socket_power": "N/A"},
        amdsmi_get_energy_count=lambda handle: {"energy_accumulator": 2_000_000, "counter_resolution": 15.3},
        amdsmi_get_temp_metric=lambda handle, kind, metric: 64,
        amdsmi_get_clock_info=lambda handle, kind: {"clk": 2100, "max_clk": 2400},
    )
    vars(module).update(functions)
    return module


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with fakes: these libraries are installed, and no others."""

    def install(*modules: ModuleType) -> None:
        names = [module.__name__ for module in modules]
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for place in ("atom.diag.gpu_telemetry", "atom.diag.gpu_choice"):
            monkeypatch.setattr(f"{place}.telemetry_modules", lambda: names)

    return install


def sample(sampler: GpuSampler, lines: int) -> list[dict[str, Any]]:
    """What it records until there are so many lines."""
    found: list[dict[str, Any]] = []
    stop, enough = threading.Event(), threading.Event()

    def record(line: Mapping[str, Any]) -> None:
        found.append(dict(line))
        if len(found) >= lines:
            enough.set()

    thread = threading.Thread(target=sampler.run, args=(record, stop))
    thread.start()
    assert enough.wait(WAIT_S)
    stop.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    return found


def test_every_card_of_nvml(libraries: Any) -> None:
    libraries(nvml())
    sampler = GpuSampler(period_s=0.01)
    first, second, third, *_ = sample(sampler, 3)
    assert [first["index"], second["index"], third["index"]] == [0, 1, 0]
    assert {name: first[name] for name in ("source", "name", "uuid", "power_limit_w", "memory_total_bytes")} == {
        "source": "nvml",
        "name": "NVIDIA H200",
        "uuid": "GPU-0f00-bar",
        "power_limit_w": 700,
        "memory_total_bytes": 100 << 30,
    }
    assert "name" not in third
    assert third["t_ns"] > first["t_ns"]
    assert {name: second[name] for name in (*GPU_VALUES, "error")} == {
        "utilization": 0.75,
        "memory_used_bytes": 2 << 30,
        "power_w": 412.5,
        "energy_j": 9000,
        "temperature_c": 61,
        "sm_clock_mhz": 1980,
        "nvlink_tx_bytes": 5120,
        "nvlink_rx_bytes": 5120,
        "error": None,
    }
    assert sampler.problem is None


def test_what_a_card_does_not_have_is_null_and_asked_for_once(libraries: Any) -> None:
    asked: list[int] = []

    def no_power(handle: int) -> float:
        asked.append(handle)
        raise NotSupported("Not Supported")

    def no_links(handle: int, fields: list[Any]) -> list[Any]:
        return [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(ullVal=0)) for _ in fields]

    module = nvml(1, nvmlDeviceGetPowerUsage=no_power, nvmlDeviceGetFieldValues=no_links)
    del module.nvmlDeviceGetTotalEnergyConsumption  # an older library
    libraries(module)
    sampler = GpuSampler(period_s=0.01)
    lines = sample(sampler, 4)
    assert {(line["power_w"], line["energy_j"], line["nvlink_tx_bytes"], line["error"]) for line in lines} == {
        (None, None, None, None)
    }
    assert {line["utilization"] for line in lines} == {0.75}
    assert asked == [0]
    assert sampler.problem is None


def test_a_card_that_gets_lost_costs_its_values_alone(libraries: Any) -> None:
    calls = iter(range(1000))

    def lost(handle: int) -> Any:
        if handle == 0 and next(calls) > 0:
            raise NvmlError("GPU is lost")
        return SimpleNamespace(gpu=50)

    libraries(nvml(nvmlDeviceGetUtilizationRates=lost))
    sampler = GpuSampler(period_s=0.01)
    lines = sample(sampler, 8)
    assert {line["utilization"] for line in lines if line["index"] == 1} == {0.5}
    own = [line for line in lines if line["index"] == 0]
    assert (own[0]["error"], own[1]["error"]) == (None, "nvmlDeviceGetUtilizationRates: GPU is lost")
    assert own[1]["utilization"] is None
    assert own[1]["power_w"] == 412.5
    assert sampler.problem == "GPU 0: nvmlDeviceGetUtilizationRates: GPU is lost"


def test_a_call_that_hangs_is_said_and_waited_for(libraries: Any) -> None:
    stuck, release = threading.Event(), threading.Event()

    def hang(handle: int) -> float:
        if stuck.is_set():
            release.wait(WAIT_S)
        return 100_000

    libraries(nvml(1, nvmlDeviceGetPowerUsage=hang))
    sampler = GpuSampler(period_s=0.01, patience_s=0.1)
    found: list[dict[str, Any]] = []
    stop, told, again = threading.Event(), threading.Event(), threading.Event()

    def record(line: Mapping[str, Any]) -> None:
        found.append(dict(line))
        stuck.set()
        if line["error"]:
            told.set()
        elif told.is_set():
            again.set()

    thread = threading.Thread(target=sampler.run, args=(record, stop))
    thread.start()
    assert told.wait(WAIT_S)
    assert sampler.problem == "nvmlDeviceGetPowerUsage of GPU 0 did not return within 0.1 s: samples are missing"
    stuck.clear()
    release.set()
    assert again.wait(WAIT_S)
    stop.set()
    thread.join(WAIT_S)
    errors = [line for line in found if line["error"]]
    assert len(errors) == 1
    assert {errors[0][name] for name in GPU_VALUES} == {None}


def test_a_hang_does_not_hold_the_end_up(libraries: Any) -> None:
    forever = threading.Event()
    libraries(nvml(nvmlInit=lambda: forever.wait(WAIT_S)))
    stop = threading.Event()
    thread = threading.Thread(target=GpuSampler().run, args=(print, stop))
    thread.start()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    forever.set()


def test_a_card_of_amdsmi(libraries: Any) -> None:
    libraries(amdsmi())
    (line, *_) = sample(GpuSampler(period_s=0.01), 1)
    assert (line["source"], line["name"]) == ("amdsmi", "AMD Instinct MI355X")
    assert (line["utilization"], line["memory_used_bytes"], line["power_w"]) == (0.93, 1 << 30, 880)
    assert (line["temperature_c"], line["sm_clock_mhz"]) == (64, 2100)
    assert line["energy_j"] == pytest.approx(30.6)
    assert line["nvlink_tx_bytes"] is line["error"] is None


def test_amdsmi_says_n_a(libraries: Any) -> None:
    def unsupported(handle: str) -> Any:
        raise AmdError("Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")

    libraries(
        amdsmi(
            amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": "N/A"},
            amdsmi_get_power_info=lambda handle: {"current_socket_power": "N/A", "average_socket_power": 120},
            amdsmi_get_energy_count=unsupported,
        )
    )
    sampler = GpuSampler(period_s=0.01)
    (line, *_) = sample(sampler, 2)
    assert (line["utilization"], line["power_w"], line["energy_j"], line["error"]) == (None, 120, None, None)
    assert sampler.problem is None


def test_a_library_without_a_driver_leaves_the_next_one_its_turn(libraries: Any) -> None:
    def no_driver() -> None:
        raise NvmlError("Driver Not Loaded")

    libraries(nvml(nvmlInit=no_driver), amdsmi())
    (line, *_) = sample(GpuSampler(period_s=0.01), 1)
    assert line["source"] == "amdsmi"


def test_no_gpu_is_no_problem(libraries: Any) -> None:
    libraries(nvml(0))
    sampler, found = GpuSampler(), list[Any]()
    sampler.run(found.append, threading.Event())
    assert (found, sampler.problem) == ([], None)
    asked_for = GpuSampler(required=True)
    asked_for.run(found.append, threading.Event())
    assert (found, asked_for.problem) == ([], "no GPU to sample (pynvml knows of none)")


@pytest.mark.parametrize(
    ("chosen", "indices", "problem"),
    [
        (["1"], {1}, None),
        (["GPU-0f00"], {0}, None),
        (["1", "7", "MIG-x"], {1}, "no GPU is called 7, MIG-x: it is not sampled"),
    ],
)
def test_the_chosen_cards(libraries: Any, chosen: list[str], indices: set[int], problem: str | None) -> None:
    libraries(nvml())
    sampler = GpuSampler(chosen, period_s=0.01)
    assert {line["index"] for line in sample(sampler, 3)} == indices
    assert sampler.problem == problem


# ---- which cards -----------------------------------------------------------------------------------------------------


def under_test(address: str, **fields: Any) -> ServerUnderTest:
    given: dict[str, Any] = {"metrics_url": None, "dialect": "auto", "recipe": None, "server": None}
    return ServerUnderTest(address=address, **{**given, **fields})


def test_only_servers_of_this_host_are_sampled_unless_asked_for(libraries: Any) -> None:
    libraries(nvml())
    near, far = under_test("http://127.0.0.1:8000"), under_test("http://10.0.0.7:8000")
    assert gpus_to_sample(near, None, None) == []
    assert gpus_to_sample(far, None, None) is None
    assert gpus_to_sample(far, True, None) == []
    assert gpus_to_sample(near, False, None) is None
    ssh = Recipe(name="r", source="r", command=("x",), exec=("/usr/bin/ssh", "node7"))
    elsewhere = under_test("http://127.0.0.1:8000", recipe=ssh, server=SimpleNamespace(env={}, dead=False))
    assert gpus_to_sample(elsewhere, None, None) is None


def test_the_devices_of_the_recipe_or_of_the_servers_environment(
    libraries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries(nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    recipe = Recipe(name="r", source="r", command=("x",))

    def of(devices: str | None, **env: str) -> list[str] | None:
        return gpus_to_sample(
            under_test("http://127.0.0.1:1", recipe=recipe, server=SimpleNamespace(env=env)), None, devices
        )

    assert of("4,5", CUDA_VISIBLE_DEVICES="0") == ["4", "5"]
    assert of(None, CUDA_VISIBLE_DEVICES="2, GPU-abc") == ["2", "GPU-abc"]
    assert of(None, HIP_VISIBLE_DEVICES="3") == ["3"]
    assert of(None, CUDA_VISIBLE_DEVICES="") is None
    assert of(None, CUDA_VISIBLE_DEVICES="-1") is None
    assert of(None) == []


def test_asking_without_a_library_is_told(libraries: Any) -> None:
    libraries()
    check_telemetry(None)
    check_telemetry(False)
    with pytest.raises(UsageError, match=r"--gpu-telemetry needs nvidia-ml-py"):
        check_telemetry(True)
    assert gpu_choice.gpus_to_sample(under_test("http://127.0.0.1:1"), None, None) is None


def test_the_time_of_a_sample_is_monotonic(libraries: Any) -> None:
    libraries(nvml(1))
    before = time.monotonic_ns()
    (line, *_) = sample(GpuSampler(period_s=0.01), 1)
    assert before <= line["t_ns"] <= time.monotonic_ns()
