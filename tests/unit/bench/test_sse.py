"""The SSE decoder against a simple reference that reads the whole stream at once, as the standard's text says."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.sse import MAX_EVENT_BYTES, EventTooLargeError, SseDecoder, TypedEvent

Event = bytes | TypedEvent


def reference(stream: bytes) -> list[Event]:
    """The standard's algorithm, line by line over the complete stream; an event without its blank line is dropped. One
    event more: `event: error` without data, whose comment says what went wrong."""
    lines = re.split(rb"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf"))[:-1]
    events: list[Event] = []
    data: list[bytes] = []
    comments: list[bytes] = []
    kind = b""
    for line in lines:
        if line == b"":
            if data:
                payload = b"\n".join(data)
                events.append(payload if kind in (b"", b"message") else TypedEvent(kind, payload))
            elif kind == b"error" and comments:
                events.append(TypedEvent(kind, b"\n".join(comments)))
            data, comments, kind = [], [], b""
        elif line.startswith(b":"):
            comments.append(line[2:] if line.startswith(b": ") else line[1:])
        else:
            name, _, value = line.partition(b":")
            if value.startswith(b" "):
                value = value[1:]
            if name == b"data":
                data.append(value)
            elif name == b"event":
                kind = value
    return events


def decode(pieces: list[bytes]) -> list[Event]:
    decoder = SseDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(c % (len(stream) + 1) for c in cuts)})
    return [stream[a:b] for a, b in pairwise(edges)]


line_end = st.sampled_from([b"\n", b"\r\n", b"\r"])
fragment = st.one_of(
    st.sampled_from([b"data: ", b"data:", b"data", b"event: error", b"event:", b"id: 1", b": ping", b":", b" "]),
    st.text(max_size=6).map(str.encode),
    st.binary(max_size=4),
    st.sampled_from([b'{"text":"\xc3\xa9"}', "é漢🙂".encode(), b"[DONE]", b"\xef\xbb\xbf", b"\x00"]),
    line_end,
    st.tuples(line_end, line_end).map(b"".join),
)


@given(st.lists(fragment, max_size=40).map(b"".join), st.lists(st.integers(0, 400), max_size=30))
def test_random_splits_and_garbage_agree_with_the_reference(stream: bytes, cuts: list[int]) -> None:
    assert decode(cut(stream, cuts)) == reference(stream)


@given(st.lists(fragment, max_size=12).map(b"".join))
def test_byte_by_byte_agrees_with_the_reference(stream: bytes) -> None:
    assert decode([bytes([byte]) for byte in stream]) == reference(stream)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_event_is_there_with_its_last_byte(end: bytes) -> None:
    """An event must not wait for the byte after it: its time would be the next event's."""
    decoder = SseDecoder()
    assert decoder.feed(b"data: a" + end) == []
    assert decoder.feed(end) == [b"a"]
    assert decoder.feed(b"data: b" + end + end) == [b"b"]


def test_several_events_in_one_read() -> None:
    assert decode([b"data: a\n\ndata: b\n\n: ping\n\ndata: c\n\ndata: d"]) == [b"a", b"b", b"c"]


def test_multi_line_data_is_joined_by_newlines() -> None:
    assert decode([b"data: {\ndata:  1\ndata:}\n\n"]) == [b"{\n 1\n}"]


def test_error_event_keeps_its_type() -> None:
    assert decode([b'event: error\ndata: {"message":"x"}\n\n']) == [TypedEvent(b"error", b'{"message":"x"}')]


def test_error_event_that_says_so_in_a_comment_is_surfaced() -> None:
    assert decode([b"event: error\n: out of memory\n\n"]) == [TypedEvent(b"error", b"out of memory")]


def test_comments_are_counted_and_no_events() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b": ping\n\n: ping\n\n") == []
    assert decoder.comments == 2


def test_rest_is_what_has_not_ended() -> None:
    decoder = SseDecoder()
    decoder.feed(b"data: a\n\ndata: half")
    assert decoder.rest == b"data: half"


def test_endless_event_is_an_error_and_not_endless_memory() -> None:
    decoder = SseDecoder()
    for _ in range(MAX_EVENT_BYTES // (1 << 20) - 1):
        decoder.feed(b"x" * (1 << 20))
    with pytest.raises(EventTooLargeError):
        decoder.feed(b"x" * (2 << 20))
