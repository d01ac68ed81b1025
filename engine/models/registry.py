"""From an architecture to the class that computes it. To add one: its options in `engine/models/config.py`, its model
here; a model needs `forward`, `compute_logits` (`engine/models/base.py`) and `checkpoint_views` for the loaders."""

from __future__ import annotations

from typing import Final

import torch

from atom.engine.errors import ModelLoadError
from atom.engine.models.config import FAMILIES, TransformerConfig
from atom.engine.models.decoder import DecoderLM

MODELS: Final[dict[str, type[DecoderLM]]] = dict.fromkeys(FAMILIES, DecoderLM)


def build_model(config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> DecoderLM:
    """A model with uninitialized weights. Raises `ModelLoadError` when they do not fit in memory."""
    try:
        return MODELS[config.architecture](config, dtype, device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and the CPU allocator raises it plain
        size = config.num_parameters * dtype.itemsize
        raise ModelLoadError(f"cannot allocate {size / 1e9:.3g} GB of weights on {device}: {error}") from None
