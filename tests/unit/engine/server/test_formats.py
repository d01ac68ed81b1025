"""Chunks put together from bytes are the JSON they should be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.loading.byte_tokenizer import ByteTokenizer
from atom.engine.messages import TokenLogprobs
from atom.engine.server.formats import AnswerFormat, ChatFormat, ChunkEncoder, CompletionFormat, usage, usage_chunk
from atom.engine.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from atom.engine.server.parameters import AnswerOptions
from atom.engine.streaming import TokenEvent

TOKENIZER = ByteTokenizer()
ODD = 'a "model" \\ with %d %b {} 🙂'


def options(**changes: Any) -> AnswerOptions:
    plain: dict[str, Any] = {
        "stream": True,
        "include_usage": False,
        "continuous_usage": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "token_ids": False,
    }
    return AnswerOptions(**{**plain, **changes})


def answer(kind: type[AnswerFormat], **changes: Any) -> AnswerFormat:
    return kind("id-1", 7, ODD, options(**changes), TOKENIZER)


def event(text: str, token_ids: list[int], **more: Any) -> TokenEvent:
    return TokenEvent(text, token_ids, more.pop("num_output_tokens", len(token_ids)), 0, **more)


def parse(chunk: bytes) -> Any:
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert chunk.count(b"\n") == 2, "one line of data"
    return json.loads(chunk[6:])


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
@given(text=st.text(), include_usage=st.booleans(), index=st.integers(0, 300))
def test_a_plain_chunk_is_what_encode_makes_of_it(
    kind: type[AnswerFormat], text: str, include_usage: bool, index: int
) -> None:
    encoder = ChunkEncoder(answer(kind, include_usage=include_usage), index, 5, [1] * 5)
    chunk = encoder.encode(event(text, [1]))
    body = parse(chunk)
    head = {"id": "id-1", "object": kind.chunk_object, "created": 7, "model": ODD}
    shown = {"text": text} if kind is CompletionFormat else {"delta": {"content": text}}
    choice = {"index": index, **shown, "logprobs": None, "finish_reason": None}
    assert body == {**head, "choices": [choice], **({"usage": None} if include_usage else {})}
    assert encoder.after is not None
    assert encoder.before + json.dumps(text, ensure_ascii=False).encode() + encoder.after
    assert parse(encoder.before + json.dumps(text).encode() + encoder.after) == body


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
def test_the_last_chunk_says_why(kind: type[AnswerFormat]) -> None:
    encoder = ChunkEncoder(answer(kind), 0, 5, [])
    (choice,) = parse(encoder.encode(event("x", [1], finish_reason="stop", stop_reason='"')))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"')


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
def test_usage_on_every_chunk(kind: type[AnswerFormat]) -> None:
    encoder = ChunkEncoder(answer(kind, continuous_usage=True), 0, 5, [])
    assert encoder.after is None
    shown = parse(encoder.encode(event("x", [1, 2], num_output_tokens=9)))["usage"]
    assert shown == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}


def test_token_ids_on_every_chunk_and_the_prompt_s_once() -> None:
    encoder = ChunkEncoder(answer(CompletionFormat, token_ids=True), 0, 2, [8, 9])
    assert encoder.after is None
    (first,) = parse(encoder.encode(event("x", [1, 2])))["choices"]
    (second,) = parse(encoder.encode(event("", [])))["choices"]
    assert (first["token_ids"], first["prompt_token_ids"]) == ([1, 2], [8, 9])
    assert (second["token_ids"], "prompt_token_ids" in second) == ([], False)


def test_an_echo_comes_before_the_first_token() -> None:
    entry = TokenLogprobs([98, 98], [-1.0, -1.0], 1)
    encoder = ChunkEncoder(answer(CompletionFormat, logprobs=1, echo=True), 0, 2, [97, 98])
    echo = TokenEvent("ab", [97, 98], 0, 0, prompt_logprobs=[None, entry])
    (choice,) = parse(encoder.encode(event("c", [99], logprobs=[TokenLogprobs([99], [-2.0], 3)]), echo))["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"b": -1.0}, {"c": -2.0}],
        "text_offset": [0, 1, 2],
    }


def test_the_opening_and_the_usage_chunk() -> None:
    format = answer(ChatFormat, include_usage=True)
    opening = parse(format.opening_chunk(3))
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert opening["usage"] is None
    last = parse(usage_chunk(format, usage(3, 4, 2)))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_logprobs_that_json_cannot_hold() -> None:
    entry = TokenLogprobs([97, 98], [float("-inf"), float("nan")], 5)
    assert CompletionLogprobs(TOKENIZER, 1).format([97], [entry])["token_logprobs"] == [-9999.0]
    shown = chat_logprobs(TOKENIZER, [entry], 1)["content"][0]
    assert (shown["logprob"], shown["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    (row,) = prompt_logprobs(TOKENIZER, [entry], 1)
    assert row == {
        "97": {"logprob": -9999.0, "rank": 5, "decoded_token": "a"},
        "98": {"logprob": -9999.0, "rank": 1, "decoded_token": "b"},
    }
