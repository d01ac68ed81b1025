"""The GGUF container: header, metadata and tensor table of a file, read with bounds checks, no torch. What the
metadata means is in `engine/loading/gguf.py` (architecture, weights) and `engine/loading/gguf_tokenizer.py`.

The package `gguf` supplies the type tables and the dequantization. Its `GGUFReader` is not used: it makes several
NumPy arrays per vocabulary string, 3.9 s for the embedded model where this reader takes 0.1 s, and it trusts lengths.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from atom.engine.errors import ModelLoadError

MAX_METADATA_ENTRIES: Final = 65_536
MAX_TENSORS: Final = 1 << 20
MAX_ARRAY_LENGTH: Final = 1 << 23
"""Elements of one metadata array; the largest real ones are vocabularies of a few hundred thousand."""
MAX_DIMENSIONS: Final = 4

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[dict[int, struct.Struct]] = {
    code: struct.Struct("<" + fmt)
    for code, fmt in ((0, "B"), (1, "b"), (2, "H"), (3, "h"), (4, "I"), (5, "i"), (6, "f"), (7, "?"))
} | {code: struct.Struct("<" + fmt) for code, fmt in ((10, "Q"), (11, "q"), (12, "d"))}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_T = TypeVar("_T", str, int)
_CHUNK_ELEMENTS: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table. `shape` is in NumPy order (outermost first), `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """An opened GGUF file, mapped read-only: pages of a tensor are read when `tensor()` asks for it."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelLoadError` naming the file when it is missing, truncated or malformed."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelLoadError(f"{path}: cannot be read as a GGUF file: {error}") from None
        cursor = _Cursor(path, self._buffer)
        try:
            self.metadata: dict[str, Any] = {}
            num_tensors = self._read_header(cursor)
            self.tensors = self._read_tensor_table(cursor, num_tensors)
        except (struct.error, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path}: malformed GGUF at byte {cursor.at}: {error}") from None

    def text(self, key: str) -> str | None:
        """A string of the metadata; None when the key is missing. Raises `ModelLoadError` when it is something else."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelLoadError(f"{self.path}: {key} must be a string, is {_brief(value)}")
        return value

    def number(self, key: str) -> float | None:
        """As `text`, for a number."""
        value = self.metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ModelLoadError(f"{self.path}: {key} must be a number, is {_brief(value)}")
        return value

    def integer(self, key: str) -> int | None:
        """As `text`, for an integer."""
        value = self.metadata.get(key)
        if value is not None and type(value) is not int:
            raise ModelLoadError(f"{self.path}: {key} must be an integer, is {_brief(value)}")
        return value

    def array(self, key: str, kind: type[_T]) -> list[_T]:
        """An array of the metadata, empty when the key is missing. Raises when its elements are not of `kind`."""
        value = self.metadata.get(key, [])
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ModelLoadError(f"{self.path}: {key} must be an array of {kind.__name__}, is {_brief(value)}")
        return value

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor dequantized to float32, in a new array of its `shape`."""
        info = self.tensors[name]
        values = np.empty(math.prod(info.shape), np.float32)
        for start, chunk in self.chunks(info, self.raw(info)):
            values[start : start + len(chunk)] = chunk
        return values.reshape(info.shape)

    def raw(self, info: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, one row per row of its last dimension; a view of the file."""
        rows = math.prod(info.shape[:-1])
        return np.frombuffer(self._buffer, np.uint8, info.num_bytes, info.offset).reshape(rows, -1)

    def chunks(self, info: GGUFTensor, raw: npt.NDArray[np.uint8]) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Dequantize `raw` piece by piece: (index of the first element, flat float32 values).

        Pieces fit a core's cache: `gguf`'s own grouping of 16 rows takes twice as long on narrow matrices, and a whole
        tensor at once takes four times its size.
        """
        block_size, block_bytes = GGML_QUANT_SIZES[info.type]
        blocks = np.ascontiguousarray(raw).reshape(-1, block_bytes)
        step = max(1, _CHUNK_ELEMENTS // block_size)
        for first in range(0, len(blocks), step):
            piece = blocks[first : first + step].reshape(1, -1)
            try:
                values = dequantize(piece, info.type)
            except NotImplementedError:
                raise ModelLoadError(
                    f"{self.path}: tensor {info.name}: type {info.type.name} is not supported"
                ) from None
            # Float32 needs no dequantization and comes as a read-only view, which torch warns of.
            yield first * block_size, np.require(values, np.float32, ["C", "W"]).ravel()

    def _read_header(self, cursor: _Cursor) -> int:
        if cursor.bytes(4) != b"GGUF":
            raise ModelLoadError(f"{self.path}: not a GGUF file (it does not start with 'GGUF')")
        version = cursor.scalar(_U32)
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path}: GGUF version {version} is not supported; versions 2 and 3 are")
        num_tensors = cursor.count(MAX_TENSORS, "tensors")
        for _ in range(cursor.count(MAX_METADATA_ENTRIES, "metadata entries")):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar(_U32))
        return num_tensors

    def _read_tensor_table(self, cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
        rows: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name = cursor.string()
            num_dimensions = cursor.scalar(_U32)
            if not 1 <= num_dimensions <= MAX_DIMENSIONS:
                raise ModelLoadError(f"{self.path}: tensor {name} has {num_dimensions} dimensions")
            shape = tuple(cursor.scalar(_U64) for _ in range(num_dimensions))[::-1]
            rows.append((name, shape, cursor.scalar(_U32), cursor.scalar(_U64)))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ModelLoadError(f"{self.path}: general.alignment {alignment!r} is not a sensible alignment")
        base = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_code, offset in rows:
            if name in tensors:
                raise ModelLoadError(f"{self.path}: tensor {name} appears twice")
            tensors[name] = self._checked_tensor(name, shape, type_code, base + offset)
        return tensors

    def _checked_tensor(self, name: str, shape: tuple[int, ...], type_code: int, offset: int) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(type_code)
        except ValueError:
            raise ModelLoadError(f"{self.path}: tensor {name} has the unknown type {type_code}") from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size or 0 in shape:
            raise ModelLoadError(f"{self.path}: tensor {name} of shape {list(shape)} does not fit {kind.name} blocks")
        num_bytes = math.prod(shape) // block_size * block_bytes
        if offset + num_bytes > len(self._buffer):
            raise ModelLoadError(
                f"{self.path}: truncated: tensor {name} ends at byte {offset + num_bytes}, the file has "
                f"{len(self._buffer)}"
            )
        return GGUFTensor(name, shape, kind, offset, num_bytes)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


class _Cursor:
    """A position in the header, which cannot pass the file's end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.at = 0

    def bytes(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self.buffer):
            raise ModelLoadError(
                f"{self.path}: truncated: the header needs byte {end}, the file has {len(self.buffer)}"
            )
        chunk = self.buffer[self.at : end]
        self.at = end
        return chunk

    def scalar(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.bytes(layout.size))[0]

    def string(self) -> str:
        return self.bytes(self.scalar(_U64)).decode("utf-8")

    def count(self, limit: int, what: str) -> int:
        number: int = self.scalar(_U64)
        if number > limit:
            raise ModelLoadError(f"{self.path}: {number} {what} is more than the limit of {limit}")
        return number

    def value(self, code: int) -> Any:
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            return self.array()
        if code not in _SCALARS:
            raise ModelLoadError(f"{self.path}: unknown metadata type {code} at byte {self.at}")
        return self.scalar(_SCALARS[code])

    def array(self) -> list[Any]:
        code = self.scalar(_U32)
        length = self.count(MAX_ARRAY_LENGTH, "array elements")
        if code == _STRING:
            return [self.string() for _ in range(length)]
        if code not in _SCALARS:
            raise ModelLoadError(f"{self.path}: arrays of metadata type {code} are not supported")
        layout = _SCALARS[code]
        raw = self.bytes(layout.size * length)
        return [row[0] for row in layout.iter_unpack(raw)]
