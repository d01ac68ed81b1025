"""One step's batch as flat arrays, cut out of the sequence table without a loop over tokens.

Shape legend: t tokens of the step (all sequences concatenated), s sequences, b blocks of the longest block table,
n rows whose logits are wanted for sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atom.engine.executors.base import SchedulerOutput
from atom.engine.executors.sequence_table import SequenceState, SequenceTable

__all__ = ["StepBatch", "build_batch"]

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class StepBatch:
    """Prefill chunks and decodes alike: sequence i has the tokens `query_start[i] : query_start[i + 1]`."""

    states: list[SequenceState]
    token_ids_t: Int32Array
    positions_t: Int32Array
    slots_t: npt.NDArray[np.int64]
    """Where each token's KV goes: `block · block_size + offset`."""
    query_start: Int32Array
    """`[s + 1]`"""
    block_tables_sb: Int32Array
    sample_rows_n: Int32Array
    """Tokens whose logits are sampled from."""
    sampling: list[SequenceState]
    """The sequences of `sample_rows_n`, in the order of the batch."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_t)


def build_batch(output: SchedulerOutput, table: SequenceTable, block_size: int) -> StepBatch:
    """Every position of the step is known: a decoding sequence's input is the token sampled last."""
    states = [table[seq_id] for seq_id in output.seq_ids]
    rows_s = np.array([state.row for state in states], dtype=np.intp)
    counts_s = np.array(output.num_new_tokens, dtype=np.int32)
    computed_s = np.array(output.num_computed_tokens, dtype=np.int32)
    known_s = np.array([state.num_tokens for state in states], dtype=np.int32)
    assert (computed_s + counts_s <= known_s).all(), "a position is scheduled whose token is not known"
    query_start = np.zeros(len(states) + 1, dtype=np.int32)
    np.cumsum(counts_s, out=query_start[1:])
    total = int(query_start[-1])
    if total == len(states):
        rows_t, positions_t = rows_s, computed_s
    else:
        rows_t = np.repeat(rows_s, counts_s)
        positions_t = np.arange(total, dtype=np.int32) + np.repeat(computed_s - query_start[:-1], counts_s)
    blocks_t = table.block_tables[rows_t, positions_t // block_size].astype(np.int64)
    samples = output.samples
    last_block = int((computed_s + counts_s - 1).max()) // block_size
    return StepBatch(
        states=states,
        token_ids_t=table.history[rows_t, positions_t],
        positions_t=positions_t,
        slots_t=blocks_t * block_size + positions_t % block_size,
        query_start=query_start,
        block_tables_sb=np.ascontiguousarray(table.block_tables[rows_s, : last_block + 1]),
        sample_rows_n=np.ascontiguousarray(query_start[1:][samples] - 1),
        sampling=[state for state, wanted in zip(states, samples, strict=True) if wanted],
    )
