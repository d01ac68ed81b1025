"""Token ids of hashed blocks: a trace that names blocks by id says which prompts share which prefix, not their words.

Here each block id becomes tokens that depend on (seed, block id) alone, so that requests share exactly the prefixes
that the trace's requests shared, in any process and in any order. Drawing is counter-based (SplitMix64: Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): a whole prompt is a few NumPy operations, and
nothing has to be cached. The ids may be token ids, or indices into a list of words (`text.py`) where prompts are text.

Shape suffixes: b = blocks, t = tokens (or positions in a block).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["block_tokens", "prompt_tokens", "stream_tokens"]

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_BLOCKS, _STREAMS = 1, 2
"""Keep the ids of blocks and the keys of tails apart."""


def block_tokens(seed: int, hash_id: int, block_size: int, token_range: tuple[int, int]) -> npt.NDArray[np.int32]:
    """The block's tokens [block_size]: uniform in the half-open `token_range`, a function of (seed, hash_id, position).

    A block of another size has the same tokens, as far as both reach.
    """
    _check_range(token_range)
    key_b = _block_keys(seed, (hash_id,))
    return _tokens(key_b, block_size, token_range).reshape(-1)


def prompt_tokens(
    hash_ids: Sequence[int],
    input_len: int,
    *,
    seed: int,
    block_size: int,
    token_range: tuple[int, int],
    tail: tuple[int, ...] = (),
) -> npt.NDArray[np.int32]:
    """A prompt of exactly `input_len` tokens: its blocks in order, the last one cut where the prompt ends.

    Tokens beyond the last block are drawn from (seed, *tail): give what names the request, so that what the trace
    does not say to be shared is not shared. Blocks beyond `input_len` are not used. Returns [input_len].
    """
    _check_range(token_range)
    wanted = -(-input_len // block_size)
    key_b = _block_keys(seed, hash_ids[:wanted])
    covered = _tokens(key_b, block_size, token_range).reshape(-1)[:input_len]
    missing = input_len - len(covered)
    if missing == 0:
        return covered
    return np.concatenate([covered, stream_tokens((seed, *tail), missing, token_range)])


def stream_tokens(key: tuple[int, ...], count: int, token_range: tuple[int, int]) -> npt.NDArray[np.int32]:
    """`count` tokens of the stream that `key` names: for what belongs to no block. Returns [count]."""
    _check_range(token_range)
    state = _STREAMS
    for part in key:
        state = _mix_int(state ^ (part & _MASK))
    return _tokens(np.array([state], dtype=np.uint64), count, token_range).reshape(-1)


def _check_range(token_range: tuple[int, int]) -> None:
    low, high = token_range
    assert 0 <= low < high <= 2**31, token_range


def _block_keys(seed: int, hash_ids: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Where each block's stream starts, [b]."""
    base = _mix_int(_BLOCKS ^ (seed & _MASK))
    id_b = np.array([hash_id & _MASK for hash_id in hash_ids], dtype=np.uint64)
    return _mix(id_b ^ np.uint64(base))


def _tokens(key_b: npt.NDArray[np.uint64], size: int, token_range: tuple[int, int]) -> npt.NDArray[np.int32]:
    """[b, size] tokens. The upper 32 bits are scaled to the range (Lemire's multiplication; its bias is below 2⁻¹¹ even
    for a range of a million ids)."""
    low, high = token_range
    step_t = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    word_bt = _mix(key_b[:, None] + step_t[None, :])
    scaled_bt = ((word_bt >> np.uint64(32)) * np.uint64(high - low)) >> np.uint64(32)
    return scaled_bt.astype(np.int32) + np.int32(low)


def _mix(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer; unsigned arithmetic wraps, as it should."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def _mix_int(word: int) -> int:
    """One step of the same generator, on a Python integer (numbers beyond 64 bits are folded by the caller)."""
    word = (word + _GAMMA) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
