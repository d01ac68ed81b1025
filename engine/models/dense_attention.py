"""Plain causal attention with a growing cache per sequence: the reference that paged attention is tested against.

Shape legend: t tokens of the step, h query heads, g key/value heads, k head size, s tokens of one sequence in the
step, c its tokens so far including them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class DenseAttention:
    """An `AttentionContext` that concatenates. One object is one set of sequences; a fresh one has no past."""

    def __init__(self) -> None:
        self._num_new: dict[int, int] = {}
        self._cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def step(self, num_new_tokens: Mapping[int, int]) -> DenseAttention:
        """Announce the next forward pass: new tokens per sequence, in the order of the batch. Returns itself."""
        self._num_new = dict(num_new_tokens)
        return self

    def attend(self, layer: int, q_thk: torch.Tensor, k_tgk: torch.Tensor, v_tgk: torch.Tensor) -> torch.Tensor:
        """Softmax(q·kᵀ/√k)·v over each sequence's own past, softmax in float32."""
        sizes = list(self._num_new.values())
        assert sum(sizes) == q_thk.shape[0], "step() announced another number of tokens"
        outputs = []
        rows = zip(self._num_new, *(torch.split(x, sizes) for x in (q_thk, k_tgk, v_tgk)), strict=True)
        for sequence, q_shk, k_sgk, v_sgk in rows:
            past = self._cache.get((layer, sequence))
            k_cgk = k_sgk if past is None else torch.cat((past[0], k_sgk))
            v_cgk = v_sgk if past is None else torch.cat((past[1], v_sgk))
            self._cache[layer, sequence] = (k_cgk, v_cgk)
            outputs.append(_attend_one(q_shk, k_cgk, v_cgk))
        return torch.cat(outputs)


def _attend_one(q_shk: torch.Tensor, k_cgk: torch.Tensor, v_cgk: torch.Tensor) -> torch.Tensor:
    s, h, k = q_shk.shape
    c, g, _ = k_cgk.shape
    k_hck = k_cgk.repeat_interleave(h // g, dim=1).transpose(0, 1)
    v_hck = v_cgk.repeat_interleave(h // g, dim=1).transpose(0, 1)
    scores_hsc = torch.matmul(q_shk.transpose(0, 1), k_hck.transpose(1, 2)) * k**-0.5
    future_sc = torch.ones(s, c, dtype=torch.bool, device=q_shk.device).triu(c - s + 1)
    weights_hsc = scores_hsc.masked_fill(future_sc, float("-inf")).softmax(-1, dtype=torch.float32)
    return torch.matmul(weights_hsc.to(q_shk.dtype), v_hck).transpose(0, 1)
