"""The packets of the asynchronous agreement: 32 bytes each, little-endian, fixed.

Events go from a rank towards the coordinator: VOTE, TIMEOUT, CLOSE, FAIL. Updates come from there: TIMEOUT, COMMIT,
CLOSE, FAIL. A FAIL has its text behind the 32 bytes, at most `MAX_TEXT` of it.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from atom.engine.transfer.errors import ProtocolError
from atom.engine.transfer.outcome import Outcome, Round

__all__ = ["HEAD_BYTES", "MAX_PACKET", "VERSION", "Kind", "Packet", "Stream", "pack", "unpack"]

VERSION: Final = 1
MAX_TEXT: Final = 480
_HEAD: Final = struct.Struct("<BBBxIQQQ")
"""version, kind, outcome (0: none), padding, source rank, request, epoch, commit sequence."""
HEAD_BYTES: Final = _HEAD.size
MAX_PACKET: Final = HEAD_BYTES + MAX_TEXT


class Stream(IntEnum):
    """Two FIFO streams between a rank and its coordinator."""

    EVENTS = 0
    UPDATES = 1


class Kind(IntEnum):
    VOTE = 1
    TIMEOUT = 2
    COMMIT = 3
    CLOSE = 4
    FAIL = 5


class Packet(NamedTuple):
    kind: Kind
    source: int
    round: Round = Round(0, 0)
    outcome: Outcome | None = None
    sequence: int = 0
    text: str = ""


_KINDS: Final = {int(kind): kind for kind in Kind}
_OUTCOMES: Final = {int(outcome): outcome for outcome in Outcome}
_WITH_OUTCOME: Final = frozenset({Kind.VOTE, Kind.COMMIT})


def pack(packet: Packet) -> bytes:
    request, epoch = packet.round
    head = _HEAD.pack(VERSION, packet.kind, packet.outcome or 0, packet.source, request, epoch, packet.sequence)
    return head + packet.text.encode()[:MAX_TEXT] if packet.text else head


def unpack(data: bytes) -> Packet:
    """ProtocolError for anything that `pack` of this version does not make."""
    if not _HEAD.size <= len(data) <= MAX_PACKET:
        raise ProtocolError(f"a packet of {len(data)} bytes; they have {_HEAD.size} to {MAX_PACKET}")
    version, kind_code, outcome_code, source, request, epoch, sequence = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ProtocolError(f"a packet of protocol version {version}; this is {VERSION}")
    kind, outcome = _KINDS.get(kind_code), _OUTCOMES.get(outcome_code)
    if kind is None:
        raise ProtocolError(f"a packet of unknown kind {kind_code} from rank {source}")
    if (outcome is None) is (kind in _WITH_OUTCOME):
        raise ProtocolError(f"a {kind.name} from rank {source} with outcome code {outcome_code}")
    if len(data) > _HEAD.size and kind is not Kind.FAIL:
        raise ProtocolError(f"a {kind.name} from rank {source} of {len(data)} bytes")
    text = data[_HEAD.size :].decode(errors="replace") if kind is Kind.FAIL else ""
    return Packet(kind, source, Round(request, epoch), outcome, sequence, text)
