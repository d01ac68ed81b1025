"""What the HTTP protocol refuses before there is a request: with uvicorn and real sockets, and an application that
answers at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from atom.engine.server import http_protocol
from atom.engine.server.http_protocol import BoundedHttpProtocol


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    config = uvicorn.Config(
        PlainTextResponse("hello"), port=0, http=BoundedHttpProtocol, lifespan="off", log_config=None, ws="none"
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    yield server.servers[0].sockets[0].getsockname()[1]
    await server.shutdown()


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("half", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n"])
async def test_a_client_that_sends_no_whole_head_is_closed(half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
    async with serving() as port:
        reader, writer = await connect(port)
        writer.write(half)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"no whole request" in answer
        writer.close()


async def test_a_request_in_time_is_not_cut_off_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.5)
    async with serving() as port:
        reader, writer = await connect(port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await reader.readuntil(b"hello")
            await asyncio.sleep(0.6)  # an idle kept connection is the keep-alive timeout's business
        writer.close()


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_CONNECTIONS", 2)
    async with serving() as port:
        first, second = await connect(port), await connect(port)
        reader, writer = await connect(port)
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        for held in (first, second):
            held[1].write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await held[0].read()).endswith(b"hello")
            held[1].close()
        writer.close()
        reader, writer = await connect(port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\nx"])
async def test_a_head_that_never_ends_is_refused(start: bytes) -> None:
    async with serving() as port:
        reader, writer = await connect(port)
        writer.write(start)
        answer = asyncio.create_task(reader.read())
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"a" * (16 << 10))
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert (await answer).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_a_body_that_follows_its_head_at_once_is_no_long_head() -> None:
    async with serving() as port:
        reader, writer = await connect(port)
        body = b"a" * (1 << 20)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert await reader.readuntil(b"hello")
        writer.close()
