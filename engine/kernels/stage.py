"""A decoder stage packed for the compiled kernels: `engine/kernels/decoder.py` in pieces, between which ranks exchange
what they have. Activations are float32 whatever the weights are.

As there, packing moves the weights: the `DecoderStage` gives up its tensors and cannot be run any more.
"""

from __future__ import annotations

import ctypes

import torch

from atom.engine.executors.kv_cache import KVCache
from atom.engine.kernels.arena import WeightArena
from atom.engine.kernels.bindings import DTYPES, Attention, Batch, CPUKernels, Layer, Model, Weight
from atom.engine.kernels.packing import LayerPacker
from atom.engine.models.decoder import Reduce
from atom.engine.models.stage import DecoderStage

__all__ = ["FusedStage"]


class FusedStage:
    """One rank's layers. Shape legend: t tokens, d hidden size, n rows, v the rank's part of the vocabulary."""

    def __init__(
        self,
        stage: DecoderStage,
        cache: KVCache,
        kernels: CPUKernels,
        attention: Attention,
        max_model_len: int,
        reduce: Reduce,
    ) -> None:
        config, local = stage.config, stage.local
        self._kernels = kernels
        self._cache = cache
        self._reduce = reduce
        self._divided = stage.shard.tp_size > 1
        self._vocabulary = stage.vocabulary
        self.hidden_size = config.hidden_size
        packer = LayerPacker(kernels, cache, WeightArena())
        self._packer = packer  # holds what the structs point to
        self._norm = stage.norm
        if self._norm is not None:
            self._norm.weight = self._norm.weight.float()
        embedding: int | None = None
        lm_head = Weight()
        if stage.lm_head is not None:
            tied = stage.embed_vd is stage.lm_head.weight
            if stage.embed_vd is not None and not tied:
                embedding = packer.keep(stage.embed_vd.contiguous())
            lm_head = packer.pack(stage.lm_head)
        elif stage.embed_vd is not None:
            embedding = packer.keep(stage.embed_vd.contiguous())
        stage.lm_head = stage.embed_vd = None
        cos_pj, sin_pj = stage.rotary.cos_sin(torch.arange(max_model_len + 1), torch.float32)
        self._layers = (Layer * local.num_layers)()
        for index, layer in enumerate(stage.layers):
            self._layers[index] = packer.pack_layer(layer, local.intermediate_size)
        stage.layers.clear()
        self._model = Model(
            num_layers=local.num_layers,
            hidden=config.hidden_size,
            ffn=local.intermediate_size,
            vocab=len(self._vocabulary),
            rotary_dim=config.head_dim,
            dtype=DTYPES[stage.dtype],
            eps=config.rms_norm_eps,
            embed_scale=1.0,
            attention=attention,
            embedding=embedding,
            cos=packer.keep_float(cos_pj),
            sin=packer.keep_float(sin_pj),
            lm_head=lm_head,
            layers=ctypes.cast(self._layers, ctypes.POINTER(Layer)),
        )
        self._workspace = torch.empty(0)

    def embed(self, token_ids_t: torch.Tensor) -> torch.Tensor:
        """`[t, d]`, summed over the ranks. `token_ids_t` int32."""
        x_td = torch.empty(len(token_ids_t), self.hidden_size)
        local_t = token_ids_t - self._vocabulary.start
        local_t[(local_t < 0) | (local_t >= len(self._vocabulary))] = -1
        self._kernels.embed(self._model, local_t, x_td)
        return self._reduce(x_td) if self._divided else x_td

    def run_layers(self, x_td: torch.Tensor, batch: Batch) -> torch.Tensor:
        """All layers, in place."""
        self._reserve(x_td.shape[0])
        if not self._divided:
            self._kernels.layers(self._model, batch, x_td, self._workspace)
            return x_td
        part_td = torch.empty_like(x_td)
        for layer in range(self._model.num_layers):
            self._kernels.half_layer(self._model, batch, layer, "attention", x_td, part_td, self._workspace)
            x_td += self._reduce(part_td)
            self._kernels.half_layer(self._model, batch, layer, "mlp", x_td, part_td, self._workspace)
            x_td += self._reduce(part_td)
        return x_td

    def final_norm(self, x_td: torch.Tensor) -> torch.Tensor:
        assert self._norm is not None
        return self._norm(x_td)

    def compute_logits(self, hidden_nd: torch.Tensor) -> torch.Tensor:
        """Logits `[n, v]`, float32."""
        self._reserve(0)
        logits_nv = torch.empty(hidden_nd.shape[0], len(self._vocabulary))
        self._kernels.decoder_logits(self._model, hidden_nd.contiguous(), self._workspace, logits_nv)
        return logits_nv

    def _reserve(self, tokens: int) -> None:
        needed = self._kernels.workspace_floats(self._model, tokens)
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed)
