"""Where a run comes from: command, code, machine, packages, environment; the head of run.json."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from atom.bench.redact import redact_arguments, redact_environment
from atom.bench.wall_clock import WallClock

__all__ = ["command_line", "provenance"]

PACKAGES: Final = (
    *("atom-serving", "numpy", "uvloop", "httpx", "torch", "triton", "vllm", "sglang", "transformers", "tokenizers"),
    *("safetensors", "mpi4py", "nixl-cu12", "nixl-cu13", "aiperf"),
)


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Facts about this run that are known before it starts. Values of secret-looking variables and flags are left
    out."""
    clock = WallClock.now()
    return {
        "command": redact_arguments(command),
        "start_time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "start_ns": clock.monotonic_ns,
        "start_unix_ns": clock.unix_ns,
        "host": {
            "name": socket.gethostname(),
            "boot_id": _read("/proc/sys/kernel/random/boot_id"),
            "kernel": platform.release(),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "cpu": _cpu_model(),
            "cpus": os.cpu_count(),
            "cpu_affinity": sorted(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "devices": _devices(),
        "git": _git(),
        "packages": _packages(),
        "env": redact_environment(
            {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(("ATOM_", "CUDA_VISIBLE", "HIP_VISIBLE", "ROCR_VISIBLE", "OMP_NUM", "PYTHONGC"))
            }
        ),
    }


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _cpu_model() -> str | None:
    match = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo") or "")
    return match[1] if match else None


def _devices() -> list[str]:
    """GPUs by name, one entry each; empty where there is none."""
    for command in (
        ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"],
        ["rocm-smi", "--showproductname", "--csv"],
    ):
        output = _output(command)
        if output:
            return [line for line in output.splitlines() if line.strip()]
    return []


def _output(command: Sequence[str], stdin: str | None = None, cwd: Path | None = None) -> str | None:
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=10, check=True, cwd=cwd, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _git() -> dict[str, Any] | None:
    """The checkout that this code runs from; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    sha = _output(["git", "rev-parse", "HEAD"], cwd=root)
    if sha is None:
        return None
    status = _output(["git", "status", "--porcelain", "--untracked-files=no"], cwd=root) or ""
    diff = _output(["git", "diff", "HEAD"], cwd=root) if status else None
    patch = _output(["git", "patch-id", "--stable"], stdin=diff + "\n", cwd=root) if diff else None
    return {
        "sha": sha,
        "branch": _output(["git", "rev-parse", "--abbrev-ref", "HEAD"], cwd=root),
        "dirty": bool(status),
        "patch_id": patch.split()[0] if patch else None,
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
    }


def _packages() -> dict[str, str]:
    """Installed versions, by metadata: nothing is imported."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command_line() -> list[str]:
    """The command as typed."""
    return ["atom", *sys.argv[1:]]
