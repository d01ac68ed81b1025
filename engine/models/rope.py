"""Rotary position embeddings and their rescalings. Shape legend: t tokens, k head size, j = k/2 frequencies, n heads.

The rotation pairs dimension i with i + k/2 (the "NeoX" layout of Hugging Face checkpoints); GGUF files of the Llama
architecture interleave the pairs and are reordered on load (`engine/loading/gguf.py`).
"""

from __future__ import annotations

import math

import torch

from atom.engine.models.config import RopeConfig


class RotaryEmbedding:
    """Angles for given positions. Computed per step instead of tabulated: a table for 131,072 positions of 128
    dimensions takes 64 MB, a step needs a few hundred rows once for all layers."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self.inv_freq_j = inverse_frequencies(config, head_dim).to(device)
        self.scale = config.attention_factor

    def cos_sin(self, positions_t: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`cos_t1j, sin_t1j` in `dtype`, computed in float32."""
        angles_t1j = (positions_t.to(torch.float32)[:, None] * self.inv_freq_j)[:, None, :]
        cos_t1j, sin_t1j = angles_t1j.cos(), angles_t1j.sin()
        if self.scale != 1.0:
            cos_t1j, sin_t1j = cos_t1j * self.scale, sin_t1j * self.scale
        return cos_t1j.to(dtype), sin_t1j.to(dtype)


def apply_rope(x_tnk: torch.Tensor, cos_t1j: torch.Tensor, sin_t1j: torch.Tensor) -> torch.Tensor:
    """Rotate every head: `(a, b) → (a·cos − b·sin, b·cos + a·sin)` for the two halves a and b."""
    a_tnj, b_tnj = x_tnk.chunk(2, dim=-1)
    return torch.cat((a_tnj * cos_t1j - b_tnj * sin_t1j, b_tnj * cos_t1j + a_tnj * sin_t1j), dim=-1)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """`inv_freq_j` in float32, in the operation order of `transformers.modeling_rope_utils` so that it rounds alike."""
    exponents_j = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq_j = 1.0 / (config.theta**exponents_j)
    if config.type == "linear":
        return inv_freq_j / config.factor
    if config.type == "llama3":
        return _llama3(config, inv_freq_j)
    if config.type == "yarn":
        return _yarn(config, head_dim)
    if config.type == "divisors":
        return inv_freq_j / torch.tensor(config.divisors, dtype=torch.float32)
    return inv_freq_j


def _llama3(config: RopeConfig, inv_freq_j: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated.

    Source: `apply_scaling` in https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py
    """
    low_wavelength = config.original_max_position_embeddings / config.low_freq_factor
    high_wavelength = config.original_max_position_embeddings / config.high_freq_factor
    wavelength_j = 2 * math.pi / inv_freq_j
    scaled_j = torch.where(wavelength_j > low_wavelength, inv_freq_j / config.factor, inv_freq_j)
    smooth_j = (config.original_max_position_embeddings / wavelength_j - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    smoothed_j = (1 - smooth_j) * scaled_j / config.factor + smooth_j * scaled_j
    between_j = ~(wavelength_j < high_wavelength) & ~(wavelength_j > low_wavelength)
    return torch.where(between_j, smoothed_j, scaled_j)


def _yarn(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Interpolate dimensions that turn fewer than `beta_slow` times within the original context, keep those that turn
    more than `beta_fast` times, ramp between. Source: https://arxiv.org/abs/2309.00071, §3.2."""

    def dimension_of(rotations: float) -> float:
        length = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (head_dim * math.log(length)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp finite
    ramp_j = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_j = 1 - ramp_j
    period_j = config.theta ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)
    return (1.0 / (config.factor * period_j)) * (1 - kept_j) + (1.0 / period_j) * kept_j
