"""What all ranks must have in common before the first vote, agreed on in one exchange that everybody completes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from atom.engine.transfer.agreement import Mode
from atom.engine.transfer.errors import ModeMismatchError
from atom.engine.transfer.topology import Topology
from atom.engine.transfer.transport import Collective
from atom.engine.transfer.wire import VERSION

__all__ = ["Descriptor", "agree_on_start"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Descriptor:
    """How this rank is about to run."""

    mode: Mode
    cancel_in_flight: bool
    topology: str
    """Digest of the tree: who reports to whom."""
    version: int = VERSION

    @classmethod
    def of(cls, mode: Mode, *, cancel_in_flight: bool, topology: Topology) -> Descriptor:
        digest = hashlib.sha256(repr(topology.parents).encode()).hexdigest()[:16]
        return cls(mode=mode, cancel_in_flight=cancel_in_flight, topology=digest)


def agree_on_start(collective: Collective, descriptor: Descriptor) -> None:
    """ModeMismatchError with the same text on every rank if any of them differs. All ranks enter."""
    mine = json.dumps(asdict(descriptor), sort_keys=True).encode()
    said = collective.allgather(mine)
    by_text: dict[bytes, list[int]] = {}
    for rank, text in enumerate(said):
        by_text.setdefault(text, []).append(rank)
    if len(by_text) > 1:
        parts = (f"ranks {', '.join(map(str, ranks))}: {_readable(text)}" for text, ranks in by_text.items())
        raise ModeMismatchError(f"ranks would not run the same agreement: {'; '.join(parts)}")


def _readable(text: bytes) -> str:
    return text[:300].decode("ascii", errors="replace")
