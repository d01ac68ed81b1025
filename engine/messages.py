"""What travels between the API process and an EngineCore process: msgspec structs in msgpack, never pickle.

Inputs go over one PUSH/PULL pair per engine, outputs over another. `seq_id` is a number that `CoreManager` hands
out and never reuses within a process, so nothing that arrives late can be taken for another request. Who owns the
sockets and threads: `engine/core_manager.py` (API side), `engine/core_process.py` (core side).

Per step the common case is one token for each of hundreds of sequences, so `StepOutputs` is columnar: two parallel
integer lists instead of one struct per sequence.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atom.engine.sampling_params import SamplingParams

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    seq_id: int
    request_id: str
    prompt: bytes
    """Token ids, little-endian int32."""
    params: SamplingParams
    arrival_ns: int
    """`time.monotonic_ns()` when the API process admitted it."""


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    seq_ids: list[int]


class UtilityCall(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A named operation on the core: `stats`, `reset_prefix_cache`, `start_profile`, `stop_profile`, `ping`."""

    call_id: int
    method: str
    args: dict[str, Any]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    drain: bool
    """True: finish what runs first. False: abort it."""


CoreInput = AddRequest | AbortRequests | UtilityCall | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the chosen token first, then the top-k in descending order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """1-based rank of the chosen token in the whole vocabulary."""


class FinishedSequence(msgspec.Struct, frozen=True, array_like=True):
    seq_id: int
    reason: str
    """One of FINISH_*."""
    stop_token_id: int | None = None
    """The token that ended it, when a stop or end-of-sequence token did; that token is the last of its output."""
    error: str | None = None


class FirstSchedule(msgspec.Struct, frozen=True, array_like=True):
    """Sent with the step that first computed a sequence: where its TTFT went, as far as the core knows."""

    seq_id: int
    queued_ns: int
    scheduled_ns: int
    num_cached_tokens: int


class DeviceTimes(msgspec.Struct, frozen=True, array_like=True):
    """Where the device spent one step."""

    forward_seconds: float
    sample_seconds: float | None = None
    """None when the step sampled nothing, or the executor cannot tell sampling apart."""


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True):
    """State after a step. Plain numbers: the core never touches Prometheus. Counts `*_total` are cumulative."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    """Referenced by a running sequence."""
    kv_blocks_cached: int = 0
    """Free, but holding reusable prefix contents."""
    num_steps_total: int = 0
    num_preemptions_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0
    """Tokens looked up."""
    prefix_cache_hits_total: int = 0
    """Tokens found."""
    step_prefill_tokens: int = 0
    """Of the last step."""
    step_decode_seqs: int = 0
    """Of the last step."""
    step_seconds: float = 0.0
    """Execution time of the last step as the executor measured it."""
    device_times: list[DeviceTimes] | None = None
    """Of the steps whose times have become known since the report before, oldest first: a device's clocks are read
    without waiting for them, so they may be those of earlier steps. None unless `envs.METRICS_DEVICE_TIMER` is on."""


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    engine_index: int
    step: int
    sent_ns: int
    seq_ids: list[int]
    """Sequences that got tokens in this step."""
    token_ids: list[int]
    """Their new tokens, concatenated in the order of `seq_ids`."""
    counts: list[int] | None = None
    """Tokens per sequence; None: one each."""
    finished: list[FinishedSequence] = []
    first_scheduled: list[FirstSchedule] = []
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """By seq_id, one entry per new token; only for sequences that asked."""
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
    """By seq_id, once, with the first token; entry 0 is None (nothing predicts the first token)."""
    stats: SchedulerStats | None = None


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    engine_index: int
    pid: int
    info: dict[str, Any]
    """What the core found out: num_kv_blocks, block_size, max_model_len, executor, dtype, load seconds, …"""


class UtilityResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    call_id: int
    value: Any
    error: str | None = None


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The last message of a core that gives up; a core that is killed sends none and is noticed by its exit."""

    engine_index: int
    error: str


CoreOutput = StepOutputs | EngineReady | UtilityResult | EngineFailed
