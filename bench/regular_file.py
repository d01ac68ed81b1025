"""Files of a run directory, which may be anybody's: only regular ones are read (a pipe would never end), and only up to
a size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["read_head", "read_regular", "read_tail"]

_TAIL_BYTES: Final = 256 << 10


def read_regular(path: Path, most_bytes: int) -> bytes:
    """All of it. OSError if it is no regular file, or larger than `most_bytes`."""
    fd = _open(path)
    with os.fdopen(fd, "rb") as file:
        raw = file.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", str(path))
    return raw


def read_head(path: Path, most_bytes: int) -> bytes:
    """The first bytes, at most so many. OSError if it is no regular file."""
    with os.fdopen(_open(path), "rb") as file:
        return file.read(most_bytes)


def read_tail(path: Path, most_bytes: int = _TAIL_BYTES) -> list[str]:
    """The last lines of a log; none if it cannot be read."""
    try:
        with os.fdopen(_open(path), "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - most_bytes, 0))
            return file.read(most_bytes).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _open(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd
