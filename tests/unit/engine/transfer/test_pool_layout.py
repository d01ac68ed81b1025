"""Layouts of pools: which bytes two ranks share, checked against arrays that know what every byte is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.errors import ConfigError
from atom.engine.executors.kv_cache import KVCache, KVCacheShape
from atom.engine.transfer.data_messages import (
    VERSION,
    Description,
    decode_message,
    encode,
    ended,
    read_description,
    round_tag,
)
from atom.engine.transfer.endpoint import marks_offset, pool_bytes
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.pool_layout import Piece, PoolLayout, cache_layout, chunks, common_slices

HEAD_BYTES = 8
NAME = "0123456789abcdef" * 2


def layout(blocks: int, layers: range, heads: range) -> PoolLayout:
    pieces = []
    for index, (layer, kind) in enumerate((layer, kind) for layer in layers for kind in "kv"):
        offset = index * blocks * len(heads) * HEAD_BYTES
        pieces.append(Piece(layer, kind, offset, heads.start, len(heads), HEAD_BYTES))
    return PoolLayout(blocks, "test", pieces)


def arrays(pool: PoolLayout, memory: np.ndarray) -> dict[tuple[int, str, int], np.ndarray]:
    """(layer, kind, head) to its `[blocks, bytes]`."""
    found = {}
    for piece in pool.pieces:
        whole = memory[piece.offset :][: pool.num_blocks * piece.block_bytes]
        whole = whole.reshape(pool.num_blocks, piece.num_heads, piece.head_bytes)
        for head in range(piece.num_heads):
            found[piece.layer, piece.kind, piece.first_head + head] = whole[:, head]
    return found


@st.composite
def parts(draw: st.DrawFn) -> PoolLayout:
    first_layer, first_head = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    layers = range(first_layer, first_layer + draw(st.integers(1, 3)))
    heads = range(first_head, first_head + draw(st.integers(1, 4)))
    return layout(draw(st.integers(4, 9)), layers, heads)


@given(parts(), parts(), st.data())
def test_what_is_copied_is_what_both_have_and_nothing_else(
    source: PoolLayout, destination: PoolLayout, data: st.DataObject
) -> None:
    number = data.draw(st.integers(1, 4))
    from_blocks = data.draw(st.permutations(range(source.num_blocks)))[:number]
    to_blocks = data.draw(st.permutations(range(destination.num_blocks)))[:number]
    max_bytes, max_segments = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 8))
    theirs = np.arange(source.num_bytes) % 251 + 1
    mine = np.zeros(destination.num_bytes, dtype=theirs.dtype)
    for chunk in chunks(
        common_slices(source, destination), from_blocks, to_blocks, max_bytes=max_bytes, max_segments=max_segments
    ):
        assert 0 < sum(segment.length for segment in chunk) <= max_bytes
        assert len(chunk) <= max_segments
        for start, to, length in chunk:
            assert not mine[to : to + length].any()  # nothing twice
            mine[to : to + length] = theirs[start : start + length]
    theirs_by_part, wanted = arrays(source, theirs), np.zeros_like(mine)
    for part, array in arrays(destination, wanted).items():
        if part in theirs_by_part:
            array[list(to_blocks)] = theirs_by_part[part][list(from_blocks)]
    assert (mine == wanted).all()


def test_neighbouring_blocks_are_one_segment() -> None:
    pool = layout(8, range(1), range(2))
    (chunk,) = chunks(common_slices(pool, pool), [0, 1, 2, 5], [3, 4, 5, 6], max_bytes=1 << 20, max_segments=100)
    assert [segment.length for segment in chunk] == [3 * 16, 16] * 2


def test_a_cache_in_a_pool_is_read_and_written_as_one_of_its_own() -> None:
    shape = KVCacheShape(2, 3, 20, 4, torch.bfloat16)
    pool = cache_layout(shape, 5, first_layer=2)
    memory = bytearray(pool.num_bytes)
    shared, own = KVCache(shape, 5, (memoryview(memory), pool)), KVCache(shape, 5)
    slots, k, v = torch.tensor([0, 5, 6, 19]), torch.randn(4, 3, 20), torch.randn(4, 3, 20)
    for cache in (shared, own):
        cache.write(1, slots, k, v)
    assert all(torch.equal(one, other) for one, other in zip(shared.keys, own.keys, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(shared.values, own.values, strict=True))
    written = arrays(pool, np.frombuffer(memory, np.uint8))
    assert bytes(written[3, "v", 2][1]) == own.values[1][1, 2].contiguous().view(torch.uint8).numpy().tobytes()
    assert not written[2, "k", 0].any()


def test_pools_of_other_models_are_refused() -> None:
    shape = KVCacheShape(1, 2, 16, 4, torch.float32)
    mine = cache_layout(shape, 4)
    with pytest.raises(ConfigError, match="--block-size"):
        common_slices(mine, cache_layout(KVCacheShape(1, 2, 16, 8, torch.float32), 4))
    other = PoolLayout(4, mine.format, [Piece(0, "k", 0, 0, 2, 12)])
    with pytest.raises(ConfigError, match="different models"):
        common_slices(mine, other)
    with pytest.raises(ConfigError, match="overlap"):
        PoolLayout(4, "x", [Piece(0, "k", 0, 0, 1, 8), Piece(0, "v", 31, 0, 1, 8)]).validate()
    with pytest.raises(ConfigError, match="twice"):
        PoolLayout(4, "x", [Piece(0, "k", 0, 0, 1, 8), Piece(0, "k", 32, 0, 1, 8)]).validate()


def description(**changes: object) -> bytes:
    pool = layout(4, range(1), range(1))
    fields = {
        "version": VERSION,
        "kind": "shared-memory",
        "name": NAME,
        "host": "h",
        "layout": pool,
        "marks_offset": marks_offset(pool),
        "memory_bytes": pool_bytes(pool),
    } | changes
    return encode(Description(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"name": "../../x"},
        {"name": NAME + "\n"},
        {"marks_offset": 8},
        {"marks_offset": 4097},
        {"memory_bytes": 4096},
        {"memory_bytes": -1},
        {"layout": PoolLayout(0, "x", [Piece(0, "k", 0, 0, 1, 8)])},
        {"layout": PoolLayout(4, "x", [])},
        {"layout": PoolLayout(4, "x", [Piece(0, "k", -8, 0, 1, 8)])},
        {"layout": PoolLayout(1 << 31, "x", [Piece(0, "k", 0, 0, 1, 8)])},
        {"agent": bytes(1 << 19)},
    ],
)
def test_descriptions_that_describe_no_pool_are_refused(changes: dict[str, object]) -> None:
    assert read_description(description()).name == NAME
    with pytest.raises(ConfigError):
        read_description(description(**changes))


@given(st.binary(max_size=300))
def test_garbage_is_no_description_and_no_message(data: bytes) -> None:
    with pytest.raises(ConfigError):
        read_description(data)
    message = decode_message(data)
    assert message is None or decode_message(encode(message)) == message


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.sampled_from(Outcome), st.text(max_size=900))
def test_notices_come_back_and_are_bounded(request: int, epoch: int, outcome: Outcome, reason: str) -> None:
    message = ended(Round(request, epoch), outcome, reason)
    data = encode(message)
    assert decode_message(data) == message
    assert len(data) < 2000
    assert round_tag(Round(request, epoch)) not in (0, round_tag(Round(request, epoch ^ 1)))
