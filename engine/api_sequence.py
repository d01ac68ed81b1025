"""A sequence as the API process sees it: what was asked, what came back, and when.

The scheduler's own view (blocks, computed tokens) is `Sequence` in `engine/sequence.py` and lives in the core process;
the two meet only as messages. A request with n > 1 is n sequences: `fan_out` is the one place that says how.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from atom.engine.errors import ContextLengthError, RequestError
from atom.engine.messages import TokenLogprobs
from atom.engine.sampling_params import SamplingParams

OutputCallback: TypeAlias = "Callable[[ApiSequence, Sequence[int]], None]"
"""Called on the output thread with the tokens that one step added, `finish_reason` already set when it is the last
call. Called without tokens when a sequence ends without any."""


class ApiSequence:
    """One sequence in flight. Written by the output thread, except by `CoreManager.abort`, which first takes it out
    of the manager's table. Times are `time.monotonic_ns`; 0 means not yet."""

    __slots__ = (
        "arrival_ns",
        "callback",
        "engine_index",
        "error",
        "finish_ns",
        "finish_reason",
        "first_token_ns",
        "logprobs",
        "num_cached_tokens",
        "output_token_ids",
        "owner",
        "params",
        "prompt_logprobs",
        "prompt_token_ids",
        "queued_ns",
        "received_ns",
        "request_id",
        "scheduled_ns",
        "seq_id",
        "stop_reason",
        "stop_token_id",
    )

    def __init__(
        self,
        seq_id: int,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        arrival_ns: int,
        callback: OutputCallback | None = None,
        owner: Any = None,
    ) -> None:
        self.seq_id = seq_id
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.callback = callback
        self.owner = owner
        """Whatever the submitting entrypoint wants to find again with the finished sequence."""
        self.engine_index = 0
        self.output_token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if params.logprobs is not None else None
        """One per output token, when asked for."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        """One per prompt token, there with the first output token, when asked for."""
        self.num_cached_tokens = 0
        """Prompt tokens whose KV came from the prefix cache."""
        self.arrival_ns = arrival_ns
        self.queued_ns = 0
        self.scheduled_ns = 0
        self.first_token_ns = 0
        self.received_ns = 0
        """When the latest step that touched it arrived in the API process."""
        self.finish_ns = 0
        self.finish_reason: str | None = None
        """One of `messages.FINISH_*`."""
        self.stop_token_id: int | None = None
        """The end-of-sequence or stop token that ended it; it is the last of `output_token_ids`."""
        self.stop_reason: str | int | None = None
        """The stop string, or the id out of `params.stop_token_ids`; None for end of sequence and for length."""
        self.error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def truncate(self, num_output_tokens: int) -> None:
        """Forget output beyond `num_output_tokens`: a stop string ended before it."""
        del self.output_token_ids[num_output_tokens:]
        if self.logprobs is not None:
            del self.logprobs[num_output_tokens:]

    def __repr__(self) -> str:
        return (
            f"ApiSequence({self.seq_id}, {self.request_id!r}, prompt {len(self.prompt_token_ids)}, "
            f"output {len(self.output_token_ids)}, finish {self.finish_reason})"
        )


def fan_out(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `n` sequences of one request.

    A seeded request gives sequence i the seed `seed + i` (wrapped at 2**64), so that choice i of a request with n > 1
    is what a request with that seed alone would get.
    """
    if params.n == 1:
        return [params]
    children = []
    for index in range(params.n):
        seed = None if params.seed is None else params.seed + index
        if seed is not None and seed >= 1 << 64:
            seed -= 1 << 64
        children.append(msgspec.structs.replace(params, n=1, seed=seed))
    return children


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32. Raises `RequestError` for what is no token id."""
    try:
        packed = array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise RequestError(f"the prompt must be a list of token ids: {error}", "prompt") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def check_prompt(
    prompt_token_ids: Sequence[int], params: SamplingParams, max_model_len: int, vocab_size: int | None = None
) -> None:
    """Raise `RequestError` unless the prompt holds 1 or more valid ids and leaves room for `max_tokens`."""
    length = len(prompt_token_ids)
    if length == 0:
        raise RequestError("the prompt must hold at least one token", "prompt")
    if vocab_size is not None and not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < vocab_size:
        raise RequestError(f"the prompt has a token id outside [0, {vocab_size})", "prompt")
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if length + wanted > max_model_len:
        asked = "" if params.max_tokens is None else f" plus max_tokens {params.max_tokens}"
        raise ContextLengthError(
            f"prompt of {length} tokens{asked} exceeds the context length of {max_model_len} tokens", "prompt"
        )
