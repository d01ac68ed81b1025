"""Inverse frequencies that a configuration can ask for; agreement with transformers is in test_decoder.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.models.config import RopeConfig
from atom.engine.models.rope import RotaryEmbedding, apply_rope, inverse_frequencies

LLAMA3 = RopeConfig(theta=5e5, type="llama3", factor=8.0, original_max_position_embeddings=8192)


def test_divisors_divide() -> None:
    plain = inverse_frequencies(RopeConfig(theta=5e5), 8)
    divided = inverse_frequencies(RopeConfig(theta=5e5, type="divisors", divisors=(1.0, 2.0, 4.0, 8.0)), 8)
    torch.testing.assert_close(divided * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)


def test_llama3_keeps_the_fast_and_divides_the_slow() -> None:
    plain, scaled = inverse_frequencies(RopeConfig(theta=5e5), 128), inverse_frequencies(LLAMA3, 128)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1].item() / 8.0)
    assert (scaled[1:] < scaled[:-1]).all()


@given(
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
    factor=st.floats(1.0, 64.0),
    original=st.integers(1, 1 << 20),
    theta=st.floats(2.0, 1e7),
    truncate=st.booleans(),
)
def test_scaled_frequencies_stay_between_plain_and_divided(
    kind: str, factor: float, original: int, theta: float, truncate: bool
) -> None:
    config = RopeConfig(
        theta=theta,
        type=kind,  # type: ignore[arg-type]
        factor=factor,
        original_max_position_embeddings=original,
        truncate=truncate,
    )
    plain, scaled = inverse_frequencies(RopeConfig(theta=theta), 64), inverse_frequencies(config, 64)
    assert torch.isfinite(scaled).all()
    assert (scaled <= plain * 1.001).all()
    assert (scaled >= plain / factor * 0.999).all()


def test_rotation_depends_on_distance_alone() -> None:
    rotary = RotaryEmbedding(RopeConfig(), 16, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0)).unbind(0)

    def score(q_position: int, k_position: int) -> float:
        cos_sin = rotary.cos_sin(torch.tensor([q_position, k_position]), torch.float32)
        rotated = apply_rope(torch.stack((q[0], k[0])), *cos_sin)
        return float(rotated[0, 0] @ rotated[1, 0])

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-4)
