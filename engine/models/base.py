"""What a model is to an executor. Shape legend: t tokens of the step (all sequences concatenated), d hidden size,
h query heads, g key/value heads, k head size, n rows whose logits are wanted, v vocabulary.

A model computes everything but attention over the cache: it hands q, k, v of each layer to an `AttentionContext`
that the executor owns, which writes k and v into the paged cache and attends. So a model knows nothing of batches,
blocks or devices, and a test can run it with plain dense attention.
"""

from __future__ import annotations

from typing import Protocol

import torch


class AttentionContext(Protocol):
    """One step's attention: knows the sequences, their block tables and the cache."""

    def attend(self, layer: int, q_thk: torch.Tensor, k_tgk: torch.Tensor, v_tgk: torch.Tensor) -> torch.Tensor:
        """Store k and v of the step's tokens for `layer`, attend causally; returns `[t, h, k]`."""
        ...


class CausalLM(Protocol):
    """A decoder with a language-model head."""

    def forward(
        self, token_ids_t: torch.Tensor, positions_t: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Final-norm hidden states `[t, d]` in the model's dtype."""
        ...

    def compute_logits(self, hidden_nd: torch.Tensor) -> torch.Tensor:
        """Logits `[n, v]` in float32."""
        ...
