"""What a session measures: a server by its URL or its pid (`UrlTarget`, `PidTarget`; the third way is a recipe), and
what a load gets to know of it (`ServerUnderTest`). Driving a session is `diag/session.py`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from atom.recipes.errors import RunError, ServerDiedError, UsageError
from atom.recipes.health import probe_health
from atom.recipes.processes import read_stat
from atom.recipes.recipe import Metrics, MetricsDialect, Recipe
from atom.recipes.server import Server

if TYPE_CHECKING:
    from atom.diag.attach_checks import AttachMethod

__all__ = ["PidTarget", "ServerUnderTest", "UrlTarget", "death_notice", "refuse_absent", "watch"]

DYING_S: Final = 10.0
"""What a server that fails its health check may take to end."""
_POLL_S: Final = 0.2
APPEARS_S: Final = 1.0
"""How long a server that refuses connections is tried again: it may be about to listen."""
_CONNECT_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UrlTarget:
    """A server that runs already, seen from outside."""

    base_url: str
    metrics: Metrics = field(default_factory=Metrics)
    metrics_url: str | None = None
    """None: found below `base_url`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PidTarget:
    """A server that runs already, seen from inside: the GC hook is put into the process and its children, and taken
    out again at the end."""

    pid: int
    base_url: str | None = None
    """None: found from the sockets of its processes; one that has none is profiled without HTTP."""
    method: AttachMethod = "auto"
    """How to attach; see `diag/attach.py`."""
    metrics: Metrics = field(default_factory=Metrics)
    metrics_url: str | None = None


@dataclass(slots=True)
class ServerUnderTest:
    """What a load gets: where the server is, and word of its death."""

    address: str | None
    """Its base URL; None for a process that serves no HTTP."""
    metrics_url: str | None
    dialect: MetricsDialect
    recipe: Recipe | None
    server: Server | None
    """None for a server that was running already."""
    pid: int | None = None
    """Of a server that was attached to: its end is told like that of one that was started."""
    listeners: list[int] = field(default_factory=list)
    """The processes that hold its HTTP socket, where that can be seen."""
    _start_ticks: int = 0
    _on_death: list[Callable[[], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.pid is not None:
            stat = read_stat(self.pid)
            if stat is None or not stat.alive:
                raise UsageError(f"--pid {self.pid}: there is no such process")
            self._start_ticks = stat.start_ticks

    @property
    def base_url(self) -> str:
        """Where to send requests; UsageError for a server that was found to serve no HTTP."""
        if self.address is None:
            raise UsageError(f"--pid {self.pid}: no socket of its processes answers HTTP; give --base-url")
        return self.address

    @property
    def dead(self) -> bool:
        """It has ended. Never true of a server known by its URL alone."""
        if self.server is not None:
            return self.server.dead
        if self.pid is None:
            return False
        stat = read_stat(self.pid)
        return stat is None or not stat.alive or stat.start_ticks != self._start_ticks

    def call_when_dead(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, on another thread, if the server dies during the load."""
        with self._lock:
            self._on_death.append(callback)
        if self.dead:
            self.tell_death()

    def forget_callbacks(self) -> None:
        """The load is over: the server's end is no news any more."""
        with self._lock:
            self._on_death.clear()

    def tell_death(self) -> None:
        with self._lock:
            callbacks, self._on_death = self._on_death, []
        for callback in callbacks:
            callback()


def refuse_absent(base_url: str) -> None:
    """RunError if nobody takes connections at this URL."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    deadline = time.monotonic() + APPEARS_S
    while True:
        try:
            socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S).close()
        except OSError as error:
            if not isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline:
                reason = (error.strerror or str(error) or type(error).__name__).lower()
                raise RunError(f"no server answers at {base_url}: {reason}; nothing was measured") from None
            time.sleep(_POLL_S)
        else:
            return


def watch(under_test: ServerUnderTest, over: threading.Event) -> None:
    """Tell the load when its server dies. Ends with the server, or when `over` is set."""
    if under_test.server is not None:
        under_test.server.wait_for_end()
    else:
        while not under_test.dead:
            if over.wait(_POLL_S):
                return
    under_test.tell_death()


def death_notice(under_test: ServerUnderTest, *, suspected: bool) -> str | None:
    """How the server died, in one line; None if it lives. A server whose engine died answers with errors for a moment
    before it ends, so when requests failed (`suspected`) one that fails its health check is given time to do so."""
    server = under_test.server
    if server is None:
        return f"process {under_test.pid} ended while it was profiled" if under_test.dead else None
    health = server.recipe.health
    deadline = time.monotonic() + DYING_S
    trouble: str | None = None
    while suspected and not server.dead:
        trouble = probe_health(server.host, server.ports[health.port], health.path, health.status)
        if trouble is None or time.monotonic() > deadline:
            break
        server.wait_for_end(0.2)
    if not server.dead:
        return None if trouble is None else f"the server has stopped working: waited in vain for {trouble}"
    try:
        server.raise_if_dead()
    except ServerDiedError as error:
        return error.cause
    except RunError as error:
        return str(error).partition("\n")[0]
    return None
