"""Which data path an instance uses. Both sides have to use the same one; descriptions say which, so that a difference
is an error that names it."""

from __future__ import annotations

import logging
from typing import Literal, get_args

from atom.engine.errors import ConfigError
from atom.engine.transfer.data_path import DataPath, Limits
from atom.engine.transfer.nixl_path import NixlPath, find_nixl
from atom.engine.transfer.pool_layout import PoolLayout
from atom.engine.transfer.shared_memory_path import SharedMemoryPath

__all__ = ["PathChoice", "open_data_path"]

PathChoice = Literal["auto", "nixl", "shared-memory"]

_LOG = logging.getLogger(__name__)


def open_data_path(choice: str, layout: PoolLayout, limits: Limits | None = None) -> tuple[DataPath, str]:
    """The path, and which it is and why in one line, which is also logged. ConfigError for an unknown choice, and for
    `nixl` where it is not installed or finds no transport."""
    if choice not in get_args(PathChoice):
        raise ConfigError(f"KV transfer over {choice!r}: must be one of {', '.join(get_args(PathChoice))}")
    path, why = _open(choice, layout, limits)
    said = f"KV transfer by {path.kind} ({why})"
    _LOG.info("%s", said)
    return path, said


def _open(choice: str, layout: PoolLayout, limits: Limits | None) -> tuple[DataPath, str]:
    if choice == "shared-memory":
        return SharedMemoryPath(layout, limits), "asked for; one host only"
    if choice == "nixl":
        return NixlPath(layout, limits), "asked for"
    found = find_nixl()
    if isinstance(found, str):
        return SharedMemoryPath(layout, limits), f"{found}; one host only"
    try:
        return NixlPath(layout, limits), "it is installed"
    except ConfigError as error:
        return SharedMemoryPath(layout, limits), f"{error}; one host only"
