"""The process of the `atom` command: what holds before the first import and after the last line.

The command itself is `cli/dispatch.py`. It is imported by `main`, because Ctrl-C may come while that takes its time,
and because libraries need descriptors 0 to 2 to be open.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final

__all__ = ["main"]

_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `atom` with `argv` (default: the process's) and return the exit status. The process should end with it."""
    signal.signal(signal.SIGINT, _leave)  # nothing is there yet that would have to be undone
    _open_standard_files()
    from atom.cli import dispatch

    try:
        status = dispatch.main(argv)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter's own end would print a traceback
    _flush()
    if status > 128:
        os._exit(status)  # whoever ended the run waits for no thread that still has work
    return status


def _leave(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


def _open_standard_files() -> None:
    """Give a closed descriptor (`>&-`) to /dev/null, lest the next file opened becomes standard output."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest one that is free: this one
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _flush() -> None:
    """What nobody reads any more must not change the exit status, as the interpreter's own flush would."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
