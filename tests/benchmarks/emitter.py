"""A server of known emission times: speaks just enough HTTP to be loaded, and writes down when it sent what.

    python tests/benchmarks/emitter.py --port-file PORT --log LOG.jsonl --tick-ms 10
    python tests/benchmarks/emitter.py --port-file PORT --full-rate

Every open stream gets one chunk in each tick, all in the same tick, as an engine step does; with --full-rate each
stream gets everything as fast as the socket takes it. One process, one epoll loop, raw sockets. --log gets one line per
request: when it was read, and when each of its chunks was handed to the kernel (time.monotonic_ns, the client's clock).
"""

from __future__ import annotations

import argparse
import errno
import json
import select
import signal
import socket
import sys
import time
from pathlib import Path

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = json.dumps(
    {"object": "list", "data": [{"id": "emitter", "object": "model", "max_model_len": 1 << 20}]}
).encode()

OOPS = b'{"error":{"message":"the emitter was told to fail","code":500}}'


def http_chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def event(text: str, finish: str | None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    chunk = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "emitter"}
    return b"data: " + json.dumps({**chunk, "choices": [choice], "usage": None}).encode() + b"\n\n"


TOKEN = http_chunk(event(" token", None))
LAST = http_chunk(event(" token", "length"))


def ending(prompt: int, tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    chunk = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "choices": [], "usage": usage}
    return http_chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n") + http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Stream:
    def __init__(self, prompt: int, tokens: int, received_ns: int) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.left = tokens
        self.received_ns = received_ns
        self.sent_ns: list[int] = []


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.read = b""
        self.unsent = b""
        self.stream: Stream | None = None


class Emitter:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.listener = socket.create_server(("127.0.0.1", options.port), backlog=4096)
        self.listener.setblocking(False)
        self.epoll = select.epoll()
        self.epoll.register(self.listener, select.EPOLLIN)
        self.connections: dict[int, Connection] = {}
        self.log = open(options.log, "a") if options.log else None  # noqa: SIM115 (lives as long as the process)
        self.tick_ns = int(options.tick_ms * 1e6)
        self.next_tick = time.monotonic_ns() + self.tick_ns
        self.chunks = 0
        self.requests = 0
        self.stop = False

    def serve(self) -> None:
        while not self.stop:
            wait = -1.0 if self.options.full_rate else max(0, self.next_tick - time.monotonic_ns() - 200_000) / 1e9
            for fd, _ in self.epoll.poll(wait):
                if fd == self.listener.fileno():
                    self.accept()
                else:
                    self.readable(self.connections[fd])
            if not self.options.full_rate and time.monotonic_ns() >= self.next_tick - 200_000:
                while time.monotonic_ns() < self.next_tick:
                    pass  # the last 0.2 ms exactly
                self.tick()
                self.next_tick += self.tick_ns

    def accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections[sock.fileno()] = Connection(sock)
            self.epoll.register(sock, select.EPOLLIN)

    def readable(self, connection: Connection) -> None:
        if connection.unsent:
            self.write(connection, b"")
        try:
            data = connection.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close(connection)
            return
        connection.read += data
        while True:
            head, blank, rest = connection.read.partition(b"\r\n\r\n")
            if not blank:
                return
            length = int((head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]) or 0)
            if len(rest) < length:
                return
            connection.read = rest[length:]
            self.request(connection, head, rest[:length])

    def request(self, connection: Connection, head: bytes, body: bytes) -> None:
        now = time.monotonic_ns()
        if not head.startswith(b"POST"):
            found = head.startswith(b"GET /v1/models")
            answer = MODELS if found else b"{}"
            status = b"200 OK" if found else b"404 Not Found"
            kind = b"Content-Type: application/json\r\n"
            self.write(
                connection, b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, kind, len(answer), answer)
            )
            return
        self.requests += 1
        if self.options.error_every and self.requests % self.options.error_every == 0:
            self.write(connection, b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n%b" % (len(OOPS), OOPS))
            return
        fields = json.loads(body)
        stream = Stream(len(fields.get("prompt") or fields["messages"]), int(fields["max_tokens"]), now)
        if self.options.full_rate:
            block = HEAD + TOKEN * (stream.tokens - 1) + LAST + ending(stream.prompt, stream.tokens)
            stream.sent_ns = [time.monotonic_ns()] * stream.tokens
            self.chunks += stream.tokens
            self.write(connection, block)
            self.finished(stream)
        else:
            connection.stream = stream
            self.write(connection, HEAD)

    def tick(self) -> None:
        for connection in list(self.connections.values()):
            stream = connection.stream
            if stream is None:
                continue
            stream.left -= 1
            stream.sent_ns.append(time.monotonic_ns())
            self.chunks += 1
            if stream.left > 0:
                self.write(connection, TOKEN)
            else:
                connection.stream = None
                self.write(connection, LAST + ending(stream.prompt, stream.tokens))
                self.finished(stream)

    def finished(self, stream: Stream) -> None:
        if self.log is not None:
            self.log.write(json.dumps({"received_ns": stream.received_ns, "sent_ns": stream.sent_ns}) + "\n")
            self.log.flush()

    def write(self, connection: Connection, data: bytes) -> None:
        """Send what the kernel takes; the rest waits for the socket to be writable."""
        waiting = bool(connection.unsent)
        connection.unsent += data
        try:
            sent = connection.sock.send(connection.unsent)
            connection.unsent = connection.unsent[sent:]
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                self.close(connection)
                return
        if waiting != bool(connection.unsent):
            mode = select.EPOLLIN | (select.EPOLLOUT if connection.unsent else 0)
            self.epoll.modify(connection.sock, mode)

    def close(self, connection: Connection) -> None:
        self.connections.pop(connection.sock.fileno(), None)
        connection.stream = None
        connection.sock.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path, help="gets the port once it is listened on")
    parser.add_argument("--log", help="JSON lines, one per request")
    parser.add_argument("--tick-ms", type=float, default=10.0)
    parser.add_argument("--full-rate", action="store_true")
    parser.add_argument("--error-every", type=int, default=0, help="answer every N-th request with HTTP 500")
    options = parser.parse_args()
    emitter = Emitter(options)

    def end(*_: object) -> None:
        emitter.stop = True
        if options.full_rate:
            sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    if options.port_file is not None:
        options.port_file.write_text(str(emitter.listener.getsockname()[1]))
    emitter.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
