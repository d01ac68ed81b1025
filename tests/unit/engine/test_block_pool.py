"""The block pool against a plain model of it, and its cases by name."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atom.engine.block_pool import BlockCounts, BlockPool


def test_allocates_each_block_once_and_refuses_without_change_when_short() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.counts() == BlockCounts(4, 3, 0, 1)
    assert pool.allocate(1) == [3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_release_makes_blocks_vacant_or_cached() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    assert pool.publish(blocks[0], b"a")
    pool.release(blocks)
    assert pool.counts() == BlockCounts(4, 0, 1, 3)
    assert pool.lookup(b"a") == blocks[0]


def test_vacant_blocks_go_first_then_the_longest_released_and_of_one_prefix_its_tail() -> None:
    pool = BlockPool(6)
    old = pool.allocate(2)
    new = pool.allocate(2)
    assert old is not None
    assert new is not None
    for block, digest in zip(old + new, (b"o0", b"o1", b"n0", b"n1"), strict=True):
        pool.publish(block, digest)
    pool.release(old)
    pool.release(new)
    taken = pool.allocate(2)
    assert taken is not None
    assert not set(taken) & set(old + new), "vacant blocks first"
    evicted = []
    for _ in range(4):
        before = {digest for digest in (b"o0", b"o1", b"n0", b"n1") if pool.lookup(digest) is not None}
        assert pool.allocate(1) is not None
        after = {digest for digest in before if pool.lookup(digest) is not None}
        evicted += list(before - after)
    assert evicted == [b"o1", b"o0", b"n1", b"n0"]


def test_a_hit_takes_a_cached_block_out_of_the_middle_and_renews_it() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, digest in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, digest)
        pool.release([block])
    pool.acquire([blocks[1]])
    assert pool.counts() == BlockCounts(3, 1, 2, 0)
    pool.release([blocks[1]])
    assert set(pool.allocate(2) or ()) == {blocks[0], blocks[2]}
    assert pool.lookup(b"b") == blocks[1]
    assert pool.lookup(b"a") is None
    assert pool.lookup(b"c") is None


def test_equal_contents_are_published_once_and_survive_their_first_owner() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    assert pool.publish(blocks[0], b"same")
    assert not pool.publish(blocks[1], b"same")
    pool.release([blocks[1]])
    assert pool.counts() == BlockCounts(2, 1, 0, 1)
    pool.release([blocks[0]])
    assert pool.counts() == BlockCounts(2, 0, 1, 1)
    pool.check_integrity()


def test_forgetting_all_leaves_used_blocks_with_their_owners() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    pool.publish(blocks[1], b"b")
    pool.release([blocks[1]])
    assert pool.forget_all() == 2
    assert pool.counts() == BlockCounts(3, 1, 0, 2)
    assert pool.lookup(b"a") is None
    pool.release([blocks[0]])
    assert pool.check_integrity() == BlockCounts(3, 0, 0, 3)


def test_a_double_release_is_noticed() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._vacant.pop(),
        lambda pool: pool._vacant.append(pool._vacant[0]),
        lambda pool: pool._by_hash.pop(b"a"),
        lambda pool: pool._ref_counts.__setitem__(0, 0),
        lambda pool: pool._by_hash.__setitem__(b"ghost", 3),
        lambda pool: pool._hashes.__setitem__(3, b"ghost"),
    ],
)
def test_the_integrity_check_can_fail(damage) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(5)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and give back blocks; the model remembers who holds what and what was published."""

    @initialize(size=st.integers(1, 12))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.size = size
        self.tables: list[list[int]] = []
        self.owned: list[list[int]] = []
        """Of each table the blocks that it got by allocation, not by a hit."""
        self.contents: dict[int, bytes] = {}
        self.next_digest = 0

    def references(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free = [block for block in range(self.size) if self.references(block) == 0]
        vacant = [block for block in free if block not in self.contents]
        blocks = self.pool.allocate(count)
        if count > len(free):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert set(blocks) <= set(free)
        assert set(blocks) <= set(vacant) or set(vacant) <= set(blocks)
        for block in blocks:
            self.contents.pop(block, None)
        self.tables.append(list(blocks))
        self.owned.append(list(blocks))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.owned.pop(index)
        self.pool.release(self.tables.pop(index))

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data(), duplicate=st.booleans())
    def publish(self, data: st.DataObject, duplicate: bool) -> None:
        block = data.draw(st.sampled_from([block for table in self.owned for block in table]))
        if block in self.contents:
            return
        if duplicate and self.contents:
            assert not self.pool.publish(block, data.draw(st.sampled_from(sorted(self.contents.values()))))
            return
        digest = self.next_digest.to_bytes(4, "big")
        self.next_digest += 1
        assert self.pool.publish(block, digest)
        self.contents[block] = digest

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.contents)), unique=True, min_size=1))
        for block in blocks:
            assert self.pool.lookup(self.contents[block]) == block
        self.pool.acquire(blocks)
        self.tables.append(blocks)
        self.owned.append([])

    @rule()
    def forget_all(self) -> None:
        assert self.pool.forget_all() == len(self.contents)
        self.contents.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        used = {block for table in self.tables for block in table}
        cached = set(self.contents) - used
        counts = self.pool.check_integrity()
        assert counts == BlockCounts(self.size, len(used), len(cached), self.size - len(used) - len(cached))
        assert self.pool.num_free == counts.cached + counts.vacant
        for block in range(self.size):
            assert self.pool.ref_count(block) == self.references(block)


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockPoolMachine = BlockPoolMachine.TestCase
