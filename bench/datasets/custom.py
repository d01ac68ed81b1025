"""The `custom` load: requests of one's own, one JSON object a line.

    {"prompt": "text" or [token ids], "output_tokens": 128}
    {"messages": [{"role": "user", "content": …}, …], "max_tokens": 128, "timestamp": 1500}
    {"custom_id": …, "method": "POST", "url": …, "body": {…}}      as in OpenAI's batch files

Of the first two kinds only these fields are read: prompt or messages, output_tokens or max_tokens or
max_completion_tokens, timestamp (milliseconds). The body of the third is sent as it is, but for what the load sets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.datasets.bodies import RequestFields
from atom.bench.datasets.items import ItemFile, index_items, quoted
from atom.bench.datasets.samples import Samples, item_order, repeated, warmup_request
from atom.bench.datasets.schedule import schedule_ns
from atom.bench.datasets.text import load_tokenizer
from atom.bench.load import Api, PlannedRequest
from atom.recipes.errors import UsageError

__all__ = ["CustomChoice", "CustomSource", "custom_source"]

MAX_OUTPUT_TOKENS: Final = 16_000_000
_MAX_MS: Final = 9_000_000_000_000
"""Beyond the year 2200, and nanoseconds still fit 64 bits."""
_LENGTHS: Final = ("output_tokens", "max_tokens", "max_completion_tokens")
_PROMPTS: Final = ("prompt", "messages")
_SET_BY_THE_LOAD: Final = frozenset({*_PROMPTS, *_LENGTHS, "model", "stream", "stream_options", "n", "best_of"})
_WRONG_API: Final[Mapping[str, str]] = {
    "messages": "field 'messages' needs --backend openai-chat",
    "ids": "field 'prompt' has token ids, which need --backend openai (a chat is text)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomChoice:
    """Which lines are sent, and how."""

    num_prompts: int | None = 1000
    """None: every line once."""
    seed: int = 0
    output_len: int | None = None
    """For every request; None: what the lines say."""
    tokenizer: Path | None = None
    shuffle: bool = True
    oversample: bool = True
    use_timestamps: bool = True
    """Lines that have times are sent at them, in the order of the file and each once."""
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_prompts is not None and self.num_prompts < 1:
            raise UsageError(f"--num-prompts must be at least 1, got {self.num_prompts}")
        if self.output_len is not None and not 1 <= self.output_len <= MAX_OUTPUT_TOKENS:
            raise UsageError(f"--custom-output-len must be at least 1 (-1: as the file says), got {self.output_len}")


@dataclass(frozen=True, slots=True)
class _Line:
    """One line, understood."""

    prompt: str | list[Any]
    """Text, token ids, or messages."""
    kind: str
    """`text`, `ids`, `messages`."""
    output_len: int | None
    time_ns: int | None
    own: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of a batch file's body."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CustomSource:
    choice: CustomChoice
    samples: Samples
    fields: RequestFields
    offsets: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def offsets_ns(self) -> npt.NDArray[np.int64] | None:
        return self.offsets

    def request(self, index: int) -> PlannedRequest:
        line = _understand(self.samples.file, int(self.samples.number[index]))
        input_len, output_len = self.samples.lengths(index)
        prompt: Any = line.prompt
        if line.kind == "text" and self.fields.api is Api.CHAT:
            prompt = [{"role": "user", "content": line.prompt}]
        encoded = json.dumps(prompt, ensure_ascii=False, separators=(",", ":")).encode()
        return PlannedRequest(self.fields.body(encoded, output_len, line.own), input_len, output_len)

    def warmup(self, index: int) -> PlannedRequest:
        at = index % len(self)
        size = int(self.samples.file.size[self.samples.number[at]])
        return warmup_request(self.fields, index, self.choice.seed, size, int(self.samples.output_len[at]))

    def describe(self) -> dict[str, Any]:
        choice = self.choice
        return {
            "prompt": "as in the file",
            "shape": self.samples.file.facts.name,
            **self.samples.describe(),
            "tokenizer": None if choice.tokenizer is None else str(choice.tokenizer),
            "output_len": choice.output_len,
            "timestamps_used": self.offsets is not None,
            "time_scale": choice.time_scale if self.offsets is not None else None,
            "shuffled": choice.shuffle and self.offsets is None,
            **self.fields.describe(),
            "notes": self.samples.notes(),
        }


def custom_source(path: Path, choice: CustomChoice, fields: RequestFields) -> CustomSource:
    """Read `path` and choose. UsageError with file and line for what cannot be sent."""
    file = index_items(path)
    timed = choice.use_timestamps and _understand(file, 0).time_ns is not None
    wanted = len(file) if choice.num_prompts is None else choice.num_prompts
    chosen = item_order(len(file), choice.seed, shuffle=choice.shuffle and not timed)[:wanted]
    tokenizer = None if choice.tokenizer is None else load_tokenizer(choice.tokenizer)
    rows = np.empty((len(chosen), 4), dtype=np.int64)
    for row, number in zip(rows, chosen.tolist(), strict=True):
        line = _understand(file, number)
        if line.kind != "text" and (line.kind == "messages") != (fields.api is Api.CHAT):
            file.refuse(number, _WRONG_API[line.kind])
        output_len = choice.output_len or line.output_len
        if output_len is None:
            file.refuse(number, f"none of the fields {', '.join(_LENGTHS)}: give --custom-output-len")
        if timed and line.time_ns is None:
            file.refuse(
                number, "no field 'timestamp', which line 1 has: give --no-use-trace-timestamps to send at once"
            )
        input_len = -1
        if line.kind == "ids":
            input_len = len(line.prompt)
        elif tokenizer is not None and fields.api is Api.COMPLETIONS:
            assert isinstance(line.prompt, str)
            input_len = tokenizer.count(line.prompt, special_tokens=True)
        row[:] = (number, input_len, output_len, line.time_ns or 0)
    offsets = None
    if timed:
        rows = rows[np.argsort(rows[:, 3], kind="stable")]
        offsets = schedule_ns(rows[:, 3], choice.time_scale)
    else:
        rows = rows[repeated(len(rows), wanted if choice.oversample else len(rows), choice.seed)]
    samples = Samples(file=file, number=rows[:, 0], input_len=rows[:, 1], output_len=rows[:, 2], distinct=len(chosen))
    return CustomSource(choice=choice, samples=samples, fields=fields, offsets=offsets)


def _understand(file: ItemFile, number: int) -> _Line:
    fields = file.object(number)
    body = fields.get("body")
    if body is None:
        return _line(file, number, fields, fields, {})
    if not isinstance(body, dict):
        file.refuse(number, f"field 'body' must be an object, got {type(body).__name__}")
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            file.refuse(number, f"field {name!r} of the body must be 1: one response is timed per request")
    own = {name: value for name, value in body.items() if name not in _SET_BY_THE_LOAD}
    return _line(file, number, body, fields, own)


def _line(file: ItemFile, number: int, request: dict[str, Any], outer: dict[str, Any], own: Mapping[str, Any]) -> _Line:
    found = [name for name in _PROMPTS if request.get(name) is not None]
    if len(found) != 1:
        file.refuse(number, "must have one of the fields 'prompt' and 'messages'" + (", not both" if found else ""))
    value = request[found[0]]
    kind = _kind(file, number, found[0], value)
    try:
        json.dumps([value, own], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        file.refuse(number, f"field {found[0]!r} has half a surrogate pair, which is no text")
    except ValueError:
        file.refuse(number, "has NaN or Infinity in it, which JSON has not")
    return _Line(value, kind, _output_len(file, number, request, outer), _time_ns(file, number, outer), own)


def _kind(file: ItemFile, number: int, name: str, value: Any) -> str:
    if name == "prompt":
        if isinstance(value, str) and value:
            return "text"
        kind = "ids"
        fits = isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)
    else:
        kind = "messages"
        fits = isinstance(value, list) and all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in value
        )
    if not fits or not value:
        wanted = "a text or a list of token ids" if name == "prompt" else "a list of objects with a role"
        file.refuse(number, f"field {name!r} must be {wanted}, and not be empty")
    return kind


def _output_len(file: ItemFile, number: int, *places: dict[str, Any]) -> int | None:
    for place in places:
        for name in _LENGTHS:
            value = place.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value % 1:
                file.refuse(number, f"field {name!r} must be a whole number of tokens, got {quoted(value)}")
            if not 1 <= value <= MAX_OUTPUT_TOKENS:
                file.refuse(number, f"field {name!r} must be from 1 to {MAX_OUTPUT_TOKENS:,}, got {quoted(value)}")
            return int(value)
    return None


def _time_ns(file: ItemFile, number: int, fields: dict[str, Any]) -> int | None:
    value = fields.get("timestamp")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_MS:
        file.refuse(number, f"field 'timestamp' must be milliseconds, not negative, got {quoted(value)}")
    return value * 1_000_000 if isinstance(value, int) else round(value * 1e6)
