"""What the readers of other tools' JSON share: files that may be packed, bounds, and what a process group is called."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any, Final

from atom.recipes.errors import UsageError

__all__ = ["MOST_BYTES", "call_name", "group_name", "is_point_to_point", "load_json", "ranks_of", "text"]

MOST_BYTES: Final = 4 << 30
_LONGEST: Final = 120
_CALLS: Final = (
    *("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "barrier", "gather", "scatter", "reduce"),
)
_PIPELINE: Final = frozenset(("pp", "pipeline"))
_TENSOR: Final = frozenset(("tp", "tensor"))


def load_json(path: Path) -> dict[str, Any]:
    """An object from a file that may be packed with gzip. UsageError if it is none, or too large."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} has more than {MOST_BYTES >> 30} GiB; record a shorter part of the run")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object")
    return value


def group_name(described: str, name: str) -> str:
    """`pp` and `tp` for the groups that are named so in whatever way; `world` for the default one; else its name."""
    words = set(re.split(r"[^a-z]+", described.lower()))
    if words & _PIPELINE:
        return "pp"
    if words & _TENSOR:
        return "tp"
    if described in ("default_pg", ""):
        return "world" if described or name in ("", "0") else text(f"group {name}")
    return text(described)


def call_name(name: str) -> str:
    """`nccl:all_reduce`, `_allgather_base`, `ncclDevKernel_AllReduce_Sum_f32_RING(…)` → `allreduce`."""
    base = name.rpartition(":")[2].partition("(")[0]
    base = re.sub(r"^(?:nccl|rccl)(?:Dev)?Kernel_?", "", base)
    words = re.sub(r"[^a-z]", "", base.lower().partition("_sum")[0])
    return next((one for one in _CALLS if one in words), text(base) or "collective")


def is_point_to_point(name: str) -> bool:
    return re.search(r"send|recv", name, re.I) is not None


def ranks_of(value: Any) -> tuple[int, ...]:
    """`[0, 1]`, also as a text, as process groups give their ranks. Empty if it is none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 1 << 16 for one in value):
        return ()
    return tuple(value)


def text(value: Any) -> str:
    flat = "".join(one if one.isprintable() else "?" for one in str(value))
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 1] + "…"
