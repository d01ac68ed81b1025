"""What /proc says about the Python in a process: whether there is any, which, where its functions are, and whether the
hook's environment can reach it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atom.diag.elf_symbols import ElfError, read_symbols
from atom.diag.gc_hook import DIRECTORY_VARIABLE
from atom.recipes.processes import arguments_of, read_environment

__all__ = [
    "PythonRuntime",
    "find_runtime",
    "hook_obstacle",
    "is_python",
    "isolating_option",
    "isolation_reason",
    "libc_function",
]

_PYTHON_NAME: Final = re.compile(r"(?:python|pypy)[0-9.t]*$")
_LIBRARY: Final = re.compile(r"/libpython3?(?:\.\d+)?t?[^/]*\.so[^/]*$")
_LIBC: Final = re.compile(r"/(?:libc\.so\.6|libc-2\.\d+\.so|ld-musl-[^/]*\.so\.1|libc\.musl-[^/]*)$")
FUNCTIONS: Final = (
    "Py_IsInitialized",
    "Py_AddPendingCall",
    "PyRun_SimpleString",
    "PyGILState_Ensure",
    "PyGILState_Release",
)
SINCE_3_8: Final = "Py_RunMain"
"""Exported by every CPython from 3.8 on, the oldest that the hook runs in, and by none before."""
_OPTIONS_WITH_VALUE: Final = "cmWX"


@dataclass(frozen=True, slots=True)
class Mapping:
    start: int
    offset: int
    path: str
    """As the process sees it."""
    deleted: bool


@dataclass(frozen=True, slots=True)
class PythonRuntime:
    """The CPython in a process."""

    path: str
    """The file that holds it: the executable or libpython."""
    functions: dict[str, int]
    """Addresses in the process of those of `FUNCTIONS` that the file exports."""
    version: tuple[int, int] | None
    """Major, minor, where that can be told."""
    recent: bool = True
    """3.8 or later: the hook can run in it."""

    @property
    def missing(self) -> list[str]:
        return [name for name in FUNCTIONS if name not in self.functions]


def mappings(pid: int) -> list[Mapping]:
    """Files mapped from their beginning, and the others, in order of address. PermissionError, or another OSError."""
    found = []
    for line in (Path("/proc") / str(pid) / "maps").read_bytes().decode("utf-8", "replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            path = fields[5].removesuffix(" (deleted)")
            start = int(fields[0].partition("-")[0], 16)
            found.append(Mapping(start, int(fields[2], 16), path, deleted=path != fields[5]))
    return found


def is_python(pid: int, exe: str | None) -> bool | None:
    """Whether there is a Python in the process; None where that cannot be told (it is gone, or another user's)."""
    if exe is not None and _PYTHON_NAME.match(Path(exe).name):
        return True
    try:
        maps = (Path("/proc") / str(pid) / "maps").read_bytes()
    except OSError:
        return None
    return b"/libpython" in maps if maps else None


def find_runtime(pid: int) -> PythonRuntime | None:
    """The CPython of the process, None if it has none. OSError where /proc may not be read; ElfError where the file
    that holds it cannot be."""
    mapped = [one for one in mappings(pid) if one.offset == 0]
    exe = _exe(pid)
    libraries = [one for one in mapped if _LIBRARY.search(one.path)]
    for one in (*libraries, *(one for one in mapped if one.path == exe)):
        functions = _functions(pid, one, (*FUNCTIONS, "Py_Version", SINCE_3_8))
        # A library of the stable ABI (libpython3.so) only forwards, and defines nothing.
        if "PyRun_SimpleString" in functions:
            version = _version(pid, functions.pop("Py_Version", None), (one.path, exe or ""))
            recent = functions.pop(SINCE_3_8, None) is not None and (version is None or version >= (3, 8))
            return PythonRuntime(one.path, functions, version, recent)
    if libraries or _PYTHON_NAME.match(Path(exe or "").name):
        return PythonRuntime(libraries[0].path if libraries else exe or "", {}, None)
    return None


def libc_function(pid: int, name: str) -> int | None:
    """Address in the process of a function of the C library."""
    for one in mappings(pid):
        if one.offset == 0 and _LIBC.search(one.path):
            return _functions(pid, one, (name,)).get(name)
    return None


def _functions(pid: int, mapping: Mapping, names: Sequence[str]) -> dict[str, int]:
    symbols = read_symbols(_file_of(pid, mapping), names)
    return {name: mapping.start - symbols.first_page + address for name, address in symbols.addresses.items()}


def _file_of(pid: int, mapping: Mapping) -> Path:
    """Where the file can be read from here: through the process's own root; by its mapping if it was deleted since."""
    process = Path("/proc") / str(pid)
    if not mapping.deleted:
        return process / "root" / mapping.path.lstrip("/")
    for name in (process / "map_files").iterdir():
        if int(name.name.partition("-")[0], 16) == mapping.start:
            return name
    raise ElfError(f"{mapping.path} was deleted")


def _exe(pid: int) -> str | None:
    try:
        return str((Path("/proc") / str(pid) / "exe").readlink()).removesuffix(" (deleted)")
    except OSError:
        return None


def _version(pid: int, at: int | None, paths: Sequence[str]) -> tuple[int, int] | None:
    """From the constant that CPython has since 3.11, read in the process; else from the names of its files."""
    if at is not None:
        try:
            with (Path("/proc") / str(pid) / "mem").open("rb", buffering=0) as memory:
                memory.seek(at)
                (number,) = struct.unpack("<Q", memory.read(8))
                return number >> 24 & 0xFF, number >> 16 & 0xFF
        except (OSError, struct.error, OverflowError):
            pass
    for path in paths:
        if match := re.search(r"python(\d)\.(\d+)", Path(path).name):
            return int(match[1]), int(match[2])
    return None


def isolating_option(arguments: Sequence[str]) -> str | None:
    """The option with which this Python command line keeps the hook's environment out: `-I`, `-E` or `-S`."""
    for letter in _options(arguments):
        if letter in "IES":
            return f"-{letter}"
    return None


def isolation_reason(option: str) -> str:
    """What that means for the hook, and what works all the same."""
    ignored = "site" if option == "-S" else "PYTHONPATH"
    return f"started with {option}, which ignores {ignored}; attach to it instead (--pid)"


def _options(arguments: Sequence[str]) -> Iterator[str]:
    """The one-letter options before the script or module."""
    words = iter(arguments[1:])
    for word in words:
        if not word.startswith("-") or word == "-" or word == "--":
            return
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        for at, letter in enumerate(word[1:], start=1):
            yield letter
            if letter in _OPTIONS_WITH_VALUE:
                if letter in "cm":
                    return  # what follows is the program's
                if at == len(word) - 1:
                    next(words, None)
                break


def hook_obstacle(pid: int, exe: str | None) -> str | None:
    """Why the hook's environment cannot have loaded the hook in this process; None if nothing of the kind is seen."""
    python = is_python(pid, exe)
    if python is False:
        return f"not a Python process ({Path(exe).name})" if exe else "not a Python process"
    if python is None:
        return None
    arguments = arguments_of(pid)
    if option := isolating_option(arguments):
        return isolation_reason(option)
    environment = read_environment(pid)
    if not arguments or (len(arguments) == 1 and not environment.get("PATH")):
        return None  # it is gone, or has a title now, which may be written over the environment
    if DIRECTORY_VARIABLE not in environment:
        return f"{DIRECTORY_VARIABLE} is not in its environment: not started with the hook, or cleared on the way"
    if "gc_inject" not in environment.get("PYTHONPATH", ""):
        return "PYTHONPATH was replaced by whoever started it"
    return None
