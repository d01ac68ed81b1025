"""What a request asks of the sampler and of the stop conditions. Text-level stop strings are matched in the API
process (`engine/output_processor.py`); everything else is applied by the executor's sampler or by the scheduler."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from atom.engine.errors import RequestError

MAX_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIAS: Final = 1024
MAX_N: Final = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one request, as OpenAI and vLLM name them.

    Immutable and wire-safe: it travels to the EngineCore as msgpack. Construction does not validate; call
    `validate()` once at the edge (server, `LLM.generate`), so that a hostile body gets one clear error.
    """

    n: int = 1
    """How many sequences to sample for the prompt. Fanned out in the API process; the core sees n == 1."""
    temperature: float = 1.0
    """0 means greedy: argmax, ties to the lowest token id."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps the whole vocabulary."""
    min_p: float = 0.0
    seed: int | None = None
    """With a seed the draw at each position depends on (seed, position) alone, never on the batch."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    """Upper bound of generated tokens; None: up to the context length."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is sampled before so many tokens."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Top-k log probabilities per generated token, plus the sampled one; 0 returns the sampled one alone."""
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise `RequestError` naming the first parameter of a wrong type or out of range. `vocab_size` bounds token
        ids when known."""
        self._validate_types()
        _check_range("n", self.n, 1, MAX_N)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", "min_tokens")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 1e6, low_open=True)
        self._validate_stops(vocab_size)
        self._validate_logit_bias(vocab_size)

    def _validate_types(self) -> None:
        """Construction checks nothing, and what the core cannot decode ends it, and every other request with it."""
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=SamplingParams)
        except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
            what, _, path = str(error).replace("`", "").partition(" - at ")
            name = path.partition("$.")[2].partition("[")[0] or None
            raise RequestError(f"{name or 'sampling parameters'}: {what[:1].lower()}{what[1:]}", name) from None

    def _validate_stops(self, vocab_size: int | None) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", "stop")
        for text in self.stop:
            if not text or len(text) > MAX_STOP_STRING_CHARS:
                raise RequestError(f"a stop string must have 1 to {MAX_STOP_STRING_CHARS} characters", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
        for token in self.stop_token_ids:
            _check_token("stop_token_ids", token, vocab_size)

    def _validate_logit_bias(self, vocab_size: int | None) -> None:
        if not self.logit_bias:
            return
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias takes at most {MAX_LOGIT_BIAS} entries", "logit_bias")
        for token, bias in self.logit_bias.items():
            _check_token("logit_bias", token, vocab_size)
            _check_range("logit_bias", bias, -100.0, 100.0)


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    """NaN fails every comparison, so the test is written as what must hold."""
    holds = (low < value if low_open else low <= value) and value <= high and not math.isinf(value)
    if not holds:
        bracket = "(" if low_open else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value}", name)


def _check_token(name: str, token: int, vocab_size: int | None) -> None:
    if token < 0 or (vocab_size is not None and token >= vocab_size):
        upper = "" if vocab_size is None else f" below the vocabulary size {vocab_size}"
        raise RequestError(f"{name}: token id {token} is not a non-negative id{upper}", name)
