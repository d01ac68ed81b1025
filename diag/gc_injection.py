"""The environment that loads `diag/gc_hook.py` into a server and all its Python children, without touching its code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from atom.diag.gc_hook import DIRECTORY_VARIABLE, ROLES_VARIABLE
from atom.recipes.recipe import Roles

__all__ = ["hook_environment", "hook_python_path"]


def hook_python_path() -> Path:
    """The directory to put first on PYTHONPATH: its `sitecustomize` loads the hook and chains the one it shadows."""
    return Path(__file__).absolute().parent / "gc_inject"


def hook_environment(directory: Path, roles: Roles) -> Mapping[str, str]:
    """Variables that make the hook write to `directory` (which must exist) under the names of these roles."""
    return {DIRECTORY_VARIABLE: str(directory.absolute()), ROLES_VARIABLE: json.dumps(roles.as_dict())}
