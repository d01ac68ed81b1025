"""Where a process's modules come from: `origins-<role>-<pid>.json`, beside the record of its collections.

A proof for comparisons of two checkouts that each server ran its own code. The file is written anew when modules have
been imported since; while none are, looking costs one comparison every two seconds.
"""

# ruff: noqa: PTH105, PTH108, PTH118

from __future__ import annotations

import contextlib
import json
import os
import sys

from .record import start_ticks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

__all__ = ["Origins"]

MAX_MODULES = 20000


class Origins:
    """Records modules of `packages` (dotted names) that this process has imported."""

    def __init__(self, directory: str, packages: Sequence[str]) -> None:
        self.directory = directory
        self.packages = list(packages)
        self.path: str | None = None
        self.modules = 0
        """How many there were of any package when it was last written."""

    def write(self, role: str) -> None:
        """Write what has been imported by now, if that is more than before or the role is another."""
        if not self.packages:
            return
        path = os.path.join(self.directory, f"origins-{role}-{os.getpid()}.json")
        count = len(sys.modules)
        if count == self.modules and path == self.path:
            return
        record = {
            "pid": os.getpid(),
            "start_ticks": start_ticks(),
            "role": role,
            "executable": sys.executable,
            "python": sys.version.split()[0],
            "packages": self.packages,
            "modules": dict(self._found()),
        }
        with contextlib.suppress(OSError):
            temporary = f"{path}.new"
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(temporary, path)
            if self.path is not None and self.path != path:
                os.unlink(self.path)
            self.path, self.modules = path, count

    def _found(self) -> Iterator[tuple[str, str]]:
        """Module to file. A package without a file of its own (a namespace) is none of them: its modules are."""
        for key, module in list(sys.modules.items())[:MAX_MODULES]:
            name, file = _name_and_file(key, module)
            if file and any(name == one or name.startswith(f"{one}.") for one in self.packages):
                yield name, os.path.realpath(file)


def _name_and_file(key: str, module: ModuleType) -> tuple[str, str]:
    spec = getattr(module, "__spec__", None)
    if key == "__main__" and spec is not None:  # `python -m package.module`
        key = spec.name[: -len(".__main__")] if spec.name.endswith(".__main__") else spec.name
    file = getattr(module, "__file__", None)
    return key, file if isinstance(file, str) else ""
