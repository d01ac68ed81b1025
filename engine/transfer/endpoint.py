"""What all data paths have in common: bounds, rounds in flight, marks on blocks, and what messages mean. How bytes and
messages travel is the path's: `shared_memory_path.py`, `nixl_path.py`.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from atom.engine.errors import ConfigError
from atom.engine.transfer.back_off import BackOff
from atom.engine.transfer.data_messages import Description, Ended, Message, Revoke, ended, read_description, round_tag
from atom.engine.transfer.data_path import Limits, PathClosedError, PathCounters, TransferFullError
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.pool_layout import PoolLayout, Slice, common_slices
from atom.engine.transfer.push_state import Link, Plan, Push
from atom.engine.transfer.reception import Reception

__all__ = ["Endpoint", "boot_id", "marks_offset", "pool_bytes"]

_PAGE: Final = 4096
_MAX_KNOWN: Final = 1024
"""Descriptions whose decoding is remembered."""


def marks_offset(layout: PoolLayout) -> int:
    return -(-layout.num_bytes // _PAGE) * _PAGE


def pool_bytes(layout: PoolLayout) -> int:
    """A pool's memory: its blocks, and a mark for each."""
    return -(-(marks_offset(layout) + 8 * layout.num_blocks) // _PAGE) * _PAGE


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Endpoint(ABC):
    """A `data_path.DataPath` without its carrier."""

    kind: str

    def __init__(self, layout: PoolLayout, limits: Limits, now_s: Callable[[], float] = time.monotonic) -> None:
        layout.validate()
        self.layout = layout
        self.limits = limits
        self.name = secrets.token_hex(16)
        self.counters = PathCounters()
        self._now_s = now_s
        self._closed = False
        self._pushes: dict[tuple[str, Round], Push] = {}
        self._receptions: dict[Round, Reception] = {}
        self._blocks_in_use: dict[int, Round] = {}
        self._known: dict[bytes, tuple[Description, list[Slice]]] = {}
        self._marks: npt.NDArray[np.uint64]
        """One word per block, in memory that senders can read."""

    # What a path has to bring.

    @property
    @abstractmethod
    def memory(self) -> memoryview: ...

    @property
    @abstractmethod
    def description(self) -> bytes: ...

    @abstractmethod
    def _link_to(self, remote: Description) -> Link:
        """The link to that receiver; a new one where there is none or it is lost."""

    @property
    @abstractmethod
    def _senders(self) -> Mapping[str, Link]:
        """Those let in, until they are silent and nobody waits for them."""

    @abstractmethod
    def _receive(self) -> Iterable[tuple[str, Message]]:
        """What has arrived, at most `limits.messages_per_poll`, without the messages of the handshake."""

    @abstractmethod
    def _reply(self, name: str, message: Message) -> None:
        """To a receiver, if it is still linked."""

    @abstractmethod
    def _maintain(self, now_s: float) -> None:
        """Whatever a path does at every poll: accept, resend, give up, forget."""

    @abstractmethod
    def _free(self, *, quiescent: bool) -> None:
        """Close links; give memory back if nothing writes into it."""

    # The interface.

    def push(
        self,
        round_: Round,
        source_blocks: Sequence[int],
        remote: bytes,
        destination_blocks: Sequence[int],
        *,
        deadline_s: float,
    ) -> Push:
        self._check_open()
        description, slices = self._known_description(remote)
        _check_blocks(source_blocks, self.layout.num_blocks, "source")
        _check_blocks(destination_blocks, description.layout.num_blocks, "destination", unique=True)
        if len(source_blocks) != len(destination_blocks):
            raise ValueError(f"{len(source_blocks)} source blocks for {len(destination_blocks)} destination blocks")
        if (description.name, round_) in self._pushes:
            raise ValueError(f"{round_} is in flight to that rank already")
        if len(self._pushes) >= self.limits.max_transfers:
            raise TransferFullError(f"{len(self._pushes)} transfers are in flight, as many as allowed")
        plan = Plan(
            round_tag(round_),
            slices,
            tuple(source_blocks),
            tuple(destination_blocks),
            ended(round_, Outcome.COMPLETED),
        )
        link = self._link_to(description)
        push = Push(round_, link, plan, deadline_s=deadline_s, now_s=self._now_s(), poll=self.poll)
        self._pushes[description.name, round_] = push
        push.advance(self._now_s())
        return push

    def expect(self, round_: Round, blocks: Sequence[int], sources: Sequence[str], *, deadline_s: float) -> Reception:
        self._check_open()
        _check_blocks(blocks, self.layout.num_blocks, "destination", unique=True)
        if not sources or len(set(sources)) != len(sources):
            raise ValueError(f"{round_} needs at least one sender, each named once")
        if round_ in self._receptions:
            raise ValueError(f"{round_} is expected already")
        for block in blocks:
            if block in self._blocks_in_use:
                raise ValueError(f"block {block} still belongs to {self._blocks_in_use[block]}")
        if len(self._receptions) >= self.limits.max_receptions:
            raise TransferFullError(f"{len(self._receptions)} receptions are open, as many as allowed")
        self._blocks_in_use.update(dict.fromkeys(blocks, round_))
        self._marks[list(blocks)] = round_tag(round_)
        reception = Reception(
            round_,
            tuple(blocks),
            self._senders,
            sources,
            deadline_s=deadline_s,
            now_s=self._now_s(),
            poll=self.poll,
            forbid=self._forbid,
        )
        self._receptions[round_] = reception
        return reception

    def poll(self) -> None:
        if self._closed:
            return
        for name, message in self._receive():
            self._handle(name, message)
        now_s = self._now_s()
        for key, push in list(self._pushes.items()):
            push.advance(now_s)
            if push.quiescent:
                del self._pushes[key]
                self._count(push)
        for round_, reception in list(self._receptions.items()):
            reception.advance(now_s)
            if reception.quiescent:
                del self._receptions[round_]
                for block in reception.blocks:
                    del self._blocks_in_use[block]
                self.counters.received += reception.state.outcome is Outcome.COMPLETED
        self._maintain(now_s)

    def close(self, deadline_s: float = 5.0) -> bool:
        if self._closed:
            return True
        until, back_off = time.monotonic() + deadline_s, BackOff()
        handles: list[Push | Reception] = [*self._pushes.values(), *self._receptions.values()]
        for handle in handles:
            handle.cancel()
        self.poll()
        while (self._pushes or self._receptions) and time.monotonic() < until:
            back_off.pause()
            self.poll()
        quiescent = not self._pushes and not self._receptions
        self._closed = True
        self._free(quiescent=quiescent)
        return quiescent

    # Inside.

    def _handle(self, name: str, message: Message) -> None:
        if isinstance(message, Ended):
            reception = self._receptions.get(Round(message.request, message.epoch))
            if reception is None or not reception.source_ended(name, message.outcome, message.reason):
                self.counters.stale_notices += 1
        elif isinstance(message, Revoke):
            round_ = Round(message.request, message.epoch)
            push = self._pushes.get((name, round_))
            if push is not None:
                push.stop(Outcome.CANCELLED, "revoked by the receiver")
            else:
                self._reply(name, ended(round_, Outcome.CANCELLED, "not begun, or ended before"))
        else:
            self.counters.bad_messages += 1

    def _forbid(self, blocks: Sequence[int]) -> None:
        self._marks[list(blocks)] = 0

    def _count(self, push: Push) -> None:
        outcome = push.state.outcome
        self.counters.completed += outcome is Outcome.COMPLETED
        self.counters.failed += outcome is Outcome.FAILED
        self.counters.cancelled += outcome is Outcome.CANCELLED
        if outcome is Outcome.COMPLETED:
            self.counters.pushed_bytes += push.plan.num_bytes

    def _known_description(self, remote: bytes) -> tuple[Description, list[Slice]]:
        known = self._known.get(remote)
        if known is None:
            description = read_description(remote)
            if description.kind != self.kind:
                raise ConfigError(
                    f"the other instance moves KV blocks by {description.kind}, this one by {self.kind}: "
                    "give both the same way of transfer"
                )
            slices = common_slices(self.layout, description.layout)
            if not slices:
                raise ConfigError("the two ranks share no layer and head: nothing is to be transferred between them")
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[remote] = (description, slices)
        return known

    def _linked(self, name: str) -> bool:
        """Whether a push needs the link to that receiver."""
        return any(receiver == name for receiver, _ in self._pushes)

    def _check_open(self) -> None:
        if self._closed:
            raise PathClosedError("the data path is closed")


def _check_blocks(blocks: Sequence[int], num_blocks: int, which: str, *, unique: bool = False) -> None:
    if not blocks:
        raise ValueError(f"no {which} blocks")
    if min(blocks) < 0 or max(blocks) >= num_blocks:
        raise ValueError(f"{which} blocks {min(blocks)} to {max(blocks)}; the pool has 0 to {num_blocks - 1}")
    if unique and len(set(blocks)) != len(blocks):
        raise ValueError(f"a {which} block is named twice")
