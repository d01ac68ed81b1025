"""One sequence inside the scheduler: its tokens, its blocks and how far it got. Who moves it: `engine/scheduler.py`;
who owns its blocks: `engine/kv_cache_manager.py`. Text, stop strings and `n` live in the API process.

Counters, for a sequence that knows tokens 0..k-1 (`len(tokens) == k`):

    num_computed < k    its known tokens still have to be computed (prompt, or recomputation after a preemption)
    num_computed == k-1 decoding: the last known token is the next input
    num_computed >= k   decoding ahead: num_computed - k + 1 sampled tokens are in flight and not known here yet
"""

from __future__ import annotations

import sys
from array import array
from enum import IntEnum
from typing import Final

from atom.engine.errors import RequestError
from atom.engine.sampling_params import SamplingParams

NOT_DECODING: Final = -1
"""`decode_limit` of a sequence with known tokens left to compute."""


class Status(IntEnum):
    WAITING = 0
    """Never scheduled, or preempted."""
    RUNNING = 1
    """Holds blocks; known to the executor."""
    FINISHED = 2
    """Reported. A step that is still in flight may carry it; what it sampled there is dropped."""


class Sequence:
    """Slots only, and an array instead of a list for the tokens: the collector tracks one object per sequence."""

    __slots__ = (
        "arrival_ns",
        "block_hashes",
        "block_ids",
        "decode_limit",
        "max_total",
        "next_event",
        "num_computed",
        "num_prompt_tokens",
        "num_published",
        "params",
        "prompt_logprobs_sent",
        "request_id",
        "resume_after",
        "seq_id",
        "started",
        "status",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        seq_id: int,
        request_id: str,
        tokens: array[int],
        params: SamplingParams,
        arrival_ns: int,
        *,
        stop_ids: frozenset[int],
        max_total: int,
    ) -> None:
        self.seq_id = seq_id
        self.request_id = request_id
        self.tokens = tokens
        """Known tokens: the prompt and what was collected so far."""
        self.num_prompt_tokens = len(tokens)
        self.params = params
        self.arrival_ns = arrival_ns
        self.stop_ids = stop_ids
        """Every id that ends it, once `min_tokens` were generated."""
        self.max_total = max_total
        """Length of prompt plus output at which it ends."""
        self.status = Status.WAITING
        self.started = False
        """Whether it was ever scheduled."""
        self.prompt_logprobs_sent = False
        self.num_computed = 0
        """Tokens whose KV the submitted steps computed."""
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        """Chained hashes of its leading full blocks, as far as anyone asked. Survive a preemption."""
        self.num_published = 0
        """Leading blocks that the prefix cache was told about."""
        self.decode_limit = NOT_DECODING
        """Decoding needs nothing (no block, no check) while `num_computed` is below this."""
        self.next_event = 0
        """`len(tokens)` at which a collected token needs a closer look: a full block, or the end. 0: at each."""
        self.resume_after = -1
        """A preempted sequence is not scheduled before this step is collected: its last tokens are in it."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, prompt {self.num_prompt_tokens}, known {len(self.tokens)}, "
            f"computed {self.num_computed}, blocks {len(self.block_ids)})"
        )


def decode_prompt(prompt: bytes) -> array[int]:
    """Token ids from little-endian int32. Raises `RequestError` when the length is no multiple of four."""
    tokens = array("i")
    if len(prompt) % tokens.itemsize:
        raise RequestError(f"a prompt of {len(prompt)} bytes is not a whole number of int32 token ids", "prompt")
    tokens.frombytes(prompt)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
