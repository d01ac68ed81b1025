"""What the executor remembers of each sequence between steps: token history, block table, sampling state.

Rows of two arrays, written incrementally: a step costs what it adds, never a copy of a history. How a step's batch is
cut out of them: `step_batch.py`. How the sampling state is used: `sampler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from atom.engine.executors.base import NewSequence, SchedulerOutput
from atom.engine.executors.penalties import PenaltyState
from atom.engine.executors.random_draws import draw_key
from atom.engine.messages import TokenLogprobs
from atom.engine.sampling_params import SamplingParams

__all__ = ["SequenceState", "SequenceTable"]


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence, compared by identity. `row` is its row in the table's arrays."""

    seq_id: int
    row: int
    num_tokens: int
    """Tokens in the history: prompt and output."""
    num_prompt_tokens: int
    num_blocks: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    key: int
    """Of the random draws, see `random_draws.py`."""
    penalties: PenaltyState | None
    wants_prompt_logprobs: bool
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


class SequenceTable:
    """All sequences between `NewSequence` and `released`."""

    def __init__(self, max_seqs: int, max_model_len: int, block_size: int, seed: int) -> None:
        self._seed = seed
        # One position more than the context: with a step in flight the scheduler learns of the end one step late.
        self._width = max_model_len + 1
        self._blocks = -(-self._width // block_size)
        # Untouched pages of a zeroed array take no memory, so the bound on sequences costs nothing.
        self.history: npt.NDArray[np.int32] = np.zeros((max_seqs, self._width), dtype=np.int32)
        self.block_tables: npt.NDArray[np.int32] = np.zeros((max_seqs, self._blocks), dtype=np.int32)
        self._free_rows = list(range(max_seqs - 1, -1, -1))
        self._states: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, seq_id: int) -> SequenceState:
        return self._states[seq_id]

    def get(self, seq_id: int) -> SequenceState | None:
        return self._states.get(seq_id)

    def take_changes(self, output: SchedulerOutput) -> None:
        """What a step ends, begins and extends."""
        for seq_id in output.released:
            self.release(seq_id)
        for new in output.new_sequences:
            self.add(new)
        for seq_id, block_ids in output.new_block_ids.items():
            self.append_blocks(seq_id, block_ids)

    def add(self, new: NewSequence) -> None:
        assert new.seq_id not in self._states, new.seq_id
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        count, params = len(new.token_ids), new.params
        self.history[row, :count] = new.token_ids
        prompt, output = new.token_ids[: new.num_prompt_tokens], new.token_ids[new.num_prompt_tokens :]
        self._states[new.seq_id] = SequenceState(
            seq_id=new.seq_id,
            row=row,
            num_tokens=count,
            num_prompt_tokens=new.num_prompt_tokens,
            num_blocks=0,
            params=params,
            stop_token_ids=new.stop_token_ids,
            key=draw_key(params.seed, self._seed, new.seq_id),
            penalties=PenaltyState(params, prompt, output) if params.has_penalties else None,
            # After a preemption with output, the prompt's log probabilities have already been delivered.
            wants_prompt_logprobs=params.prompt_logprobs is not None and not output,
            # Positions whose KV came from the prefix cache have no logits: null, never a guess.
            prompt_logprobs=[None] * (new.num_computed_tokens + 1),
        )
        self.append_blocks(new.seq_id, new.block_ids)

    def append_blocks(self, seq_id: int, block_ids: list[int]) -> None:
        state = self._states[seq_id]
        end = state.num_blocks + len(block_ids)
        self.block_tables[state.row, state.num_blocks : end] = block_ids
        state.num_blocks = end

    def append_token(self, state: SequenceState, token_id: int) -> None:
        self.history[state.row, state.num_tokens] = token_id
        state.num_tokens += 1
        if state.penalties is not None:
            state.penalties.add_output(token_id)

    def release(self, seq_id: int) -> None:
        """Forget a sequence; one that was never scheduled is unknown here, which is fine."""
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._free_rows.append(state.row)

    def _grow(self) -> None:
        rows = len(self.history)
        self.history = np.concatenate([self.history, np.zeros_like(self.history)])
        self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)])
        self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
