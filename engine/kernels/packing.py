"""From tensors of decoder layers to what the kernels' structs point to: packed weights, float32 norms and biases."""

from __future__ import annotations

import torch

from atom.engine.executors.kv_cache import KVCache
from atom.engine.kernels.arena import WeightArena
from atom.engine.kernels.bindings import CPUKernels, Layer, Weight
from atom.engine.models.decoder import DecoderLayer
from atom.engine.models.layers import Linear

__all__ = ["LayerPacker"]


class LayerPacker:
    """Keeps alive whatever it has returned a pointer to."""

    def __init__(self, kernels: CPUKernels, cache: KVCache, arena: WeightArena) -> None:
        self._kernels = kernels
        self._cache = cache
        self._arena = arena
        self._tensors: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def pack_layer(self, layer: DecoderLayer, intermediate_size: int) -> Layer:
        """The layer gives up its weights."""
        gate_up, inner = _linear(layer.gate_up_proj), intermediate_size
        gate_bias, up_bias = (None, None) if gate_up.bias is None else (gate_up.bias[:inner], gate_up.bias[inner:])
        packed = Layer(
            qkv=self.pack(layer.qkv_proj),
            o=self.pack(layer.o_proj),
            gate=self.pack(Linear(gate_up.weight[:inner], gate_bias)),
            up=self.pack(Linear(gate_up.weight[inner:], up_bias)),
            down=self.pack(layer.down_proj),
            input_norm=self.keep_float(layer.input_norm.weight),
            post_norm=self.keep_float(layer.post_attention_norm.weight),
            q_norm=None if layer.q_norm is None else self.keep_float(layer.q_norm.weight),
            k_norm=None if layer.k_norm is None else self.keep_float(layer.k_norm.weight),
            k_cache=self._cache.keys[layer.cache_index].data_ptr(),
            v_cache=self._cache.values[layer.cache_index].data_ptr(),
        )
        layer.qkv_proj = layer.o_proj = layer.gate_up_proj = layer.down_proj = None  # type: ignore[assignment]
        return packed

    def pack(self, projection: object) -> Weight:
        linear = _linear(projection)
        n, k = linear.weight.shape
        bias = None if linear.bias is None else self.keep_float(linear.bias)
        return Weight(self.keep(self._kernels.pack(linear.weight, self._arena)), bias, n, k)

    def keep_float(self, tensor: torch.Tensor) -> int:
        return self.keep(tensor.to(torch.float32).contiguous())

    def keep(self, tensor: torch.Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()


def _linear(projection: object) -> Linear:
    assert isinstance(projection, Linear)
    return projection
