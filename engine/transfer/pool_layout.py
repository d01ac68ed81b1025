"""Where the KV blocks of a pool lie in memory, and which bytes of one rank's block are which of another rank's.

A block is in several pieces: in each layer one of keys and one of values, each in an array `[blocks, heads, …]`. A
rank of a pipeline has some of the layers and a tensor-parallel one some of the heads, so what a context rank hands to
a generation rank is the layers that both have, and of these the heads that both have. The layout of the CPU cache:
`cache_layout`; how bytes move: `data_path.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from atom.engine.errors import ConfigError

if TYPE_CHECKING:
    from atom.engine.executors.kv_cache import KVCacheShape  # brings torch along

__all__ = ["Piece", "PoolLayout", "Segment", "Slice", "cache_layout", "chunks", "common_slices"]

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
_ALIGNMENT = 64


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A contiguous array `[blocks, heads, bytes of a head]`: a part of every block."""

    layer: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    """Of the whole model, not of the stage."""
    kind: Annotated[str, msgspec.Meta(max_length=16)]
    """`k` or `v`; other caches have other words."""
    offset: _Size
    """Bytes from the start of the pool's memory."""
    first_head: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    """Of the whole model, not of the rank."""
    num_heads: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    head_bytes: _Count

    @property
    def block_bytes(self) -> int:
        return self.num_heads * self.head_bytes


class PoolLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A pool of blocks."""

    num_blocks: _Count
    format: Annotated[str, msgspec.Meta(max_length=128)]
    """Whatever must be the same for one rank's bytes to mean the same to another: type, tokens per block, order."""
    pieces: Annotated[list[Piece], msgspec.Meta(min_length=1, max_length=4096)]

    @property
    def num_bytes(self) -> int:
        """Memory that holds all of it."""
        return max(piece.offset + self.num_blocks * piece.block_bytes for piece in self.pieces)

    def validate(self) -> None:
        """ConfigError when pieces share bytes, or two are the same part of a block."""
        seen = {(piece.layer, piece.kind) for piece in self.pieces}
        if len(seen) != len(self.pieces):
            raise ConfigError("a pool layout names the same layer and kind twice")
        end = 0
        for piece in sorted(self.pieces, key=lambda piece: piece.offset):
            if piece.offset < end:
                raise ConfigError(f"a pool layout's pieces overlap at byte {piece.offset}")
            end = piece.offset + self.num_blocks * piece.block_bytes


def cache_layout(shape: KVCacheShape, num_blocks: int, *, first_layer: int = 0, first_head: int = 0) -> PoolLayout:
    """The CPU cache of a rank whose part of the model begins at that layer and key/value head: per layer the keys
    `[b, g, k, s]`, then the values `[b, g, s, p]`."""
    pieces: list[Piece] = []
    offset = 0
    for layer in range(shape.num_layers):
        for kind, dim in (("k", shape.head_dim), ("v", shape.value_dim)):
            head_bytes = dim * shape.block_size * shape.dtype.itemsize
            pieces.append(Piece(first_layer + layer, kind, offset, first_head, shape.num_kv_heads, head_bytes))
            size = num_blocks * shape.num_kv_heads * head_bytes
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    name = str(shape.dtype).removeprefix("torch.")
    text = f"cpu {name} {shape.block_size} tokens k[{shape.head_dim},s] v[s,{shape.value_dim}]"
    return PoolLayout(num_blocks, text, pieces)


class Slice(NamedTuple):
    """Bytes that two layouts share in every block: block `b` has them at `offset + b · stride`."""

    source_offset: int
    source_stride: int
    destination_offset: int
    destination_stride: int
    length: int


def common_slices(source: PoolLayout, destination: PoolLayout) -> list[Slice]:
    """What `source` has of `destination`'s blocks; empty when they share no layer or head. ConfigError when the same
    layer lies differently in the two."""
    if source.format != destination.format:
        raise ConfigError(
            f"KV blocks differ: the context rank has '{source.format}', the generation rank '{destination.format}'; "
            "give both the same --block-size and cache dtype"
        )
    there = {(piece.layer, piece.kind): piece for piece in destination.pieces}
    slices: list[Slice] = []
    for piece in source.pieces:
        other = there.get((piece.layer, piece.kind))
        if other is None:
            continue
        if piece.head_bytes != other.head_bytes:
            raise ConfigError(
                f"layer {piece.layer} {piece.kind}: a head takes {piece.head_bytes} bytes of a block on the context "
                f"rank and {other.head_bytes} on the generation rank: they run different models"
            )
        first = max(piece.first_head, other.first_head)
        heads = min(piece.first_head + piece.num_heads, other.first_head + other.num_heads) - first
        if heads > 0:
            slices.append(
                Slice(
                    piece.offset + (first - piece.first_head) * piece.head_bytes,
                    piece.block_bytes,
                    other.offset + (first - other.first_head) * other.head_bytes,
                    other.block_bytes,
                    heads * piece.head_bytes,
                )
            )
    return slices


class Segment(NamedTuple):
    """Contiguous bytes to copy."""

    source: int
    destination: int
    length: int


def chunks(
    slices: Sequence[Slice],
    source_blocks: Sequence[int],
    destination_blocks: Sequence[int],
    *,
    max_bytes: int,
    max_segments: int,
) -> Iterator[list[Segment]]:
    """The copies in portions of at most so many bytes and segments. Neighbours on both sides become one segment."""
    chunk: list[Segment] = []
    size = 0
    for segment in _joined(slices, source_blocks, destination_blocks):
        source, destination, left = segment
        while left:
            length = min(left, max_bytes - size)
            chunk.append(Segment(source, destination, length))
            source, destination, left, size = source + length, destination + length, left - length, size + length
            if size == max_bytes or len(chunk) == max_segments:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def _joined(
    slices: Sequence[Slice], source_blocks: Sequence[int], destination_blocks: Sequence[int]
) -> Iterator[Segment]:
    for part in slices:
        whole = part.length == part.source_stride == part.destination_stride
        start = length = 0
        to = 0
        for from_block, to_block in zip(source_blocks, destination_blocks, strict=True):
            source = part.source_offset + from_block * part.source_stride
            destination = part.destination_offset + to_block * part.destination_stride
            if whole and length and source == start + length and destination == to + length:
                length += part.length
                continue
            if length:
                yield Segment(start, to, length)
            start, to, length = source, destination, part.length
        if length:
            yield Segment(start, to, length)
