"""The `random` load: prompts of random tokens or words with lengths around a mean, seeded request by request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.datasets.bodies import RequestFields, chat_prompt, text_prompt, token_prompt
from atom.bench.datasets.text import word_list
from atom.bench.load import Api, PlannedRequest
from atom.recipes.errors import UsageError

__all__ = ["DEFAULT_TOKEN_RANGE", "RandomSource", "token_range"]

DEFAULT_TOKEN_RANGE: Final = (256, 30_000)
"""Token ids drawn where the vocabulary's size is unknown: inside that of every common model, and away from the first
few hundred ids, where tokenizers keep special and single-byte tokens."""

_PROMPTS, _PREFIX, _WARMUP = 0, 1, 3


def token_range(vocab_size: int | None) -> tuple[int, int]:
    """Half-open range of ids to draw from. Both ends of a vocabulary hold special tokens in one family or another
    (Llama 3 and Qwen at the top, SmolLM and older Llamas at the bottom), so both are left out."""
    if vocab_size is None:
        return DEFAULT_TOKEN_RANGE
    if vocab_size < 4:
        raise UsageError(f"--vocab-size must be at least 4, got {vocab_size}")
    return min(256, vocab_size // 8), vocab_size - min(2048, max(1, vocab_size // 16))


@dataclass(frozen=True, kw_only=True)
class RandomSource:
    """`num_prompts` requests. Request i depends on (seed, i) alone: the same however many workers share the load."""

    num_prompts: int
    api: Api
    model: str
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    """Different prefixes of `prefix_len` tokens; request i has number i mod `num_prefixes`."""
    text: bool = False
    """Words instead of token ids (always so for chat)."""
    tokenizer: Path | None = None
    """For text of exactly as many tokens."""
    seed: int = 0
    vocab_size: int | None = None
    """For token ids."""
    ignore_eos: bool = False
    continuous_usage_stats: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the body: temperature, top_p, …"""
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise UsageError(f"--num-prompts must be at least 1, got {self.num_prompts}")
        if self.input_len < 1:
            raise UsageError(f"--random-input-len must be at least 1, got {self.input_len}")
        if self.output_len < 1:
            raise UsageError(f"--random-output-len must be at least 1, got {self.output_len}")
        if self.prefix_len < 0:
            raise UsageError(f"--random-prefix-len must not be negative, got {self.prefix_len}")
        if not 0 <= self.range_ratio < 1:
            raise UsageError(
                f"--random-range-ratio must be at least 0 and below 1, got {self.range_ratio:g}: lengths are drawn "
                "from mean × (1 − r) to mean × (1 + r), as in vLLM; SGLang's ratio (from mean × r to mean) differs"
            )
        if not 1 <= self.num_prefixes <= self.num_prompts:
            raise UsageError(
                f"--num-prefixes must be from 1 to --num-prompts ({self.num_prompts}), got {self.num_prefixes}"
            )
        if self.num_prefixes > 1 and self.prefix_len == 0:
            raise UsageError(f"--num-prefixes {self.num_prefixes}: prefixes of what length? give --random-prefix-len")
        token_range(self.vocab_size)

    def __len__(self) -> int:
        return self.num_prompts

    @property
    def max_total_len(self) -> int:
        """Longest prompt plus longest output, in tokens."""
        return self.prefix_len + self._bounds(self.input_len)[1] + self._bounds(self.output_len)[1]

    def request(self, index: int) -> PlannedRequest:
        return self._plan(index, np.random.default_rng([self.seed, _PROMPTS, index]))

    def warmup(self, index: int) -> PlannedRequest:
        return self._plan(index, np.random.default_rng([self.seed, _WARMUP, index]))

    def offsets_ns(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "random_input_len": self.input_len,
            "random_output_len": self.output_len,
            "random_range_ratio": self.range_ratio,
            "random_prefix_len": self.prefix_len,
            "num_prefixes": self.num_prefixes,
            "prompt": "text" if self._is_text else "token ids",
            "token_range": None if self._is_text else list(token_range(self.vocab_size)),
            "tokenizer": None if self.tokenizer is None else str(self.tokenizer),
            **self._fields.describe(),
        }

    @property
    def _is_text(self) -> bool:
        return self.text or self.api is Api.CHAT

    @property
    def _fields(self) -> RequestFields:
        return RequestFields(
            api=self.api,
            model=self.model,
            ignore_eos=self.ignore_eos,
            continuous_usage_stats=self.continuous_usage_stats,
            sampling=self.sampling,
            extra_body=self.extra_body,
        )

    def _bounds(self, mean: int) -> tuple[int, int]:
        return max(1, math.floor(mean * (1 - self.range_ratio))), math.ceil(mean * (1 + self.range_ratio))

    def _plan(self, index: int, rng: np.random.Generator) -> PlannedRequest:
        input_len = int(rng.integers(*self._bounds(self.input_len), endpoint=True))
        output_len = int(rng.integers(*self._bounds(self.output_len), endpoint=True))
        prefix = np.random.default_rng([self.seed, _PREFIX, index % self.num_prefixes])
        words = word_list(self.tokenizer) if self._is_text else None
        span = token_range(self.vocab_size) if words is None else (0, len(words))
        total = self.prefix_len + input_len
        count = total if words is None else words.words_for(total, self.api)
        planned = total if words is None else words.tokens_of(count, self.api)
        ids = np.concatenate([_draw(prefix, span, self.prefix_len), _draw(rng, span, input_len)])[:count]
        if words is None:
            prompt = token_prompt(ids)
        else:
            text = words.text(ids.tolist())
            prompt = chat_prompt(text) if self.api is Api.CHAT else text_prompt(text)
        return PlannedRequest(self._fields.body(prompt, output_len), planned, output_len)


def _draw(rng: np.random.Generator, span: tuple[int, int], count: int) -> npt.NDArray[np.int64]:
    return rng.integers(*span, size=count)
