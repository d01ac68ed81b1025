"""Decoder and reader together against a reference that sees the whole stream at once: random events, written in every
way that the standard allows, cut anywhere, with garbage between them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from atom.bench.load import Api
from atom.bench.records import Outcome, RequestRecord
from atom.bench.stream import StreamReader

FINISH = st.sampled_from([None, None, None, "stop", "length", "tool_calls", "abort"])
texts = st.one_of(st.text(max_size=4), st.sampled_from([" word", '"', "\\\\", "é漢🙂", "data: x", "\r\n\r\n"]))


def completion(text: Any, finish: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def delta(fields: dict[str, Any], finish: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


call = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.none(), "arguments": texts})})
fields = st.one_of(
    texts.map(lambda text: {"content": text}),
    texts.map(lambda text: {"content": None, "reasoning_content": text}),
    st.lists(call, max_size=2).map(lambda calls: {"tool_calls": calls}),
    st.sampled_from([{"content": None}, {"role": "assistant", "content": ""}, {"tool_calls": None}]),
)
payload = {
    Api.COMPLETIONS: st.builds(completion, st.one_of(st.none(), texts), FINISH),
    Api.CHAT: st.builds(delta, fields, FINISH),
}
special = st.sampled_from(
    [
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        {"error": {"message": "boom"}},
        {"object": "error", "message": "boom", "code": 500},
        {"choices": None},
        [],
        "garbage",
    ]
)
newline = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def event(draw: st.DrawFn, api: Api) -> bytes:
    """One event in one of the ways to write it, a comment, or garbage."""
    end = draw(newline)
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from([b": ping", b":", b"id: 7", b"retry: 10", b"unknown: x"])) + end + end
    if kind == 1:
        return b"data: " + draw(st.binary(max_size=6)).replace(b"\n", b"").replace(b"\r", b"") + end + end
    if kind == 4:
        return draw(st.sampled_from([b": half", b"data", b"data: ", b"\r", b"\n"]))  # no event: what follows goes on
    if kind == 2:
        return b"event: error" + end + draw(st.sampled_from([b"data: boom", b": boom"])) + end + end
    value = draw(special if kind == 3 else payload[api])
    text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, None, 1])))
    colon = draw(st.sampled_from([b"data: ", b"data:"]))
    lines = [colon + line for line in text.encode().split(b"\n")]
    if draw(st.integers(0, 5)) == 0:
        lines.insert(draw(st.integers(0, len(lines))), b": heartbeat")
    return end.join(lines) + end + end


def reference(stream: bytes, edges: list[int], api: Api) -> tuple[list[int], str, str | None]:
    """Times of the chunks with text, the text, and what class of failure the stream itself is."""
    times, said, failure, done = [], "", None, False
    for position, kind, data in reference_events(stream):
        number = next(i for i, edge in enumerate(edges) if position < edge)
        if kind == b"error":
            failure = failure or "server_error"
            continue
        if done:
            continue
        if data == b"[DONE]":
            done = True
            continue
        try:
            chunk = json.loads(data.decode())
            assert isinstance(chunk, dict)
        except (ValueError, AssertionError):
            failure = failure or "bad_event"
            continue
        if chunk.get("error") or chunk.get("object") == "error":
            failure = failure or "server_error"
            continue
        for choice in chunk.get("choices") or []:
            text = choice.get("text") if api is Api.COMPLETIONS else delta_text(choice.get("delta") or {})
            if choice.get("finish_reason") == "abort":
                failure = failure or "aborted"
            if text:
                times.append(number)
                said += text
    return times, said, failure


def delta_text(delta: dict[str, Any]) -> str:
    calls = [call["function"] for call in delta.get("tool_calls") or []]
    parts = [delta.get("content"), delta.get("reasoning_content"), *(call["arguments"] for call in calls)]
    return "".join(part or "" for part in parts)


def reference_events(stream: bytes) -> list[tuple[int, bytes, bytes]]:
    """(offset of the byte that ends it, type, data) of each event, one byte after the other."""
    events: list[tuple[int, bytes, bytes]] = []
    lines: list[bytes] = []
    line, previous = b"", 0
    for offset, byte in enumerate(stream):
        if byte == 10 and previous == 13:
            previous = byte
            continue
        previous = byte
        if byte not in (10, 13):
            line += bytes([byte])
            continue
        if line:
            lines.append(line)
        else:
            named = [(name, value.removeprefix(b" ")) for name, _, value in (one.partition(b":") for one in lines)]
            data = [value for name, value in named if name == b"data"]
            kind = next((value for name, value in reversed(named) if name == b"event"), b"")
            comments = [value for name, value in named if name == b""]
            if data or (kind == b"error" and comments):
                events.append((offset, kind, b"\n".join(data or comments)))
            lines = []
        line = b""
    return events


@st.composite
def streams(draw: st.DrawFn) -> tuple[Api, bytes, list[int]]:
    api = draw(st.sampled_from(list(Api)))
    events = draw(st.lists(event(api), max_size=14))
    # What the shortcut for chunks that differ in their text alone lives on.
    if draw(st.booleans()):
        events = [one for one in events for _ in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        like = completion(" a", None) if api is Api.COMPLETIONS else delta({"content": " a"}, None)
        plain = b"data: " + json.dumps(like).encode()
        events = [one for other in events for one in (plain + b"\n\n", other)]
    if draw(st.booleans()):
        events.append(b"data: [DONE]\n\n")
    stream = b"".join(events)
    if draw(st.booleans()):
        cuts = draw(st.lists(st.integers(0, len(stream)), max_size=40))
        return api, stream, sorted({0, len(stream), *cuts})
    edges = [0]
    for one in events:  # a read per event, as most are
        edges.append(edges[-1] + len(one))
    return api, stream, edges


@settings(max_examples=400)
@given(streams())
def test_random_streams_agree_with_the_reference(case: tuple[Api, bytes, list[int]]) -> None:
    api, stream, edges = case
    reader = StreamReader(api, keep_text=True)
    reader.begin(200, {"content-type": "text/event-stream"})
    for number, (start, end) in enumerate(pairwise(edges), 1):
        if start < end:
            reader.feed(stream[start:end], number)
    reader.finish()
    reader.fill(record := RequestRecord(index=0))
    times, said, failure = reference(stream, edges, api)
    assert record.text == said
    assert set(times) <= set(record.chunk_ns)
    assert list(record.chunk_ns) == sorted(record.chunk_ns)
    if failure is not None:
        assert (record.outcome, record.error_class) == (Outcome.FAILED, failure)
    else:
        assert record.error_class in (None, "truncated", "empty")


@given(st.lists(st.binary(max_size=30), max_size=20), st.sampled_from(list(Api)))
def test_any_bytes_end_in_a_record(pieces: list[bytes], api: Api) -> None:
    reader = StreamReader(api)
    reader.begin(200, {"content-type": "text/event-stream"})
    for number, piece in enumerate(pieces, 1):
        reader.feed(piece, number)
    reader.finish(cut=True)
    reader.fill(record := RequestRecord(index=0))
    assert record.outcome == Outcome.FAILED
