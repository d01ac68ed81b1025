"""Block tables, prefix hits and what may be published when."""

from __future__ import annotations

from array import array

import pytest

from atom.engine.kv_cache_manager import KVCacheManager, hash_block
from atom.engine.sampling_params import SamplingParams
from atom.engine.sequence import Sequence

BLOCK = 4


def sequence(seq_id: int, tokens: list[int], **params: object) -> Sequence:
    return Sequence(
        seq_id,
        f"r{seq_id}",
        array("i", tokens),
        SamplingParams(**params),  # type: ignore[arg-type]
        0,
        stop_ids=frozenset(),
        max_total=1000,
    )


def computed(kv: KVCacheManager, seq: Sequence) -> Sequence:
    """`seq` admitted, computed as a whole, and published."""
    assert kv.admit(seq, kv.get_computed_blocks(seq), len(seq.tokens), 0)
    kv.publish(seq, len(seq.tokens))
    return seq


@pytest.fixture
def kv() -> KVCacheManager:
    return KVCacheManager(16, BLOCK, enable_prefix_caching=True)


def test_a_hash_covers_the_whole_prefix() -> None:
    tokens = array("i", [1, 2, 3, 4]).tobytes()
    assert hash_block(bytes(32), tokens) != hash_block(hash_block(bytes(32), tokens), tokens)
    assert hash_block(bytes(32), tokens) != hash_block(bytes(32), array("i", [1, 2, 4, 3]).tobytes())


def test_hits_end_at_the_first_difference_and_at_full_blocks(kv: KVCacheManager) -> None:
    first = computed(kv, sequence(0, list(range(11))))
    assert kv.get_computed_blocks(sequence(1, list(range(11)))) == first.block_ids[:2]
    assert kv.get_computed_blocks(sequence(2, [*range(7), 99, *range(8, 20)])) == first.block_ids[:1]
    assert kv.get_computed_blocks(sequence(3, [99, *range(1, 11)])) == []


def test_a_block_that_is_equal_but_at_another_place_is_no_hit(kv: KVCacheManager) -> None:
    computed(kv, sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert kv.get_computed_blocks(sequence(1, [5, 6, 7, 8, 1, 2, 3, 4, 9])) == []


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_prompt_cached_as_a_whole_still_computes_a_token(kv: KVCacheManager, length: int) -> None:
    first = computed(kv, sequence(0, list(range(length))))
    again = sequence(1, list(range(length)))
    hits = kv.get_computed_blocks(again)
    assert hits == first.block_ids[: length // BLOCK - 1]
    assert kv.admit(again, hits, length, 0)
    assert len(again.block_ids) == length // BLOCK
    assert again.block_ids[-1] != first.block_ids[-1], "the last block is written again, so it must be its own"


def test_no_hits_when_prompt_logprobs_are_wanted(kv: KVCacheManager) -> None:
    computed(kv, sequence(0, list(range(9))))
    assert kv.get_computed_blocks(sequence(1, list(range(9)), prompt_logprobs=0)) == []


def test_nothing_is_found_or_published_when_switched_off() -> None:
    kv = KVCacheManager(16, BLOCK, enable_prefix_caching=False)
    first = computed(kv, sequence(0, list(range(9))))
    assert kv.get_computed_blocks(sequence(1, list(range(9)))) == []
    kv.free(first)
    assert kv.pool.check_integrity().cached == 0


def test_admission_counts_free_hits_once_and_changes_nothing_when_it_refuses() -> None:
    kv = KVCacheManager(4, BLOCK, enable_prefix_caching=True)
    first = computed(kv, sequence(0, list(range(8))))
    kv.free(first)
    again = sequence(1, [*range(8), *range(50, 59)])  # 5 blocks of 4, two of them hits
    hits = kv.get_computed_blocks(again)
    assert len(hits) == 2
    assert not kv.admit(again, hits, 17, 0)
    assert again.block_ids == []
    assert kv.pool.check_integrity().used == 0
    shorter = sequence(2, [*range(8), *range(50, 58)])
    assert not kv.admit(shorter, hits, 16, 1), "the reserve"
    assert kv.admit(shorter, hits, 16, 0)
    assert shorter.block_ids[:2] == hits
    assert kv.pool.counts().used == 4


def test_admission_by_a_first_chunk_wants_room_for_the_whole_prompt() -> None:
    kv = KVCacheManager(4, BLOCK, enable_prefix_caching=True)
    assert not kv.admit(sequence(0, list(range(17))), [], 4, 0)
    fits = sequence(1, list(range(16)))
    assert kv.admit(fits, [], 4, 0)
    assert len(fits.block_ids) == 1


def test_slots_grow_by_what_is_missing_and_refuse_without_change(kv: KVCacheManager) -> None:
    seq = sequence(0, list(range(3)))
    assert kv.admit(seq, [], 3, 0)
    assert kv.allocate_slots(seq, 4) == []
    assert kv.allocate_slots(seq, 5) == [1]
    assert kv.allocate_slots(seq, 16 * BLOCK + 1) is None
    assert len(seq.block_ids) == 2
    assert len(kv.allocate_slots(seq, 16 * BLOCK) or []) == 14


def test_only_full_computed_blocks_are_published(kv: KVCacheManager) -> None:
    seq = sequence(0, list(range(12)))
    assert kv.admit(seq, [], 12, 0)
    assert kv.publish(seq, 3) == 4
    assert kv.publish(seq, 7) == 8
    assert len(kv.get_computed_blocks(sequence(1, list(range(12))))) == 1
    assert kv.publish(seq, 8) == 12
    assert len(kv.get_computed_blocks(sequence(1, list(range(12))))) == 2


def test_freed_prefixes_stay_until_their_blocks_are_needed_tail_first() -> None:
    kv = KVCacheManager(4, BLOCK, enable_prefix_caching=True)
    kv.free(computed(kv, sequence(0, list(range(16)))))
    other = sequence(1, list(range(100, 105)))
    assert kv.admit(other, [], 5, 0)
    assert len(kv.get_computed_blocks(sequence(2, list(range(17))))) == 2


def test_a_reset_forgets_contents_but_not_owners(kv: KVCacheManager) -> None:
    seq = computed(kv, sequence(0, list(range(9))))
    assert kv.reset_prefix_cache() == 2
    assert kv.get_computed_blocks(sequence(1, list(range(9)))) == []
    kv.free(seq)
    assert kv.pool.check_integrity().vacant == 16
