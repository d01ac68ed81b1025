"""`python -m smallserve --port N`: /v1/completions (streamed or not), /v1/models, /health, /metrics."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
from pathlib import Path
from typing import Any

from smallserve import batch as engine
from smallserve._built import PYTHON  # made by build.py

MODEL = "small"
MOST_BODY = 1 << 20


class Server:
    def __init__(self) -> None:
        self.batch = engine.Batch()
        self.requests = itertools.count(1)
        self.prompt_tokens = 0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await read_request(reader)) is not None:
                await self.answer(writer, *request)
        except (ConnectionError, asyncio.IncompleteReadError, ValueError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> None:
        if path == "/health":
            await send(writer, 200, b"")
        elif path == "/v1/models":
            models = [{"id": MODEL, "object": "model", "owned_by": f"python {PYTHON}", "max_model_len": 8192}]
            await send(writer, 200, json.dumps({"object": "list", "data": models}).encode())
        elif path == "/metrics":
            await send(writer, 200, self.metrics().encode(), "text/plain; version=0.0.4")
        elif path == "/v1/completions" and method == "POST":
            await self.complete(writer, json.loads(body))
        else:
            await send(writer, 404, error(f"no {path}"))

    def metrics(self) -> str:
        return "".join(
            f"# TYPE vllm:{name} {kind}\nvllm:{name} {value}\n"
            for name, kind, value in (
                ("num_requests_running", "gauge", self.batch.running),
                ("prompt_tokens_total", "counter", self.prompt_tokens),
                ("generation_tokens_total", "counter", self.batch.generated),
            )
        )

    async def complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        prompt, max_tokens = body.get("prompt", ""), int(body.get("max_tokens", 16))
        words = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
        if engine.FAIL_EVERY and next(self.requests) % engine.FAIL_EVERY == 0:
            return await send(writer, 500, error("out of cache blocks"))
        if not 0 < max_tokens <= 4096:
            return await send(writer, 400, error("max_tokens must be 1 to 4096"))
        loop, texts = asyncio.get_running_loop(), asyncio.Queue[tuple[str, bool]]()
        self.batch.add(words, max_tokens, lambda *item: loop.call_soon_threadsafe(texts.put_nowait, item))
        self.prompt_tokens += words
        usage = {"prompt_tokens": words, "completion_tokens": max_tokens, "total_tokens": words + max_tokens}
        if not body.get("stream"):
            text = "".join([(await texts.get())[0] for _ in range(max_tokens)])
            return await send(writer, 200, json.dumps(chunk(text, "length") | {"usage": usage}).encode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(max_tokens):
            text, last = await texts.get()
            event(writer, json.dumps(chunk(text, "length" if last else None)))
            await writer.drain()
        if (body.get("stream_options") or {}).get("include_usage"):
            event(writer, json.dumps(chunk("", None) | {"choices": [], "usage": usage}))
        event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return None


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes] | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= MOST_BODY:
        return None
    return method, path, await reader.readexactly(length)


async def send(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


def event(writer: asyncio.StreamWriter, data: str) -> None:
    line = f"data: {data}\n\n".encode()
    writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")


def chunk(text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return {"id": "cmpl", "object": "text_completion", "model": MODEL, "choices": [choice]}


def error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": None}}).encode()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path)
    options = parser.parse_args()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = await asyncio.start_server(Server().connection, options.host, options.port)
    port = server.sockets[0].getsockname()[1]
    if options.port_file:
        temporary = options.port_file.with_suffix(".tmp")
        temporary.write_text(str(port))
        temporary.replace(options.port_file)
    print(f"listening on {port}, built for python {PYTHON}", flush=True)
    await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
