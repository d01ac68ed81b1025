"""The `trace` load: recorded requests at their recorded times, with prompts that share what the recorded ones shared.

`trace_formats.py` reads the files. Prompts are made of the trace's block ids (`block_tokens.py`): token ids for
completions, words of one token each where text is wanted or the API is chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from atom.bench.datasets.block_tokens import prompt_tokens, stream_tokens
from atom.bench.datasets.bodies import RequestFields, chat_prompt, text_prompt, token_prompt
from atom.bench.datasets.prefix_cache import InfiniteCache
from atom.bench.datasets.schedule import check_time_scale, schedule_ns
from atom.bench.datasets.text import word_list
from atom.bench.datasets.trace_formats import Trace
from atom.bench.load import Api, PlannedRequest
from atom.bench.random_load import token_range

__all__ = ["TraceReplay", "TraceSource", "theoretical_hits"]

_TAIL, _WARMUP = 7, 8
"""Keep these random numbers apart from each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceReplay:
    """How the rows of a trace become requests."""

    seed: int = 0
    text: bool = False
    """Prompts of words instead of token ids (always so for chat)."""
    tokenizer: Path | None = None
    """For text of exactly the recorded lengths."""
    vocab_size: int | None = None
    """For token ids."""
    lengths_only: bool = False
    """Prompts share nothing, whatever the trace says."""
    use_timestamps: bool = True
    time_scale: float = 1.0
    """Gaps between requests are multiplied by this."""

    def __post_init__(self) -> None:
        check_time_scale(self.time_scale)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TraceSource:
    trace: Trace
    replay: TraceReplay
    fields: RequestFields
    cached: npt.NDArray[np.int64] | None
    """[rows] theoretical hits in tokens, `theoretical_hits(trace)`; None where prompts share nothing."""

    def __len__(self) -> int:
        return len(self.trace)

    def offsets_ns(self) -> npt.NDArray[np.int64] | None:
        return schedule_ns(self.trace.time_ns, self.replay.time_scale) if self.replay.use_timestamps else None

    def request(self, index: int) -> PlannedRequest:
        blocks = [] if self.cached is None else self.trace.blocks(index).tolist()
        tags = None if self.cached is None else {"theoretical_cached_tokens": int(self.cached[index])}
        return self._plan(index, blocks, (_TAIL, index), tags)

    def warmup(self, index: int) -> PlannedRequest:
        return self._plan(index % len(self), [], (_WARMUP, index), None)

    @property
    def max_total_len(self) -> int:
        """Longest prompt plus its output, in tokens."""
        return int((self.trace.input_len + self.trace.output_len).max())

    def describe(self) -> dict[str, Any]:
        trace, replay = self.trace, self.replay
        total = int(trace.input_len.sum())
        return {
            "prompt": "text" if self._is_text else "token ids",
            "shape": f"{trace.format} trace",
            "trace_format": trace.format,
            "dataset": trace.facts.describe(),
            "dropped": trace.dropped,
            "clipped": trace.clipped,
            "block_size": None if self.cached is None else trace.block_size,
            "lengths_only": replay.lengths_only,
            "timestamps_used": replay.use_timestamps,
            "time_scale": replay.time_scale if replay.use_timestamps else None,
            "recorded_s": (int(trace.time_ns[-1]) - int(trace.time_ns[0])) / 1e9,
            "mean_input_len": total / len(trace),
            "mean_output_len": float(trace.output_len.mean()),
            "total_input_tokens": total,
            "theoretical_cached_tokens": None if self.cached is None else int(self.cached.sum()),
            "theoretical_hit_rate": None if self.cached is None else int(self.cached.sum()) / total,
            "tokenizer": None if replay.tokenizer is None else str(replay.tokenizer),
            "token_range": None if self._is_text else list(token_range(replay.vocab_size)),
            **self.fields.describe(),
            "notes": self._notes(),
        }

    def _notes(self) -> list[str]:
        trace, notes = self.trace, []
        if self.cached is None:
            notes.append("prompts share no prefix: " + self._why_nothing_is_shared())
        notes += [f"{count:,} requests of the trace were left out: {reason}" for reason, count in trace.dropped.items()]
        notes += [
            f"{count:,} requests of the trace were shortened: {reason}" for reason, count in trace.clipped.items()
        ]
        if self._is_text and self.replay.tokenizer is None:
            notes.append("prompts have as many words as the trace has tokens (no --tokenizer to count with)")
        return notes

    def _why_nothing_is_shared(self) -> str:
        return "--trace-lengths-only" if self.replay.lengths_only else "the trace says nothing about it"

    @property
    def _is_text(self) -> bool:
        return self.replay.text or self.fields.api is Api.CHAT

    def _plan(
        self, row: int, blocks: Sequence[int], tail: tuple[int, int], tags: dict[str, Any] | None
    ) -> PlannedRequest:
        input_len, output_len = int(self.trace.input_len[row]), int(self.trace.output_len[row])
        api, seed = self.fields.api, self.replay.seed
        words = word_list(self.replay.tokenizer) if self._is_text else None
        span = token_range(self.replay.vocab_size) if words is None else (0, len(words))
        count = input_len if words is None else words.words_for(input_len, api)
        size = self.trace.block_size
        if blocks and size is not None:
            ids = prompt_tokens(blocks, count, seed=seed, block_size=size, token_range=span, tail=tail)
        else:
            ids = stream_tokens((seed, *tail), count, span)
        if words is None:
            return PlannedRequest(self.fields.body(token_prompt(ids), output_len), input_len, output_len, tags=tags)
        text = words.text(ids.tolist())
        prompt = chat_prompt(text) if api is Api.CHAT else text_prompt(text)
        planned = words.tokens_of(count, api)
        return PlannedRequest(self.fields.body(prompt, output_len), planned, output_len, tags=tags)


def theoretical_hits(trace: Trace) -> npt.NDArray[np.int64] | None:
    """[rows] tokens of each prompt that a cache without end would have, had all earlier prompts of the trace been
    finished; None where the trace has no blocks."""
    if trace.block_size is None:
        return None
    cache = InfiniteCache(trace.block_size)
    return np.array(
        [cache.send(trace.blocks(row).tolist(), int(trace.input_len[row])) for row in range(len(trace))], dtype=np.int64
    )
