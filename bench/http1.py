"""HTTP/1.1 framing of one response, without I/O: head, then a body by chunks, by length, or until the connection ends
(RFC 9112). Sockets and timestamps live in `bench/connection.py`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

__all__ = ["HttpProtocolError", "ResponseParser", "request_head"]

MAX_HEAD_BYTES: Final = 64 << 10
MAX_LINE_BYTES: Final = 8 << 10
"""Of a chunk-size line with its extensions, and of one trailer line."""
_HEX: Final = frozenset(b"0123456789abcdefABCDEF")


class HttpProtocolError(ValueError):
    """The peer does not speak HTTP/1.1."""


def request_head(method: str, host: str, path: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request, without Content-Length and the blank line that ends it."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n").encode("latin-1")


class ResponseParser:
    """Parses one response to a request that is not HEAD. `feed` takes the bytes of a read and returns the body bytes
    in them; `complete` turns True with the last byte, `excess` then holds what came after it.

    Interim responses (1xx) are skipped. The peer is untrusted: every length is bounded and strictly parsed.
    """

    __slots__ = ("_buffer", "_left", "_state", "chunked", "complete", "excess", "headers", "keep_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        """0 until the head has been read."""
        self.headers: Mapping[str, str] = {}
        """Lower-case names; repeated fields joined by a comma."""
        self.keep_alive = False
        self.chunked = False
        self.complete = False
        self.excess = b""
        self._buffer = b""
        self._left = 0
        self._state = "head"

    def feed(self, data: bytes) -> bytes:
        if self.chunked and not (self._left or self._buffer or self.complete):
            # The usual read is one chunk, an event.
            line_end = data.find(b"\r\n", 0, 8)
            size = _SIZES.get(data[:line_end])
            if size and line_end + size + 4 == len(data) and data.endswith(b"\r\n"):
                return data[line_end + 2 : -2]
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        if self._state == "head":
            rest = self._head(data)
            if rest is None:
                return b""
            data = rest
        if self._state == "chunked":
            return self._chunks(data)
        if self._state == "until-eof":
            return data
        return self._by_length(data)

    def eof(self) -> bool:
        """The connection ended. True if that completes the response (a body without length), False if it cuts it."""
        if self._state == "until-eof":
            self.complete = True
        return self.complete

    def _head(self, data: bytes) -> bytes | None:
        while True:
            end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
            if end < 0:
                if len(data) >= MAX_HEAD_BYTES:
                    raise HttpProtocolError(f"the response head is larger than {MAX_HEAD_BYTES} bytes")
                if data[:7] != b"HTTP/1."[: len(data)]:
                    raise HttpProtocolError(f"the answer is not HTTP/1.1: it begins with {data[:40]!r}")
                self._buffer = data
                return None
            status, minor, headers = _parse_head(data[:end])
            data = data[end + 4 :]
            if 100 <= status < 200:
                if status == 101:
                    raise HttpProtocolError("the server switched protocols unasked")
                continue
            self._frame(status, minor, headers)
            return data

    def _frame(self, status: int, minor: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers
        options = {option.strip() for option in headers.get("connection", "").lower().split(",")}
        self.keep_alive = "close" not in options and (minor >= 1 or "keep-alive" in options)
        coding = headers.get("transfer-encoding", "").lower().strip()
        if status in (204, 304):
            self._state, self._left = "length", 0
        elif coding:
            if coding != "chunked":
                raise HttpProtocolError(f"Transfer-Encoding {coding!r} is not supported")
            self._state, self.chunked = "chunked", True
        elif "content-length" in headers:
            lengths = {value.strip() for value in headers["content-length"].split(",")}
            text = lengths.pop()
            if lengths or not (text.isascii() and text.isdigit()) or len(text) > 18:
                raise HttpProtocolError(f"Content-Length {headers['content-length']!r} is no length")
            self._state, self._left = "length", int(text)
        else:
            self._state, self.keep_alive = "until-eof", False

    def _by_length(self, data: bytes) -> bytes:
        if len(data) < self._left:
            self._left -= len(data)
            return data
        body, self.excess = data[: self._left], self.excess + data[self._left :]
        self._left, self.complete = 0, True
        return body

    def _chunks(self, data: bytes) -> bytes:
        """`_left` is what is missing of the current chunk: its data and the CRLF after them; 0 between chunks."""
        if self.complete:
            self.excess += data
            return b""
        pieces: list[bytes] = []
        position = self._rest_of_chunk(data, pieces) if self._left else 0
        if not self._left and not self._buffer:
            position = self._whole_chunks(data, position, pieces)
            self._next_chunk(data, position, pieces)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _rest_of_chunk(self, data: bytes, pieces: list[bytes]) -> int:
        """Take the current chunk's bytes from the front of `data`; return where it ends."""
        size = len(data)
        if self._left <= size:
            end = self._left
            if data[end - 2 : end] != b"\r\n":
                raise HttpProtocolError("a chunk is longer than its size says")
            pieces.append(data[: end - 2])
            self._left = 0
            return end
        if size <= self._left - 2:
            pieces.append(data)
            self._left -= size
        else:  # cut between the data and the CRLF, or inside the CRLF
            pieces.append(data[: self._left - 2])
            self._left, self._buffer = 2, data[self._left - 2 :]
        return size

    def _whole_chunks(self, data: bytes, position: int, pieces: list[bytes]) -> int:
        """Take the chunks that lie in `data` as a whole; return where the first one begins that does not.

        Split at CRLF, sizes and data alternate. That is the framing exactly if every size says the length that its
        data have; where data contain a CRLF they disagree, and the chunks before the disagreement stand.
        """
        parts = data.split(b"\r\n") if position == 0 else data[position:].split(b"\r\n")
        lines, contents = parts[:-1:2], parts[1:-1:2]
        sizes = [_SIZES.get(line) or _parse_size(line) for line in lines[: len(contents)]]
        lengths = list(map(len, contents))
        count = len(sizes)
        if sizes != lengths or not all(sizes):
            count = next(
                i for i, (size, length) in enumerate(zip(sizes, lengths, strict=True)) if size != length or not size
            )
        pieces += contents[:count]
        return position + sum(map(len, lines[:count])) + sum(lengths[:count]) + 4 * count

    def _next_chunk(self, data: bytes, position: int, pieces: list[bytes]) -> None:
        """What is left from `position`: a chunk that is cut, one with a CRLF in its data, or the last one."""
        while position < len(data):
            line_end = data.find(b"\r\n", position, position + MAX_LINE_BYTES)
            if line_end < 0:
                if len(data) - position >= MAX_LINE_BYTES:
                    raise HttpProtocolError("a chunk-size line is too long")
                self._buffer = data[position:]
                return
            length = _chunk_size(data[position:line_end])
            if length == 0:
                end = self._trailer_end(data, position, line_end)
                if end < 0:
                    self._buffer = data[position:]
                else:
                    self.complete, self.excess = True, data[end:]
                return
            self._left = length + 2
            rest = data[line_end + 2 :]
            position = line_end + 2 + self._rest_of_chunk(rest, pieces)
            if self._left or self._buffer:
                return

    @staticmethod
    def _trailer_end(data: bytes, start: int, line_end: int) -> int:
        """Where the last chunk's trailer section ends; −1 while it has not. Trailer fields are skipped."""
        if data[line_end + 2 : line_end + 4] == b"\r\n":
            return line_end + 4
        end = data.find(b"\r\n\r\n", line_end)
        if end < 0 and len(data) - start > MAX_LINE_BYTES:
            raise HttpProtocolError("the trailer section is too long")
        return end + 4 if end >= 0 else -1


_SIZES: dict[bytes, int] = {}
"""Chunk-size lines seen lately: a server sends few different ones, and checking digits costs more than a look-up."""


def _chunk_size(line: bytes) -> int:
    size = _parse_size(line)
    if size < 0:
        raise HttpProtocolError(f"{bytes(line[:40])!r} is no chunk size")
    return size


def _parse_size(line: bytes) -> int:
    """The size in a chunk-size line, extensions ignored; −1 if it is none."""
    digits = line.partition(b";")[0].rstrip(b" \t")
    if not digits or len(digits) > 12 or not _HEX.issuperset(digits):
        return -1
    size = int(digits, 16)
    if len(line) <= 4 and len(_SIZES) < 4096:
        _SIZES[line] = size
    return size


@lru_cache(maxsize=64)
def _parse_head(head: bytes) -> tuple[int, int, Mapping[str, str]]:
    """Status, minor version, headers. The heads of a server's answers are the same but for a date, so the last ones are
    remembered."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    code = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit()) or len(code) < 3:
        raise HttpProtocolError(f"the answer is not HTTP/1.1: it begins with {first[:40]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise HttpProtocolError(f"{line[:60]!r} is no header field")
        key, value = name.lower(), value.strip()
        headers[key] = f"{headers[key]}, {value}" if key in headers else value
    return int(code), int(version[-1]), headers
