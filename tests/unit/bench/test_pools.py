"""Sockets and pools below the runner: partial sends, several servers, names, and connections that went stale."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from atom.bench import plain_socket
from atom.bench.exchange import Exchange
from atom.bench.load import Api, Endpoint
from atom.bench.pools import ServerPools, open_pools
from atom.bench.records import RequestRecord
from atom.bench.stream import StreamReader
from atom.bench.work_queue import MAX_LATER, WorkQueue


def open_on(*urls: str, **options: Any) -> ServerPools:
    endpoint = Endpoint(base_url=urls[0], more_urls=urls[1:], model="m", **options)
    return open_pools(endpoint, WorkQueue(asyncio.get_running_loop(), pytest.fail))


async def ask(pools: ServerPools, body: bytes = b"{}", timeout: float = 20) -> tuple[Exchange, RequestRecord]:
    exchange = Exchange(StreamReader(Api.COMPLETIONS, keep_text=True), asyncio.get_running_loop())
    await pools.perform(exchange, body, timeout)
    exchange.reader.fill(record := RequestRecord(index=0))
    return exchange, record


async def test_requests_go_to_each_server_in_turn(serve: Any, wire: Any) -> None:
    servers = [serve(lambda number, body: wire.good_answer()) for _ in range(3)]
    pools = open_on(servers[0].url, servers[1].url + "/below", servers[2].url)
    asked = [(await ask(pools)) for _ in range(7)]
    pools.close()
    assert [exchange.server for exchange, _ in asked] == [0, 1, 2, 0, 1, 2, 0]
    assert [record.outcome for _, record in asked] == ["completed"] * 7
    assert [len(server.requests) for server in servers] == [3, 2, 2]
    assert servers[1].heads[0].startswith(b"POST /below/v1/completions HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{servers[2].port}".encode() in servers[2].heads[0]
    assert (pools.sent, pools.opened) == (7, 3)


async def test_arrival_times_say_where_they_come_from(serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: [*wire.good_answer(), 0.01])
    pools = open_on(server.url)
    for _ in range(5):
        exchange, record = await ask(pools)
        assert exchange.sent_ns is not None
        assert exchange.sent_ns <= (record.first_ns or 0) <= (record.last_ns or 0) <= (exchange.end_ns or 0)
    pools.close()
    assert sum(pools.stamps.values()) >= 5


async def test_body_larger_than_the_socket_takes(serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    pools = open_on(server.url)
    body = bytes(range(256)) * 60_000
    for _ in range(2):
        _, record = await ask(pools, body)
        assert record.outcome == "completed"
    pools.close()
    assert server.requests == [body, body]
    assert server.connections == 1


async def test_answer_before_the_body_was_sent_ends_the_connection(wire: Any) -> None:
    """A server that refuses a large body without reading it: its answer counts, and nothing else goes over the rest."""
    listener = socket.create_server(("127.0.0.1", 0))
    answer = b"HTTP/1.1 413 Too Large\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    held = []

    async def refuse() -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        connection, _ = await loop.sock_accept(listener)
        held.append(connection)
        await loop.sock_recv(connection, 100)
        await loop.sock_sendall(connection, answer)

    refusing = asyncio.create_task(refuse())
    pools = open_on(f"http://127.0.0.1:{listener.getsockname()[1]}")
    _, record = await ask(pools, bytes(30_000_000))
    await refusing
    assert record.error_class == "http_413"
    assert all(server.pool.busy == 0 for server in pools._servers)
    pools.close()
    for sock in (listener, *held):
        sock.close()


async def test_name_with_several_addresses_is_tried_through(
    serve: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda number, body: wire.good_answer())
    asked = 0

    async def look_up(host: str, port: int, **_: Any) -> Any:
        nonlocal asked
        asked += 1
        return [(socket.AF_INET, 0, 0, "", ("127.0.0.1", port)) for port in (1, server.port)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    pools = open_on("http://model.example:80")
    answers = await asyncio.gather(*(ask(pools) for _ in range(4)))
    assert [record.outcome for _, record in answers] == ["completed"] * 4
    assert asked == 1
    pools.close()


async def test_ipv6(wire: Any) -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines(wire.good_answer())
        await writer.drain()

    server = await asyncio.start_server(answer, sock=listener)
    pools = open_on(f"http://[::1]:{listener.getsockname()[1]}")
    _, record = await ask(pools)
    assert record.outcome == "completed", record.error_message
    pools.close()
    server.close()


async def test_name_that_does_not_resolve_is_a_failure_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    pools = open_on("http://nowhere.invalid:80")
    for _ in range(2):
        _, record = await ask(pools)
        assert record.error_class == "connect"
        assert "Name or service not known" in (record.error_message or "")
    pools.close()


async def test_idle_connection_whose_end_was_not_seen_yet_is_not_used(
    serve: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop was busy with something else when the server's FIN came: looked at before it is used again."""
    monkeypatch.setattr(plain_socket, "FRESH_NS", 0)
    server = serve(lambda number, body: [*wire.good_answer(), wire.CLOSE])
    pools = open_on(server.url)
    for _ in range(3):
        exchange, record = await ask(pools)
        assert (record.outcome, exchange.retries) == ("completed", 0)
        time.sleep(0.1)  # noqa: ASYNC251 (blocks the loop on purpose)
    assert server.connections == 3
    pools.close()


async def test_connections_are_closed_with_the_pools(serve: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    pools = open_on(server.url)
    await asyncio.gather(*(ask(pools) for _ in range(5)))
    assert server._open == 0
    pools.close()
    pools.close()
    for thread in server._threads[1:]:
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()


async def test_unparsed_bytes_are_bounded(serve: Any, wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_socket, "BACKLOG_BYTES", 100_000)
    block = wire.http_chunk(wire.event(wire.text_chunk(" a"))) * 20_000
    last = wire.http_chunk(wire.stream_of(wire.text_chunk(" b", "stop"), wire.usage_chunk(1, 20_001))) + wire.END
    server = serve(lambda number, body: [wire.SSE_HEAD + block + last])
    pools = open_on(server.url)
    answers = await asyncio.gather(*(ask(pools) for _ in range(8)))
    assert [len(record.chunk_ns) for _, record in answers] == [20_001] * 8
    work = pools._servers[0].pool.work
    assert work.backlog == 0
    assert 0 < work.max_backlog <= 100_000 + plain_socket.READ_BYTES
    pools.close()


async def test_records_are_written_while_the_load_never_lets_up() -> None:
    """Parsing goes first, but what is put off must not pile up for the length of the run."""
    work = WorkQueue(asyncio.get_running_loop(), pytest.fail)
    done = 0

    class Busy:
        def parse(self) -> None:
            time.sleep(0.001)
            if done < 5:
                work.parse(self)

    def record() -> None:
        nonlocal done
        done += 1

    work.parse(Busy())
    for _ in range(MAX_LATER + 5):
        work.later(record)
    async with asyncio.timeout(20):
        while done < 5:  # noqa: ASYNC110 (nothing else to wait for)
            await asyncio.sleep(0)
