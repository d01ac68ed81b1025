"""What data paths tell each other: descriptions of pools, and messages about rounds. Another process wrote them, so
they are decoded into these structs and nothing else, and bounded.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated, Final

import msgspec

from atom.engine.errors import ConfigError
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.pool_layout import PoolLayout

__all__ = [
    "MAX_MESSAGE",
    "VERSION",
    "Description",
    "Ended",
    "Hello",
    "Message",
    "Ping",
    "Revoke",
    "Welcome",
    "decode_message",
    "encode",
    "ended",
    "read_description",
    "round_tag",
]

VERSION: Final = 1
MAX_DESCRIPTION: Final = 1 << 20
MAX_MESSAGE: Final = 1 << 16
MAX_REASON: Final = 300
_ROUND: Final = struct.Struct("<QQ")

_Name = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Unsigned = Annotated[int, msgspec.Meta(ge=0)]
"""At most 64 bits: msgpack has no more."""


class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A pool, for those who push into it."""

    version: int
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    name: _Name
    host: Annotated[str, msgspec.Meta(max_length=128)]
    """Boot id: memory is shared only within one boot of one machine."""
    layout: PoolLayout
    marks_offset: _Word
    """Behind the blocks: one 8-byte word for each, the tag of the round that may write it, 0: none."""
    memory_bytes: _Word
    base_address: _Word = 0
    """NIXL: where the memory lies in its process."""
    agent: Annotated[bytes, msgspec.Meta(max_length=1 << 18)] = b""
    """NIXL: its agent's metadata."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello", forbid_unknown_fields=True):
    """Sender to receiver, first."""

    version: int
    name: _Name
    agent: Annotated[bytes, msgspec.Meta(max_length=1 << 15)] = b""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome", forbid_unknown_fields=True):
    """Receiver to sender: from now on it may write where it finds its tag. Shared memory: comes with the pool."""

    version: int
    name: _Name


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended", forbid_unknown_fields=True):
    """Sender to receiver: this sender touches no block of the round any more."""

    request: _Unsigned
    epoch: _Unsigned
    outcome: Outcome
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


class Revoke(msgspec.Struct, frozen=True, array_like=True, tag="revoke", forbid_unknown_fields=True):
    """Receiver to sender: stop, and say Ended."""

    request: _Unsigned
    epoch: _Unsigned


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping", forbid_unknown_fields=True):
    """Says nothing; that it cannot be sent says that the peer is gone."""


Message = Hello | Welcome | Ended | Revoke | Ping

_ENCODER: Final = msgspec.msgpack.Encoder()
_MESSAGES: Final = msgspec.msgpack.Decoder(Message)
_DESCRIPTIONS: Final = msgspec.msgpack.Decoder(Description)


def encode(message: Message | Description) -> bytes:
    return _ENCODER.encode(message)


def decode_message(data: bytes) -> Message | None:
    """None for bytes that are no message of this version."""
    if len(data) > MAX_MESSAGE:
        return None
    try:
        message: Message = _MESSAGES.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if isinstance(message, Hello | Welcome) and message.version != VERSION:
        return None
    return message


def read_description(data: bytes) -> Description:
    """ConfigError for bytes that describe no pool, or one whose parts do not fit each other."""
    if len(data) > MAX_DESCRIPTION:
        raise ConfigError(f"a pool description of {len(data)} bytes; they have at most {MAX_DESCRIPTION}")
    try:
        description: Description = _DESCRIPTIONS.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"not a pool description: {error}") from None
    if description.version != VERSION:
        raise ConfigError(
            f"a pool description of version {description.version}; this is {VERSION}: both instances need the same atom"
        )
    layout = description.layout
    layout.validate()
    if layout.num_bytes > description.marks_offset or description.marks_offset % 8:
        raise ConfigError("a pool description whose marks lie among its blocks")
    if description.marks_offset + 8 * layout.num_blocks > description.memory_bytes:
        raise ConfigError(f"a pool description of more than its {description.memory_bytes} bytes of memory")
    return description


def ended(round_: Round, outcome: Outcome, reason: str = "") -> Ended:
    return Ended(round_.request, round_.epoch, outcome, reason[:MAX_REASON])


def round_tag(round_: Round) -> int:
    """One word that stands for a round; one word because it is read and written without tearing. Never 0."""
    digest = hashlib.blake2b(_ROUND.pack(*round_), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
