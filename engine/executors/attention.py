"""Paged attention for models that run in torch: two `AttentionContext`s over the same cache, the torch reference and
the compiled kernel. A model with a fused decoder (`engine/kernels/decoder.py`) needs neither.

Shape legend: t tokens of the step, h query heads, g key/value heads, k head size, q tokens of one sequence in the step,
c its tokens so far including them.
"""

from __future__ import annotations

import numpy as np
import torch

from atom.engine.executors.kv_cache import KVCache
from atom.engine.executors.step_batch import StepBatch
from atom.engine.kernels import bindings

__all__ = ["KernelPagedAttention", "TorchPagedAttention", "kernel_batch"]


class TorchPagedAttention:
    """The reference: gathers each sequence's blocks and attends in float32. Always available."""

    def __init__(self, cache: KVCache, num_heads: int, scale: float) -> None:
        self._cache = cache
        self._group = num_heads // cache.shape.num_kv_heads
        self._scale = scale
        self._slots_t = torch.empty(0, dtype=torch.int64)
        self._sequences: list[tuple[int, int, int, torch.Tensor]] = []

    def begin(self, batch: StepBatch) -> None:
        self._slots_t = torch.from_numpy(batch.slots_t)
        starts = batch.query_start.tolist()
        ends = (batch.positions_t[batch.query_start[1:] - 1] + 1).tolist()
        size = self._cache.shape.block_size
        self._sequences = [
            (starts[i], starts[i + 1], end, torch.from_numpy(batch.block_tables_sb[i, : -(-end // size)]).long())
            for i, end in enumerate(ends)
        ]

    def attend(self, layer: int, q_thk: torch.Tensor, k_tgk: torch.Tensor, v_tgk: torch.Tensor) -> torch.Tensor:
        self._cache.write(layer, self._slots_t, k_tgk, v_tgk)
        out_thk = torch.empty_like(q_thk)
        for start, stop, num_tokens, blocks in self._sequences:
            k_gck, v_gck = self._cache.read(layer, blocks, num_tokens)
            out_thk[start:stop] = self._attend_one(q_thk[start:stop], k_gck.float(), v_gck.float())
        return out_thk

    def _attend_one(self, q_qhk: torch.Tensor, k_gck: torch.Tensor, v_gck: torch.Tensor) -> torch.Tensor:
        queries, heads, k = q_qhk.shape
        g, keys, _ = k_gck.shape
        # Query heads of one kv head are further queries: [g, q · group, k].
        q_grk = (q_qhk.float() * self._scale).view(queries, g, self._group, k).transpose(0, 1).reshape(g, -1, k)
        scores_grc = torch.matmul(q_grk, k_gck.transpose(1, 2))
        if queries > 1:
            future_qc = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
            scores_grc.masked_fill_(future_qc.repeat_interleave(self._group, dim=0), -torch.inf)
        out_grk = torch.matmul(scores_grc.softmax(-1), v_gck)
        return out_grk.view(g, queries, self._group, k).transpose(0, 1).reshape(queries, heads, k).to(q_qhk.dtype)


class KernelPagedAttention:
    """The compiled kernel. Float32 inside, whatever the model's dtype."""

    def __init__(self, cache: KVCache, num_heads: int, scale: float, kernels: bindings.CPUKernels) -> None:
        self._cache = cache
        self._kernels = kernels
        self._attention = attention_struct(cache, num_heads, scale)
        self._scratch = kernels.attention_scratch(self._attention)
        self._batch = bindings.Batch()
        self._arrays: StepBatch | None = None

    def begin(self, batch: StepBatch) -> None:
        self._arrays = batch  # the struct below only borrows its memory
        self._batch = kernel_batch(batch)

    def attend(self, layer: int, q_thk: torch.Tensor, k_tgk: torch.Tensor, v_tgk: torch.Tensor) -> torch.Tensor:
        qkv = (q_thk.float().contiguous(), k_tgk.float().contiguous(), v_tgk.float().contiguous())
        out_thk = torch.empty_like(qkv[0])
        caches = (self._cache.keys[layer], self._cache.values[layer])
        self._kernels.attend(self._attention, self._batch, qkv, caches, out_thk, self._scratch)
        return out_thk.to(q_thk.dtype)


def attention_struct(cache: KVCache, num_heads: int, scale: float) -> bindings.Attention:
    shape = cache.shape
    return bindings.Attention(
        num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, bindings.DTYPES[shape.dtype], scale
    )


def kernel_batch(batch: StepBatch) -> bindings.Batch:
    """The batch as the kernels see it. It borrows the arrays: keep `batch` alive during the call."""
    arrays = (
        batch.token_ids_t,
        batch.positions_t,
        batch.slots_t,
        batch.query_start,
        batch.block_tables_sb,
        batch.sample_rows_n,
    )
    assert all(array.flags.c_contiguous for array in arrays)
    assert batch.slots_t.dtype == np.int64
    tokens, positions, slots, starts, tables, rows = (array.ctypes.data for array in arrays)
    return bindings.Batch(
        num_seqs=len(batch.states),
        num_tokens=batch.num_tokens,
        token_ids=tokens,
        positions=positions,
        slots=slots,
        query_start=starts,
        block_tables=tables,
        max_blocks=batch.block_tables_sb.shape[1],
        num_logits=len(batch.sample_rows_n),
        logits_rows=rows,
    )
