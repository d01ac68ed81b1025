"""Random numbers of the sampler: one uniform per (sequence key, position), counter-based.

SplitMix64 (Steele, Lea, Flood 2014) as a keyed counter: `mix(mix(seed) + position · γ)`. A draw needs no state, so it
depends neither on the batch nor on what was drawn before, and a preempted sequence goes on with the same numbers.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["draw_key", "uniform_draws"]

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_RUN_DOMAIN: Final = 0xD1B54A32D192ED03
"""Keeps the keys of unseeded sequences apart from those that a client could choose."""


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def draw_key(seed: int | None, run_seed: int, seq_id: int) -> int:
    """Key of a sequence: from its own seed if it has one, else from the run's seed and the sequence's number."""
    if seed is not None:
        return _mix((seed & _MASK) + _GAMMA & _MASK)
    return _mix(_mix((run_seed & _MASK) ^ _RUN_DOMAIN) + (seq_id & _MASK) * _GAMMA & _MASK)


def uniform_draws(keys_n: npt.NDArray[np.uint64], positions_n: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 random bits, one per row."""
    with np.errstate(over="ignore"):
        x = keys_n + positions_n * np.uint64(_GAMMA)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.asarray((x >> np.uint64(11)) * 2.0**-53, dtype=np.float64)
