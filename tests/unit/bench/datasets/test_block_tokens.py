"""Blocks of a trace become the same tokens everywhere, share what the trace shares, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.datasets.block_tokens import block_tokens, prompt_tokens, stream_tokens

RANGE = (256, 30_000)
SOURCE = Path(__file__).resolve().parents[4] / ".src"


@given(
    st.integers(0, 2**63),
    st.lists(st.integers(-(2**63), 2**64 - 1), max_size=9),
    st.integers(1, 20),
    st.integers(0, 99),
)
def test_a_prompt_is_its_blocks_and_its_own_tail(seed: int, ids: list[int], size: int, length: int) -> None:
    tokens = prompt_tokens(ids, length, seed=seed, block_size=size, token_range=RANGE, tail=(7,))
    assert len(tokens) == length
    assert tokens.dtype == np.int32
    for number, hash_id in enumerate(ids):
        part = tokens[number * size : (number + 1) * size]
        assert np.array_equal(part, block_tokens(seed, hash_id, size, RANGE)[: len(part)])
    rest = tokens[len(ids) * size :]
    assert np.array_equal(rest, stream_tokens((seed, 7), len(rest), RANGE))


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_other_ids_are_other_tokens(one: int, other: int) -> None:
    same = np.array_equal(block_tokens(0, one, 16, RANGE), block_tokens(0, other, 16, RANGE))
    assert same == (one == other)


def test_seeds_ids_and_tails_are_kept_apart() -> None:
    kinds = [
        *(block_tokens(seed, hash_id, 16, RANGE) for seed in range(20) for hash_id in range(20)),
        *(stream_tokens((seed, key), 16, RANGE) for seed in range(20) for key in range(20)),
    ]
    assert len({tuple(tokens.tolist()) for tokens in kinds}) == len(kinds)


def test_a_longer_block_begins_with_the_shorter_one() -> None:
    assert np.array_equal(block_tokens(3, 4, 512, RANGE)[:100], block_tokens(3, 4, 100, RANGE))


def test_tokens_fill_the_range_evenly() -> None:
    tokens = prompt_tokens(range(200), 200 * 512, seed=1, block_size=512, token_range=(10, 20))
    counts = np.bincount(tokens, minlength=20)
    assert (tokens.min(), tokens.max()) == (10, 19)
    assert np.abs(counts[10:] / len(tokens) - 0.1).max() < 0.005


def test_another_process_and_another_day_give_the_same_tokens() -> None:
    script = "from atom.bench.datasets.block_tokens import block_tokens as b;print(b(42, 46, 4, (256, 30000)).tolist())"
    out = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == str(block_tokens(42, 46, 4, RANGE).tolist())
    assert out.strip() == "[11872, 22043, 17367, 13904]"
