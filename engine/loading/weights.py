"""`load_model`: a model with its weights on a device, from whatever format it comes in.

A format is a `TensorSource`: names, shapes, and one tensor at a time. Shapes are compared with the architecture
before anything is allocated; then each tensor is copied, in the target dtype, straight into the model's (fused)
weights, so there are never more than a few tensors beside the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from atom.engine.config import DType, ModelConfig
from atom.engine.errors import ModelLoadError
from atom.engine.loading.describe import ModelDescription, describe_gguf, describe_model
from atom.engine.loading.dummy import fill_dummy
from atom.engine.loading.gguf import ROPE_FACTORS, gguf_name, read_gguf_tensor
from atom.engine.loading.gguf_file import GGUFFile
from atom.engine.loading.hf import SafetensorsSource
from atom.engine.loading.source import resolve_model
from atom.engine.models.config import TransformerConfig
from atom.engine.models.decoder import DecoderLM
from atom.engine.models.registry import build_model

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MAX_LOAD_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    model: DecoderLM
    transformer_config: TransformerConfig
    eos_token_ids: tuple[int, ...]
    name: str
    """`--served-model-name`, or the model's default name."""


class TensorSource(Protocol):
    """A checkpoint, by Hugging Face tensor names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def origin(self, name: str) -> str:
        """The file that holds the tensor."""
        ...

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Copy one tensor into `target`, which is contiguous, of the same shape and of any float dtype and device.
        Called from several threads."""
        ...


class GGUFSource:
    """The tensors of a GGUF file under their Hugging Face names; implements `TensorSource`."""

    def __init__(self, file: GGUFFile, config: TransformerConfig) -> None:
        self._file = file
        self._config = config
        names = _skeleton(config).checkpoint_views()
        by_gguf_name = {gguf_name(name): name for name in names}
        # Tensors that the architecture does not know keep their GGUF name and are reported by it.
        self._names = {by_gguf_name.get(name, name): name for name in file.tensors if name != ROPE_FACTORS}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._file.tensors[own].shape for name, own in self._names.items()}

    def origin(self, name: str) -> str:
        return str(self._file.path)

    def read_into(self, name: str, target: torch.Tensor) -> None:
        flat = target.view(-1)
        for start, values in read_gguf_tensor(self._file, self._config, name):
            flat[start : start + len(values)].copy_(torch.from_numpy(values))


def load_model(
    model_config: ModelConfig, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LoadedModel:
    """Load the model that `model_config` names.

    `dtype`: of the weights and the computation; None: what `model_config.dtype` and the checkpoint say
    (`resolve_dtype`). Raises `ModelLoadError`, one line that names the file and the tensor or field at fault.
    """
    source = resolve_model(model_config.model, model_config.load_format)
    file = GGUFFile(source.path) if source.kind == "gguf" else None
    description: ModelDescription = (
        describe_gguf(source, file) if file else describe_model(model_config.model, model_config.load_format)
    )
    config = description.config
    target_dtype = dtype or resolve_dtype(model_config.dtype, config)
    target_device = torch.device(device)
    # Worker threads cannot write into tensors that were made in the caller's inference mode.
    with torch.inference_mode(False):
        if model_config.load_format == "dummy" or source.kind == "preset":
            model = build_model(config, target_dtype, target_device)
            fill_dummy(model.checkpoint_views(), model_config.seed)
        else:
            tensors: TensorSource = GGUFSource(file, config) if file else SafetensorsSource(source.path)
            model = _load(tensors, config, target_dtype, target_device, str(source.path))
    return LoadedModel(model, config, description.eos_token_ids, model_config.served_model_name or description.name)


def resolve_dtype(dtype: DType, config: TransformerConfig) -> torch.dtype:
    """`--dtype`; with "auto" the checkpoint's own, or float32 where it does not say (GGUF)."""
    return TORCH_DTYPES[(config.dtype or "float32") if dtype == "auto" else dtype]


def _load(
    tensors: TensorSource, config: TransformerConfig, dtype: torch.dtype, device: torch.device, origin: str
) -> DecoderLM:
    _check_shapes(tensors, _skeleton(config).checkpoint_views(), config, origin)
    model = build_model(config, dtype, device)
    views = model.checkpoint_views()
    with ThreadPoolExecutor(min(MAX_LOAD_THREADS, len(os.sched_getaffinity(0))), "load") as pool:
        for _ in pool.map(tensors.read_into, views.keys(), views.values()):
            pass
    return model


def _skeleton(config: TransformerConfig) -> DecoderLM:
    """The model without storage: names and shapes alone."""
    return build_model(config, torch.float32, torch.device("meta"))


def _check_shapes(
    tensors: TensorSource, views: Mapping[str, torch.Tensor], config: TransformerConfig, origin: str
) -> None:
    found = tensors.shapes()
    missing = [name for name in views if name not in found]
    if missing:
        raise ModelLoadError(f"{origin}: tensor {missing[0]} is missing{_and_others(missing)}")
    unexpected = [name for name in found if name not in views and not _is_redundant(name, config)]
    if unexpected:
        raise ModelLoadError(
            f"{tensors.origin(unexpected[0])}: tensor {unexpected[0]} does not belong to {config.architecture}"
            f"{_and_others(unexpected)}"
        )
    for name, view in views.items():
        if found[name] != tuple(view.shape):
            raise ModelLoadError(
                f"{tensors.origin(name)}: tensor {name} has shape {list(found[name])}, "
                f"the configuration says {list(view.shape)}"
            )


def _and_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _is_redundant(name: str, config: TransformerConfig) -> bool:
    """A copy of a tied embedding, or the rotary table that old checkpoints carry."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
