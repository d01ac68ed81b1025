"""What a prefix cache could find at best: the theoretical hits of a trace, for a cache that forgets nothing."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["InfiniteCache"]


class InfiniteCache:
    """Remembers the chain of blocks of every prompt it has seen; a block counts only after the same prefix."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._after: dict[tuple[int, int], int] = {}
        """(node of a prefix, next block) → the node of the longer prefix."""

    def __len__(self) -> int:
        """Different prefixes seen, in blocks."""
        return len(self._after)

    def send(self, hash_ids: Iterable[int], input_len: int) -> int:
        """Tokens of this prompt in the leading blocks that earlier prompts had too; at most all but one, which an
        engine has to compute to have an output. Then remembers the prompt."""
        node, cached, known = 0, 0, True
        for hash_id in hash_ids:
            key = (node, hash_id)
            following = self._after.get(key)
            if following is None:
                known = False
                following = self._after[key] = len(self._after) + 1
            elif known:
                cached += self._block_size
            node = following
        return min(cached, input_len - 1)
