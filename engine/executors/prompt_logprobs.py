"""Log probabilities of prompt tokens, collected over the chunks of a prompt. Shape legend: t tokens of the step,
n rows at a time, d hidden size, v vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from atom.engine.executors.base import SchedulerOutput
from atom.engine.executors.logprobs import token_logprobs
from atom.engine.executors.sequence_table import SequenceTable
from atom.engine.executors.step_batch import StepBatch
from atom.engine.messages import TokenLogprobs

__all__ = ["extend_prompt_logprobs"]

ROWS: Final = 64
"""Prompt rows whose logits exist at a time: 64 rows of 150,000 words are 38 MB."""


def extend_prompt_logprobs(
    output: SchedulerOutput,
    batch: StepBatch,
    table: SequenceTable,
    hidden_td: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> dict[int, list[TokenLogprobs | None]]:
    """Extend the lists of this step's prompt chunks; return those that are complete.

    `compute_logits`: from hidden states `[n, d]` to `[n, v]`.
    """
    complete: dict[int, list[TokenLogprobs | None]] = {}
    for i, state in enumerate(batch.states):
        if not state.wants_prompt_logprobs:
            continue
        first, computed = int(batch.query_start[i]), output.num_computed_tokens[i]
        end = computed + output.num_new_tokens[i]
        # The last prompt position predicts an output token, which is not part of the prompt.
        count = min(end, state.num_prompt_tokens - 1) - computed
        targets = table.history[state.row, computed + 1 : computed + 1 + count]
        num_top = state.params.prompt_logprobs or 0
        for start in range(0, count, ROWS):
            stop = min(start + ROWS, count)
            logits_nv = compute_logits(hidden_td[first + start : first + stop])
            chosen = torch.from_numpy(targets[start:stop]).long()
            state.prompt_logprobs.extend(token_logprobs(logits_nv, chosen, [num_top] * (stop - start)))
        if end >= state.num_prompt_tokens:
            complete[state.seq_id] = state.prompt_logprobs
            state.prompt_logprobs, state.wants_prompt_logprobs = [], False
    return complete
