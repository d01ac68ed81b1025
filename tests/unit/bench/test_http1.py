"""HTTP/1.1 response framing: every way to cut it, every length checked."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.http1 import HttpProtocolError, ResponseParser, request_head

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def run(pieces: list[bytes]) -> tuple[bytes, ResponseParser]:
    parser = ResponseParser()
    body = b"".join(parser.feed(piece) for piece in pieces)
    return body, parser


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(c % (len(stream) + 1) for c in cuts)})
    return [stream[a:b] for a, b in pairwise(edges)]


def chunked(parts: list[bytes], trailer: bytes = b"", extension: bytes = b"") -> bytes:
    body = b"".join(b"%X%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return CHUNKED + body + b"0\r\n" + trailer + b"\r\n"


body_part = st.one_of(
    st.binary(min_size=1, max_size=20), st.sampled_from([b"0\r\n\r\n", b"\r\n", b"\r", b"data: x\n\n"])
)


@given(
    st.lists(body_part, max_size=8),
    st.sampled_from([b"", b"X-Took: 1\r\n", b"A: 1\r\nB: 2\r\n"]),
    st.sampled_from([b"", b";name=value", b" "]),
    st.sampled_from([b"", b"HTTP/1.1 200 next"]),
    st.lists(st.integers(0, 500), max_size=40),
)
def test_chunked_body_cut_anywhere(
    parts: list[bytes], trailer: bytes, extension: bytes, excess: bytes, cuts: list[int]
) -> None:
    body, parser = run(cut(chunked(parts, trailer, extension) + excess, cuts))
    assert body == b"".join(parts)
    assert parser.complete
    assert parser.excess == excess
    assert (parser.status, parser.keep_alive) == (200, True)


@given(st.binary(max_size=60), st.lists(st.integers(0, 200), max_size=20))
def test_body_by_length_cut_anywhere(content: bytes, cuts: list[int]) -> None:
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\nConnection: close\r\n\r\n" % len(content)
    body, parser = run(cut(head + content, cuts))
    assert (body, parser.complete, parser.status, parser.keep_alive) == (content, True, 400, False)


@given(st.binary(max_size=300))
def test_garbage_is_an_error_or_waits_never_anything_else(garbage: bytes) -> None:
    parser = ResponseParser()
    try:
        parser.feed(garbage)
    except HttpProtocolError:
        return
    assert not parser.complete


@given(st.lists(st.one_of(st.binary(max_size=8), st.sampled_from([b"5\r\n", b"0\r\n", b"\r\n", b"ffff"])), max_size=20))
def test_garbage_as_a_chunked_body(pieces: list[bytes]) -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED)
    try:
        for piece in pieces:
            parser.feed(piece)
    except HttpProtocolError:
        return


def test_body_until_the_connection_ends() -> None:
    body, parser = run([b"HTTP/1.0 200 OK\r\n\r\nab", b"cd"])
    assert (body, parser.complete, parser.keep_alive) == (b"abcd", False, False)
    assert parser.eof()
    assert parser.complete


def test_end_of_connection_inside_a_chunk_is_no_end() -> None:
    _, parser = run([CHUNKED + b"5\r\nab"])
    assert not parser.eof()


def test_interim_responses_are_skipped() -> None:
    body, parser = run(
        [b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early", b" Hints\r\nLink: x\r\n\r\n" + chunked([b"a"])]
    )
    assert (body, parser.complete) == (b"a", True)


def test_no_content() -> None:
    assert run([b"HTTP/1.1 204 No Content\r\n\r\n"])[1].complete


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/2 200\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 20\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nName : x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        CHUNKED + b"xyz\r\n",
        CHUNKED + b"-5\r\n",
        CHUNKED + b"0x5\r\n",
        CHUNKED + b"1_0\r\n",
        CHUNKED + b"2\r\nabXX",
        CHUNKED + b"1" * 9000,
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20000,
    ],
)
def test_what_is_not_http_is_refused(wire: bytes) -> None:
    with pytest.raises(HttpProtocolError):
        run([wire])


def test_request_head() -> None:
    head = request_head("POST", "h:1", "/v1/completions", {"A": "b"})
    assert head == b"POST /v1/completions HTTP/1.1\r\nHost: h:1\r\nA: b\r\n"
