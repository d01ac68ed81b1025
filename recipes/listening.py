"""Finding where a server listens when nobody says: the sockets of its processes, and which of them speaks HTTP.

A server has other sockets (a rendezvous store, message queues), which a stray GET could confuse. So each is asked a few
times at most and the likeliest first: those of the API process, and of those the usual ports.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from atom.recipes.processes import ListeningSocket, command_line, held_sockets, listening_sockets
from atom.recipes.recipe import Roles

__all__ = ["Listener", "PortFinder", "connect_host", "tree_listeners"]

_TIMEOUT_S: Final = 2.0
_ASKS: Final = 3
"""A socket that gave no HTTP answer so often is not asked again."""
_PATIENCE_S: Final = 5.0
"""How long a server that answers, but knows neither path, waits for a better one to come up."""
_USUAL_PORTS: Final = (8000, 30000, 8080, 5000, 3000, 8001)


def connect_host(host: str) -> str:
    """The address to connect to for one that is listened on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and who holds it."""

    socket: ListeningSocket
    pids: tuple[int, ...]

    @property
    def host(self) -> str:
        """Where to connect."""
        return connect_host(self.socket.host)

    @property
    def port(self) -> int:
        return self.socket.port


def tree_listeners(pids: Sequence[int]) -> list[Listener]:
    """The listening sockets that any of these processes holds."""
    held: Mapping[int, set[str]] = {pid: held_sockets(pid) for pid in pids}
    found = []
    for one in listening_sockets():
        holders = tuple(pid for pid in pids if one.inode in held[pid])
        if holders:
            found.append(Listener(one, holders))
    return found


class _Answer(IntEnum):
    NONE = 0
    OTHER_HTTP = 1
    HEALTH = 2
    MODELS = 3


@dataclass(slots=True)
class _Asked:
    answer: _Answer
    times: int
    first: float


@dataclass(slots=True)
class PortFinder:
    """Looks again and again while a server starts; remembers what each socket answered."""

    roles: Roles
    any_http: bool = True
    """Whether a server that knows neither /v1/models nor /health will do in the end."""
    patience_s: float = _PATIENCE_S
    _asked: dict[str, _Asked] = field(default_factory=dict)

    def look(self, pids: Sequence[int]) -> Listener | None:
        """The socket that is the server's, or None if none is yet."""
        listeners = sorted(self._likely(tree_listeners(pids)), key=_unlikeliness)
        for listener in listeners:
            if self._ask(listener).answer is _Answer.MODELS:
                return listener
        known = [(self._asked[one.socket.inode], one) for one in listeners]
        for asked, listener in known:
            if asked.answer is _Answer.HEALTH:
                return listener
        late = time.monotonic() - self.patience_s
        others = [one for asked, one in known if asked.answer is _Answer.OTHER_HTTP and asked.first <= late]
        return others[0] if others and self.any_http else None

    def _likely(self, listeners: Sequence[Listener]) -> Sequence[Listener]:
        """Those of the API process; all, where none of the processes is known for one."""
        api = [one for one in listeners if any(self.roles.role_of(command_line(pid)) == "api" for pid in one.pids)]
        return api or listeners

    def _ask(self, listener: Listener) -> _Asked:
        asked = self._asked.setdefault(listener.socket.inode, _Asked(_Answer.NONE, 0, time.monotonic()))
        if asked.answer is _Answer.NONE and asked.times < _ASKS:
            asked.times += 1
            asked.answer = _what_answers(listener)
        return asked


def _unlikeliness(listener: Listener) -> tuple[bool, int]:
    return listener.port not in _USUAL_PORTS, listener.port


def _what_answers(listener: Listener) -> _Answer:
    models = _status(listener, "/v1/models")
    if models in (200, 401, 403):
        return _Answer.MODELS
    if models is None:
        return _Answer.NONE
    return _Answer.HEALTH if _status(listener, "/health") in (200, 503) else _Answer.OTHER_HTTP


def _status(listener: Listener, path: str) -> int | None:
    """The HTTP status of a GET; None if what answers is no HTTP, or nothing does."""
    connection = http.client.HTTPConnection(listener.host, listener.port, timeout=_TIMEOUT_S)
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError), contextlib.closing(connection):
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().status
    return None
