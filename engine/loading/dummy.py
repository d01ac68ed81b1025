"""Made-up weights, for `--load-format dummy` and presets: the shapes of a model without its files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from atom.engine.models.shard import Part

MAX_THREADS: Final = 8
STANDARD_DEVIATION: Final = 0.02
"""Of weights; the usual initialization, which keeps activations finite in every dtype."""


def fill_dummy(
    parts: Sequence[tuple[str, Part | None, torch.Tensor]], shapes: Mapping[str, torch.Tensor], seed: int
) -> None:
    """Fill every tensor, or part of one, with seeded random numbers; norms are 1. `shapes` has the whole tensors.

    A tensor depends on (seed, name) alone, on one kind of device: neither on the order nor on fusion, and a part is a
    part of it.
    """
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "dummy") as pool:
        for _ in pool.map(lambda item: _fill(seed, item, shapes[item[0]].shape), parts):
            pass


def _fill(seed: int, item: tuple[str, Part | None, torch.Tensor], shape: torch.Size) -> None:
    name, part, view = item
    if name.endswith("norm.weight"):
        view.fill_(1.0)
        return
    generator = torch.Generator(device=view.device)
    generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    bound = STANDARD_DEVIATION * 3**0.5
    tensor = view if part is None else torch.empty(shape, dtype=view.dtype, device=view.device)
    tensor.uniform_(-bound, bound, generator=generator)
    if part is not None:
        view.copy_(tensor.narrow(part.dimension, part.start, part.stop - part.start))
