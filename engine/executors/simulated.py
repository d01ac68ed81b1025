"""An executor without tensors: it takes as long as a model of the step time says and answers with made-up tokens.
It load-tests what is around an executor (the API process, the scheduler, the tools) at scales that no accelerator at
hand reaches. Whoever prints a figure from it says so: `kind` is "simulated".

    seconds(step) = (base + prefill_us · prefill tokens + decode_us · decoding sequences) · exp(jitter · N(0, 1))
    token(seed, position) = low + splitmix64(seed, position) mod (vocab_size - low)

Tokens depend on nothing else, so output is the same whatever the batching, the preemptions or the prefix hits. There
is no end-of-sequence id: `max_tokens` governs lengths, and `stop_token_ids` end a sequence where a token happens to
be one of them. Logprobs are as made up as the tokens, but well-formed and reproducible.
"""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from atom.engine import envs
from atom.engine.config import EngineConfig
from atom.engine.errors import ConfigError
from atom.engine.executors.base import Executor, NewSequence, SchedulerOutput, StepHandle, StepResult
from atom.engine.messages import DeviceTimes, TokenLogprobs

DEFAULT_NUM_BLOCKS: Final = 1 << 16
DEFAULT_MAX_MODEL_LEN: Final = 131_072
_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MAX_CONFIG_BYTES: Final = 1 << 20


def lowest_token(vocab_size: int) -> int:
    """Tokens below are never produced: common vocabularies keep control and single-byte tokens there."""
    return min(256, vocab_size // 2)


def token_at(seed: int, position: int, vocab_size: int) -> int:
    """The token at `position` of a sequence with `seed`. The hash is splitmix64 (Steele, Lea, Flood 2014)."""
    low = lowest_token(vocab_size)
    return low + _splitmix64(seed * _GAMMA + position) % (vocab_size - low)


def _splitmix64(state: int) -> int:
    z = (state + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def token_table(seed: int, count: int, vocab_size: int) -> list[int]:
    """`[token_at(seed, position, vocab_size) for position in range(count)]`, vectorised."""
    with np.errstate(over="ignore"):
        z = np.arange(count, dtype=np.uint64) + np.uint64((seed * _GAMMA + _GAMMA) & _MASK)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
        z = z ^ (z >> np.uint64(31))
    low = lowest_token(vocab_size)
    tokens: list[int] = (z % np.uint64(vocab_size - low) + np.uint64(low)).astype(np.int64).tolist()
    return tokens


@dataclass(slots=True)
class _Step:
    """A submitted step: what it will answer, and when."""

    result: StepResult
    done_at: float
    """`time.monotonic()` seconds."""


class SimulatedExecutor(Executor):
    """The device is a clock: a step starts when it is submitted or when the one before it ends, whichever is later,
    and `collect` sleeps until it has ended. So steps overlap with scheduling as they do on a real device, late
    wake-ups do not add up, and a model of zero runs as fast as Python can."""

    kind = "simulated"

    def __init__(self, config: EngineConfig) -> None:
        if config.cache.memory_bytes is not None:
            raise ConfigError(
                "--kv-cache-memory means nothing to the simulated executor, which has no memory; "
                "use --num-gpu-blocks-override"
            )
        self._config = config
        self._model = config.simulated
        facts = _read_model_config(config.model.model)
        self._vocab_size = facts.get("vocab_size", config.simulated.vocab_size)
        self._max_model_len = config.model.max_model_len or facts.get("max_position_embeddings", DEFAULT_MAX_MODEL_LEN)
        self._seed = config.model.seed
        self._jitter = random.Random(config.model.seed)
        self._tokens: list[int] = []
        self._special: dict[int, NewSequence] = {}
        """Sequences that need more than the token of their position."""
        self._busy_until = 0.0
        self._report_device_times = envs.METRICS_DEVICE_TIMER.read()

    def start(self) -> int:
        self._tokens = token_table(self._seed, self._max_model_len + 1, self._vocab_size)
        return self._config.cache.num_blocks or DEFAULT_NUM_BLOCKS

    def info(self) -> dict[str, Any]:
        model = self._model
        return {
            "executor": self.kind,
            "simulated": True,
            "vocab_size": self._vocab_size,
            "max_model_len": self._max_model_len,
            "eos_token_ids": [],
            "dtype": "none",
            "base_ms": model.base_ms,
            "prefill_us_per_token": model.prefill_us_per_token,
            "decode_us_per_seq": model.decode_us_per_seq,
            "jitter": model.jitter,
        }

    def submit(self, output: SchedulerOutput) -> StepHandle:
        for seq_id in output.released:
            self._special.pop(seq_id, None)
        for new in output.new_sequences:
            if _is_special(new):
                self._special[new.seq_id] = new
        seconds = self._step_seconds(output)
        result = self._compute(output, seconds)
        done_at = 0.0
        if seconds > 0.0:
            done_at = max(time.monotonic(), self._busy_until) + seconds
            self._busy_until = done_at
        return StepHandle(output.step, _Step(result, done_at))

    def collect(self, handle: StepHandle) -> StepResult:
        step: _Step = handle.state
        if step.done_at:
            remaining = step.done_at - time.monotonic()
            if remaining > 0.0:
                time.sleep(remaining)
        return step.result

    def is_done(self, handle: StepHandle) -> bool:
        step: _Step = handle.state
        return step.done_at <= time.monotonic()

    def shutdown(self) -> None:
        self._special.clear()
        self._tokens = []

    def _step_seconds(self, output: SchedulerOutput) -> float:
        model = self._model
        seconds = (
            model.base_ms * 1e-3
            + model.prefill_us_per_token * 1e-6 * output.num_prefill_tokens
            + model.decode_us_per_seq * 1e-6 * output.num_decode_seqs
        )
        if model.jitter:
            seconds *= math.exp(self._jitter.gauss(0.0, model.jitter))
        return seconds

    def _compute(self, output: SchedulerOutput, seconds: float) -> StepResult:
        tokens = self._tokens
        computed = output.num_computed_tokens
        if output.num_prefill_tokens == 0:  # every sequence decodes one token
            seq_ids = output.seq_ids
            token_ids = [tokens[position + 1] for position in computed]
        else:
            rows = zip(output.seq_ids, computed, output.num_new_tokens, output.samples, strict=True)
            sampled = [(seq_id, start + size) for seq_id, start, size, samples in rows if samples]
            seq_ids = [seq_id for seq_id, _ in sampled]
            token_ids = [tokens[position] for _, position in sampled]
        result = StepResult(output.step, seq_ids, token_ids, seconds=seconds)
        if self._report_device_times:  # what the model says; it has no sampler
            result.device_times = [DeviceTimes(seconds)]
        if self._special:
            self._compute_special(output, result)
        return result

    def _compute_special(self, output: SchedulerOutput, result: StepResult) -> None:
        """Correct the tokens of sequences with a seed or a mask of their own and add what else they asked for."""
        index = -1
        rows = zip(output.seq_ids, output.num_computed_tokens, output.num_new_tokens, output.samples, strict=True)
        for seq_id, start, size, samples in rows:
            index += samples
            new = self._special.get(seq_id)
            if new is None:
                continue
            wants_prompt = new.params.prompt_logprobs
            if wants_prompt is not None and start < new.num_prompt_tokens <= start + size:
                result.prompt_logprobs[seq_id] = self._prompt_logprobs(new, wants_prompt)
            if samples:
                token = self._token(new, start + size)
                result.token_ids[index] = token
                if new.params.logprobs is not None:
                    result.logprobs[seq_id] = [self._logprobs(token, start + size, new.params.logprobs, 1)]

    def _token(self, new: NewSequence, position: int) -> int:
        """Until `min_tokens` were generated, a stop id gives way to the next id that is none."""
        params = new.params
        seed = self._seed if params.seed is None else params.seed
        token = token_at(seed, position, self._vocab_size)
        if position - new.num_prompt_tokens < params.min_tokens:
            low = lowest_token(self._vocab_size)
            while token in new.stop_token_ids:
                token = token + 1 if token + 1 < self._vocab_size else low
        return token

    def _logprobs(self, chosen: int, position: int, top_k: int, rank: int) -> TokenLogprobs:
        """A geometric distribution whose head moves with the position; the chosen token is at `rank`."""
        head = 0.35 + 0.5 * (_splitmix64(position ^ chosen) / 2.0**64)
        values = [math.log(head) + place * math.log1p(-head) for place in range(max(top_k, rank))]
        others = (token for token in range(lowest_token(self._vocab_size), self._vocab_size) if token != chosen)
        top = [chosen if place == rank - 1 else next(others) for place in range(top_k)]
        return TokenLogprobs([chosen, *top], [values[rank - 1], *values[:top_k]], rank)

    def _prompt_logprobs(self, new: NewSequence, top_k: int) -> list[TokenLogprobs | None]:
        entries: list[TokenLogprobs | None] = [None]
        for position in range(1, new.num_prompt_tokens):
            token = new.token_ids[position]
            rank = 1 + _splitmix64(token * _GAMMA + position) % 3
            entries.append(self._logprobs(token, position, top_k, rank))
        return entries


def _is_special(new: NewSequence) -> bool:
    params = new.params
    return (
        params.seed is not None
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or (params.min_tokens > 0 and bool(new.stop_token_ids))
    )


def _read_model_config(model: str) -> dict[str, int]:
    """`vocab_size` and `max_position_embeddings` where `model` is a directory whose config.json has them."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path} is not JSON: {exc}") from exc
    facts: dict[str, int] = {}
    for key, least, most in (("vocab_size", 16, 1 << 22), ("max_position_embeddings", 1, 1 << 24)):
        value = raw.get(key) if isinstance(raw, dict) else None
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{path}: {key} must be an integer from {least} to {most}, got {value!r}")
        facts[key] = value
    return facts
