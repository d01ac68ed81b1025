"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families, which differ only by options of `TransformerConfig`.

Shape legend: t tokens of the step, d hidden size, h query heads, g key/value heads, k head size, n rows whose logits
are wanted, v vocabulary, i intermediate size. q, k and v share one weight, and so do gate and up: fewer and larger
matrix products. Which checkpoint tensor fills which part of them is `checkpoint_views`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from atom.engine.models.base import AttentionContext
from atom.engine.models.config import TransformerConfig
from atom.engine.models.layers import Linear, RMSNorm, silu_and_mul
from atom.engine.models.rope import RotaryEmbedding, apply_rope

Projection = Callable[[torch.Tensor], torch.Tensor]
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums what the ranks of a group computed, each from its part of a weight."""


def whole(x_td: torch.Tensor) -> torch.Tensor:
    """The `Reduce` of weights that are not divided."""
    return x_td


class DecoderLayer:
    """Attention and MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(
        self,
        config: TransformerConfig,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        cache_index: int | None = None,
        reduce: Reduce = whole,
    ) -> None:
        """`cache_index`: the layer's number in the cache, where that does not begin with the model's first layer."""

        def linear(out_features: int, in_features: int, bias: bool) -> Linear:
            return Linear(
                torch.empty(out_features, in_features, dtype=dtype, device=device),
                torch.empty(out_features, dtype=dtype, device=device) if bias else None,
            )

        def norm(size: int) -> RMSNorm:
            return RMSNorm(torch.empty(size, dtype=dtype, device=device), config.rms_norm_eps)

        d, k = config.hidden_size, config.head_dim
        self.index = index
        self.cache_index = index if cache_index is None else cache_index
        self._reduce = reduce
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = k
        self.input_norm = norm(d)
        self.qkv_proj: Projection = linear((config.num_heads + 2 * config.num_kv_heads) * k, d, config.qkv_bias)
        self.q_norm = norm(k) if config.qk_norm else None
        self.k_norm = norm(k) if config.qk_norm else None
        self.o_proj: Projection = linear(d, config.num_heads * k, config.o_bias)
        self.post_attention_norm = norm(d)
        self.gate_up_proj: Projection = linear(2 * config.intermediate_size, d, config.mlp_bias)
        self.down_proj: Projection = linear(d, config.intermediate_size, config.mlp_bias)

    def __call__(
        self, x_td: torch.Tensor, cos_t1j: torch.Tensor, sin_t1j: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        x_td = x_td + self._reduce(self._attend(self.input_norm(x_td), cos_t1j, sin_t1j, attention))
        mlp_td = self.down_proj(silu_and_mul(self.gate_up_proj(self.post_attention_norm(x_td))))
        return x_td + self._reduce(mlp_td)

    def _attend(
        self, x_td: torch.Tensor, cos_t1j: torch.Tensor, sin_t1j: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        h, g = self.num_heads, self.num_kv_heads
        qkv_tnk = self.qkv_proj(x_td).view(x_td.shape[0], h + 2 * g, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_thk = apply_rope(self.q_norm(qkv_tnk[:, :h]), cos_t1j, sin_t1j)
            k_tgk = apply_rope(self.k_norm(qkv_tnk[:, h : h + g]), cos_t1j, sin_t1j)
        else:
            qk_tnk = apply_rope(qkv_tnk[:, : h + g], cos_t1j, sin_t1j)
            q_thk, k_tgk = qk_tnk[:, :h], qk_tnk[:, h:]
        out_thk = attention.attend(self.cache_index, q_thk, k_tgk, qkv_tnk[:, h + g :])
        return self.o_proj(out_thk.reshape(x_td.shape[0], h * self.head_dim))


class DecoderLM:
    """A decoder with a language-model head; implements `CausalLM`. Weights are uninitialized until a loader fills the
    tensors of `checkpoint_views`."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embed_vd = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, index, dtype, device) for index in range(config.num_layers)]
        self.norm = RMSNorm(torch.empty(config.hidden_size, dtype=dtype, device=device), config.rms_norm_eps)
        head_vd = self.embed_vd if config.tie_word_embeddings else torch.empty_like(self.embed_vd)
        self.lm_head: Projection = Linear(head_vd)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)

    def forward(
        self, token_ids_t: torch.Tensor, positions_t: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Final-norm hidden states `[t, d]` in the model's dtype."""
        x_td = F.embedding(token_ids_t, self.embed_vd)
        cos_t1j, sin_t1j = self.rotary.cos_sin(positions_t, self.dtype)
        for layer in self.layers:
            x_td = layer(x_td, cos_t1j, sin_t1j, attention)
        return self.norm(x_td)

    def compute_logits(self, hidden_nd: torch.Tensor) -> torch.Tensor:
        """Logits `[n, v]` in float32."""
        return self.lm_head(hidden_nd).to(torch.float32)

    def named_linears(self) -> Iterator[tuple[str, DecoderLayer | DecoderLM, str, Linear]]:
        """Every projection that is still a plain `Linear`: name, its owner, the owner's attribute, and the projection.

        `setattr(owner, attribute, replacement)` puts another callable of the same signature in its place.
        """
        for layer in self.layers:
            for attribute in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
                projection = getattr(layer, attribute)
                if isinstance(projection, Linear):
                    yield f"layers.{layer.index}.{attribute}", layer, attribute, projection
        if isinstance(self.lm_head, Linear):
            yield "lm_head", self, "lm_head", self.lm_head

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """The tensors of a Hugging Face checkpoint by name, as views of the (fused) weights that they fill.

        Call it before any projection is replaced. A tied head has no tensor of its own.
        """
        views = {"model.embed_tokens.weight": self.embed_vd, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            views |= _linear_views("lm_head", self.lm_head)
        for layer in self.layers:
            views |= layer_views(layer, self.config)
        return views


def layer_views(layer: DecoderLayer, config: TransformerConfig) -> dict[str, torch.Tensor]:
    """`checkpoint_views` of one layer. `config` has the sizes that the layer was made with."""
    prefix = f"model.layers.{layer.index}"
    q, kv, i = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    views = {
        f"{prefix}.input_layernorm.weight": layer.input_norm.weight,
        f"{prefix}.post_attention_layernorm.weight": layer.post_attention_norm.weight,
    }
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    views |= _split_views(
        layer.qkv_proj, {f"{attention}.{name}_proj": size for name, size in zip("qkv", (q, kv, kv), strict=True)}
    )
    views |= _split_views(layer.gate_up_proj, {f"{mlp}.gate_proj": i, f"{mlp}.up_proj": i})
    views |= _linear_views(f"{attention}.o_proj", layer.o_proj)
    views |= _linear_views(f"{mlp}.down_proj", layer.down_proj)
    if layer.q_norm is not None and layer.k_norm is not None:
        views[f"{attention}.q_norm.weight"] = layer.q_norm.weight
        views[f"{attention}.k_norm.weight"] = layer.k_norm.weight
    return views


def _linear_views(name: str, projection: Projection) -> dict[str, torch.Tensor]:
    assert isinstance(projection, Linear), f"{name} was already replaced"
    return _split_views(projection, {name: projection.weight.shape[0]})


def _split_views(projection: Projection, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Rows of a fused projection by the names of its parts."""
    assert isinstance(projection, Linear), f"{next(iter(sizes))} was already replaced"
    views: dict[str, torch.Tensor] = {}
    start = 0
    for name, size in sizes.items():
        views[f"{name}.weight"] = projection.weight[start : start + size]
        if projection.bias is not None:
            views[f"{name}.bias"] = projection.bias[start : start + size]
        start += size
    return views
