"""KV blocks by NIXL over UCX: between hosts, or between processes of one.

Without NIXL's progress thread, which takes a core for itself even when idle: everything moves when the path is polled.
A chunk that was posted is never released before it has ended, since a released one may still be under way; so a copy
stops between chunks. `UCX_TLS` and `UCX_NET_DEVICES` choose the transport as in any program that uses UCX.

Agents' metadata are opaque bytes that NIXL itself decodes: descriptions must come from the instances' control plane.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Final

import numpy as np

from atom.engine.errors import ConfigError
from atom.engine.transfer.data_messages import (
    VERSION,
    Description,
    Hello,
    Message,
    Ping,
    Welcome,
    decode_message,
    encode,
)
from atom.engine.transfer.data_path import Limits
from atom.engine.transfer.endpoint import Endpoint, marks_offset, pool_bytes
from atom.engine.transfer.nixl_copy import NixlJob
from atom.engine.transfer.pool_layout import PoolLayout
from atom.engine.transfer.push_state import Link, Plan

__all__ = ["NixlPath", "find_nixl"]

_MODULES: Final = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_PING_S: Final = 0.5
_MAX_UNREAD: Final = 1 << 16


def find_nixl() -> ModuleType | str:
    """The API's module, or why there is none."""
    reason = "NIXL is not installed"
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                reason = f"NIXL cannot be imported: {error}"
        except ImportError as error:
            reason = f"NIXL cannot be imported: {error}"
    return reason


class NixlLink:
    """To one peer, whichever side pushes."""

    def __init__(self, path: NixlPath, name: str, now_s: float) -> None:
        self.name = name
        self.ready = False
        self.lost: str | None = None
        self.remote: Description | None = None
        self.scratch: NixlScratch | None = None
        self.jobs: list[NixlJob] = []
        self.until = now_s + path.limits.handshake_s
        self.next_ping_s = now_s
        self._path = path
        self._lost_at = 0.0

    @property
    def silent(self) -> bool:
        return self.lost is not None and self._path.now_s() >= self._lost_at + self._path.limits.lost_grace_s

    @property
    def busy(self) -> bool:
        self.jobs = [job for job in self.jobs if not job.quiescent]
        for job in self.jobs:
            job.advance()
        return bool(self.jobs)

    def lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost, self._lost_at = reason, self._path.now_s()

    def send(self, message: Message) -> None:
        if self.lost is None:
            try:
                self._path.agent.send_notif(self.name, encode(message))
            except Exception as error:  # the binding's exceptions have no root of their own
                self.lose(f"the other rank cannot be reached: {error}")

    def start(self, plan: Plan) -> NixlJob:
        assert self.remote is not None
        if self.scratch is None:
            self.scratch = NixlScratch(self._path.agent, self.remote.layout.num_blocks)
        job = NixlJob(
            self._path.agent,
            self,
            plan,
            self._path.base_address,
            self.remote,
            self.scratch,
            max_bytes=self._path.limits.chunk_bytes,
            max_segments=self._path.limits.max_segments,
        )
        self.jobs = [job, *(job for job in self.jobs if not job.quiescent)]
        return job


class NixlScratch:
    """Where a receiver's marks are read to. One job at a time."""

    def __init__(self, agent: Any, num_blocks: int) -> None:
        self._agent = agent
        self.words = np.zeros(num_blocks, np.uint64)
        self.address = int(self.words.ctypes.data)
        self.owner: object | None = None
        self._registered = agent.register_memory([(self.address, self.words.nbytes, 0, "")], "DRAM")

    def free(self) -> None:
        self._agent.deregister_memory(self._registered)


class NixlPath(Endpoint):
    """A `data_path.DataPath`."""

    kind = "nixl"

    def __init__(
        self, layout: PoolLayout, limits: Limits | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        found = find_nixl()
        if isinstance(found, str):
            raise ConfigError(f"KV transfer over nixl: {found}: pip install 'atom-serving[nixl]'")
        super().__init__(layout, limits or Limits(), now_s)
        self.now_s = now_s
        size = pool_bytes(layout)
        self._map = mmap.mmap(-1, size)
        whole = np.frombuffer(self._map, np.uint8)
        self._marks = whole[marks_offset(layout) :][: 8 * layout.num_blocks].view(np.uint64)
        self.base_address = int(whole.ctypes.data)
        try:
            self.agent: Any = found.nixl_agent(
                self.name, found.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            )
            self._registered = self.agent.register_memory([(self.base_address, size, 0, "")], "DRAM")
            self._metadata: bytes = self.agent.get_agent_metadata()
        except Exception as error:
            raise ConfigError(f"KV transfer over nixl: NIXL does not start with UCX: {error}") from None
        self._peers: dict[str, NixlLink] = {}
        self._let_in: dict[str, NixlLink] = {}
        self._unread: deque[tuple[str, bytes]] = deque()
        self._description = encode(
            Description(
                VERSION,
                self.kind,
                self.name,
                "",
                layout,
                marks_offset(layout),
                size,
                self.base_address,
                self._metadata,
            )
        )

    @property
    def memory(self) -> memoryview:
        return memoryview(self._map)[: self.layout.num_bytes]

    @property
    def description(self) -> bytes:
        return self._description

    def _link_to(self, remote: Description) -> Link:
        link = self._peer(remote.name, remote.agent)
        if isinstance(link, str):
            return _Refused(remote.name, link)
        if link.remote is None:
            link.remote = remote
            link.until = self._now_s() + self.limits.handshake_s
            link.send(Hello(VERSION, self.name, self._metadata))
        return link

    def _peer(self, name: str, agent: bytes) -> NixlLink | str:
        """The link to that agent, a new one if it is unknown, or why there is none."""
        link = self._peers.get(name)
        if link is not None and link.lost is not None:
            return f"the other rank is lost ({link.lost}), and that its former copies have ended is not known yet"
        if link is not None:
            return link
        if len(self._peers) >= self.limits.max_peers:
            return f"linked to {len(self._peers)} ranks, as many as allowed"
        try:
            known = _text(self.agent.add_remote_agent(agent))
        except Exception as error:
            return f"the other rank is gone, or its NIXL cannot be reached: {error}"
        if known != name:
            if known not in self._peers:
                with contextlib.suppress(Exception):
                    self.agent.remove_remote_agent(known)
            return "the other rank's NIXL agent has another name than its description"
        link = self._peers[name] = NixlLink(self, name, self._now_s())
        return link

    @property
    def _senders(self) -> Mapping[str, Link]:
        return self._let_in

    def _reply(self, name: str, message: Message) -> None:
        link = self._peers.get(name)
        if link is not None:
            link.send(message)

    def _receive(self) -> Iterable[tuple[str, Message]]:
        for name, notices in self.agent.get_new_notifs().items():
            self._unread.extend((_text(name), bytes(notice)) for notice in notices)
        for _ in range(min(len(self._unread), self.limits.messages_per_poll)):
            name, data = self._unread.popleft()
            message = decode_message(data)
            if message is None:
                self.counters.bad_messages += 1
            elif isinstance(message, Hello):
                self._meet(name, message)
            elif isinstance(message, Welcome):
                link = self._peers.get(name)
                if link is not None and link.remote is not None and link.lost is None:
                    link.ready = True
            elif not isinstance(message, Ping):
                yield name, message
        while len(self._unread) > _MAX_UNREAD:
            self._unread.pop()
            self.counters.bad_messages += 1

    def _meet(self, name: str, hello: Hello) -> None:
        """Let a sender in, unless it is one whose former writes may still go on."""
        link = self._peer(name, hello.agent) if hello.name == name else "an agent under another's name"
        if isinstance(link, str):
            self.counters.bad_messages += 1
            return
        self._let_in[name] = link
        link.send(Welcome(VERSION, self.name))

    def _maintain(self, now_s: float) -> None:
        waited_for = any(not reception.quiescent for reception in self._receptions.values())
        for link in list(self._peers.values()):
            if link.remote is not None and not link.ready and now_s >= link.until:
                link.lose(f"the receiver did not answer within {self.limits.handshake_s:g} s")
            if waited_for and link.name in self._let_in and now_s >= link.next_ping_s:
                link.next_ping_s = now_s + _PING_S
                link.send(Ping())
            if link.lost is not None and not link.busy and (link.silent or link.name not in self._let_in):
                self._forget(link)

    def _forget(self, link: NixlLink) -> None:
        self.counters.lost_peers += 1
        del self._peers[link.name]
        self._let_in.pop(link.name, None)
        self._drop(link)

    def _drop(self, link: NixlLink) -> None:
        try:
            if link.scratch is not None:
                link.scratch.free()
            self.agent.remove_remote_agent(link.name)
        except Exception as error:
            link.lose(f"NIXL: {error}")  # of a link that nobody looks at any more

    def _free(self, *, quiescent: bool) -> None:
        if not quiescent:
            return  # something may still write: the memory stays until the process ends
        for link in self._peers.values():
            self._drop(link)
        self.agent.deregister_memory(self._registered)
        del self.agent


class _Refused:
    """A link that is lost from the start."""

    ready = False
    silent = False

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.lost: str | None = reason

    def send(self, message: Message) -> None:
        """Nobody is there."""

    def start(self, plan: Plan) -> NixlJob:
        raise AssertionError("a lost link starts nothing")


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
