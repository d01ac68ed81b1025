"""Log probabilities as OpenAI's two formats and vLLM's `prompt_logprobs` show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from atom.engine.loading.tokenizer import Tokenizer
from atom.engine.messages import TokenLogprobs

LOWEST: Final = -9999.0
"""JSON has no -inf; OpenAI and vLLM write this."""


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST  # also for NaN, which compares false


class CompletionLogprobs:
    """`choices[].logprobs` of completions, piece by piece: `text_offset` runs on."""

    def __init__(self, tokenizer: Tokenizer, num_alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._num_alternatives = num_alternatives
        self._offset = 0

    def format(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """`entries` has one per token; None (the first token of a prompt) reads as null."""
        text = self._tokenizer.token_text
        tokens = [text(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else _finite(entry.logprobs[0]) for entry in entries],
            "top_logprobs": [None if entry is None else self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """By token text: the most likely ones, and the chosen token wherever it ranks."""
        top: dict[str, float] = {}
        stop = 1 + self._num_alternatives
        for token_id, logprob in zip(entry.token_ids[1:stop], entry.logprobs[1:stop], strict=True):
            top.setdefault(self._tokenizer.token_text(token_id), _finite(logprob))
        top.setdefault(self._tokenizer.token_text(entry.token_ids[0]), _finite(entry.logprobs[0]))
        return top


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_alternatives: int) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    return {"content": [_chat_entry(tokenizer, entry, num_alternatives) for entry in entries], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprobs, num_alternatives: int) -> dict[str, Any]:
    rows = [_chat_token(tokenizer, *pair) for pair in zip(entry.token_ids, entry.logprobs, strict=True)]
    return {**rows[0], "top_logprobs": rows[1 : 1 + num_alternatives]}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": text,
        "logprob": _finite(logprob),
        "bytes": list(raw if raw is not None else text.encode("utf-8")),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], num_alternatives: int
) -> list[dict[str, Any] | None]:
    """Per prompt token null (the first) or `{token id: {logprob, rank, decoded_token}}`, the actual token first."""
    rows: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            rows.append(None)
            continue
        row: dict[str, Any] = {}
        ranks = [entry.rank, *range(1, num_alternatives + 1)]
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=False):
            shown = {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
            row.setdefault(str(token_id), shown)
        rows.append(row)
    return rows
