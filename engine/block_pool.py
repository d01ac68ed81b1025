"""The pool of KV blocks: who references each, which contents are reusable, which block to give away next.
Sequences, hashes and hit rules live in `engine/kv_cache_manager.py`; the memory itself lives in the executor.

A block is in exactly one of three states:

    used      referenced by at least one sequence
    cached    referenced by none, but its published contents can still be found by hash
    vacant    referenced by none and worth nothing

Vacant blocks are handed out first, then the cached one that was released longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class BlockCounts(NamedTuple):
    """`total == used + cached + vacant`."""

    total: int
    used: int
    cached: int
    vacant: int


class BlockPool:
    """Columns indexed by block id rather than an object per block. All operations are O(blocks named)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_used = 0
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._vacant = list(range(num_blocks - 1, -1, -1))
        # An OrderedDict is a doubly linked list with an index: a hit leaves the middle in O(1). A plain dict would
        # scan its deleted entries each time the oldest is asked for.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, cached ones included."""
        return len(self._vacant) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def lookup(self, digest: bytes) -> int | None:
        """The block with these published contents, used or cached."""
        return self._by_hash.get(digest)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and no change when there are fewer."""
        vacant = self._vacant
        shortfall = count - len(vacant)
        if shortfall > 0:
            if shortfall > len(self._cached):
                return None
            self._evict(shortfall)
        ref_counts = self._ref_counts
        self.num_used += count
        if count == 1:  # a decoding sequence: most calls
            block = vacant.pop()
            ref_counts[block] = 1
            return [block]
        blocks = [vacant.pop() for _ in range(count)]
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def _evict(self, count: int) -> None:
        for _ in range(count):
            block, _none = self._cached.popitem(last=False)
            self._forget(block)
            self._vacant.append(block)

    def _forget(self, block: int) -> None:
        digest = self._hashes[block]
        assert digest is not None, f"block {block} has no published contents"
        del self._by_hash[digest]
        self._hashes[block] = None

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these published blocks: a prefix hit."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
                self.num_used += 1
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each. `blocks` is in the order of the block table and is walked from its end, so
        that the tail of a prefix is evicted before what it hangs on."""
        ref_counts = self._ref_counts
        for block in reversed(blocks):
            count = ref_counts[block]
            assert count > 0, f"block {block} is released more often than it was referenced"
            ref_counts[block] = count - 1
            if count == 1:
                self.num_used -= 1
                if self._hashes[block] is None:
                    self._vacant.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, digest: bytes) -> bool:
        """Make a used block's contents findable. False when an equal block already is: the first one stays."""
        assert self._ref_counts[block] > 0, f"block {block} is published but nobody holds it"
        if digest in self._by_hash:
            return False
        assert self._hashes[block] is None, f"block {block} is published twice with different contents"
        self._by_hash[digest] = block
        self._hashes[block] = digest
        return True

    def forget_all(self) -> int:
        """Empty the prefix cache; blocks in use keep their owners. Returns how many contents were forgotten."""
        forgotten = len(self._by_hash)
        for block in self._by_hash.values():
            self._hashes[block] = None
        self._by_hash.clear()
        self._vacant.extend(self._cached)
        self._cached.clear()
        return forgotten

    def counts(self) -> BlockCounts:
        return BlockCounts(self.num_blocks, self.num_used, len(self._cached), len(self._vacant))

    def check_counts(self) -> BlockCounts:
        """O(1): every block is accounted for. Raises AssertionError."""
        counts = self.counts()
        if counts.used + counts.cached + counts.vacant != counts.total:
            raise AssertionError(f"KV blocks were lost or duplicated: {counts}")
        return counts

    def check_integrity(self) -> BlockCounts:
        """O(blocks): states are disjoint and agree with references and hashes. Raises AssertionError."""
        counts = self.check_counts()
        vacant = set(self._vacant)
        used = sum(1 for count in self._ref_counts if count)
        if len(vacant) != counts.vacant or used != counts.used:
            raise AssertionError(f"duplicate vacant blocks, or {used} referenced blocks do not match {counts}")
        for block, (references, digest) in enumerate(zip(self._ref_counts, self._hashes, strict=True)):
            states = (references > 0) + (block in self._cached) + (block in vacant)
            if references < 0 or states != 1:
                raise AssertionError(f"block {block} is in {states} states with {references} references")
            if digest is None:
                if block in self._cached:
                    raise AssertionError(f"block {block} is cached without contents")
            elif block in vacant or self._by_hash.get(digest) != block:
                raise AssertionError(f"block {block} has contents that the index does not know as its own")
        if len(self._by_hash) != sum(digest is not None for digest in self._hashes):
            raise AssertionError("the prefix index names blocks that hold nothing")
        return counts
