"""Paged attention, in torch and compiled, against attention over plain tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.engine.executors.attention import KernelPagedAttention, TorchPagedAttention
from atom.engine.executors.kv_cache import KVCache, KVCacheShape
from atom.engine.executors.step_batch import StepBatch
from atom.engine.kernels.bindings import CPUKernels


class Case:
    """Sequences whose tokens are computed in given chunks, over scattered blocks of a pool full of garbage."""

    def __init__(
        self, chunks: list[list[int]], block_size: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.chunks, self.block_size, self.heads, self.dtype = chunks, block_size, heads, dtype
        self.shape = KVCacheShape(1, kv_heads, head_dim, block_size, dtype)
        lengths = [sum(sizes) for sizes in chunks]
        needed = [-(-length // block_size) for length in lengths]
        self.num_blocks = sum(needed) + 3
        rng = np.random.default_rng(0)
        order = rng.permutation(self.num_blocks)
        self.tables = np.full((len(chunks), max(needed)), order[-1], dtype=np.int32)
        for i, count in enumerate(needed):
            self.tables[i, :count] = order[sum(needed[:i]) : sum(needed[:i]) + count]
        generator = torch.Generator().manual_seed(0)
        self.q = [torch.randn(n, heads, head_dim, generator=generator) for n in lengths]
        self.k = [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype).float() for n in lengths]
        self.v = [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype).float() for n in lengths]
        self.scale = head_dim**-0.5

    def cache(self) -> KVCache:
        cache = KVCache(self.shape, self.num_blocks)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_(std=100.0)
        return cache

    def run(self, attention: TorchPagedAttention | KernelPagedAttention, together: bool = True) -> list[torch.Tensor]:
        """Output per sequence, computed chunk by chunk; `together`: one batch per chunk, else one per sequence."""
        out = [torch.full_like(q, torch.nan) for q in self.q]
        for step in range(max(len(sizes) for sizes in self.chunks)):
            active = [i for i, sizes in enumerate(self.chunks) if step < len(sizes)]
            for group in [active] if together else [[i] for i in active]:
                spans = [(sum(self.chunks[i][:step]), sum(self.chunks[i][: step + 1])) for i in group]
                attention.begin(self.batch(group, spans))
                parts = [
                    torch.cat([rows[i][first:end] for i, (first, end) in zip(group, spans, strict=True)])
                    for rows in (self.q, self.k, self.v)
                ]
                result = attention.attend(0, *parts)
                for i, (first, end), rows in zip(
                    group, spans, torch.split(result, [end - first for first, end in spans]), strict=True
                ):
                    out[i][first:end] = rows
        return out

    def batch(self, group: list[int], spans: list[tuple[int, int]]) -> StepBatch:
        positions = np.concatenate([np.arange(first, end) for first, end in spans]).astype(np.int32)
        rows = np.repeat(group, [end - first for first, end in spans])
        slots = self.tables[rows, positions // self.block_size].astype(np.int64) * self.block_size
        return StepBatch(
            states=[None] * len(group),  # type: ignore[list-item]
            token_ids_t=positions,
            positions_t=positions,
            slots_t=slots + positions % self.block_size,
            query_start=np.cumsum([0, *(end - first for first, end in spans)]).astype(np.int32),
            block_tables_sb=np.ascontiguousarray(self.tables[group]),
            sample_rows_n=np.zeros(0, dtype=np.int32),
            sampling=[],
        )

    def expected(self, i: int) -> torch.Tensor:
        """Dense causal attention in float64."""
        group = self.heads // self.shape.num_kv_heads
        q, k, v = self.q[i].double(), self.k[i].double(), self.v[i].double()
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhk,chk->hqc", q, k) * self.scale
        scores.masked_fill_(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("hqc,chk->qhk", scores.softmax(-1), v)

    def check(self, outputs: list[torch.Tensor]) -> None:
        for i, output in enumerate(outputs):
            torch.testing.assert_close(output.double(), self.expected(i), rtol=1e-4, atol=2e-5)


CASES = {
    "one-token": Case([[1]], 16, 4, 2, 16, torch.float32),
    "decode-and-prefill": Case([[40, 1, 1], [7, 30, 1], [100], [1, 1, 1]], 16, 6, 2, 64, torch.float32),
    "bf16": Case([[40, 1, 1], [7, 30, 1], [100]], 16, 9, 3, 64, torch.bfloat16),
    "block-1": Case([[20, 1], [3, 70]], 1, 4, 2, 32, torch.float32),
    "block-8-bf16": Case([[20, 1], [3, 70]], 8, 4, 4, 32, torch.bfloat16),
    "block-64": Case([[65, 1, 130]], 64, 4, 1, 16, torch.float32),
    "block-256": Case([[65, 1, 130, 120]], 256, 4, 1, 16, torch.bfloat16),
    "head-dim-8": Case([[33, 2]], 16, 2, 2, 8, torch.float32),
    "head-dim-24": Case([[33, 2, 1]], 16, 4, 2, 24, torch.bfloat16),
    "head-dim-80": Case([[33, 2, 1]], 32, 4, 2, 80, torch.float32),
    "head-dim-256": Case([[33, 2, 1]], 16, 2, 1, 256, torch.float32),
    "group-7": Case([[33, 2, 1], [1]], 16, 14, 2, 16, torch.float32),
    "group-64": Case([[33, 2, 1], [1]], 16, 64, 1, 16, torch.float32),
    "long": Case([[700, 1, 1], [3]], 16, 3, 1, 16, torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_torch(name: str) -> None:
    case = CASES[name]
    case.check(case.run(TorchPagedAttention(case.cache(), case.heads, case.scale)))


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str, kernels: CPUKernels) -> None:
    case = CASES[name]
    case.check(case.run(KernelPagedAttention(case.cache(), case.heads, case.scale, kernels)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    data=st.data(),
    block_size=st.sampled_from([1, 4, 16, 32, 128]),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (12, 1)]),
    head_dim=st.sampled_from([6, 16, 40, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_chunks_and_batches_do_not_change_a_bit(
    kernels: CPUKernels,
    data: st.DataObject,
    block_size: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """The promise that makes greedy output independent of scheduling: not close, equal."""
    chunks = data.draw(st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=4), min_size=1, max_size=5))
    case = Case(chunks, block_size, *heads, head_dim, dtype)
    chunked = case.run(KernelPagedAttention(case.cache(), case.heads, case.scale, kernels))
    case.check(chunked)
    case.chunks = [[sum(sizes)] for sizes in chunks]
    whole = case.run(KernelPagedAttention(case.cache(), case.heads, case.scale, kernels), together=False)
    for a, b in zip(chunked, whole, strict=True):
        assert torch.equal(a, b)
