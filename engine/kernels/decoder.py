"""A decoder of the Llama, Mistral, Qwen2 and Qwen3 families packed for the fused step in `cpu/decoder.c`.

Packing moves the weights: the tensors of the `DecoderLM` are dropped layer by layer as they are packed, so memory never
holds the model twice, and that model cannot be run any more.
"""

from __future__ import annotations

import ctypes

import torch

from atom.engine.executors.kv_cache import KVCache
from atom.engine.kernels.arena import WeightArena
from atom.engine.kernels.bindings import (
    DTYPES,
    MAX_GROUP,
    MAX_HEAD_DIM,
    Attention,
    Batch,
    CPUKernels,
    Layer,
    Model,
)
from atom.engine.kernels.packing import LayerPacker
from atom.engine.models.config import TransformerConfig
from atom.engine.models.decoder import DecoderLM

__all__ = ["FusedDecoder", "why_not_fused"]


def why_not_fused(config: TransformerConfig, dtype: torch.dtype) -> str | None:
    """What keeps a decoder from the fused kernel, or None."""
    if dtype not in DTYPES:
        return f"weights are {str(dtype).removeprefix('torch.')}"
    if config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} exceeds {MAX_HEAD_DIM}"
    if config.num_heads // config.num_kv_heads > MAX_GROUP:
        return f"more than {MAX_GROUP} query heads per kv head"
    if config.hidden_size % 2 or config.intermediate_size % 2:
        return "hidden_size and intermediate_size must be even"
    return None


class FusedDecoder:
    """`step` computes a whole batch in one call. Activations are float32 whatever the weights are."""

    def __init__(
        self, model: DecoderLM, cache: KVCache, kernels: CPUKernels, attention: Attention, max_model_len: int
    ) -> None:
        config = model.config
        self._kernels = kernels
        self._cache = cache
        packer = LayerPacker(kernels, cache, WeightArena())
        self._packer = packer  # holds what the structs point to
        self._dtype = model.dtype
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        embedding = None if config.tie_word_embeddings else packer.keep(model.embed_vd.contiguous())
        lm_head = packer.pack(model.lm_head)
        model.lm_head = model.embed_vd = None  # type: ignore[assignment]
        cos_pj, sin_pj = model.rotary.cos_sin(torch.arange(max_model_len + 1), torch.float32)
        self._layers = (Layer * config.num_layers)()
        for index, layer in enumerate(model.layers):
            self._layers[index] = packer.pack_layer(layer, config.intermediate_size)
        final_norm = packer.keep_float(model.norm.weight)
        model.layers.clear()
        self._model = Model(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            vocab=config.vocab_size,
            rotary_dim=config.head_dim,
            dtype=DTYPES[self._dtype],
            eps=config.rms_norm_eps,
            embed_scale=1.0,
            attention=attention,
            embedding=embedding,
            cos=packer.keep_float(cos_pj),
            sin=packer.keep_float(sin_pj),
            final_norm=final_norm,
            lm_head=lm_head,
            layers=ctypes.cast(self._layers, ctypes.POINTER(Layer)),
        )
        self._workspace = torch.empty(0)

    @property
    def weight_bytes(self) -> int:
        return self._packer.num_bytes

    def step(self, batch: Batch, logits_nv: torch.Tensor, hidden_td: torch.Tensor | None = None) -> None:
        """Fill `logits_nv` for the batch's logits rows, and `hidden_td` for every token if given; both float32."""
        self._reserve(batch.num_tokens)
        self._kernels.decoder_step(self._model, batch, self._workspace, logits_nv, hidden_td)

    def compute_logits(self, hidden_nd: torch.Tensor) -> torch.Tensor:
        """Logits `[n, v]` of final-norm hidden states, float32."""
        self._reserve(0)
        logits_nv = torch.empty(hidden_nd.shape[0], self.vocab_size)
        self._kernels.decoder_logits(self._model, hidden_nd.contiguous(), self._workspace, logits_nv)
        return logits_nv

    def _reserve(self, tokens: int) -> None:
        needed = self._kernels.workspace_floats(self._model, tokens)
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed)
