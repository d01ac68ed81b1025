"""Server-sent events, decoded incrementally as the WHATWG standard says (section 9.2.6, "Interpreting an event
stream"). Bytes in, event payloads out; what the payloads mean lives in `bench/stream.py`."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["EventTooLargeError", "SseDecoder", "TypedEvent"]

MAX_EVENT_BYTES: Final = 8 << 20
"""An event that grows beyond this is an error: the server is untrusted input."""

_BOM: Final = b"\xef\xbb\xbf"


class EventTooLargeError(ValueError):
    """One event is larger than `MAX_EVENT_BYTES`."""


class TypedEvent(NamedTuple):
    """An event with a type of its own (`event: error`)."""

    type: bytes
    data: bytes


class SseDecoder:
    """Decodes one stream: `feed` bytes, get the payloads of the events that end in them: plain `bytes` for events of
    the default type `message`, `TypedEvent` for others.

    Line ends may be LF, CRLF or CR, mixed and split anywhere; payloads stay bytes, so that a character split between
    two reads is whole again when the event is. `rest` is what has come of an event that is not complete.
    """

    __slots__ = ("_skip_lf", "_start", "comments", "rest")

    def __init__(self) -> None:
        self.rest = b""
        self.comments = 0
        """Comment lines (heartbeats) seen."""
        self._skip_lf = False
        self._start = True

    @property
    def between_events(self) -> bool:
        """What comes next begins an event."""
        return not (self.rest or self._skip_lf or self._start)

    def feed(self, data: bytes) -> list[bytes | TypedEvent]:
        return self.events(self.take(data))

    def take(self, data: bytes) -> bytes:
        """Add `data`; return all whole events, blank lines included, with LF for line ends. The first half of `feed`,
        for a reader that knows a faster second half."""
        if self._skip_lf and data:
            self._skip_lf = False
            if data.startswith(b"\n"):
                data = data[1:]
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self.rest:
            data = self.rest + data
        if self._start:
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self.rest = data
                return b""
            self._start = False
            data = data.removeprefix(_BOM)
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            self._keep(data.lstrip(b"\n"))
            return b""
        if end == len(data):
            self.rest = b""
            return data
        self._keep(data[end:])
        return data[:end]

    def events(self, whole: bytes) -> list[bytes | TypedEvent]:
        """The events of what `take` returned."""
        events: list[bytes | TypedEvent] = []
        for block in whole.split(b"\n\n"):
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(block[6:])
            elif block:
                event = self._block(block)
                if event is not None:
                    events.append(event)
        return events

    def _keep(self, rest: bytes) -> None:
        if len(rest) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of the stream is larger than {MAX_EVENT_BYTES >> 20} MiB")
        self.rest = rest

    def _block(self, block: bytes) -> bytes | TypedEvent | None:
        """The lines between two blank lines; None where they hold no data field.

        One event more than the standard knows: `event: error` that says what went wrong in a comment (Dynamo).
        """
        data: list[bytes] = []
        comments: list[bytes] = []
        kind = b""
        for line in block.split(b"\n"):
            name, colon, value = line.partition(b":")
            if not name:
                if colon:
                    self.comments += 1
                    comments.append(value.removeprefix(b" "))
                continue
            value = value.removeprefix(b" ")
            if name == b"data":
                data.append(value)
            elif name == b"event":
                kind = value
        if not data:
            return TypedEvent(kind, b"\n".join(comments)) if kind == b"error" and comments else None
        payload = b"\n".join(data)
        return payload if kind in (b"", b"message") else TypedEvent(kind, payload)
