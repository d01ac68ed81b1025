"""The JSON bodies of requests: what every load puts around a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.load import Api

__all__ = ["RequestFields", "chat_prompt", "text_prompt", "token_prompt"]

_PIECE: Final = 65_536
"""Token ids that are made text in one go."""
_TABLE: Final = 1 << 20
"""Ids below this are looked up; others are formatted one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFields:
    """Everything in a request's body but its prompt and its length."""

    api: Api
    model: str
    ignore_eos: bool = False
    continuous_usage_stats: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the body: temperature, top_p, …"""
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: bytes, output_len: int, own: Mapping[str, Any] | None = None) -> bytes:
        """`prompt`: JSON, of messages where the API is chat. `own`: fields that the request itself came with: they
        win over `sampling`, and lose against what the load needs and against `extra_body`."""
        options: dict[str, Any] = {"include_usage": True}
        if self.continuous_usage_stats:
            options["continuous_usage_stats"] = True
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": options,
            "max_tokens": output_len,
        }
        fields = {**fields, **self.sampling, **(own or {}), **fields}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        fields |= self.extra_body
        name = b"messages" if self.api is Api.CHAT else b"prompt"
        head = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
        return head[:-1] + b',"%b":%b}' % (name, prompt)

    def describe(self) -> dict[str, Any]:
        return {
            "continuous_usage_stats": self.continuous_usage_stats,
            "sampling": dict(self.sampling),
            "extra_body": dict(self.extra_body),
        }


def token_prompt(ids: npt.NDArray[np.integer[Any]]) -> bytes:
    """A list of token ids, as JSON. In pieces: a join never lets another thread run, and a signal has to be heard
    meanwhile."""
    highest = int(ids.max()) if len(ids) else 0
    decimal = _decimals(1 << highest.bit_length()).__getitem__ if highest < _TABLE else b"%d".__mod__
    pieces = (ids[at : at + _PIECE].tolist() for at in range(0, len(ids), _PIECE))
    return b"[" + b",".join([b",".join(map(decimal, piece)) for piece in pieces]) + b"]"


def text_prompt(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


def chat_prompt(text: str) -> bytes:
    """One user message, as JSON."""
    return json.dumps([{"role": "user", "content": text}], ensure_ascii=False).encode()


@lru_cache(maxsize=4)
def _decimals(count: int) -> tuple[bytes, ...]:
    """Every id below `count` as text: three times as fast as formatting each one where it occurs."""
    return tuple(b"%d" % token for token in range(count))
