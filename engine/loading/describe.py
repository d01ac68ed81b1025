"""`describe_model`: what a model is, without its weights and without torch, for the API process and the simulated
executor. The weights are loaded by `engine/loading/weights.py`."""

from __future__ import annotations

from dataclasses import dataclass

from atom.engine.config import LoadFormat
from atom.engine.errors import ModelLoadError
from atom.engine.loading.byte_tokenizer import EOS_ID
from atom.engine.loading.eos import gguf_eos_token_ids, hf_eos_token_ids
from atom.engine.loading.gguf import gguf_config
from atom.engine.loading.gguf_file import GGUFFile
from atom.engine.loading.source import ModelSource, read_json, resolve_model
from atom.engine.models.config import TransformerConfig, transformer_config
from atom.engine.models.presets import preset_config


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is known of a model before its weights are read."""

    source: ModelSource
    config: TransformerConfig
    eos_token_ids: tuple[int, ...]
    name: str
    """Default name in the API."""
    max_model_len: int
    """Context length that the model is meant for."""

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size


def describe_model(model: str, load_format: LoadFormat = "auto") -> ModelDescription:
    """Describe a Hugging Face directory, a .gguf file, "embedded" or "preset:NAME".

    Raises `ModelLoadError` naming the file and field when it is missing, malformed or unsupported.
    """
    source = resolve_model(model, load_format)
    if source.kind == "gguf":
        file = GGUFFile(source.path)
        return describe_gguf(source, file)
    if source.kind == "preset":
        config = preset_config(source.name)
        return _describe(source, config, (EOS_ID,))
    path = source.path / "config.json"
    return _describe(source, transformer_config(read_json(path), str(path)), hf_eos_token_ids(source.path))


def describe_gguf(source: ModelSource, file: GGUFFile) -> ModelDescription:
    """As `describe_model`, for a file that is already open."""
    return _describe(source, gguf_config(file), gguf_eos_token_ids(file.metadata, file.path))


def _describe(source: ModelSource, config: TransformerConfig, eos_token_ids: tuple[int, ...]) -> ModelDescription:
    for token_id in eos_token_ids:
        if token_id >= config.vocab_size:
            raise ModelLoadError(
                f"{source.path}: end-of-sequence token {token_id} is not below vocab_size {config.vocab_size}"
            )
    return ModelDescription(source, config, eos_token_ids, source.name, config.context_length)
