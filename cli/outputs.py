"""Files that a user names (`--json PATH`, …): what can be said against them before a run, and how they are written
after it. The files of the run directory are `bench/rundir.py`."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from pathlib import Path
from typing import Final

from atom.recipes.errors import RunError, UsageError

__all__ = ["check_distinct", "check_writable", "complain", "describe_os_error", "write_output"]

_DESCRIPTOR: Final = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_STANDARD: Final = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


def check_writable(flag: str, path: str | Path | None) -> None:
    """Refuse a file that cannot be written before anything is measured. Creates nothing, and opens no FIFO."""
    if path is None or str(path) == "-" or _descriptor(path) is not None:
        return
    try:
        target = Path(path).resolve()
        mode = target.stat().st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise UsageError(f"{flag} {path}: there is no directory {target.parent}") from None
        if not target.name or not os.access(target.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{flag} {path}: no file can be made in {target.parent}") from None
        return
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a loop of links, a NUL
        raise UsageError(f"{flag} {path}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{flag} {path} is a directory; a file is needed")
    if stat.S_ISSOCK(mode):
        raise UsageError(f"{flag} {path} is a socket; a file is needed")
    if not os.access(target, os.W_OK):
        raise UsageError(f"{flag} {path}: it may not be written")


def check_distinct(outputs: list[tuple[str, str | Path | None]]) -> None:
    """Refuse two outputs for one file, or for standard output."""
    taken: dict[str, tuple[str, str]] = {}
    for flag, path in outputs:
        if path is None or (str(path) != "-" and _is_stream(path)):
            continue  # a device or FIFO may well take both
        key = "-" if str(path) == "-" else str(Path(path).resolve())
        if key in taken:
            where = "standard output" if key == "-" else str(path)
            first = " ".join(taken[key])
            raise UsageError(f"{first} and {flag} {path} both want {where}; give one of them another path")
        taken[key] = (flag, str(path))


def write_output(path: str | Path, text: str) -> None:
    """Write `text` where the user wants it.

    A regular file is replaced atomically, through links, keeping its mode; into anything else (a device, a FIFO, an
    open descriptor such as /dev/stdout) the text is written. RunError names the file if that fails.
    """
    from atom.bench.rundir import write_text  # `atom --version` imports this module

    try:
        descriptor = _descriptor(path)
        if descriptor is not None:
            # The descriptor itself, not its file anew: what else is written there must not overwrite this.
            with os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file:
                file.write(text)
            return
        target = Path(path).resolve()
        if _is_stream(target) or not os.access(target.parent, os.W_OK):
            with target.open("w", encoding="utf-8") as file:
                file.write(text)
        else:
            write_text(target, text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


def describe_os_error(error: OSError) -> str:
    """One line: which file, and what the system said about it."""
    said = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {said}" if error.filename else said


def complain(error: Exception) -> None:
    """Say it on standard error: for a run whose exit status says something else (the signal that ended it)."""
    with contextlib.suppress(OSError):
        print(f"error: {describe_os_error(error) if isinstance(error, OSError) else error}", file=sys.stderr)


def _descriptor(path: str | Path) -> int | None:
    text = os.path.normpath(path)
    match = _DESCRIPTOR.fullmatch(text)
    return int(match[1]) if match is not None else _STANDARD.get(text)


def _is_stream(path: str | Path) -> bool:
    try:
        return _descriptor(path) is not None or not stat.S_ISREG(Path(path).stat().st_mode)
    except OSError:
        return False
