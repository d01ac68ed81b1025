"""Weights of a Hugging Face directory: one model.safetensors, or shards with an index. Memory-mapped, never pickled.

Only names and shapes are read here until a tensor is asked for, so that a wrong directory is refused before anything
is allocated (`engine/loading/weights.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from atom.engine.errors import ModelLoadError
from atom.engine.loading.source import read_json
from atom.engine.models.shard import Part

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_SHARDS: Final = 4096
_FLOATS: Final = frozenset(["F32", "F16", "BF16"])


class SafetensorsSource:
    """The tensors of a model directory by name; implements `TensorSource`."""

    def __init__(self, folder: Path) -> None:
        """Opens every shard and reads its header. Raises `ModelLoadError` naming the file at fault."""
        self._handles: dict[Path, Any] = {}
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        expected = _weight_files(folder)
        for path, names in expected.items():
            self._open(path)
            for name in names - self._files.keys():
                raise ModelLoadError(f"{path}: tensor {name} is missing, though {INDEX_FILE} says it is there")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def origin(self, name: str) -> str:
        return str(self._files[name])

    def read_into(self, name: str, target: torch.Tensor, part: Part | None = None) -> None:
        """Copy from the mapped file. Raises `ModelLoadError` for a dtype that is no float."""
        path = self._files[name]
        if self._dtypes[name] not in _FLOATS:
            raise ModelLoadError(
                f"{path}: tensor {name} has dtype {self._dtypes[name]}; supported are {', '.join(sorted(_FLOATS))}"
            )
        handle = self._handles[path]
        try:
            if part is None:
                target.copy_(handle.get_tensor(name))
            else:
                rows = slice(part.start, part.stop)
                target.copy_(handle.get_slice(name)[rows if part.dimension == 0 else (slice(None), rows)])
        except SafetensorError as error:
            raise ModelLoadError(f"{path}: tensor {name} cannot be read: {error}") from None

    def _open(self, path: Path) -> None:
        try:
            handle: Any = safe_open(path, framework="pt", device="cpu")
            rows = [(name, handle.get_slice(name)) for name in handle.keys()]  # noqa: SIM118  (not a mapping)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: is not a complete safetensors file: {error}") from None
        self._handles[path] = handle
        for name, part in rows:
            if name in self._files:
                raise ModelLoadError(f"{path}: tensor {name} is also in {self._files[name].name}")
            self._files[name] = path
            self._shapes[name] = tuple(part.get_shape())
            self._dtypes[name] = part.get_dtype()


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """The files to read, each with the tensors that the index promises (none for a single file)."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if index.exists():
        return _shards(folder, index)
    if single.exists():
        return {_regular(single): set()}
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return {_regular(others[0]): set()}
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelLoadError(f"{folder}: has only pickled weights, which are never loaded; convert them to safetensors")
    raise ModelLoadError(
        f"{folder}: has no {SINGLE_FILE} and no {INDEX_FILE}; for weights made up use --load-format dummy"
    )


def _shards(folder: Path, index: Path) -> dict[Path, set[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map must be an object that maps tensors to files")
    files: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        # A name with a separator could leave the directory; a plain one cannot, links of a download cache aside.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelLoadError(f"{index}: weight_map: {name}: {file!r} is not a plain name of a .safetensors file")
        files.setdefault(folder / file, set()).add(name)
    if len(files) > MAX_SHARDS:
        raise ModelLoadError(f"{index}: names {len(files)} files, more than the limit of {MAX_SHARDS}")
    return {_regular(path): files[path] for path in sorted(files)}


def _regular(path: Path) -> Path:
    if not path.is_file():
        raise ModelLoadError(f"{path}: weight file is missing or not a regular file")
    return path
