"""A client that only drains: N streaming completions on raw sockets, epoll, large reads, events counted by their
blank line and parsed never. Run by `bench_api_process.py`, in a process of its own, so that what it costs is not the
server's and what it measures is not its own JSON parser.

Prints JSON lines: `{"mark": …}` when the streams together have passed a share of their events, and a last one with the
events of each stream, the usage that its last chunk reported and the CPU seconds used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import socket
import time

READ_BYTES = 1 << 20
TAIL_BYTES = 4096


class Stream:
    """One connection. An SSE event ends with a blank line, which cannot occur inside JSON; HTTP's framing has none."""

    def __init__(self, host: str, port: int, body: bytes) -> None:
        self.socket = socket.create_connection((host, port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self.socket.setblocking(False)
        self.events = 0
        self.tail = b""

    def read(self, buffer: bytearray) -> int:
        """Count what has arrived. -1 at the end."""
        try:
            size = self.socket.recv_into(buffer)
        except BlockingIOError:
            return 0
        if size == 0:
            return -1
        found = buffer.count(b"\n\n", 0, size)
        if buffer[0] == 10 and self.tail.endswith(b"\n"):
            found += 1
        self.events += found
        self.tail = (self.tail + bytes(buffer[max(0, size - TAIL_BYTES) : size]))[-TAIL_BYTES:]
        return found

    def usage(self) -> int | None:
        """`completion_tokens` of the usage chunk, which is the last before [DONE]."""
        for line in reversed(self.tail.split(b"\n")):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                tokens: int = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
                return tokens
        return None


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def drain(streams: list[Stream], expected: int, marks: list[float], interval: float) -> None:
    """Read until every stream has ended."""
    poller = select.epoll()
    by_fd = {stream.socket.fileno(): stream for stream in streams}
    for fd in by_fd:
        poller.register(fd, select.EPOLLIN)
    buffer = bytearray(READ_BYTES)
    total, pending = 0, list(marks)
    while by_fd:
        for fd, _ in poller.poll():
            found = by_fd[fd].read(buffer)
            if found < 0:
                poller.unregister(fd)
                by_fd.pop(fd).socket.close()
            else:
                total += found
        while pending and total >= pending[0] * expected:
            say(mark=pending.pop(0), events=total, ns=time.monotonic_ns())
        time.sleep(interval)  # let more arrive: fewer, larger reads leave the CPU to the server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--marks", type=float, nargs="+", required=True)
    parser.add_argument("--interval", type=float, default=0.02)
    args = parser.parse_args()
    request = {
        "model": args.model,
        "prompt": [1, 2, 3, 4],
        "max_tokens": args.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(request).encode()
    streams = [Stream(args.host, args.port, body) for _ in range(args.streams)]
    drain(streams, args.streams * args.tokens, args.marks, args.interval)
    say(
        events=[stream.events for stream in streams],
        usage=[stream.usage() for stream in streams],
        cpu_seconds=time.process_time(),
        first_failure=next((s.tail.decode("utf-8", "replace") for s in streams if s.usage() is None), None),
    )


if __name__ == "__main__":
    main()
