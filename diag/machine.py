"""The machine: processor, memory, clocks, limits, as the kernel tells them. For `diag/environment.py`.

Each function returns dicts with `name`, `value` (in words), maybe `warning`, and the facts behind them.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any, Final

from atom.recipes.processes import boot_id

__all__ = ["clocks", "cpu", "cpu_quota", "limits", "memory"]

_SIMD: Final = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "neon", "asimd", "sve")
_GIB: Final = 1 << 30


def cpu() -> list[dict[str, Any]]:
    info = _read("/proc/cpuinfo")
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    flags_line = next((line for line in info.splitlines() if line.startswith(("flags", "Features"))), "")
    flags = [flag for flag in _SIMD if flag in flags_line.split()]
    total, usable = os.cpu_count() or 0, len(os.sched_getaffinity(0))
    quota = cpu_quota()
    parts = [model or "unknown model", f"{total} CPUs"]
    if usable != total:
        parts.append(f"{usable} usable by this process")
    if quota is not None:
        parts.append(f"container quota {quota:g}")
    found: dict[str, Any] = {
        "name": "cpu",
        "value": ", ".join([*parts, " ".join(flags) or "no known SIMD flags"]),
        "model": model,
        "cpus": total,
        "affinity": usable,
        "quota": quota,
        "simd": flags,
    }
    if quota is not None and quota < usable:
        found["warning"] = f"a quota of {quota:g} CPUs throttles {usable} busy threads: set --num-threads to the quota"
    return [found]


def cpu_quota() -> float | None:
    """CPUs this cgroup may use; None if unlimited. cgroup v2, then v1."""
    limit, _, period = _read(_cgroup_file("cpu.max")).strip().partition(" ")
    if limit.isdigit() and period.isdigit():
        return int(limit) / int(period)
    quota, period = (_read(f"/sys/fs/cgroup/cpu/cpu.cfs_{kind}_us").strip() for kind in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _cgroup_file(name: str) -> str:
    own = next((line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    path = Path("/sys/fs/cgroup") / own.lstrip("/") / name
    return str(path if path.exists() else Path("/sys/fs/cgroup") / name)


def memory() -> list[dict[str, Any]]:
    fields = dict(line.partition(":")[::2] for line in _read("/proc/meminfo").splitlines())
    names = ("MemTotal", "MemAvailable", "SwapTotal")
    sizes: dict[str, Any] = {name: int(fields[name].split()[0]) * 1024 for name in names if name in fields}
    limit_text = _read(_cgroup_file("memory.max")).strip()
    limit = int(limit_text) if limit_text.isdigit() else None
    value = f"{sizes.get('MemTotal', 0) / _GIB:.1f} GiB, {sizes.get('MemAvailable', 0) / _GIB:.1f} available"
    if limit is not None:
        value += f", container limit {limit / _GIB:.1f} GiB"
    found: list[dict[str, Any]] = [{"name": "memory", "value": value, "limit_bytes": limit, **sizes}]
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return [
            *found,
            {"name": "/dev/shm", "value": "not there", "warning": "shared memory between ranks does not work"},
        ]
    size, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    entry: dict[str, Any] = {"name": "/dev/shm", "value": f"{size / _GIB:.2f} GiB, {free / _GIB:.2f} free"}
    entry |= {"size_bytes": size, "free_bytes": free}
    if size < _GIB:
        entry["warning"] = "small: KV transfer by shared memory and NCCL may fail (docker run --shm-size=8g)"
    return [*found, entry]


def clocks() -> list[dict[str, Any]]:
    source = _read("/sys/devices/system/clocksource/clocksource0/current_clocksource").strip()
    clock = time.get_clock_info("monotonic")
    step = _smallest_step_ns()
    entry: dict[str, Any] = {
        "name": "monotonic",
        "value": f"clocksource {source or 'unknown'}, resolution {clock.resolution * 1e9:g} ns, step seen {step} ns",
        "clocksource": source,
        "resolution_ns": clock.resolution * 1e9,
        "step_ns": step,
    }
    if source and source not in ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"):
        entry["warning"] = "a slow clock source: reading the time costs more than the things it measures"
    paths = Path("/sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_governor")
    governors = sorted({_read(path).strip() for path in paths})
    frequency: dict[str, Any] = {
        "name": "cpu frequency",
        "value": f"governor {', '.join(governors)}" if governors else "not visible (a virtual machine, or a container)",
        "governors": governors,
    }
    if governors and governors != ["performance"]:
        frequency["warning"] = "the clock rate follows the load: use the performance governor for measurements"
    return [entry, frequency, {"name": "boot id", "value": boot_id() or "unknown"}]


def _smallest_step_ns() -> int:
    steps = []
    for _ in range(1000):
        begun = time.monotonic_ns()
        while (ended := time.monotonic_ns()) == begun:
            pass
        steps.append(ended - begun)
    return min(steps)


def limits() -> list[dict[str, Any]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(soft)} (hard {_limit(hard)})"
    files: dict[str, Any] = {"name": "open files", "value": value, "soft": soft, "hard": hard}
    if 0 <= hard < 65536:
        files["warning"] = f"at most about {hard // 2} concurrent streams on client and server: raise it (ulimit -n)"
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return [
        files,
        {"name": "processes", "value": _limit(processes), "soft": processes},
        {"name": "locked memory", "value": _limit(locked), "soft": locked},
    ]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _read(path: str | Path) -> str:
    """A kernel file's text, empty where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
