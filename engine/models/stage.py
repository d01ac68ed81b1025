"""One rank's part of a decoder: the layers of its pipeline stage, each divided among the tensor-parallel ranks.

Shape legend: t tokens of the step, d hidden size, n rows whose logits are wanted, v the rank's part of the vocabulary.
The layers are those of `engine/models/decoder.py` with smaller sizes; which part of a checkpoint fills them is
`engine/models/shard.py`'s.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom.engine.models.base import AttentionContext
from atom.engine.models.config import TransformerConfig
from atom.engine.models.decoder import DecoderLayer, Reduce, layer_views
from atom.engine.models.layers import Linear, RMSNorm
from atom.engine.models.rope import RotaryEmbedding
from atom.engine.models.shard import Part, Shard

__all__ = ["DecoderStage"]


class DecoderStage:
    """Weights are uninitialized until a loader fills the tensors of `checkpoint_parts`."""

    def __init__(
        self, config: TransformerConfig, shard: Shard, dtype: torch.dtype, device: torch.device, reduce: Reduce
    ) -> None:
        """`reduce`: sums a tensor over the tensor-parallel ranks."""
        self.config = config
        """Of the whole model."""
        self.local = shard.local_config(config)
        """Sizes of this rank's layers."""
        self.shard = shard
        self.dtype = dtype
        self.vocabulary = shard.vocabulary(config)
        self._reduce = reduce

        def rows() -> torch.Tensor:
            return torch.empty(len(self.vocabulary), config.hidden_size, dtype=dtype, device=device)

        self.embed_vd = rows() if shard.is_first else None
        self.layers = [
            DecoderLayer(self.local, index, dtype, device, cache_index=i, reduce=reduce)
            for i, index in enumerate(shard.layers(config))
        ]
        if shard.tp_rank > 0:
            for layer in self.layers:
                assert isinstance(layer.down_proj, Linear)
                layer.down_proj.bias = None  # added once, by the first rank
        self.norm: RMSNorm | None = None
        self.lm_head: Linear | None = None
        if shard.is_last:
            self.norm = RMSNorm(torch.empty(config.hidden_size, dtype=dtype, device=device), config.rms_norm_eps)
            tied = config.tie_word_embeddings and self.embed_vd is not None
            self.lm_head = Linear(self.embed_vd if tied and self.embed_vd is not None else rows())
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)

    def embed(self, token_ids_t: torch.Tensor) -> torch.Tensor:
        """Embeddings `[t, d]`; the first stage's."""
        assert self.embed_vd is not None
        if self.shard.tp_size == 1:
            return F.embedding(token_ids_t, self.embed_vd)
        local_t = token_ids_t - self.vocabulary.start
        mine_t = (local_t >= 0) & (local_t < len(self.vocabulary))
        x_td = F.embedding(local_t.where(mine_t, 0), self.embed_vd) * mine_t[:, None]
        return self._reduce(x_td)

    def run_layers(self, x_td: torch.Tensor, positions_t: torch.Tensor, attention: AttentionContext) -> torch.Tensor:
        """`[t, d]` after the stage's layers, in the model's dtype."""
        cos_t1j, sin_t1j = self.rotary.cos_sin(positions_t, self.dtype)
        for layer in self.layers:
            x_td = layer(x_td, cos_t1j, sin_t1j, attention)
        return x_td

    def final_norm(self, x_td: torch.Tensor) -> torch.Tensor:
        """The last stage's."""
        assert self.norm is not None
        return self.norm(x_td)

    def compute_logits(self, hidden_nd: torch.Tensor) -> torch.Tensor:
        """Logits `[n, v]` in float32, of the rank's part of the vocabulary; the last stage's."""
        assert self.lm_head is not None
        return self.lm_head(hidden_nd).to(torch.float32)

    def checkpoint_parts(self) -> list[tuple[str, Part | None, torch.Tensor]]:
        """What to load: the tensor's Hugging Face name, which part of it, and the view that it fills."""
        views: list[tuple[str, torch.Tensor]] = []
        if self.embed_vd is not None:
            views.append(("model.embed_tokens.weight", self.embed_vd))
        for layer in self.layers:
            views.extend(layer_views(layer, self.local).items())
        if self.norm is not None and self.lm_head is not None:
            views.append(("model.norm.weight", self.norm.weight))
            if not self.config.tie_word_embeddings:
                views.append(("lm_head.weight", self.lm_head.weight))
            elif self.embed_vd is None:
                views.append(("model.embed_tokens.weight", self.lm_head.weight))
        return [(name, self.shard.part(name, self.config), view) for name, view in views]
