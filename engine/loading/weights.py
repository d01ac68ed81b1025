"""`load_model`: a model with its weights on a device, from whatever format it comes in.

A format is a `TensorSource`: names, shapes, and one tensor at a time. Shapes are compared with the architecture
before anything is allocated; then each tensor is copied, in the target dtype, straight into the model's (fused)
weights, so there are never more than a few tensors beside the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
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
from atom.engine.models.decoder import DecoderLM, Reduce
from atom.engine.models.registry import build_model
from atom.engine.models.shard import Part, Shard
from atom.engine.models.stage import DecoderStage

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

    def read_into(self, name: str, target: torch.Tensor, part: Part | None = None) -> None:
        """Copy one tensor, or a part of it, into `target`, which is contiguous, of the same shape and of any float
        dtype and device. Called from several threads."""
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

    def read_into(self, name: str, target: torch.Tensor, part: Part | None = None) -> None:
        pieces = read_gguf_tensor(self._file, self._config, name)
        flat = target.view(-1)
        if part is not None and part.dimension == 1:
            self._read_columns(name, target, part, pieces)
            return
        width = math.prod(target.shape[1:])
        skip = 0 if part is None else part.start * width
        for start, values in pieces:
            first, last = max(start, skip), min(start + len(values), skip + len(flat))
            if first < last:
                flat[first - skip : last - skip].copy_(torch.from_numpy(values[first - start : last - start]))

    def _read_columns(
        self, name: str, target: torch.Tensor, part: Part, pieces: Iterator[tuple[int, npt.NDArray[np.float32]]]
    ) -> None:
        """Pieces end anywhere: what is left of a row waits for the rest of it."""
        width, row = self.shapes()[name][1], 0
        left = np.empty(0, np.float32)
        for _, piece in pieces:
            values = np.concatenate((left, piece))
            rows, rest = divmod(len(values), width)
            whole = values[: rows * width].reshape(rows, width)
            target[row : row + rows].copy_(torch.from_numpy(whole[:, part.start : part.stop]))
            left, row = values[len(values) - rest :], row + rows


def load_model(
    model_config: ModelConfig, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LoadedModel:
    """Load the model that `model_config` names.

    `dtype`: of the weights and the computation; None: what `model_config.dtype` and the checkpoint say
    (`resolve_dtype`). Raises `ModelLoadError`, one line that names the file and the tensor or field at fault.
    """
    checkpoint = _open(model_config)
    config = checkpoint.description.config
    target_dtype = dtype or resolve_dtype(model_config.dtype, config)
    # Worker threads cannot write into tensors that were made in the caller's inference mode.
    with torch.inference_mode(False):
        checkpoint.check_shapes()
        model = build_model(config, target_dtype, torch.device(device))
        checkpoint.fill([(name, None, view) for name, view in model.checkpoint_views().items()], model_config.seed)
    description = checkpoint.description
    return LoadedModel(model, config, description.eos_token_ids, model_config.served_model_name or description.name)


def load_stage(model_config: ModelConfig, dtype: torch.dtype, shard: Shard, reduce: Reduce) -> DecoderStage:
    """Load one rank's part of the model on the CPU; nothing else of it is ever in memory. Raises as `load_model`."""
    checkpoint = _open(model_config)
    config = checkpoint.description.config
    with torch.inference_mode(False):
        checkpoint.check_shapes()
        try:
            stage = DecoderStage(config, shard, dtype, torch.device("cpu"), reduce)
        except RuntimeError as error:
            raise ModelLoadError(f"{shard.name} cannot allocate its weights: {error}") from None
        checkpoint.fill(stage.checkpoint_parts(), model_config.seed)
    return stage


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A model's description and where its tensors come from; None: they are made up."""

    description: ModelDescription
    tensors: TensorSource | None

    def check_shapes(self) -> None:
        config = self.description.config
        if self.tensors is not None:
            _check_shapes(self.tensors, _skeleton(config).checkpoint_views(), config, str(self.description.source.path))

    def fill(self, parts: Sequence[tuple[str, Part | None, torch.Tensor]], seed: int) -> None:
        if self.tensors is None:
            fill_dummy(parts, _skeleton(self.description.config).checkpoint_views(), seed)
            return
        tensors = self.tensors
        with ThreadPoolExecutor(min(MAX_LOAD_THREADS, len(os.sched_getaffinity(0))), "load") as pool:
            for _ in pool.map(lambda item: tensors.read_into(item[0], item[2], item[1]), parts):
                pass


def _open(model_config: ModelConfig) -> _Checkpoint:
    source = resolve_model(model_config.model, model_config.load_format)
    file = GGUFFile(source.path) if source.kind == "gguf" else None
    description: ModelDescription = (
        describe_gguf(source, file) if file else describe_model(model_config.model, model_config.load_format)
    )
    if model_config.load_format == "dummy" or source.kind == "preset":
        return _Checkpoint(description, None)
    config = description.config
    return _Checkpoint(description, GGUFSource(file, config) if file else SafetensorsSource(source.path))


def resolve_dtype(dtype: DType, config: TransformerConfig) -> torch.dtype:
    """`--dtype`; with "auto" the checkpoint's own, or float32 where it does not say (GGUF)."""
    return TORCH_DTYPES[(config.dtype or "float32") if dtype == "auto" else dtype]


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
