"""KV blocks between processes of one host: the sender maps the receiver's pool and copies.

The receiver listens on a Unix socket and hands its pool's memfd to who connects and runs as the same user. Neither the
pool nor the socket has a name in a file system, so there is nothing to sweep after a kill. Both sides have to share a
network namespace (the socket's address is in it), but not /dev/shm.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from atom.engine.errors import ConfigError
from atom.engine.transfer.copy_worker import CopyJob, CopyWorker
from atom.engine.transfer.data_messages import VERSION, Description, Hello, Message, Welcome, encode
from atom.engine.transfer.data_path import Limits, TransferFullError
from atom.engine.transfer.endpoint import Endpoint, boot_id
from atom.engine.transfer.pool_layout import PoolLayout
from atom.engine.transfer.push_state import Link, Plan
from atom.engine.transfer.shared_pool import RemotePool, SharedPool
from atom.engine.transfer.socket_link import SocketLink, address_of, listen, same_user

__all__ = ["SharedMemoryPath"]

_MESSAGES_PER_LINK: Final = 16
"""Read from one link before the next one's turn."""


class _Outgoing(SocketLink):
    """To a receiver. Connects when the receiver's queue has room, and may copy when the pool has come."""

    def __init__(self, remote: Description, path: SharedMemoryPath, now_s: float) -> None:
        super().__init__(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), remote.name)
        self._remote = remote
        self._path = path
        self._pool: RemotePool | None = None
        self._until = now_s + path.limits.handshake_s
        self._jobs: list[CopyJob] = []
        self._connected = False

    @property
    def ready(self) -> bool:
        return self._pool is not None

    @property
    def busy(self) -> bool:
        self._jobs = [job for job in self._jobs if not job.quiescent]
        return bool(self._jobs)

    def connect(self) -> bool:
        """Try to, if it is not yet; whether it is."""
        if self._connected or self.lost is not None:
            return self._connected
        try:
            self.connection.connect(address_of(self.name))
        except BlockingIOError:
            return False  # its queue is full: try again at the next poll
        except OSError:
            self.lose("the other rank does not listen: its process is gone, or in another network namespace")
            return False
        if not same_user(self.connection):
            self.lose("the other rank belongs to another user")
            return False
        self._connected = True
        self._unsent.appendleft(encode(Hello(VERSION, self._path.name)))  # before what was queued meanwhile
        self.flush()
        return True

    def send(self, message: Message) -> None:
        if self._connected:
            super().send(message)
        else:
            self._unsent.append(encode(message))

    def start(self, plan: Plan) -> CopyJob:
        assert self._pool is not None
        job = self._path.copy(plan, self._pool, self)
        self._jobs = [job, *(job for job in self._jobs if not job.quiescent)]
        return job

    def take_welcome(self) -> None:
        """The first packet: the receiver's pool."""
        message, fds = self.receive_with_fd(1)
        if not isinstance(message, Welcome) or len(fds) != 1 or message.name != self.name:
            for fd in fds:
                os.close(fd)
            if message is not None:
                self.lose("the receiver answered without its pool")
            return
        remote = self._remote
        try:
            self._pool = RemotePool(fds[0], remote.memory_bytes, remote.marks_offset, remote.layout.num_blocks)
        except (OSError, ValueError) as error:
            self.lose(f"cannot map the receiver's pool: {error}")

    def close(self) -> None:
        """Lets go of the pool at once: of a receiver that was killed, this is what its memory lives by."""
        super().close()
        self._pool = None
        self._jobs.clear()

    def give_up_if_late(self, now_s: float) -> None:
        if self._pool is None and now_s >= self._until:
            self.lose(f"the receiver did not answer within {self._path.limits.handshake_s:g} s")


class _Incoming(SocketLink):
    """From a sender."""

    ready = False

    def start(self, plan: Plan) -> CopyJob:
        raise AssertionError("nothing is pushed to a sender")


class SharedMemoryPath(Endpoint):
    """A `data_path.DataPath`."""

    kind = "shared-memory"

    def __init__(
        self, layout: PoolLayout, limits: Limits | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(layout, limits or Limits(), now_s)
        self._pool = SharedPool(layout)
        self._marks = self._pool.marks
        self._host = boot_id()
        self._worker = CopyWorker()
        self._server = listen(self.name, self.limits.max_peers)
        self._epoll = select.epoll()
        self._epoll.register(self._server, select.EPOLLIN)
        self._outgoing: dict[str, _Outgoing] = {}
        self._ending: list[_Outgoing] = []
        """Lost, but with copies that have not stopped yet: only then may the receiver see the connection end."""
        self._incoming: dict[str, _Incoming] = {}
        self._strangers: dict[int, tuple[SocketLink, float]] = {}
        """Connected, but have not said who they are, and until when they may."""
        self._links: dict[int, SocketLink] = {}
        """All that are polled, by descriptor."""
        self._description = encode(
            Description(
                VERSION, self.kind, self.name, self._host, layout, self._pool.marks_offset, self._pool.num_bytes
            )
        )

    @property
    def memory(self) -> memoryview:
        return self._pool.memory[: self.layout.num_bytes]

    @property
    def description(self) -> bytes:
        return self._description

    def copy(self, plan: Plan, pool: RemotePool, link: SocketLink) -> CopyJob:
        job = CopyJob(
            plan,
            self._pool.address,
            pool,
            lambda: link.send(plan.completion),
            max_bytes=self.limits.chunk_bytes,
            max_segments=self.limits.max_segments,
        )
        self._worker.add(job)
        return job

    def _link_to(self, remote: Description) -> Link:
        if remote.host != self._host:
            raise ConfigError(
                "the other rank runs on another host (or boot), whose memory cannot be shared: install the extra "
                "[nixl] on both and transfer over nixl"
            )
        link = self._outgoing.get(remote.name)
        if link is not None and link.lost is None:
            return link
        if link is None and len(self._outgoing) >= self.limits.max_peers:
            raise TransferFullError(f"linked to {len(self._outgoing)} receivers, as many as allowed")
        if link is not None:
            self._ending.append(link)
        link = self._outgoing[remote.name] = _Outgoing(remote, self, self._now_s())
        if link.connect():
            self._watch(link)
        return link

    @property
    def _senders(self) -> Mapping[str, Link]:
        return self._incoming

    def _reply(self, name: str, message: Message) -> None:
        link = self._outgoing.get(name)
        if link is not None and link.lost is None:
            link.send(message)

    def _receive(self) -> Iterable[tuple[str, Message]]:
        left = self.limits.messages_per_poll
        for fd, _ in self._epoll.poll(0):
            if fd == self._server.fileno():
                self._accept()
                continue
            link = self._links.get(fd)
            if link is None:
                continue
            for message in self._read(link, min(left, _MESSAGES_PER_LINK)):
                left -= 1
                yield link.name, message
            if left <= 0:
                return

    def _read(self, link: SocketLink, most: int) -> Iterator[Message]:
        if isinstance(link, _Outgoing) and not link.ready:
            link.take_welcome()
        elif link.fileno() in self._strangers:
            self._let_in(link)
        else:
            for _ in range(most):
                message = link.receive()
                if message is None:
                    break
                if link.lost is None:
                    yield message
        self.counters.bad_messages += link.bad_messages
        link.bad_messages = 0
        if link.silent:
            self._unwatch(link)  # its end would be reported at every poll

    def _accept(self) -> None:
        for _ in range(_MESSAGES_PER_LINK):
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            if len(self._strangers) + len(self._incoming) >= self.limits.max_peers or not same_user(connection):
                connection.close()
                continue
            link = _Incoming(connection, "")
            self._strangers[link.fileno()] = (link, self._now_s() + self.limits.handshake_s)
            self._watch(link)

    def _let_in(self, link: SocketLink) -> None:
        message = link.receive()
        if message is None and link.lost is None:
            return
        del self._strangers[link.fileno()]
        if not isinstance(message, Hello) or message.name in self._incoming:
            # A known name is one whose former connection has not ended: until then its writes may go on.
            self._forget(link)
            return
        link.name = message.name
        assert isinstance(link, _Incoming)
        try:
            socket.send_fds(link.connection, [encode(Welcome(VERSION, self.name))], [self._pool.fd])
        except OSError:
            self._forget(link)
            return
        self._incoming[link.name] = link

    def _maintain(self, now_s: float) -> None:
        for link, until in list(self._strangers.values()):
            if now_s >= until:
                del self._strangers[link.fileno()]
                self._forget(link)
        for link in list(self._links.values()):
            link.flush()
        for outgoing in self._outgoing.values():
            if outgoing.fileno() not in self._links and outgoing.connect():
                self._watch(outgoing)
            outgoing.give_up_if_late(now_s)
        self._forget_lost()

    def _forget_lost(self) -> None:
        for name, sender in list(self._incoming.items()):
            if sender.silent:  # receptions have been advanced since
                del self._incoming[name]
                self._lose(sender)
            elif sender.lost is not None:
                sender.hang_up()
        for receiver in [link for link in self._outgoing.values() if link.lost is not None]:
            del self._outgoing[receiver.name]
            self._ending.append(receiver)
        for receiver in [link for link in self._ending if not link.busy]:
            self._ending.remove(receiver)
            self._lose(receiver)

    def _lose(self, link: SocketLink) -> None:
        self.counters.lost_peers += 1
        self._forget(link)

    def _watch(self, link: SocketLink) -> None:
        self._links[link.fileno()] = link
        self._epoll.register(link.fileno(), select.EPOLLIN)

    def _unwatch(self, link: SocketLink) -> None:
        if self._links.pop(link.fileno(), None) is not None:
            self._epoll.unregister(link.fileno())

    def _forget(self, link: SocketLink) -> None:
        self._unwatch(link)
        link.close()

    def _free(self, *, quiescent: bool) -> None:
        self._worker.close(1.0)
        self._server.close()
        for stranger, _ in self._strangers.values():
            self._forget(stranger)
        for outgoing in [*self._outgoing.values(), *self._ending]:
            if not outgoing.busy:  # its end says that nothing is copied any more
                self._forget(outgoing)
        for link in list(self._links.values()):
            if isinstance(link, _Incoming):
                self._forget(link)
        self._epoll.close()
        self._pool.close()
