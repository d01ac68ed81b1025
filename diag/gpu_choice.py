"""Which GPUs a server under test computes on, as far as that can be told. `diag/gpu_telemetry.py` samples them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final
from urllib.parse import urlsplit

from atom.diag.gpu_telemetry import telemetry_modules
from atom.diag.server_under_test import ServerUnderTest
from atom.recipes.errors import UsageError
from atom.recipes.processes import read_environment

__all__ = ["check_telemetry", "gpus_to_sample", "is_this_host"]

_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ELSEWHERE: Final = frozenset({"kubectl", "mpiexec", "mpirun", "oc", "srun", "ssh"})
"""Prefixes (`exec`) that may start the server on another host."""


def check_telemetry(wanted: bool | None) -> None:
    """UsageError if it was asked for where no library can tell."""
    if wanted and not telemetry_modules():
        raise UsageError(
            "--gpu-telemetry needs nvidia-ml-py (pip install 'atom-serving[gpu]') or, for AMD GPUs, ROCm's amdsmi"
        )


def gpus_to_sample(under_test: ServerUnderTest, wanted: bool | None, devices: str | None) -> list[str] | None:
    """Indices or UUIDs of the GPUs to sample; empty: all of this host; None: none.

    `wanted` None: where the server runs on this host. `devices`: what its recipe was given. Otherwise its environment
    says, where that can be read.
    """
    if wanted is False or not telemetry_modules():
        return None
    if wanted is None and not _on_this_host(under_test):
        return None
    visible = devices if devices is not None else _visible(_environment(under_test))
    if visible is None:
        return []
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names or names[0] == "-1":  # how a server is kept from using any
        return None
    return [] if names == ["all"] else names


def is_this_host(host: str) -> bool:
    """Whether the name in a URL is this machine's loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _on_this_host(under_test: ServerUnderTest) -> bool:
    recipe = under_test.recipe
    if recipe is not None and recipe.exec and PurePath(recipe.exec[0]).name in _ELSEWHERE:
        return False
    if under_test.server is not None or under_test.pid is not None:
        return True
    return under_test.address is not None and is_this_host(urlsplit(under_test.address).hostname or "")


def _environment(under_test: ServerUnderTest) -> Mapping[str, str]:
    if under_test.server is not None:
        return {**os.environ, **under_test.server.env}
    pids = [*under_test.listeners, *([] if under_test.pid is None else [under_test.pid])]
    return next((found for found in map(read_environment, pids) if found), {})


def _visible(environment: Mapping[str, str]) -> str | None:
    return next((environment[name] for name in _VISIBLE if name in environment), None)
