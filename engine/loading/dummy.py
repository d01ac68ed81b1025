"""Made-up weights, for `--load-format dummy` and presets: the shapes of a model without its files."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import torch

MAX_THREADS: Final = 8
STANDARD_DEVIATION: Final = 0.02
"""Of weights; the usual initialization, which keeps activations finite in every dtype."""


def fill_dummy(views: dict[str, torch.Tensor], seed: int) -> None:
    """Fill every tensor with seeded random numbers; norms are 1.

    A tensor depends on (seed, name) alone, on one kind of device: neither on the order nor on fusion.
    """
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "dummy") as pool:
        for _ in pool.map(partial(_fill, seed), views.keys(), views.values()):
            pass


def _fill(seed: int, name: str, view: torch.Tensor) -> None:
    if name.endswith("norm.weight"):
        view.fill_(1.0)
        return
    generator = torch.Generator(device=view.device)
    generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    bound = STANDARD_DEVIATION * 3**0.5
    view.uniform_(-bound, bound, generator=generator)
