"""Memory of a pool that another process on the host can map: a memfd, which has no name in any file system, so that
nothing stays behind however its process ends. Its size is sealed: no peer can cut it short under our feet.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from atom.engine.errors import ConfigError
from atom.engine.transfer.endpoint import marks_offset, pool_bytes
from atom.engine.transfer.pool_layout import PoolLayout

__all__ = ["RemotePool", "SharedPool"]

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedPool:
    """Zeros; pages take memory when they are first written."""

    def __init__(self, layout: PoolLayout) -> None:
        self.num_bytes = pool_bytes(layout)
        self.marks_offset = marks_offset(layout)
        self.fd = os.memfd_create("atom-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, self.num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, self.num_bytes)
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(
                f"cannot share {self.num_bytes / 2**30:.1f} GiB of KV blocks ({error.strerror}): lower "
                "--kv-cache-memory or --num-gpu-blocks-override"
            ) from None
        self.memory = memoryview(self._map)
        self.marks: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, layout.num_blocks, self.marks_offset)
        self.address = _address(self._map)

    def close(self) -> None:
        """The mapping goes when the last view of it does."""
        os.close(self.fd)


class RemotePool:
    """Another process' pool, mapped here."""

    def __init__(self, fd: int, num_bytes: int, marks: int, num_blocks: int) -> None:
        """Owns and closes `fd`. ValueError when it is not what was described."""
        try:
            size = os.fstat(fd).st_size
            if size != num_bytes:
                raise ValueError(f"the receiver's pool has {size} bytes, its description says {num_bytes}")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("the receiver's pool is not sealed")
            self._map = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
        self.marks: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64, num_blocks, marks)
        self.address = _address(self._map)


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
