"""Where each item of a large file lies: lines of JSONL, or elements of one JSON array.

Files are read in pieces and only the places of their items are kept (16 bytes each), so that a file of several
gigabytes costs little memory; an item is read when it is needed. Files are untrusted: their items are bounded in size
and number, and what is wrong with one is said with the file and the line.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from atom.recipes.errors import UsageError

__all__ = ["FileFacts", "ItemFile", "index_items", "open_data_file", "quoted", "read_lines"]

MAX_ITEM_BYTES: Final = 64 << 20
MAX_ITEMS: Final = 20_000_000
_LONGEST_QUOTE: Final = 80
"""Characters of a value that an error repeats: a cell may be as long as its file."""
_PIECE: Final = 1 << 20
_ENDLESS: Final = "the array does not end"
_SPACE: Final = b" \t\r\n"
_BOM: Final = b"\xef\xbb\xbf"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def quoted(value: object) -> str:
    """A value of a file, for the error that it is wrong."""
    text = repr(value[: _LONGEST_QUOTE + 1] if isinstance(value, str | list) else value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What identifies a file's content, for run.json."""

    path: str
    size: int
    mtime_ns: int
    sha256: str | None
    """None where only a part was read."""

    @property
    def name(self) -> str:
        return Path(self.path).name

    def describe(self) -> dict[str, Any]:
        return {"path": self.path, "bytes": self.size, "sha256": self.sha256}


@dataclass(frozen=True, slots=True, eq=False)
class ItemFile:
    """The items of a file by number. Picklable: it opens the file anew where it is used."""

    facts: FileFacts
    start: npt.NDArray[np.int64]
    """[items] offset of the first byte."""
    size: npt.NDArray[np.int64]
    """[items] bytes."""

    def __len__(self) -> int:
        return len(self.start)

    def raw(self, number: int) -> bytes:
        path = Path(self.facts.path)
        with open_data_file(path) as file:
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (self.facts.size, self.facts.mtime_ns):
                raise UsageError(f"{path} changed while it was being used: it must stay as it is during a run")
            file.seek(int(self.start[number]))
            return file.read(int(self.size[number]))

    def object(self, number: int) -> dict[str, Any]:
        """Item `number`, which must be a JSON object. UsageError with file and line."""
        try:
            value = json.loads(self.raw(number).decode())
        except (ValueError, RecursionError) as error:
            self.refuse(number, f"no JSON ({_reason(error)})")
        if not isinstance(value, dict):
            self.refuse(number, f"must be a JSON object, got {type(value).__name__}")
        return value

    def sendable(self, number: int, name: str, text: str) -> str:
        """`text`, the value of field `name`, if a request can carry it."""
        if not text.isascii() and _SURROGATE.search(text):
            self.refuse(number, f"field {name!r} has half a surrogate pair, which is no text")
        return text

    def refuse(self, number: int, what: str) -> NoReturn:
        raise UsageError(f"{self.facts.path}:{self.line(number)}: {what}")

    def line(self, number: int) -> int:
        """The line on which the item begins, from 1: counted only when somebody has to be told."""
        left, line = int(self.start[number]), 1
        with open_data_file(Path(self.facts.path)) as file:
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                line += piece.count(b"\n")
                left -= len(piece)
        return line


def open_data_file(path: Path, flag: str = "--dataset-path") -> IO[bytes]:
    """UsageError that names `flag` if it is not a regular file that can be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{flag} {path}: must be a regular file (it is read twice, so no pipe or device will do)")
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


def index_items(path: Path, flag: str = "--dataset-path") -> ItemFile:
    """Find the items of a JSON array, or of JSONL if the file does not begin with `[`."""
    with open_data_file(path, flag) as file:
        status = path.stat()
        head = file.read(4096).removeprefix(_BOM).lstrip(_SPACE)
        file.seek(0)
        digest = hashlib.sha256()
        spans = _array_spans(file, path, digest) if head[:1] == b"[" else _line_spans(file, path, digest)
        start, size = array("q"), array("q")
        for first, length in spans:
            start.append(first)
            size.append(length)
            if len(start) > MAX_ITEMS:
                raise UsageError(f"{path}: more than {MAX_ITEMS:,} items")
    if not start:
        raise UsageError(f"{path}: no items in it")
    facts = FileFacts(str(path), status.st_size, status.st_mtime_ns, digest.hexdigest())
    return ItemFile(facts, np.array(start, dtype=np.int64), np.array(size, dtype=np.int64))


def read_lines(file: IO[bytes], path: Path, digest: hashlib._Hash) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, offset, line) of the lines that are not blank, each of bounded length."""
    offset = 0
    number = 0
    while line := file.readline(MAX_ITEM_BYTES + 1):
        number += 1
        if len(line) > MAX_ITEM_BYTES:
            raise UsageError(f"{path}:{number}: the line is longer than {MAX_ITEM_BYTES >> 20} MiB")
        digest.update(line)
        here = offset
        offset += len(line)
        if here == 0 and line.startswith(_BOM):
            here, line = len(_BOM), line[len(_BOM) :]
        if line.strip(_SPACE):
            yield number, here, line


def _line_spans(file: IO[bytes], path: Path, digest: hashlib._Hash) -> Iterator[tuple[int, int]]:
    for _, offset, line in read_lines(file, path, digest):
        yield offset, len(line)


def _array_spans(file: IO[bytes], path: Path, digest: hashlib._Hash) -> Iterator[tuple[int, int]]:
    """Elements of the array. Bytes are read as Latin-1, one character each, which finds the same ends as UTF-8 does:
    JSON's structure is ASCII, and no byte of a longer character is."""
    decode = json.JSONDecoder().raw_decode
    text, base, at, want = "", 0, 0, _PIECE
    line = 1  # of text[0]

    def more(count: int) -> bool:
        nonlocal text, base, at, line
        piece = file.read(count)
        digest.update(piece)
        line += text.count("\n", 0, at)
        text, base, at = text[at:] + piece.decode("latin-1"), base + at, 0
        return bool(piece)

    def refuse(what: str) -> NoReturn:
        raise UsageError(f"{path}:{line + text.count(chr(10), 0, at)}: {what}")

    def skip_space() -> str:
        """The next character that is no space; empty at the end."""
        nonlocal at
        while True:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at < len(text) or not more(_PIECE):
                return text[at : at + 1]

    more(max(_PIECE, len(_BOM)))
    at = len(_BOM) if text.startswith(_BOM.decode("latin-1")) else 0
    skip_space()
    at += 1  # the bracket
    if skip_space() == "]":
        return
    while True:
        skip_space()
        while True:
            try:
                _, end = decode(text, at)
            except (ValueError, RecursionError) as error:
                reason = _reason(error)
            else:
                if end < len(text):
                    break
                reason = _ENDLESS  # a number may go on in the next piece
            if len(text) - at > MAX_ITEM_BYTES:
                refuse(f"no JSON within {MAX_ITEM_BYTES:,} bytes ({reason})")
            want = min(2 * want, MAX_ITEM_BYTES)
            if not more(want):
                refuse(f"no JSON ({reason})")
        yield base + at, end - at
        at, want = end, _PIECE
        separator = skip_space()
        at += 1
        if separator == "]":
            if skip_space():
                refuse("something follows the array")
            return
        if separator != ",":
            refuse(f"',' or ']' must follow an element, got {separator!r}" if separator else _ENDLESS)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
