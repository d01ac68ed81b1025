"""Nothing in a server grows with the requests it has served: 10,000 requests, of every kind of end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from atom.engine.server.args import parse_args
from atom.engine.server.serve import serve
from tests.server_process import FAST, SIMULATED

REQUESTS: Final = 10_000
CONNECTIONS: Final = 64
KINDS: Final = ("stream", "whole", "abort early", "abort", "invalid", "n", "unread", "stop")


class Connection:
    """A keep-alive connection, as little of HTTP as the test needs."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, path: str, body: Any) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        data = json.dumps(body).encode()
        self._writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)))
        self._writer.write(data)

    async def head(self) -> tuple[int, bool, int]:
        """Status, whether chunked, length."""
        assert self._reader is not None
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return int(head[9:12]), b"transfer-encoding: chunked" in head, int(length or 0)

    async def answer(self) -> tuple[int, bytes]:
        assert self._reader is not None
        status, chunked, length = await self.head()
        if not chunked:
            return status, await self._reader.readexactly(length)
        body = bytearray()
        while size := int(await self._reader.readline(), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()
        return status, bytes(body)

    async def some_chunks(self, count: int) -> None:
        assert self._reader is not None
        await self.head()
        for _ in range(count):
            await self._reader.readexactly(int(await self._reader.readline(), 16) + 2)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)
            self._reader = self._writer = None


async def one_request(connection: Connection, kind: str, rng: random.Random) -> None:
    body: dict[str, Any] = {"prompt": [rng.randrange(256) for _ in range(rng.randrange(1, 60))], "max_tokens": 6}
    long = {**body, "max_tokens": 50_000}
    match kind:
        case "stream" | "stop":
            if kind == "stop":
                body |= {"stop_token_ids": list(range(256, 400))}
            await connection.send("/v1/completions", {**body, "stream": True})
            status, text = await connection.answer()
            assert status == 200
            assert text.endswith(b"data: [DONE]\n\n")
        case "whole" | "n":
            await connection.send("/v1/completions", {**body, "n": 3 if kind == "n" else 1, "logprobs": 1})
            status, text = await connection.answer()
            assert (status, len(json.loads(text)["choices"])) == (200, 3 if kind == "n" else 1)
        case "invalid":
            await connection.send("/v1/chat/completions", rng.choice([body, {"messages": []}, {"messages": 3}]))
            status, _ = await connection.answer()
            assert status == 400
        case "abort early":
            await connection.send("/v1/completions", long)
            await connection.close()
        case "abort":
            await connection.send("/v1/completions", {**long, "stream": True})
            await connection.some_chunks(rng.randrange(1, 4))
            await connection.close()
        case "unread":
            await connection.send("/v1/completions", {**long, "stream": True})
            await asyncio.sleep(rng.random() * 0.01)
            await connection.close()


async def load(port: int, requests: int, seed: int) -> Counter[str]:
    done: Counter[str] = Counter()

    async def worker(index: int) -> None:
        rng = random.Random(seed + index)
        connection = Connection(port)
        for number in range(index, requests, CONNECTIONS):
            kind = KINDS[number % len(KINDS)]
            await one_request(connection, kind, rng)
            done[kind] += 1
        await connection.close()

    await asyncio.gather(*[worker(index) for index in range(CONNECTIONS)])
    return done


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
    text = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    await writer.wait_closed()
    return text


async def metrics(port: int) -> dict[str, float]:
    lines = [line for line in (await get(port, "/metrics")).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def settle(port: int) -> dict[str, float]:
    """The metrics once no block is in use and no request is open."""
    async with asyncio.timeout(30):
        while True:
            samples = await metrics(port)
            open_requests = json.loads(await get(port, "/load"))["server_load"]
            if not samples["atom:kv_cache_blocks_used"] and not samples["atom:requests_running"] and not open_requests:
                return samples
            await asyncio.sleep(0.05)


async def footprint() -> dict[str, int]:
    """What this process holds. The sockets just closed need a moment."""
    await asyncio.sleep(0.3)
    gc.collect()
    process = psutil.Process()
    return {
        "fds": process.num_fds(),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
        "objects": len(gc.get_objects()),
    }


@pytest.mark.timeout(200)
async def test_ten_thousand_requests_leave_nothing_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    # As in the server's own process; pytest would keep every record of "socket.send() raised exception".
    caplog.set_level(logging.ERROR, logger="asyncio")
    port_file = tmp_path / "port"
    flags = ["--port", "0", "--port-file", str(port_file), *SIMULATED, *FAST, "--num-gpu-blocks-override", "20000"]
    server = asyncio.create_task(serve(*parse_args(flags, environ={})))
    try:
        while not port_file.exists():
            assert not server.done()
            await asyncio.sleep(0.05)
        port = int(port_file.read_text())
        await load(port, 1000, seed=1)  # whatever is allocated once
        await settle(port)  # itself adds the series of the routes it asks
        first = await settle(port)
        before = await footprint()

        done = await load(port, REQUESTS, seed=2)
        last = await settle(port)
        after = await footprint()
    finally:
        gc.unfreeze()  # the server froze what was there
        if not server.done():
            os.kill(os.getpid(), signal.SIGTERM)
    assert await server == 0
    capfd.readouterr()

    assert sum(done.values()) == REQUESTS
    assert set(done) == set(KINDS)
    assert last["atom:kv_cache_blocks_free"] == last["atom:kv_cache_blocks_total"] == 20000
    assert last.keys() == first.keys(), "a metric series was added"
    assert after["fds"] == before["fds"]
    assert after["threads"] == before["threads"]
    assert after["tasks"] == before["tasks"]
    assert after["objects"] - before["objects"] < 2000, "less than one object per five requests"
    finished = {
        reason: last[f'atom:requests_finished_total{{reason="{reason}"}}']
        - first[f'atom:requests_finished_total{{reason="{reason}"}}']
        for reason in ("stop", "length", "abort", "error")
    }
    assert finished["error"] == 0
    assert finished["stop"] > 0
    assert finished["stop"] + finished["length"] == done["stream"] + done["stop"] + done["whole"] + 3 * done["n"]
    # A client that leaves at once may be gone before its request is parsed.
    assert done["abort"] <= finished["abort"] <= done["abort"] + done["abort early"] + done["unread"]
