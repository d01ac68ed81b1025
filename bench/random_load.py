"""The `random` load: prompts of random tokens with lengths around a mean, seeded request by request."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.load import Api, PlannedRequest
from atom.bench.words import WORDS
from atom.recipes.errors import UsageError

__all__ = ["DEFAULT_TOKEN_RANGE", "RandomSource", "token_range"]

DEFAULT_TOKEN_RANGE: Final = (256, 30_000)
"""Token ids drawn where the vocabulary's size is unknown: inside that of every common model, and away from the first
few hundred ids, where tokenizers keep special and single-byte tokens."""

_PIECE: Final = 65_536
"""Token ids that are made text in one go."""
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
    seed: int = 0
    vocab_size: int | None = None
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
        token_range(self.vocab_size)

    def __len__(self) -> int:
        return self.num_prompts

    @property
    def max_total_len(self) -> int:
        """Longest prompt plus longest output, in tokens."""
        return self.prefix_len + self._bounds(self.input_len)[1] + self._bounds(self.output_len)[1]

    def request(self, index: int) -> PlannedRequest:
        return self._plan(np.random.default_rng([self.seed, _PROMPTS, index]))

    def warmup(self, index: int) -> PlannedRequest:
        return self._plan(np.random.default_rng([self.seed, _WARMUP, index]))

    def offsets_ns(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {
            "random_input_len": self.input_len,
            "random_output_len": self.output_len,
            "random_range_ratio": self.range_ratio,
            "random_prefix_len": self.prefix_len,
            "prompt": "text" if self.api is Api.CHAT else "token ids",
            "token_range": None if self.api is Api.CHAT else list(token_range(self.vocab_size)),
            "continuous_usage_stats": self.continuous_usage_stats,
            "sampling": dict(self.sampling),
            "extra_body": dict(self.extra_body),
        }

    def _bounds(self, mean: int) -> tuple[int, int]:
        return max(1, math.floor(mean * (1 - self.range_ratio))), math.ceil(mean * (1 + self.range_ratio))

    def _plan(self, rng: np.random.Generator) -> PlannedRequest:
        input_len = int(rng.integers(*self._bounds(self.input_len), endpoint=True))
        output_len = int(rng.integers(*self._bounds(self.output_len), endpoint=True))
        prefix = np.random.default_rng([self.seed, _PREFIX])
        if self.api is Api.CHAT:
            words = [*self._words(prefix, self.prefix_len), *self._words(rng, input_len)]
            prompt = json.dumps([{"role": "user", "content": " ".join(words)}]).encode()
            planned: int | None = None  # only the server's usage knows how many tokens the words and the template make
        else:
            ids = np.concatenate([self._ids(prefix, self.prefix_len), self._ids(rng, input_len)])
            # In pieces: a join never lets another thread run, and a signal has to be heard meanwhile.
            pieces = (ids[at : at + _PIECE].tolist() for at in range(0, len(ids), _PIECE))
            prompt = b"[" + b",".join([b",".join(map(self._decimal.__getitem__, piece)) for piece in pieces]) + b"]"
            planned = self.prefix_len + input_len
        return PlannedRequest(self._body(prompt, output_len), planned, output_len)

    @cached_property
    def _decimal(self) -> list[bytes]:
        """Every token id as text: three times as fast as formatting each one where it occurs."""
        return [b"%d" % token for token in range(token_range(self.vocab_size)[1])]

    def _ids(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        return rng.integers(*token_range(self.vocab_size), size=count)

    def _words(self, rng: np.random.Generator, count: int) -> Sequence[str]:
        return [WORDS[i] for i in rng.integers(0, len(WORDS), size=count).tolist()]

    def _body(self, prompt: bytes, output_len: int) -> bytes:
        options: dict[str, Any] = {"include_usage": True}
        if self.continuous_usage_stats:
            options["continuous_usage_stats"] = True
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": options,
            "max_tokens": output_len,
            **self.sampling,
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        fields |= self.extra_body
        name = b"messages" if self.api is Api.CHAT else b"prompt"
        return json.dumps(fields, separators=(",", ":")).encode()[:-1] + b',"%b":%b}' % (name, prompt)
