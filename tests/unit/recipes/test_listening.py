"""Which of a process's sockets is the server, found with real sockets of this process."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from atom.recipes.listening import PortFinder, tree_listeners
from atom.recipes.processes import listening_processes
from atom.recipes.recipe import Roles


@contextlib.contextmanager
def web(paths: dict[str, int], address: str = "127.0.0.1") -> Iterator[int]:
    """An HTTP server that answers these paths so, and others with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(paths.get(self.path, 404))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    with Server((address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(10)


class Mute:
    """A socket that takes connections, notes them, and closes them without a word."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.taken = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.taken += 1
                connection.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self.listener.close()


def look(finder: PortFinder, ports: set[int]) -> int | None:
    """As `finder.look`; other listeners that this test process may have are none of ours."""
    found = finder.look([os.getpid()])
    assert found is None or found.port in ports
    return None if found is None else found.port


def test_sockets_of_both_families_are_seen() -> None:
    with web({}) as four, web({}, "::1") as six:
        hosts = {one.port: one.host for one in tree_listeners([os.getpid()])}
        assert hosts[four] == "127.0.0.1"
        assert hosts[six] == "::1"
        assert listening_processes(six) == [os.getpid()]


def test_the_one_with_models_is_the_server() -> None:
    with web({"/health": 200}) as sidecar, web({"/v1/models": 401}) as server:
        assert look(PortFinder(Roles()), {sidecar, server}) == server


@pytest.mark.parametrize("status", [200, 503])
def test_without_models_the_one_with_health(status: int) -> None:
    with web({}) as other, web({"/health": status}) as server:
        assert look(PortFinder(Roles(), patience_s=0), {other, server}) == server


def test_any_http_only_after_a_while_and_where_allowed() -> None:
    with web({}) as port:
        assert look(PortFinder(Roles(), patience_s=60), {port}) is None
        assert look(PortFinder(Roles(), patience_s=0, any_http=False), {port}) is None
        assert look(PortFinder(Roles(), patience_s=0), {port}) == port


def test_a_socket_that_speaks_no_http_is_left_alone() -> None:
    mute = Mute()
    try:
        finder = PortFinder(Roles(), patience_s=0)
        for _ in range(6):
            assert look(finder, set()) is None
        assert 1 <= mute.taken <= 3
    finally:
        mute.close()
