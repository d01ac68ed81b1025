"""A server that nobody here wrote, for tests: plain Python, OpenAI-like, with forced collections of known length.

It keeps the truth: one JSON line [start_ns, stop_ns] of CLOCK_MONOTONIC around each `gc.collect()` that it forces, in
`--truth`. Every other collection is off. With `--elsewhere` a forked child serves all requests while this process goes
on collecting, so that its pauses have nothing to do with anybody's latency; `--idle` makes them wait instead of
work, so that they take no CPU from that child either. `--slow-share` of the requests wait
`--slow-ms` for their first token, whatever the collector does.

Standard library only; knows nothing of atom.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

METRICS = "# TYPE requests counter\nrequests_total 1\n"
HEAP: list[list[int]] = []
STOP: list[bool] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    options: argparse.Namespace
    draw = random.Random(7)

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, b"")
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"object": "list", "data": [{"id": "pausing"}]}).encode())
        elif self.path == "/die":
            os._exit(9)
        elif self.path == "/metrics" and not self.options.no_metrics:
            self.answer(200, METRICS.encode(), "text/plain; version=0.0.4")
        else:
            self.answer(404, b"{}")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.draw.random() < self.options.slow_share:
            time.sleep(self.options.slow_ms / 1e3)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = int(request.get("max_tokens", 1))
        for number in range(tokens):
            end = "length" if number == tokens - 1 else None
            self.event({"choices": [{"index": 0, "text": f"t{number} ", "finish_reason": end}]})
            time.sleep(0.001)
        usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": tokens}
        self.event({"choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value: object) -> None:
        self.chunk(f"data: {json.dumps(value)}\n\n".encode())

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


class Idler:
    """A finalizer that waits: the collection that finds it takes that long."""

    def __init__(self, seconds: float) -> None:
        self.itself = self
        self.seconds = seconds

    def __del__(self) -> None:
        time.sleep(self.seconds)


def grow_heap(pause_ms: float) -> None:
    """Until a collection takes about `pause_ms` here."""
    while True:
        start = time.monotonic_ns()
        gc.collect()
        if time.monotonic_ns() - start >= pause_ms * 1e6:
            return
        HEAP.extend([number] for number in range(20_000))


def collect_for_ever(every_s: float, truth: Path, idle_s: float) -> None:
    draw = random.Random(3)
    with truth.open("a", encoding="utf-8") as file:
        while not STOP:
            time.sleep(every_s * draw.uniform(0.7, 1.3))
            if idle_s:
                Idler(idle_s)
            start = time.monotonic_ns()
            gc.collect()
            stop = time.monotonic_ns()
            file.write(f"[{start}, {stop}]\n")
            file.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--pause-ms", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=0.1)
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--elsewhere", action="store_true")
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--slow-share", type=float, default=0.0)
    parser.add_argument("--slow-ms", type=float, default=40.0)
    parser.add_argument("--looks-like", help="for whoever tells processes by their command lines")
    parser.add_argument("--no-metrics", action="store_true")
    parser.add_argument("--ignore-sigterm", action="store_true")
    options = parser.parse_args()
    gc.disable()
    # A thread that waited out a collection would else take the GIL before the clock is read after it.
    sys.setswitchinterval(1.0)
    Handler.options = options
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.daemon_threads = True
    child = os.fork() if options.elsewhere else 0

    def end(*_: object) -> None:
        if child:
            os.kill(child, signal.SIGKILL)
        STOP.append(True)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.ignore_sigterm else end)
    if child == 0:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    if (child or not options.elsewhere) and options.truth is not None:
        if not options.idle:
            grow_heap(options.pause_ms)
        print(f"port {server.server_address[1]}", flush=True)
        collect_for_ever(options.every_s, options.truth, options.pause_ms / 1e3 if options.idle else 0.0)
    print(f"port {server.server_address[1]}", flush=True)
    while not STOP:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
