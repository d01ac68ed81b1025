"""Changes to the logits that can alter even a greedy choice: logit bias, masked stop tokens, penalties.

In vLLM's order: bias, then the mask of `min_tokens`, then penalties (repetition over prompt and output, divided or
multiplied by sign as in Hugging Face; frequency and presence over the output). All of it touches few entries of a row,
so it works on (row, token) index lists collected over the batch, never on dense counts. Filters and temperature, which
leave the argmax alone, live in `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from atom.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom.engine.executors.sequence_table import SequenceState

__all__ = ["PenaltyState", "adjust_logits", "needs_adjustment"]


class PenaltyState:
    """Distinct tokens of one sequence and how often each was generated, kept up to date token by token."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], output: Iterable[int]) -> None:
        self._repeats = params.repetition_penalty != 1.0
        self._index: dict[int, int] = {}
        self._size = 0
        self._tokens: npt.NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._counts: npt.NDArray[np.float32] = np.zeros(64, dtype=np.float32)
        if self._repeats:
            for token in prompt:
                self._slot(token)
        for token in output:
            self.add_output(token)

    def add_output(self, token: int) -> None:
        slot = self._slot(token)  # may replace the arrays
        self._counts[slot] += 1.0

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self._tokens[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Occurrences in the output; 0 for a token of the prompt alone."""
        return self._counts[: self._size]

    def _slot(self, token: int) -> int:
        slot = self._index.get(token)
        if slot is None:
            slot = self._index[token] = self._size
            if slot == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._tokens[slot] = token
            self._size += 1
        return slot


def needs_adjustment(state: SequenceState) -> bool:
    return (
        state.penalties is not None
        or bool(state.params.logit_bias)
        or (state.num_output_tokens < state.params.min_tokens and bool(state.stop_token_ids))
    )


def adjust_logits(logits_nv: torch.Tensor, states: Sequence[SequenceState]) -> None:
    """Apply bias, mask and penalties in place; row i belongs to `states[i]`. Float32, contiguous."""
    _add_bias(logits_nv, states)
    _mask_stop_tokens(logits_nv, states)
    _apply_penalties(logits_nv, states)


def _add_bias(logits_nv: torch.Tensor, states: Sequence[SequenceState]) -> None:
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for row, state in enumerate(states):
        if state.params.logit_bias:
            tokens.extend(state.params.logit_bias)
            values.extend(state.params.logit_bias.values())
            rows.extend([row] * len(state.params.logit_bias))
    if rows:
        logits_nv[rows, tokens] += torch.tensor(values)


def _mask_stop_tokens(logits_nv: torch.Tensor, states: Sequence[SequenceState]) -> None:
    rows: list[int] = []
    tokens: list[int] = []
    for row, state in enumerate(states):
        if state.num_output_tokens < state.params.min_tokens:
            tokens.extend(state.stop_token_ids)
            rows.extend([row] * len(state.stop_token_ids))
    if rows:
        logits_nv[rows, tokens] = -torch.inf


def _apply_penalties(logits_nv: torch.Tensor, states: Sequence[SequenceState]) -> None:
    found = [
        (row, state.penalties, state.params)
        for row, state in enumerate(states)
        if state.penalties is not None and len(state.penalties.tokens)
    ]
    if not found:
        return
    sizes = [len(penalties.tokens) for _, penalties, _ in found]
    rows = torch.from_numpy(np.repeat(np.array([row for row, _, _ in found], dtype=np.int64), sizes))
    tokens = torch.from_numpy(np.concatenate([penalties.tokens for _, penalties, _ in found]))
    counts = torch.from_numpy(np.concatenate([penalties.counts for _, penalties, _ in found]))

    def per_entry(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes))

    repetition = per_entry([params.repetition_penalty for _, _, params in found])
    frequency = per_entry([params.frequency_penalty for _, _, params in found])
    presence = per_entry([params.presence_penalty for _, _, params in found])
    values = logits_nv[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits_nv[rows, tokens] = values - frequency * counts - presence * (counts > 0)
