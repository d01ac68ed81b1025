"""How a module of this project is started in a process of its own, whichever way the project is on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import atom.recipes

__all__ = ["import_root", "module_command"]


def import_root() -> Path:
    """The directory that holds the package `atom` this process runs: site-packages, or `.src` of a checkout."""
    (package,) = atom.recipes.__path__
    return Path(package).parent.parent


def module_command(module: str, *, isolated: bool = False) -> list[str]:
    """Arguments that run `module` as a script with this interpreter and this very version of the project.

    `isolated` leaves out site-packages, user settings and PYTHON* variables: for helpers that need the standard
    library only and have to start fast and undisturbed.
    """
    run = f"runpy.run_module({module!r}, None, '__main__', True)"
    code = f"import sys, runpy; sys.path.insert(0, {str(import_root())!r}); {run}"
    return [sys.executable, *(["-I", "-S"] if isolated else ["-P"]), "-c", code]
