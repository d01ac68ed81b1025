"""The tensors of the paged KV cache on the CPU, and how large the pool is. Which block belongs to whom:
`engine/block_pool.py`; who reads and writes the tensors: `attention.py` and `engine/kernels/cpu/attention.c`.

Shape legend: b blocks, g key/value heads, k head size, p head size padded to 16, s tokens per block.
Keys are stored transposed per block, `[b, g, k, s]`, so that vector lanes run over keys and a score needs no horizontal
sum; values are `[b, g, s, p]`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from atom.engine.config import CacheConfig
from atom.engine.errors import ConfigError

if TYPE_CHECKING:
    from atom.engine.transfer.pool_layout import PoolLayout

__all__ = ["KVCache", "KVCacheShape", "available_memory", "choose_num_blocks"]

DEFAULT_FRACTION: Final = 0.5
"""Share of the memory that is free after loading the weights, when no flag says how much."""
DEFAULT_LIMIT_BYTES: Final = 4 << 30
VALUE_PADDING: Final = 16


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """One cache: sizes of a block over all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def value_dim(self) -> int:
        return -(-self.head_dim // VALUE_PADDING) * VALUE_PADDING

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block over all layers."""
        per_token = self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize
        return self.num_layers * self.block_size * per_token


class KVCache:
    """`keys[layer]` and `values[layer]`. Pages take memory when they are first written."""

    def __init__(self, shape: KVCacheShape, num_blocks: int, pool: tuple[memoryview, PoolLayout] | None = None) -> None:
        """`pool`: memory of zeros that other processes read or write, laid out by `cache_layout` of the same shape."""
        self.shape = shape
        self.num_blocks = num_blocks
        if pool is not None:
            self._lie_in(*pool)
            return
        g, s = shape.num_kv_heads, shape.block_size
        try:
            self.keys = [_zeros((num_blocks, g, shape.head_dim, s), shape.dtype) for _ in range(shape.num_layers)]
            self.values = [_zeros((num_blocks, g, s, shape.value_dim), shape.dtype) for _ in range(shape.num_layers)]
        except MemoryError:
            size = num_blocks * shape.block_bytes / 2**30
            raise ConfigError(
                f"cannot allocate {size:.1f} GiB for {num_blocks} KV blocks: lower --kv-cache-memory or "
                f"--num-gpu-blocks-override"
            ) from None

    def _lie_in(self, memory: memoryview, layout: PoolLayout) -> None:
        shape = self.shape
        dims = {"k": (shape.head_dim, shape.block_size), "v": (shape.block_size, shape.value_dim)}
        arrays: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
        for piece in layout.pieces:
            size = (self.num_blocks, shape.num_kv_heads, *dims[piece.kind])
            flat = torch.frombuffer(memory, dtype=shape.dtype, count=math.prod(size), offset=piece.offset)
            arrays[piece.kind].append(flat.view(size))
        self.keys, self.values = arrays["k"], arrays["v"]

    def write(self, layer: int, slots_t: torch.Tensor, k_tgk: torch.Tensor, v_tgk: torch.Tensor) -> None:
        """Store keys and values of the step's tokens at slots `block · block_size + offset`."""
        blocks_t, offsets_t = slots_t // self.shape.block_size, slots_t % self.shape.block_size
        self.keys[layer][blocks_t, :, :, offsets_t] = k_tgk.to(self.shape.dtype)
        self.values[layer][blocks_t, :, offsets_t, : self.shape.head_dim] = v_tgk.to(self.shape.dtype)

    def read(self, layer: int, blocks_b: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `num_tokens` keys and values of a block table, both `[g, tokens, k]`."""
        keys_gkc = self.keys[layer][blocks_b].permute(1, 2, 0, 3).flatten(2)
        values_gcp = self.values[layer][blocks_b].permute(1, 0, 2, 3).flatten(1, 2)
        k_gck = keys_gkc[:, :, :num_tokens].transpose(1, 2)
        return k_gck, values_gcp[:, :num_tokens, : self.shape.head_dim]


def choose_num_blocks(cache: CacheConfig, shape: KVCacheShape, max_tokens: int, available_bytes: int) -> int:
    """Blocks of the pool: the number given, or what fits the memory given, or a share of what is available.

    `max_tokens`: more than all sequences together can ever hold, so more memory than that is never taken by default.
    """
    if cache.num_blocks is not None:
        needed = cache.num_blocks * shape.block_bytes
        if needed > available_bytes:
            raise ConfigError(
                f"--num-gpu-blocks-override {cache.num_blocks} takes {needed / 2**30:.1f} GiB of KV cache, "
                f"{available_bytes / 2**30:.1f} GiB are available; at most "
                f"{max(available_bytes // shape.block_bytes, 0)} blocks fit"
            )
        return cache.num_blocks
    if cache.memory_bytes is not None:
        if cache.memory_bytes > available_bytes:
            raise ConfigError(
                f"--kv-cache-memory {cache.memory_bytes} exceeds the {available_bytes} bytes that are available"
            )
        budget = cache.memory_bytes
    else:
        budget = min(int(available_bytes * DEFAULT_FRACTION), DEFAULT_LIMIT_BYTES)
        budget = min(budget, -(-max_tokens // shape.block_size) * shape.block_bytes)
    if budget < shape.block_bytes:
        raise ConfigError(
            f"--kv-cache-memory: one KV block takes {shape.block_bytes} bytes, {budget} are to be used; "
            f"give at least {shape.block_bytes}, or lower --block-size {shape.block_size}"
        )
    return budget // shape.block_bytes


def available_memory() -> int:
    """Bytes this process may still take: the machine's available memory, or less where a cgroup limits it."""
    available = _mem_available()
    for limit_file, usage_file in _cgroup_files():
        try:
            limit = limit_file.read_text().strip()
            if limit != "max":
                available = min(available, int(limit) - int(usage_file.read_text()))
        except (OSError, ValueError):
            continue
    return max(available, 0)


def _mem_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_files() -> list[tuple[Path, Path]]:
    """(limit, usage) files of this process' cgroup and its ancestors, version 2 and 1."""
    root = Path("/sys/fs/cgroup")
    pairs = [(root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes")]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory == base.parent:
                break
            pairs.append((directory / names[0], directory / names[1]))
    return pairs


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages are not touched: `torch.zeros` would write the whole pool at start."""
    storage = np.zeros(shape, dtype={2: np.uint16, 4: np.uint32}[dtype.itemsize])
    return torch.from_numpy(storage).view(dtype)
