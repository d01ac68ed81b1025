"""From what a user calls a model to the files it consists of, and reading the small ones: bounded JSON, no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from atom.engine.config import EMBEDDED_MODEL, LoadFormat
from atom.engine.errors import ModelLoadError
from atom.engine.loading.embedded import EMBEDDED_NAME, embedded_model_path

PRESET_PREFIX: Final = "preset:"
"""`preset:NAME` is an architecture of `engine/models/presets.py` with dummy weights: no files at all."""
MAX_JSON_BYTES: Final = 64 << 20

SourceKind = Literal["hf", "gguf", "preset"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. `path` is the directory (hf), the file (gguf) or the preset's bare name."""

    kind: SourceKind
    path: Path
    name: str
    """Default name in the API."""


def resolve_model(model: str, load_format: LoadFormat = "auto") -> ModelSource:
    """Find the files of `model`: a Hugging Face directory, a .gguf file, "embedded" or "preset:NAME".

    Raises `ModelLoadError` when nothing is there, or when it is not of the format that `load_format` demands.
    """
    try:
        source = _find(model)
    except (OSError, RuntimeError) as error:  # a name too long, a directory without permission, ~nobody-of-that-name
        raise ModelLoadError(f"{model[:200]!r} cannot be looked up: {error}") from None
    if load_format in ("hf", "gguf") and source.kind != load_format:
        raise ModelLoadError(f"--load-format {load_format} does not fit the model {model!r}, which is {source.kind}")
    return source


def _find(model: str) -> ModelSource:
    if model == EMBEDDED_MODEL:
        return ModelSource("gguf", embedded_model_path(), EMBEDDED_NAME)
    if model.startswith(PRESET_PREFIX):
        name = model.removeprefix(PRESET_PREFIX)
        return ModelSource("preset", Path(name), name)
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource("hf", path, path.resolve().name)
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return ModelSource("gguf", files[0], files[0].stem)
        raise ModelLoadError(f"{path}: has no config.json, so it is not a Hugging Face model directory")
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return ModelSource("gguf", path, path.stem)
        raise ModelLoadError(f"{path}: not a .gguf file; for safetensors give the directory that holds config.json")
    raise ModelLoadError(
        f"{model!r} was not found: give a Hugging Face directory, a .gguf file or 'embedded' (nothing is downloaded)"
    )


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """The file's text. Raises `ModelLoadError` when it is missing, too large or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelLoadError(f"{path}: {size} bytes is more than the limit of {max_bytes}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: is not UTF-8: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object. Raises `ModelLoadError` naming the file."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must be a JSON object, is a {type(value).__name__}")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """As `read_json`, but a missing file reads as an empty object."""
    return read_json(path) if path.exists() else {}
