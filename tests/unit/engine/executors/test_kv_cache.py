"""Sizing of the KV pool, and what its tensors hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atom.engine.config import CacheConfig
from atom.engine.errors import ConfigError
from atom.engine.executors import kv_cache
from atom.engine.executors.kv_cache import KVCache, KVCacheShape, available_memory, choose_num_blocks

SHAPE = KVCacheShape(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)
GIB = 1 << 30


def test_block_bytes() -> None:
    assert SHAPE.block_bytes == 30 * 16 * 3 * (64 + 64) * 2
    padded = KVCacheShape(num_layers=1, num_kv_heads=2, head_dim=24, block_size=4, dtype=torch.float32)
    assert padded.block_bytes == 4 * 2 * (24 + 32) * 4
    cache = KVCache(padded, 5)
    assert sum(tensor.numel() * 4 for tensor in (*cache.keys, *cache.values)) == 5 * padded.block_bytes


def test_the_number_given_is_the_number() -> None:
    assert choose_num_blocks(CacheConfig(num_blocks=7), SHAPE, 10_000, 8 * GIB) == 7


def test_the_memory_given_is_used_up() -> None:
    blocks = choose_num_blocks(CacheConfig(memory_bytes=GIB), SHAPE, 10**9, 8 * GIB)
    assert blocks * SHAPE.block_bytes <= GIB < (blocks + 1) * SHAPE.block_bytes


@pytest.mark.parametrize(
    ("available", "max_tokens", "expected"),
    [(2 * GIB, 10**9, GIB), (100 * GIB, 10**9, 4 * GIB), (100 * GIB, 1000, 63 * SHAPE.block_bytes)],
    ids=["half of what is free", "four GiB at most", "no more than all sequences can hold"],
)
def test_default(available: int, max_tokens: int, expected: int) -> None:
    blocks = choose_num_blocks(CacheConfig(), SHAPE, max_tokens, available)
    assert blocks == expected // SHAPE.block_bytes


@pytest.mark.parametrize(
    ("cache", "available", "message"),
    [
        (CacheConfig(num_blocks=10**6), GIB, r"--num-gpu-blocks-override 1000000 takes .* at most 2912 blocks fit"),
        (CacheConfig(memory_bytes=2 * GIB), GIB, "--kv-cache-memory 2147483648 exceeds the 1073741824 bytes"),
        (CacheConfig(), 1000, "--kv-cache-memory: one KV block takes 368640 bytes, 500 are to be used"),
        (CacheConfig(block_size=256, memory_bytes=1 << 20), GIB, "--block-size 256"),
    ],
)
def test_errors_name_the_flag(cache: CacheConfig, available: int, message: str) -> None:
    shape = KVCacheShape(30, 3, 64, cache.block_size, torch.bfloat16)
    with pytest.raises(ConfigError, match=message):
        choose_num_blocks(cache, shape, 10**9, available)


def test_a_cgroup_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = available_memory()
    assert unlimited > 0
    limit, usage = tmp_path / "memory.max", tmp_path / "memory.current"
    usage.write_text("1000\n")
    monkeypatch.setattr(kv_cache, "_cgroup_files", lambda: [(limit, usage)])
    assert available_memory() > 100_000  # a file that is not there limits nothing
    limit.write_text("max\n")
    assert available_memory() > 100_000
    limit.write_text("51000\n")
    assert available_memory() == 50_000
    limit.write_text("500\n")
    assert available_memory() == 0


def test_write_then_read() -> None:
    shape = KVCacheShape(num_layers=2, num_kv_heads=2, head_dim=6, block_size=4, dtype=torch.float32)
    cache = KVCache(shape, 6)
    k, v = torch.randn(7, 2, 6), torch.randn(7, 2, 6)
    blocks = torch.tensor([4, 1])
    positions = torch.arange(7)
    cache.write(1, blocks[positions // 4] * 4 + positions % 4, k, v)
    k_gck, v_gck = cache.read(1, blocks, 7)
    assert torch.equal(k_gck, k.transpose(0, 1))
    assert torch.equal(v_gck, v.transpose(0, 1))
    assert not cache.keys[0].any()
