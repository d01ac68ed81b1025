"""Loads the GC hook into an interpreter that was started with this directory first on PYTHONPATH, then runs the
`sitecustomize` that this one shadows, if there is one.

It runs in other people's interpreters: nothing here may fail, import much, or print more than one line. That the file
parses and chains in any Python, 2.7 too, is on purpose; the hook needs 3.8.
"""

# ruff: noqa: PTH100, PTH118, PTH120, SIM105, UP031, UP036

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_HOOK = "_atom_gc_hook"


def _load_hook():
    # type: () -> None
    import importlib.util

    folder = os.path.join(os.path.dirname(_HERE), "gc_hook")
    spec = importlib.util.spec_from_file_location(
        _HOOK, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_HOOK] = module
    spec.loader.exec_module(module)
    module.install_from_environment()


def _tell_failure(error):
    # type: (Exception) -> None
    """Never the server's problem: the process is then listed as not hooked, with this reason."""
    message = "%s: %s" % (type(error).__name__, error)
    try:
        sys.stderr.write("atom: the GC hook did not load: %s\n" % message)
    except Exception:
        pass
    try:
        import json

        path = os.path.join(os.environ["ATOM_GC_HOOK_DIR"], "gc-failed-%d.json" % os.getpid())
        with open(path, "w") as file:
            json.dump({"pid": os.getpid(), "error": message}, file)
    except Exception:
        pass


def _run_shadowed():
    # type: () -> None
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != _HERE]
    if sys.version_info < (3, 5):
        _run_shadowed_of_old()
        return
    import importlib.util

    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find("sitecustomize", None)
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            sys.modules["sitecustomize"] = module
            spec.loader.exec_module(module)
            return


def _run_shadowed_of_old():
    # type: () -> None
    imp = __import__("imp")

    try:
        file, path, description = imp.find_module("sitecustomize", sys.path)
    except ImportError:
        return
    imp.load_module("sitecustomize", file, path, description)


if os.environ.get("ATOM_GC_HOOK_DIR"):
    try:
        if sys.version_info < (3, 8):
            raise RuntimeError("it needs Python 3.8 or later, this is %d.%d" % sys.version_info[:2])
        _load_hook()
    except Exception as _error:
        _tell_failure(_error)
_run_shadowed()
