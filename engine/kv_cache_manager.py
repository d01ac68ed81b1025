"""Which blocks a sequence holds, and which of its tokens it need not compute because another sequence did.
States of blocks: `engine/block_pool.py`. When to ask: `engine/scheduler.py`.

Prefix caching works on full blocks. A block's hash covers its own token ids and the hash of the block before it, so
equal hashes mean equal prefixes; BLAKE2b with 256 bits makes that hold for prompts made to collide, too. A hash is
published only once the step that computed the block's last position was collected: what can be found is there.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from atom.engine.block_pool import BlockPool
from atom.engine.sequence import Sequence

_ROOT: Final = bytes(32)
"""Parent of a sequence's first block."""

_NEVER: Final = 1 << 62


def hash_block(parent: bytes, token_bytes: bytes) -> bytes:
    """32-byte digest of a full block. Both parts have a fixed length, so their concatenation is unambiguous."""
    return blake2b(parent + token_bytes, digest_size=32).digest()


class KVCacheManager:
    """Block tables over one pool."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._shift = block_size.bit_length() - 1
        assert 1 << self._shift == block_size, f"block size {block_size} is not a power of two"

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) >> self._shift

    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        """Published blocks that hold the longest known prefix of `seq`, without taking them.

        At least one token is always left to compute, because its logits are wanted: a prompt that is cached as a
        whole gives back its last block. None when prompt logprobs are wanted: those need every position's logits.
        """
        if not self.enable_prefix_caching or seq.params.prompt_logprobs is not None:
            return []
        most = (len(seq.tokens) - 1) >> self._shift
        self._hash_blocks(seq, most)
        blocks: list[int] = []
        lookup = self.pool.lookup
        for digest in seq.block_hashes[:most]:
            block = lookup(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _hash_blocks(self, seq: Sequence, count: int) -> None:
        """Have the hashes of the first `count` blocks, all of whose tokens are known. Each is computed once."""
        hashes, tokens, size = seq.block_hashes, seq.tokens, self.block_size
        parent = hashes[-1] if hashes else _ROOT
        for start in range(len(hashes) * size, count * size, size):
            parent = hash_block(parent, tokens[start : start + size].tobytes())
            hashes.append(parent)

    def allocate_slots(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Give `seq` the blocks it lacks for its first `num_tokens` tokens; None, and no change, when there are too
        few. Returns the new ones."""
        count = self.blocks_for(num_tokens) - len(seq.block_ids)
        if count <= 0:
            return []
        new = self.pool.allocate(count)
        if new is not None:
            seq.block_ids += new
        return new

    def admit(self, seq: Sequence, hits: list[int], num_tokens: int, reserve: int) -> bool:
        """Give a sequence without blocks its `hits` and new blocks up to `num_tokens`.

        Refused, without any change, unless all that it knows would fit now and leave `reserve` blocks free: a long
        prompt that is admitted by its first chunk alone would be computed, preempted and computed again.
        """
        assert not seq.block_ids, f"{seq!r} already holds blocks"
        pool = self.pool
        free = pool.num_free - sum(1 for block in hits if pool.ref_count(block) == 0)
        if free < self.blocks_for(len(seq.tokens)) - len(hits) + reserve:
            return False
        pool.acquire(hits)  # before allocating, which may evict
        new = pool.allocate(self.blocks_for(num_tokens) - len(hits))
        assert new is not None, "fewer free blocks than were just counted"
        seq.block_ids = hits + new
        seq.num_published = len(hits)
        return True

    def publish(self, seq: Sequence, num_computed: int) -> int:
        """Let others find the full blocks among the first `num_computed` tokens, all of them known and computed.
        Returns the number of computed tokens at which there is something to publish again."""
        if not self.enable_prefix_caching:
            return _NEVER
        first, end = seq.num_published, num_computed >> self._shift
        if end > first:
            if len(seq.block_hashes) < end:
                self._hash_blocks(seq, end)
            for index in range(first, end):
                self.pool.publish(seq.block_ids[index], seq.block_hashes[index])
            seq.num_published = end
        return (end + 1) << self._shift

    def free(self, seq: Sequence) -> None:
        """Take all blocks back; published ones stay findable until they are needed."""
        self.pool.release(seq.block_ids)
        seq.block_ids = []

    def reset_prefix_cache(self) -> int:
        """Forget all published contents. Running sequences are not disturbed."""
        return self.pool.forget_all()
