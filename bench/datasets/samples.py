"""Which items of a dataset become requests: as `vllm bench serve` chooses them (shuffled, and some twice where the file
has too few), but each choice a function of the seed alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.datasets.bodies import RequestFields, chat_prompt, text_prompt
from atom.bench.datasets.items import ItemFile
from atom.bench.datasets.text import word_list
from atom.bench.load import Api, PlannedRequest

__all__ = ["Samples", "item_order", "repeated", "warmup_request"]

_ORDER, _REPEAT, _WARMUP = 4, 5, 6
"""Keep these random numbers apart from those of other loads (`bench/random_load.py`)."""
_WARMUP_WORDS: Final = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """The items of `file` that are sent, in order."""

    file: ItemFile
    number: npt.NDArray[np.int64]
    """[requests] of the item."""
    input_len: npt.NDArray[np.int64]
    """[requests] prompt tokens; −1 where only the server can count them."""
    output_len: npt.NDArray[np.int64]
    """[requests] tokens to ask for."""
    distinct: int
    """Requests before items were taken again."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Items that were looked at and not taken, by reason."""

    def __len__(self) -> int:
        return len(self.number)

    def lengths(self, index: int) -> tuple[int | None, int]:
        """(prompt tokens or None, output tokens) of request `index`."""
        input_len = int(self.input_len[index])
        return (None if input_len < 0 else input_len), int(self.output_len[index])

    def describe(self) -> dict[str, Any]:
        known = self.input_len[self.input_len >= 0]
        return {
            "dataset": self.file.facts.describe(),
            "items": len(self.file),
            "skipped": dict(self.skipped),
            "repeated": len(self) - self.distinct,
            "mean_input_len": float(known.mean()) if len(known) == len(self) else None,
            "mean_output_len": float(self.output_len.mean()),
        }

    def notes(self) -> list[str]:
        notes = [f"{count:,} items of the file were left out: {reason}" for reason, count in self.skipped.items()]
        if len(self) > self.distinct:
            notes.append(
                f"{len(self) - self.distinct:,} of {len(self):,} prompts are repeated, and may be found in the prefix "
                "cache: the file has too few (--no-oversample: send no prompt twice)"
            )
        return notes


def item_order(count: int, seed: int, *, shuffle: bool) -> npt.NDArray[np.int64]:
    """[count] the numbers of the items in the order in which they are considered."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    return np.random.default_rng([seed, _ORDER]).permutation(count).astype(np.int64)


def repeated(have: int, want: int, seed: int) -> npt.NDArray[np.int64]:
    """[want] which of `have` samples each request is: each once, then drawn with replacement."""
    extra = np.random.default_rng([seed, _REPEAT]).integers(0, have, size=max(0, want - have))
    return np.concatenate([np.arange(min(have, want)), extra])


def warmup_request(fields: RequestFields, index: int, seed: int, size_bytes: int, output_len: int) -> PlannedRequest:
    """Random words of about `size_bytes`: a request as long as those of the file, and none of them."""
    words = word_list(None)
    count = min(_WARMUP_WORDS, max(1, size_bytes // 5))
    text = words.text(np.random.default_rng([seed, _WARMUP, index]).integers(0, len(words), size=count).tolist())
    prompt = chat_prompt(text) if fields.api is Api.CHAT else text_prompt(text)
    return PlannedRequest(fields.body(prompt, output_len), None, output_len)
