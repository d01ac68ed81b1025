"""From logits to tokens. Shape legend: n sampled rows of the step, v vocabulary.

A row passes: bias, mask, penalties (`penalties.py`), then greedy choice or temperature, filters (`filters.py`) and one
draw (`random_draws.py`) that inverts the cumulative distribution in the order of token ids. Work is done for the rows
that need it; a batch of plain greedy rows is one argmax. Log probabilities come from the untouched logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atom.engine.executors.filters import FilterParams, filter_logits, needs_filter
from atom.engine.executors.logprobs import token_logprobs
from atom.engine.executors.penalties import adjust_logits, needs_adjustment
from atom.engine.executors.random_draws import uniform_draws
from atom.engine.executors.sequence_table import SequenceState
from atom.engine.kernels.bindings import CPUKernels
from atom.engine.messages import TokenLogprobs

__all__ = ["Sampler"]


@dataclass(slots=True)
class _Plan:
    """Which rows of a batch need what; reused as long as the batch holds the same sequences."""

    states: list[SequenceState]
    greedy: list[int]
    plain: list[int]
    """Random rows without a filter."""
    filtered: list[int]
    logprobs: list[int]
    adjusting: list[int]
    """Rows that need an adjustment now or, with `min_tokens`, needed it when the plan was made."""
    keys_n: np.ndarray[tuple[int], np.dtype[np.uint64]]
    inv_temperature_n: torch.Tensor
    filters: FilterParams
    """Of the filtered rows."""


class Sampler:
    """Samples one token per row. `kernels`: the compiled ones, or None for torch alone; both give the same tokens up to
    rounding of the probabilities."""

    def __init__(self, kernels: CPUKernels | None = None) -> None:
        self._kernels = kernels
        self._plan: _Plan | None = None

    def sample(
        self, logits_nv: torch.Tensor, states: list[SequenceState]
    ) -> tuple[list[int], dict[int, list[TokenLogprobs]]]:
        """Token of each row and the log probabilities of those that asked. May overwrite `logits_nv` (float32)."""
        if self._plan is None or self._plan.states != states:
            self._plan = _make_plan(states)
        plan = self._plan
        raw_logits = logits_nv[plan.logprobs] if plan.logprobs else None  # indexing by a list copies
        adjusting = [row for row in plan.adjusting if needs_adjustment(states[row])]
        if adjusting:
            self._adjust(logits_nv, adjusting, states)
        tokens_n = self._choose(logits_nv, plan)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if raw_logits is not None:
            num_top = [states[row].params.logprobs or 0 for row in plan.logprobs]
            entries = token_logprobs(raw_logits, tokens_n[plan.logprobs], num_top)
            logprobs = {states[row].seq_id: [entry] for row, entry in zip(plan.logprobs, entries, strict=True)}
        tokens: list[int] = tokens_n.tolist()
        return tokens, logprobs

    @staticmethod
    def _adjust(logits_nv: torch.Tensor, rows: list[int], states: list[SequenceState]) -> None:
        if len(rows) == len(states):
            adjust_logits(logits_nv, states)
        else:
            selected = logits_nv[rows]
            adjust_logits(selected, [states[row] for row in rows])
            logits_nv[rows] = selected

    def _choose(self, logits_nv: torch.Tensor, plan: _Plan) -> torch.Tensor:
        if len(plan.greedy) == len(plan.states):
            return self._argmax(logits_nv)
        positions_n = np.array([state.num_tokens for state in plan.states], dtype=np.uint64)
        uniform_n = torch.from_numpy(uniform_draws(plan.keys_n, positions_n))
        if plan.filtered:
            rows = plan.filtered
            everything = len(rows) == len(plan.states)
            scaled = logits_nv if everything else logits_nv[rows]
            self._filter(scaled, plan.filters)
            filtered_tokens = self._draw(scaled, torch.ones(len(rows)), uniform_n if everything else uniform_n[rows])
            if everything:
                return filtered_tokens
        tokens_n = torch.empty(len(plan.states), dtype=torch.int64)
        if plan.filtered:
            tokens_n[plan.filtered] = filtered_tokens
        for rows, greedy in ((plan.greedy, True), (plan.plain, False)):
            if not rows:
                continue
            selected = logits_nv if len(rows) == len(plan.states) else logits_nv[rows]
            if greedy:
                tokens_n[rows] = self._argmax(selected)
            else:
                tokens_n[rows] = self._draw(selected, plan.inv_temperature_n[rows], uniform_n[rows])
        return tokens_n

    def _argmax(self, logits_nv: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None:
            return self._kernels.argmax(logits_nv.contiguous())
        return logits_nv.argmax(dim=-1)

    def _filter(self, logits_nv: torch.Tensor, params: FilterParams) -> None:
        if self._kernels is not None and logits_nv.is_contiguous():
            self._kernels.filter(logits_nv, params.inv_temperature_n, params.min_p_n, params.top_k_n, params.top_p_n)
        else:
            filter_logits(logits_nv, params)

    def _draw(self, logits_nv: torch.Tensor, inv_temperature_n: torch.Tensor, uniform_n: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None:
            return self._kernels.sample(logits_nv.contiguous(), inv_temperature_n.contiguous(), uniform_n.contiguous())
        scaled_nv = (logits_nv - logits_nv.amax(dim=-1, keepdim=True)) * inv_temperature_n[:, None]
        mass_nv = scaled_nv.exp_().cumsum(dim=-1, dtype=torch.float64)
        # The first token whose cumulative mass exceeds the target; capped where u · total rounds up to the total.
        target_n1 = torch.minimum(
            uniform_n[:, None] * mass_nv[:, -1:], mass_nv[:, -1:].nextafter(torch.zeros((), dtype=torch.float64))
        )
        return torch.searchsorted(mass_nv, target_n1, right=True)[:, 0]


def _make_plan(states: Sequence[SequenceState]) -> _Plan:
    greedy: list[int] = []
    plain: list[int] = []
    filtered: list[int] = []
    for row, state in enumerate(states):
        params = state.params
        (greedy if params.greedy else filtered if needs_filter(params) else plain).append(row)
    return _Plan(
        states=list(states),
        greedy=greedy,
        plain=plain,
        filtered=filtered,
        logprobs=[row for row, state in enumerate(states) if state.params.logprobs is not None],
        adjusting=[row for row, state in enumerate(states) if needs_adjustment(state)],
        keys_n=np.array([state.key for state in states], dtype=np.uint64),
        filters=FilterParams.of([states[row].params for row in filtered]),
        inv_temperature_n=torch.tensor([0.0 if s.params.greedy else 1.0 / s.params.temperature for s in states]),
    )
