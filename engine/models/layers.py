"""The building blocks of a decoder: plain objects that hold tensors. Shape legend: t tokens, i in, o out features.

They are not `torch.nn.Module`s: a decode step of a small model calls hundreds of them, and an executor replaces a
`Linear` by a packed or quantized kernel of the same call signature (`engine/models/decoder.py`, `named_linears`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """`y_to = x_ti · weight_oiᵀ + bias_o`."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight_oi: torch.Tensor, bias_o: torch.Tensor | None = None) -> None:
        self.weight = weight_oi
        self.bias = bias_o

    def __call__(self, x_ti: torch.Tensor) -> torch.Tensor:
        return F.linear(x_ti, self.weight, self.bias)


class RMSNorm:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension (https://arxiv.org/abs/1910.07467).

    Normalized in float32 and rounded to the input's dtype before the weight is applied, as the reference does.
    """

    __slots__ = ("eps", "weight")

    def __init__(self, weight_i: torch.Tensor, eps: float) -> None:
        self.weight = weight_i
        self.eps = eps

    def __call__(self, x_ti: torch.Tensor) -> torch.Tensor:
        x32_ti = x_ti.to(torch.float32)
        scale_t1 = torch.rsqrt(x32_ti.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x32_ti * scale_t1).to(x_ti.dtype)


def silu_and_mul(gate_up_ti: torch.Tensor) -> torch.Tensor:
    """SwiGLU's activation: `silu(gate) · up` of the two halves (https://arxiv.org/abs/2002.05202)."""
    gate_ti, up_ti = gate_up_ti.chunk(2, dim=-1)
    return F.silu(gate_ti) * up_ti
