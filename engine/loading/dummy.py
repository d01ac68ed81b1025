"""Made-up weights, for `--load-format dummy` and presets: the shapes of a model without its files."""

from __future__ import annotations

import zlib
from typing import Final

import torch

STANDARD_DEVIATION: Final = 0.02
"""Of weights; the usual initialization, which keeps activations finite in every dtype."""


def fill_dummy(views: dict[str, torch.Tensor], seed: int) -> None:
    """Fill every tensor with seeded random numbers; norms are 1.

    A tensor depends on (seed, name) alone, on one kind of device: neither on the order nor on fusion.
    """
    bound = STANDARD_DEVIATION * 3**0.5
    for name, view in views.items():
        if name.endswith("norm.weight"):
            view.fill_(1.0)
            continue
        generator = torch.Generator(device=view.device)
        generator.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        view.uniform_(-bound, bound, generator=generator)
