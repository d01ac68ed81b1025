"""A server that plays a script byte by byte, so that a test decides what the wire carries and when."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from atom.bench.arrivals import Arrivals
from atom.bench.load import Endpoint, LoadSpec, PlannedRequest
from atom.bench.records import RequestRecord, read_records
from atom.bench.rundir import RunDirectory
from atom.bench.runner import LoadOutcome, run_load
from atom.bench.static_load import StaticLoad

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")  # a busy machine is no failure

CLOSE = "close"
RESET = "reset"
HANG = "hang"
Action = bytes | float | str
"""Bytes to send in one call, seconds to wait, or what to do with the connection."""
Script = Callable[[int, bytes], Sequence[Action]]
"""(number of the request on this server, its body) → actions. Without CLOSE the connection is kept alive."""

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
SSE_HEAD_EOF = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
END = b"0\r\n\r\n"


def http_chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def event(value: object) -> bytes:
    payload = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b"data: " + payload + b"\n\n"


def text_chunk(text: str, finish: str | None = None, **more: object) -> dict[str, object]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], **more}


def usage_chunk(prompt: int, output: int) -> dict[str, object]:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [], "usage": usage}


def stream_of(*values: object, done: bool = True) -> bytes:
    """The body of a stream with one event per value."""
    return b"".join(map(event, values)) + (b"data: [DONE]\n\n" if done else b"")


def good_answer(tokens: int = 3, prompt: int = 5) -> list[Action]:
    values = [text_chunk(f" t{i}", "length" if i == tokens - 1 else None) for i in range(tokens)]
    return [
        SSE_HEAD,
        *(http_chunk(event(value)) for value in (*values, usage_chunk(prompt, tokens))),
        http_chunk(b"data: [DONE]\n\n") + END,
    ]


class ScriptedServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.heads: list[bytes] = []
        self.connections = 0
        self.most_open = 0
        self._open = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = b""
        with connection:
            connection.settimeout(20)
            try:
                while True:
                    while b"\r\n\r\n" not in buffer:
                        data = connection.recv(1 << 16)
                        if not data:
                            return
                        buffer += data
                    head, _, buffer = buffer.partition(b"\r\n\r\n")
                    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                    while len(buffer) < length:
                        buffer += connection.recv(1 << 16)
                    body, buffer = buffer[:length], buffer[length:]
                    with self._lock:
                        number = len(self.requests)
                        self.requests.append(body)
                        self.heads.append(head)
                        self._open += 1
                        self.most_open = max(self.most_open, self._open)
                    if not self._play(connection, self.script(number, body)):
                        return
            except OSError:
                return

    def _play(self, connection: socket.socket, actions: Sequence[Action]) -> bool:
        try:
            for number, action in enumerate(actions):
                if number == len(actions) - 1:
                    with self._lock:
                        self._open -= 1
                if isinstance(action, bytes):
                    connection.sendall(action)
                elif isinstance(action, float):
                    time.sleep(action)
                elif action == HANG:
                    self._stop.wait(20)
                    return False
                elif action == RESET:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return False
                else:
                    return False
        except OSError:
            return False
        return True

    def stop_listening(self) -> None:
        with contextlib.suppress(OSError):  # for the second time
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self._stop.set()
        self.stop_listening()
        self._threads[0].join()


@pytest.fixture
def serve() -> Iterator[Callable[[Script], ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def start(script: Script) -> ScriptedServer:
        servers.append(ScriptedServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class FixedSource:
    """`count` equal requests."""

    def __init__(self, count: int, output_len: int = 3) -> None:
        self.count = count
        self.output_len = output_len

    def __len__(self) -> int:
        return self.count

    def request(self, index: int) -> PlannedRequest:
        return PlannedRequest(json.dumps({"index": index, "stream": True}).encode(), 5, self.output_len)

    def warmup(self, index: int) -> PlannedRequest:
        return PlannedRequest(json.dumps({"warmup": index, "stream": True}).encode(), 5, self.output_len)

    def offsets_ns(self) -> None:
        return None

    def describe(self) -> dict[str, object]:
        return {"kind": "fixed"}


class Loaded:
    """A finished load and its records."""

    def __init__(self, outcome: LoadOutcome, run_dir: RunDirectory) -> None:
        self.outcome = outcome
        self.run_dir = run_dir
        self.records: list[RequestRecord] = sorted(read_records(run_dir), key=lambda r: r.index)


class Wire:
    """What the tests build scripts from, as one fixture (test folders are no packages)."""

    CLOSE, RESET, HANG, END = CLOSE, RESET, HANG, END
    SSE_HEAD, SSE_HEAD_EOF = SSE_HEAD, SSE_HEAD_EOF
    http_chunk = staticmethod(http_chunk)
    event = staticmethod(event)
    text_chunk = staticmethod(text_chunk)
    usage_chunk = staticmethod(usage_chunk)
    stream_of = staticmethod(stream_of)
    good_answer = staticmethod(good_answer)
    FixedSource = FixedSource


@pytest.fixture
def wire() -> type[Wire]:
    return Wire


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    """`await load(url, count, **options)`: run equal requests. Options of Endpoint and LoadSpec by name."""
    names = {"api", "api_key", "headers", "request_timeout", "connect_timeout", "verify_tls", "path", "more_urls"}
    runs = itertools.count()

    async def run(url: str, count: int = 1, *, stop: asyncio.Event | None = None, **more: Any) -> Loaded:
        endpoint = Endpoint(base_url=url, model="m", **{k: v for k, v in more.items() if k in names})
        options: dict[str, Any] = {"name": "fixed", "max_concurrency": 1}
        options |= {k: v for k, v in more.items() if k not in names}
        arrivals = Arrivals(**{name: options.pop(name) for name in ("request_rate", "burstiness") if name in options})
        options["workload"] = StaticLoad(
            source=options.pop("source", FixedSource(count)),
            arrivals=arrivals,
            concurrency_ramp_s=options.pop("concurrency_ramp_s", None),
            duration_s=options.get("duration"),
        )
        run_dir = RunDirectory(tmp_path / f"run-{next(runs)}")
        spec = LoadSpec(endpoint=endpoint, **options)
        return Loaded(await run_load(spec, run_dir, None, stop or asyncio.Event()), run_dir)

    return run
