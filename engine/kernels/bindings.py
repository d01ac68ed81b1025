"""Typed access to the compiled CPU kernels: the ctypes mirror of `cpu/atom.h` and the `CPUKernels` handle.

A `CPUKernels` owns one pool of compute threads. Calls release the GIL; calls on one handle run one after another.
Every tensor that goes in must be contiguous and stay alive during the call.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int64, c_void_p
from functools import lru_cache
from typing import Final, Literal

import torch

from atom.engine.kernels.arena import WeightArena
from atom.engine.kernels.build import KernelsUnavailableError, build_library

__all__ = ["DTYPES", "Attention", "Batch", "CPUKernels", "KernelsUnavailableError", "Layer", "Model", "Weight"]

ABI: Final = 1
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""Weight and cache types the kernels know, with their number in `enum atom_dtype`."""
MAX_GROUP: Final = 64
MAX_HEAD_DIM: Final = 256


class Weight(Structure):
    _fields_ = [("data", c_void_p), ("bias", c_void_p), ("n", c_int64), ("k", c_int64)]


class Batch(Structure):
    _fields_ = [
        ("num_seqs", c_int64),
        ("num_tokens", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("block_tables", c_void_p),
        ("max_blocks", c_int64),
        ("num_logits", c_int64),
        ("logits_rows", c_void_p),
    ]


class Attention(Structure):
    _fields_ = [
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("dtype", c_int64),
        ("scale", c_float),
    ]


class Layer(Structure):
    _fields_ = [
        ("qkv", Weight),
        ("o", Weight),
        ("gate", Weight),
        ("up", Weight),
        ("down", Weight),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
    ]


class Model(Structure):
    _fields_ = [
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("ffn", c_int64),
        ("vocab", c_int64),
        ("rotary_dim", c_int64),
        ("dtype", c_int64),
        ("eps", c_float),
        ("embed_scale", c_float),
        ("attention", Attention),
        ("embedding", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("final_norm", c_void_p),
        ("lm_head", Weight),
        ("layers", POINTER(Layer)),
    ]


_SIGNATURES: Final = {
    "atom_abi": (c_int, []),
    "atom_isa": (c_char_p, []),
    "atom_pool_create": (c_void_p, [c_int]),
    "atom_pool_destroy": (None, [c_void_p]),
    "atom_pool_size": (c_int, [c_void_p]),
    "atom_packed_bytes": (c_int64, [c_int64, c_int64, c_int]),
    "atom_pack_weight": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int]),
    "atom_gemm_scratch": (c_int64, [c_int]),
    "atom_gemm": (None, [c_void_p, POINTER(Weight), c_int, c_void_p, c_int64, c_void_p, c_void_p]),
    "atom_attention_scratch": (c_int64, [POINTER(Attention)]),
    "atom_attend": (c_int, [c_void_p, POINTER(Attention), POINTER(Batch), *[c_void_p] * 7]),
    "atom_workspace": (c_int64, [POINTER(Model), c_int64, c_int]),
    "atom_decoder_step": (c_int, [c_void_p, POINTER(Model), POINTER(Batch), c_void_p, c_void_p, c_void_p]),
    "atom_decoder_logits": (None, [c_void_p, POINTER(Model), c_void_p, c_int64, c_void_p, c_void_p]),
    "atom_layers": (c_int, [c_void_p, POINTER(Model), POINTER(Batch), c_void_p, c_void_p]),
    "atom_half_layer": (c_int, [c_void_p, POINTER(Model), POINTER(Batch), c_int64, c_int64, *[c_void_p] * 3]),
    "atom_embed": (None, [c_void_p, POINTER(Model), c_void_p, c_int64, c_void_p]),
    "atom_argmax": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "atom_filter": (c_int, [c_void_p, c_void_p, c_int64, c_int64, *[c_void_p] * 4]),
    "atom_sample": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
}


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_library()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    assert library.atom_abi() == ABI
    return library


def aligned_empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized 1-d tensor whose storage starts at a cache line."""
    padded = torch.empty(count + 64 // dtype.itemsize, dtype=dtype)
    skip = -padded.data_ptr() % 64 // dtype.itemsize
    return padded[skip : skip + count]


class CPUKernels:
    """The kernels with a thread pool of their own. Raises `KernelsUnavailableError` where they cannot be had."""

    def __init__(self, num_threads: int) -> None:
        self._lib = _library()
        self._pool: int | None = self._lib.atom_pool_create(num_threads)
        if not self._pool:
            raise KernelsUnavailableError("no memory for the kernels' thread pool")
        self.num_threads: int = self._lib.atom_pool_size(self._pool)
        self.isa: str = self._lib.atom_isa().decode()

    def close(self) -> None:
        """Stop the threads. Safe to call twice."""
        pool, self._pool = self._pool, None
        if pool:
            self._lib.atom_pool_destroy(pool)

    def pack(self, weight_nk: torch.Tensor, arena: WeightArena) -> torch.Tensor:
        """Panels of a linear layer's weight `[n, k]`, k even, as an opaque 1-d tensor of the same dtype."""
        n, k = weight_nk.shape
        assert k % 2 == 0
        source, code = weight_nk.contiguous(), DTYPES[weight_nk.dtype]
        packed = arena.empty(self._lib.atom_packed_bytes(n, k, code) // source.element_size(), source.dtype)
        self._lib.atom_pack_weight(source.data_ptr(), packed.data_ptr(), n, k, code)
        return packed

    def linear(self, packed: torch.Tensor, n: int, a_mk: torch.Tensor) -> torch.Tensor:
        """`a W^T` in float32, `[m, n]`; the layer on its own, for tests and measurements."""
        m, k = a_mk.shape
        out_mn = torch.empty(m, n)
        scratch = aligned_empty(self._lib.atom_gemm_scratch(self.num_threads), torch.float32)
        weight = Weight(packed.data_ptr(), None, n, k)
        a_mk = a_mk.contiguous()
        self._lib.atom_gemm(
            self._pool,
            byref(weight),
            DTYPES[packed.dtype],
            a_mk.data_ptr(),
            m,
            out_mn.data_ptr(),
            scratch.data_ptr(),
        )
        return out_mn

    def attention_scratch(self, attention: Attention) -> torch.Tensor:
        return aligned_empty(self._lib.atom_attention_scratch(byref(attention)) * self.num_threads, torch.float32)

    def attend(
        self,
        attention: Attention,
        batch: Batch,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor],
        out_thk: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Store k and v of the step, attend, write `out_thk`. All float32 and contiguous but the caches."""
        pointers = [tensor.data_ptr() for tensor in (*qkv, *caches, out_thk, scratch)]
        if self._lib.atom_attend(self._pool, byref(attention), byref(batch), *pointers):
            raise MemoryError("attention tiles")

    def workspace_floats(self, model: Model, tokens: int) -> int:
        return int(self._lib.atom_workspace(byref(model), tokens, self.num_threads))

    def decoder_step(
        self,
        model: Model,
        batch: Batch,
        workspace: torch.Tensor,
        logits_nv: torch.Tensor,
        hidden_td: torch.Tensor | None,
    ) -> None:
        """One step of a whole decoder into `logits_nv` and, if given, the final-norm hidden states of every token."""
        hidden = None if hidden_td is None else hidden_td.data_ptr()
        if self._lib.atom_decoder_step(
            self._pool, byref(model), byref(batch), workspace.data_ptr(), logits_nv.data_ptr(), hidden
        ):
            raise MemoryError("attention tiles")

    def decoder_logits(
        self, model: Model, hidden_nd: torch.Tensor, workspace: torch.Tensor, logits_nv: torch.Tensor
    ) -> None:
        self._lib.atom_decoder_logits(
            self._pool,
            byref(model),
            hidden_nd.data_ptr(),
            hidden_nd.shape[0],
            workspace.data_ptr(),
            logits_nv.data_ptr(),
        )

    def layers(self, model: Model, batch: Batch, x_td: torch.Tensor, workspace: torch.Tensor) -> None:
        """All layers of `model` over `x_td`, in place. Float32, contiguous."""
        if self._lib.atom_layers(self._pool, byref(model), byref(batch), x_td.data_ptr(), workspace.data_ptr()):
            raise MemoryError("attention tiles")

    def half_layer(
        self,
        model: Model,
        batch: Batch,
        layer: int,
        half: Literal["attention", "mlp"],
        x_td: torch.Tensor,
        out_td: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        """What half of a layer would add to `x_td`, into `out_td`: this rank's part of it. Float32, contiguous."""
        pointers = [tensor.data_ptr() for tensor in (x_td, out_td, workspace)]
        if self._lib.atom_half_layer(self._pool, byref(model), byref(batch), layer, half == "mlp", *pointers):
            raise MemoryError("attention tiles")

    def embed(self, model: Model, token_ids_t: torch.Tensor, out_td: torch.Tensor) -> None:
        """Rows of the embedding, zeros for negative ids. Int32 and float32, contiguous."""
        self._lib.atom_embed(self._pool, byref(model), token_ids_t.data_ptr(), token_ids_t.shape[0], out_td.data_ptr())

    def argmax(self, logits_nv: torch.Tensor) -> torch.Tensor:
        """Index of each row's largest logit, int64 `[n]`; ties to the lowest. Float32, contiguous."""
        n, vocab = logits_nv.shape
        out_n = torch.empty(n, dtype=torch.int64)
        self._lib.atom_argmax(self._pool, logits_nv.data_ptr(), n, vocab, out_n.data_ptr())
        return out_n

    def filter(
        self,
        logits_nv: torch.Tensor,
        inv_temperature_n: torch.Tensor,
        min_p_n: torch.Tensor,
        top_k_n: torch.Tensor,
        top_p_n: torch.Tensor,
    ) -> None:
        """Scale rows by the temperature and set what min_p, top_k (int64, 0: off) and top_p (float64) exclude to -inf,
        in place."""
        n, vocab = logits_nv.shape
        rows = [tensor.data_ptr() for tensor in (inv_temperature_n, min_p_n, top_k_n, top_p_n)]
        if self._lib.atom_filter(self._pool, logits_nv.data_ptr(), n, vocab, *rows):
            raise MemoryError("sampling weights")

    def sample(self, logits_nv: torch.Tensor, inv_temperature_n: torch.Tensor, uniform_n: torch.Tensor) -> torch.Tensor:
        """Draws from softmax(logits · inv_temperature) at `uniform_n` (float64, [0, 1)); int64 `[n]`."""
        n, vocab = logits_nv.shape
        out_n = torch.empty(n, dtype=torch.int64)
        self._lib.atom_sample(
            self._pool,
            logits_nv.data_ptr(),
            n,
            vocab,
            inv_temperature_n.data_ptr(),
            uniform_n.data_ptr(),
            out_n.data_ptr(),
        )
        return out_n
