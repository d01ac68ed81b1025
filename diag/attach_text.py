"""The Python text that a running process is made to run, so that it installs the hook. ASCII, and it raises nothing.
What a process is given parses in every Python: one of another version than was believed is left as it was.

It runs between two bytecodes of the main thread, which may hold any lock: so it only starts a thread. It binds no
name in `__main__`. The thread makes the hook's package from its source, unless the process has it already, and calls
`install_attached` (`diag/gc_hook/process.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from atom.diag import gc_hook

__all__ = ["attach_text"]

_MODULES: Final = ("actions", "record", "passes", "tally", "forks", "origins", "hook", "process", "__init__")
"""In the order of their imports."""

_LAUNCH: Final = """\
try:
    if __import__("sys").version_info >= (3, 8):
        __import__("_thread").start_new_thread(
            getattr(__import__("builtins"), "exec"), ({body}, {{"__name__": "_atom_gc_attach"}})
        )
except Exception:
    pass
"""

_BODY: Final = """\
import json, os, sys, time, types
from importlib.machinery import ModuleSpec

SOURCES = {sources}
ARGUMENTS = {arguments}
INTERFACE = {interface}


def module_of(name, spec_name, is_package):
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(spec_name, None, is_package=is_package)
    module.__package__ = module.__spec__.parent
    if is_package:
        module.__path__ = []
    return module


def package_of(name):
    package = module_of(name, name, True)
    found = sys.modules.setdefault(name, package)
    if found is not package:  # loaded by its environment, by an attach before, or just now by another thread
        for _ in range(500):
            if hasattr(found, "__all__"):
                break
            time.sleep(0.01)
        return found if getattr(found, "INTERFACE", None) == INTERFACE else package_of(name + "_")
    for short, source in SOURCES:
        if short == "__init__":
            module = package
        else:
            full = name + "." + short
            module = sys.modules[full] = module_of(full, full, False)
            setattr(package, short, module)
        exec(compile(source, "<atom " + short + ">", "exec"), module.__dict__)
    return package


def run():
    try:
        package_of("_atom_gc_hook").install_attached(**ARGUMENTS)
    except BaseException as error:
        try:
            path = ARGUMENTS["confirmation"]
            with open(path + ".new", "w") as file:
                json.dump({{"ok": False, "error": repr(error)}}, file)
            os.rename(path + ".new", path)
        except Exception:
            pass


run()
"""


def attach_text(directory: str, roles: Mapping[str, Sequence[str]], action: str | None, confirmation: str) -> str:
    """The text that installs the hook for `directory` and tells the result in the file `confirmation`."""
    folder = Path(gc_hook.__file__).parent
    sources = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES]
    arguments = {
        "directory": directory,
        "roles": {role: list(patterns) for role, patterns in roles.items()},
        "action": action,
        "confirmation": confirmation,
    }
    body = _BODY.format(sources=ascii(sources), arguments=ascii(arguments), interface=gc_hook.INTERFACE)
    return _LAUNCH.format(body=ascii(body))
