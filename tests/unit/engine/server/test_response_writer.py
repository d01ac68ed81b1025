"""`ResponseWriter` against an ASGI server that blocks when it is told to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atom.engine.server.response_writer import ResponseWriter


class StandInServer:
    """`send` waits while `full`, as a server with flow control does; `sent` is what it took."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.ended = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def full(self) -> bool:
        return not self._writable.is_set()

    @full.setter
    def full(self, value: bool) -> None:
        self._writable.clear() if value else self._writable.set()

    async def send(self, message: Any) -> None:
        while self.full:
            await self._writable.wait()
            await asyncio.sleep(0)  # more than one suspension within one send
        self.sent.append(message)
        if message.get("more_body") is False:
            self.ended.set()

    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


async def test_nothing_waits_while_the_server_takes_it() -> None:
    server = StandInServer()
    writer = ResponseWriter(server.send, ((b"x", b"y"),))
    writer.start_stream()
    writer.write(b"1")
    writer.write(b"2")
    writer.finish(b"3")
    start = server.sent[0]
    assert start["status"] == writer.status == 200
    assert (b"x", b"y") in start["headers"]
    assert server.bodies() == [b"1", b"2", b"3"]
    assert [message.get("more_body") for message in server.sent[1:]] == [True, True, False]
    assert writer.started
    assert writer.ended
    assert not writer.blocked


async def test_a_full_server_blocks_until_it_has_taken_what_was_written() -> None:
    server = StandInServer()
    drained = asyncio.Event()
    writer = ResponseWriter(server.send, ())
    writer.on_drained(drained.set)
    writer.start_stream()
    server.full = True
    writer.write(b"1")
    assert writer.blocked
    assert server.bodies() == []
    with pytest.raises(AssertionError):
        writer.write(b"2")
    await asyncio.sleep(0.01)
    assert not drained.is_set()
    server.full = False
    await asyncio.wait_for(drained.wait(), 5)
    states = {"blocked": writer.blocked}
    assert states == {"blocked": False}
    writer.finish(b"3")
    assert server.bodies() == [b"1", b"3"]


async def test_a_whole_response_waits_for_the_server() -> None:
    server = StandInServer()
    server.full = True
    writer = ResponseWriter(server.send, ())
    writer.respond(404, b"body")
    assert writer.blocked
    assert writer.ended
    server.full = False
    async with asyncio.timeout(5):
        await server.ended.wait()
    assert server.sent[0]["status"] == 404
    assert (b"content-length", b"4") in server.sent[0]["headers"]
    assert server.bodies() == [b"body"]


async def test_an_error_of_the_server_reaches_the_caller() -> None:
    async def send(message: Any) -> None:
        raise RuntimeError("no")

    writer = ResponseWriter(send, ())
    with pytest.raises(RuntimeError, match="no"):
        writer.start_stream()


async def test_a_cancelled_write_is_cancelled_in_the_server() -> None:
    ended = []

    async def send(message: Any) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    writer = ResponseWriter(send, ())
    writer.start_stream()
    assert writer.blocked
    task = writer._task
    assert task is not None
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ended == [True]
