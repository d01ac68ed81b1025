"""Loads the GC hook into an interpreter that was started with this directory first on PYTHONPATH, then runs the
`sitecustomize` that this one shadows, if there is one.

It runs in other people's interpreters, of any version from 3.8 on: nothing here may fail, import much, or print.
"""

# ruff: noqa: PTH100, PTH118, PTH120

from __future__ import annotations

import os
import sys


def _load_hook() -> None:
    import importlib.util

    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "gc_hook.py")
    spec = importlib.util.spec_from_file_location("_atom_gc_hook", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_atom_gc_hook"] = module
    spec.loader.exec_module(module)
    module.install_from_environment()


def _run_shadowed() -> None:
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    sys.path[:] = paths
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("ATOM_GC_HOOK_DIR"):
    try:
        _load_hook()
    except Exception as error:  # never the server's problem; the process is then listed as not hooked
        sys.stderr.write(f"atom: the GC hook did not load: {error!r}\n")
_run_shadowed()
