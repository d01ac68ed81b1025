"""Moving KV blocks from a context rank's pool into a generation rank's: the interface.

Every rank has one `DataPath`, with one pool that is registered once. The receiver allocates blocks, calls `expect`,
and only then tells the sender (by the instances' control plane) its description, the round and the blocks; the sender
calls `push`. Both get a handle of the same shape:

    state       in flight, completed, failed or cancelled, and why. Sender and receiver of a part see the same end,
                unless a deadline passed or the other side died on the way
    cancel()    whether the wish was taken; says nothing about bytes
    quiescent   no byte of the blocks is read or written any more on behalf of this round. Only now may blocks be used
                for something else. A handle can have failed (deadline, lost peer) long before it is quiescent

What keeps an old transfer away from a reused id or block: a receiver marks the blocks of a round in its pool with the
round's tag, a sender looks at the marks before it writes, and marks are taken away as soon as the round ends. Notices
carry request and epoch; those of a round that is not expected are dropped and counted.

`push_state.py` and `reception.py` have the two handles, `endpoint.py` what paths have in common,
`shared_memory_path.py` and `nixl_path.py` the paths, `choose_path.py` which one is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol

from atom.engine.errors import AtomEngineError
from atom.engine.transfer.outcome import Outcome, Round

__all__ = [
    "DataPath",
    "Handle",
    "Limits",
    "PathClosedError",
    "PathCounters",
    "Progress",
    "TransferFullError",
    "TransferState",
]


class PathClosedError(AtomEngineError):
    """Used after `close`."""


class TransferFullError(AtomEngineError):
    """As many transfers as allowed are in flight; nothing was begun. Try again when one is quiescent."""


class Progress(Enum):
    IN_FLIGHT = "in flight"
    DONE = "done"
    FAILED = "failed"


class TransferState(NamedTuple):
    progress: Progress
    reason: str = ""
    """Why it failed."""
    outcome: Outcome | None = None
    """The vote that follows from it. None while in flight."""


IN_FLIGHT: Final = TransferState(Progress.IN_FLIGHT)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one data path."""

    max_transfers: int = 64
    """Pushes that may be not yet quiescent."""
    max_receptions: int = 1024
    max_peers: int = 256
    chunk_bytes: int = 4 << 20
    """A cancellation takes effect after at most so many bytes."""
    max_segments: int = 1024
    """Separate pieces of memory in one chunk."""
    messages_per_poll: int = 256
    handshake_s: float = 10.0
    lost_grace_s: float = 30.0
    """How long a peer that cannot be reached over a network, but may live, is thought able to write."""

    def __post_init__(self) -> None:
        for name in (
            "max_transfers",
            "max_receptions",
            "max_peers",
            "chunk_bytes",
            "max_segments",
            "messages_per_poll",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(slots=True)
class PathCounters:
    """Totals since the start."""

    pushed_bytes: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    received: int = 0
    stale_notices: int = 0
    """Ends of rounds that nobody expects (any more)."""
    bad_messages: int = 0
    lost_peers: int = 0


class Handle(Protocol):
    """One side's view of a round: a push, or a reception."""

    @property
    def round(self) -> Round: ...

    @property
    def state(self) -> TransferState:
        """As of the last poll."""

    @property
    def quiescent(self) -> bool: ...

    def poll(self) -> TransferState:
        """Poll the path and say the state. Never waits."""

    def cancel(self) -> bool:
        """Begin to stop. False when it has ended already. May be repeated."""


class DataPath(Protocol):
    """One rank's end. One thread uses it; nothing but `close` waits."""

    @property
    def kind(self) -> str:
        """`shared-memory` or `nixl`."""

    @property
    def name(self) -> str:
        """Random; unique among all ranks."""

    @property
    def memory(self) -> memoryview:
        """The pool's bytes, zero at first, laid out as its layout says."""

    @property
    def description(self) -> bytes:
        """What another process needs to push into this pool."""

    @property
    def counters(self) -> PathCounters: ...

    def push(
        self,
        round_: Round,
        source_blocks: Sequence[int],
        remote: bytes,
        destination_blocks: Sequence[int],
        *,
        deadline_s: float,
    ) -> Handle:
        """Begin to copy blocks into the pool that `remote` describes, `source_blocks[i]` to `destination_blocks[i]`:
        the layers and heads that both have. ConfigError when the pools do not fit together, ValueError for blocks that
        do not exist, TransferFullError when too many are in flight."""

    def expect(self, round_: Round, blocks: Sequence[int], sources: Sequence[str], *, deadline_s: float) -> Handle:
        """Allow the named ranks to write these blocks in this round; complete when all have said that they did."""

    def poll(self) -> None:
        """Move on whatever can move, a bounded amount of work."""

    def close(self, deadline_s: float = 5.0) -> bool:
        """Cancel everything, wait for quiescence, free. False when the deadline passed first: something may still
        write, and the memory stays until the process ends."""
