"""What a prefix cache could find at best: the theoretical hits of a trace, for a cache that forgets nothing."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["InfiniteCache"]


class InfiniteCache:
    """Remembers the chain of blocks of every prompt it has seen; a block counts only after the same prefix, and as far
    as an earlier prompt reached into it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._after: dict[tuple[int, int], int] = {}
        """(node of a prefix, next block) → the node of the longer prefix."""
        self._filled: list[int] = [block_size]
        """By node: tokens of its last block that have been seen."""

    def __len__(self) -> int:
        """Different prefixes seen, in blocks."""
        return len(self._after)

    def send(self, hash_ids: Iterable[int], input_len: int) -> int:
        """Tokens at the beginning of this prompt that earlier ones had too; at most all but one, which an engine has to
        compute to have an output. Then remembers the prompt."""
        node, cached, known, left = 0, 0, True, input_len
        for hash_id in hash_ids:
            own = min(self._block_size, left)
            left -= own
            key = (node, hash_id)
            node = self._after.get(key, 0)
            if node == 0:
                known = False
                node = self._after[key] = len(self._filled)
                self._filled.append(own)
                continue
            had = self._filled[node]
            if known:
                cached += min(had, own)
                known = had == self._block_size
            self._filled[node] = max(had, own)
        return min(cached, input_len - 1)
