"""The response as the hot path sees it: bytes in, no waiting, and a flag that says when the client cannot keep up.

Events arrive in a callback of the event loop, hundreds per engine step. Awaiting the ASGI `send` for each would take a
task and a queue per stream, so its coroutine is driven by hand: as long as the server takes the bytes it ends at once.
Only when it waits (the server's flow control: the socket's buffer is full) does a task carry it on; `blocked` is set
until then, and what comes meanwhile is the caller's to keep, as one merged event.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final

from starlette.types import Send

STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE: Final = b"data: [DONE]\n\n"
JSON_HEADER: Final = (b"content-type", b"application/json")

Headers = tuple[tuple[bytes, bytes], ...]


class ResponseWriter:
    """One HTTP response. Belongs to the event loop."""

    __slots__ = ("_headers", "_on_drained", "_send", "_task", "blocked", "ended", "started", "status")

    def __init__(self, send: Send, headers: Headers) -> None:
        """`headers` are added to those of whatever is sent."""
        self._send = send
        self._headers = headers
        self._on_drained: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None
        self.blocked = False
        """The client takes nothing at the moment. Nothing may be written until `on_drained` was called."""
        self.started = False
        self.ended = False
        """The last byte was handed over; nothing may be written any more."""
        self.status = 0

    def on_drained(self, callback: Callable[[], None] | None) -> None:
        """Have `callback()` called when `blocked` was cleared."""
        self._on_drained = callback

    def start_stream(self) -> None:
        """Send the head of an event stream."""
        self._start(200, STREAM_HEADERS)

    def write(self, data: bytes) -> None:
        """Send a piece of the stream."""
        message = {"type": "http.response.body", "body": data, "more_body": True}
        sending: Any = self._send(message)
        try:
            waiting = sending.send(None)
        except StopIteration:
            return
        self._carry_on(sending, waiting)

    def finish(self, data: bytes) -> None:
        """Send the last piece of the stream."""
        self.ended = True
        self._drive({"type": "http.response.body", "body": data, "more_body": False})

    def respond(self, status: int, body: bytes, headers: Headers = (JSON_HEADER,)) -> None:
        """Send a whole response."""
        length = (b"content-length", b"%d" % len(body))
        self._start(status, (*headers, length))
        self.ended = True
        if self.blocked:
            # Pipelined behind a response that its client has not read yet.
            self.on_drained(lambda: self.finish(body))
        else:
            self.finish(body)

    def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.status = status
        self._drive({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})

    def _drive(self, message: dict[str, Any]) -> None:
        sending: Any = self._send(message)
        try:
            waiting = sending.send(None)
        except StopIteration:
            return
        self._carry_on(sending, waiting)

    def _carry_on(self, sending: Coroutine[Any, Any, None], waiting: Any) -> None:
        """Let a task finish a `send` that has begun and waits."""
        assert not self.blocked, "written while blocked"
        self.blocked = True
        self._task = asyncio.get_running_loop().create_task(self._finish_send(sending, waiting))

    async def _finish_send(self, sending: Coroutine[Any, Any, None], waiting: Any) -> None:
        await _resume(sending, waiting)
        self.blocked = False
        self._task = None
        if self._on_drained is not None:
            self._on_drained()


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    """Go on with a coroutine that was started by hand and yielded `waiting`."""
    while True:
        failure: BaseException | None = None
        sent = None
        try:
            sent = yield waiting
        except BaseException as error:
            failure = error
        try:
            waiting = coroutine.send(sent) if failure is None else coroutine.throw(failure)
        except StopIteration:
            return
