"""Probing servers that answer, close, drip, flood and hang: each probe is a line, null where there was no answer."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest

from atom.diag.health_probe import HealthProbe
from atom.recipes.errors import UsageError

Behave = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Peer:
    """A listener that does `behave` after each request head; `connections` counts what it accepted."""

    def __init__(self, behave: Behave, *, per_connection: int = 1_000_000) -> None:
        self.connections = 0
        self._behave, self._per_connection = behave, per_connection
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/health"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            for _ in range(self._per_connection):
                if not connection.recv(65536):
                    return
                self._behave(connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def peer(behave: Behave, **options: Any) -> Iterator[Peer]:
    one = Peer(behave, **options)
    try:
        yield one
    finally:
        one.close()


def send(data: bytes) -> Behave:
    return lambda connection: connection.sendall(data)


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(1000):
        connection.sendall(b"x")
        time.sleep(0.02)


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def test_one_connection_for_many_probes() -> None:
    with peer(send(OK)) as server:
        probe = HealthProbe(server.url)
        lines = [probe.probe(number) for number in range(5)]
        assert server.connections == 1
    assert [line["t_ns"] for line in lines] == [0, 1, 2, 3, 4]
    assert {(line["status"], line["error"]) for line in lines} == {(200, None)}
    assert all(line["latency_ns"] > 0 for line in lines)


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    with peer(send(OK), per_connection=1) as server:
        probe = HealthProbe(server.url)
        for _ in range(3):
            assert probe.probe(0)["status"] == 200
            time.sleep(0.02)
        assert server.connections == 3


@pytest.mark.parametrize("data", [b"HTTP/1.0 200 OK\r\n\r\nok", b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"])
def test_any_answer_is_an_answer(data: bytes) -> None:
    def behave(connection: socket.socket) -> None:
        connection.sendall(data)
        if b"1.0" in data:
            connection.shutdown(socket.SHUT_RDWR)

    with peer(behave) as server:
        line = HealthProbe(server.url).probe(0)
    assert line["status"] == int(data.split()[1])
    assert line["error"] is None


@pytest.mark.parametrize(
    ("behave", "error"),
    [
        (lambda connection: time.sleep(1), "no complete answer within 0.2 s"),
        (drip, "no complete answer within 0.2 s"),
        (flood, "larger than"),
        (send(b"\xff\xfe garbage\r\n\r\n"), "BadStatusLine"),
        (send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"), "no complete answer within 0.2 s"),
        (lambda connection: connection.shutdown(socket.SHUT_RDWR), "RemoteDisconnected"),
    ],
)
def test_no_answer_is_null_and_why(behave: Behave, error: str) -> None:
    with peer(behave) as server:
        begun = time.monotonic()
        line = HealthProbe(server.url, timeout_s=0.2).probe(7)
        assert time.monotonic() - begun < 10
    assert line["latency_ns"] is None
    assert error in line["error"]


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert HealthProbe(f"http://127.0.0.1:{port}/health").probe(0)["error"] == "connection refused"


def test_probes_that_a_slow_one_covered_are_counted() -> None:
    answers = iter([0.0, 0.25])

    def behave(connection: socket.socket) -> None:
        time.sleep(next(answers, 0.0))
        connection.sendall(OK)

    lines: list[Mapping[str, Any]] = []
    stop = threading.Event()

    def record(line: Mapping[str, Any]) -> None:
        lines.append(line)
        if len(lines) == 4:
            stop.set()

    with peer(behave) as server:
        HealthProbe(server.url, period_s=0.05).run(record, stop)
    assert sum(line["skipped"] for line in lines) >= 4
    due = [line["t_ns"] for line in lines]
    steps = [round((after - before) / 5e7) for before, after in pairwise(due)]
    assert steps == [line["skipped"] + 1 for line in lines[1:]]


def test_a_probe_under_way_is_cut() -> None:
    with peer(lambda connection: time.sleep(5)) as server:
        probe = HealthProbe(server.url)
        lines: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: lines.append(probe.probe(0)))
        thread.start()
        while not server.connections:
            time.sleep(0.01)
        time.sleep(0.05)
        probe.cut()
        thread.join(10)
    assert lines[0]["error"] == "the capture ended during this probe"


def test_a_url_that_is_none() -> None:
    with pytest.raises(UsageError, match="health URL"):
        HealthProbe("ftp://host/health")
