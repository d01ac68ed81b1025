"""What the CPU executors choose where no flag says it, alike in one process and in many."""

from __future__ import annotations

import os

import torch

from atom.engine.config import EngineConfig
from atom.engine.errors import ConfigError
from atom.engine.loading.describe import describe_model
from atom.engine.models.config import TransformerConfig

__all__ = ["choose_dtype", "compute_threads", "context_length"]


def choose_dtype(config: EngineConfig) -> tuple[torch.dtype, str]:
    """The dtype of weights and cache. "auto": a decode step is bound by the bytes of the weights, so the smallest type
    that loses nothing which matters."""
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype), "--dtype"
    description = describe_model(config.model.model, config.model.load_format)
    checkpoint = description.config.dtype
    if checkpoint is None:
        return torch.bfloat16, "quantized checkpoint: bfloat16 rounds finer than its quantization, at half the bytes"
    if checkpoint == "float16":
        return torch.float32, "float16 checkpoint: float32 holds it exactly, and no CPU kernel takes float16"
    return getattr(torch, checkpoint), "the checkpoint's own"


def context_length(config: EngineConfig, architecture: TransformerConfig) -> int:
    """Longest context served: `--max-model-len`, or the model's own."""
    limit, wanted = architecture.context_length, config.model.max_model_len
    if wanted is not None and wanted > limit:
        raise ConfigError(f"--max-model-len {wanted} exceeds the model's context length {limit}")
    return wanted or limit


def compute_threads(config: EngineConfig) -> int:
    """Of this process: its share of `--num-threads`, or of the CPUs that all cores may run on."""
    parallel = config.parallel
    threads = config.num_threads or len(os.sched_getaffinity(0)) // parallel.data_parallel_size
    return max(1, threads // parallel.num_ranks)
