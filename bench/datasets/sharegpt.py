"""The `sharegpt` load: conversations of people with a chatbot, in the ShareGPT format.

A file is a JSON array (or JSONL) of {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}.
The first human turn that is answered is the prompt, its answer's length is the output length; conversations beyond the
limits are left out, as `vllm bench serve` does. Without a tokenizer lengths are estimated from characters.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from atom.bench.datasets.bodies import RequestFields, chat_prompt, text_prompt
from atom.bench.datasets.items import ItemFile, index_items
from atom.bench.datasets.samples import Samples, item_order, repeated, warmup_request
from atom.bench.datasets.text import load_tokenizer
from atom.bench.load import Api, PlannedRequest
from atom.recipes.errors import UsageError

__all__ = ["ShareGptChoice", "ShareGptSource", "sharegpt_source"]

CHARACTERS_PER_TOKEN: Final = 4
"""Of English text in the usual vocabularies."""
_ASKING: Final = frozenset({"human", "user"})
_ANSWERING: Final = frozenset({"gpt", "chatgpt", "assistant", "bing", "bard"})

_NO_PAIR = "no human turn that is answered"
_SHORT = "shorter than --sharegpt-min-len"
_LONG_PROMPT = "prompt beyond --sharegpt-max-prompt-len"
_LONG = "prompt and output beyond --sharegpt-max-total-len"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareGptChoice:
    """Which conversations are sent."""

    num_prompts: int = 1000
    seed: int = 0
    output_len: int | None = None
    """For every request; None: the length of the recorded answer."""
    tokenizer: Path | None = None
    min_len: int = 4
    """Of the prompt, and of the answer unless `output_len` is given; tokens."""
    max_prompt_len: int = 1024
    max_total_len: int = 2048
    shuffle: bool = True
    oversample: bool = True

    def __post_init__(self) -> None:
        for name, value, low in (
            ("--num-prompts", self.num_prompts, 1),
            ("--sharegpt-output-len", 1 if self.output_len is None else self.output_len, 1),
            ("--sharegpt-min-len", self.min_len, 1),
            ("--sharegpt-max-prompt-len", self.max_prompt_len, 1),
            ("--sharegpt-max-total-len", self.max_total_len, 2),
        ):
            if value < low:
                raise UsageError(f"{name} must be at least {low}, got {value}")

    def refusal(self, input_len: int, output_len: int) -> str | None:
        """Why a conversation of these lengths is left out."""
        if input_len < self.min_len or (self.output_len is None and output_len < self.min_len):
            return _SHORT
        if input_len > self.max_prompt_len:
            return _LONG_PROMPT
        return _LONG if input_len + output_len > self.max_total_len else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareGptSource:
    choice: ShareGptChoice
    samples: Samples
    fields: RequestFields

    def __len__(self) -> int:
        return len(self.samples)

    def offsets_ns(self) -> None:
        return None

    def request(self, index: int) -> PlannedRequest:
        number = int(self.samples.number[index])
        pair = _first_pair(self.samples.file, number)
        assert pair is not None, "the file has not changed, and this item had a pair"
        input_len, output_len = self.samples.lengths(index)
        prompt = chat_prompt(pair[0]) if self.fields.api is Api.CHAT else text_prompt(pair[0])
        return PlannedRequest(self.fields.body(prompt, output_len), input_len, output_len)

    def warmup(self, index: int) -> PlannedRequest:
        at = index % len(self)
        size = int(self.samples.file.size[self.samples.number[at]])
        size = min(size, self.choice.max_prompt_len * CHARACTERS_PER_TOKEN)
        return warmup_request(self.fields, index, self.choice.seed, size, int(self.samples.output_len[at]))

    def describe(self) -> dict[str, Any]:
        tokenizer = self.choice.tokenizer
        notes = self.samples.notes()
        if tokenizer is None:
            notes.insert(0, f"lengths are estimates of {CHARACTERS_PER_TOKEN} characters a token (no --tokenizer)")
        return {
            "prompt": "text",
            "shape": "ShareGPT",
            **self.samples.describe(),
            "tokenizer": None if tokenizer is None else str(tokenizer),
            "output_len": self.choice.output_len,
            "limits": [self.choice.min_len, self.choice.max_prompt_len, self.choice.max_total_len],
            "shuffled": self.choice.shuffle,
            **self.fields.describe(),
            "notes": notes,
        }


def sharegpt_source(path: Path, choice: ShareGptChoice, fields: RequestFields) -> ShareGptSource:
    """Read `path` and choose. UsageError with file and line for what is no ShareGPT, and if nothing can be sent."""
    file = index_items(path)
    special = fields.api is Api.COMPLETIONS
    tokenizer = None if choice.tokenizer is None else load_tokenizer(choice.tokenizer)

    def tokens(text: str, *, prompt: bool) -> int:
        if tokenizer is None:
            return -(-len(text) // CHARACTERS_PER_TOKEN)
        return tokenizer.count(text, special_tokens=prompt and special)

    taken: list[tuple[int, int, int]] = []
    skipped: Counter[str] = Counter()
    for number in item_order(len(file), choice.seed, shuffle=choice.shuffle).tolist():
        if len(taken) == choice.num_prompts:
            break
        pair = _first_pair(file, number)
        if pair is None:
            skipped[_NO_PAIR] += 1
            continue
        input_len = tokens(pair[0], prompt=True)
        output_len = choice.output_len or tokens(pair[1], prompt=False)
        if refused := choice.refusal(input_len, output_len):
            skipped[refused] += 1
        else:
            taken.append((number, input_len, output_len))
    if not taken:
        reasons = "; ".join(f"{count:,}: {reason}" for reason, count in skipped.items())
        raise UsageError(f"{path}: none of {len(file):,} conversations can be sent ({reasons})")
    columns = np.array(taken, dtype=np.int64)
    which = repeated(len(taken), choice.num_prompts if choice.oversample else len(taken), choice.seed)
    number, input_len_of, output_len_of = columns[which].T
    counted = tokenizer is not None and fields.api is Api.COMPLETIONS
    samples = Samples(
        file=file,
        number=number,
        input_len=input_len_of if counted else np.full(len(which), -1, dtype=np.int64),
        output_len=output_len_of,
        distinct=len(taken),
        skipped=dict(skipped),
    )
    return ShareGptSource(choice=choice, samples=samples, fields=fields)


def _first_pair(file: ItemFile, number: int) -> tuple[str, str] | None:
    """(prompt, answer): the first human turn that is answered; None if there is none."""
    turns = file.object(number).get("conversations")
    if turns is None:
        return None
    if not isinstance(turns, list):
        file.refuse(number, f"field 'conversations' must be a list of turns, got {type(turns).__name__}")
    before: dict[str, Any] | None = None
    for turn in turns:
        if not isinstance(turn, dict):
            file.refuse(number, f"field 'conversations' must hold objects, got {type(turn).__name__}")
        if before is not None and before.get("from") in _ASKING and turn.get("from") in _ANSWERING:
            return _value(file, number, before), _value(file, number, turn)
        before = turn
    return None


def _value(file: ItemFile, number: int, turn: dict[str, Any]) -> str:
    value = turn.get("value")
    if not isinstance(value, str):
        file.refuse(number, f"field 'value' of a turn must be a string, got {type(value).__name__}")
    return file.sendable(number, "value", value)
