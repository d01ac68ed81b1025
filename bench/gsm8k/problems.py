"""Word problems with worked solutions, as GSM8K keeps them: `question`, and `answer`, whose last line is `#### number`.

Files are untrusted input: JSON Lines or parquet, read up to a bound, and every error names file, line and field.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from atom.bench.gsm8k.extract import normalised
from atom.recipes.errors import UsageError

__all__ = ["GSM8K", "Problem", "ProblemSet", "read_fewshot_problems", "read_problems", "split_file"]

GSM8K: Final = "gsm8k"
"""Begins the names of the figures, where the problems came from a file."""
MAX_FILE_BYTES: Final = 256 << 20
MAX_PROBLEMS: Final = 1_000_000
SPLIT_FILES: Final = ("{split}.jsonl", "{split}-*.parquet", "{split}.parquet")
"""How a folder's files are called: by the data set's authors, and by the hub's conversion."""


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    """Worked solution; `#### number` at its end."""

    @cached_property
    def key(self) -> str:
        """Names the question whatever its place in a file: two runs are compared by it."""
        return hashlib.sha256(self.question.encode()).hexdigest()[:16]

    @cached_property
    def gold(self) -> str:
        """The number that is right, as answers are compared."""
        return normalised(self.answer)


@dataclass(frozen=True, kw_only=True)
class ProblemSet:
    """Problems and where they came from."""

    name: str
    """As tables show it. A generated set never claims to be another one."""
    problems: tuple[Problem, ...]
    figure: str = GSM8K
    """Begins the names of its figures in summary.json."""
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.problems)


def read_problems(path: Path, *, limit: int | None = None, flag: str = "--dataset-path") -> ProblemSet:
    """The problems of `path`: a .jsonl or .parquet file, or a folder that has a test split in one of them.

    `limit`: the first so many. UsageError names the flag, the file, and where in it.
    """
    file = split_file(path, "test", flag) if path.is_dir() else path
    data = _read(file, flag)
    rows = _parquet_rows(file, data, flag) if data[:4] == b"PAR1" else _json_rows(file, data, flag)
    problems: list[Problem] = []
    for where, row in rows:
        if limit is not None and len(problems) == limit:
            break
        if len(problems) == MAX_PROBLEMS:
            raise UsageError(f"{flag} {file} has more than {MAX_PROBLEMS:,} problems")
        problems.append(_problem(row, f"{flag} {file}, {where}"))
    if not problems:
        raise UsageError(f"{flag} {file} has no problems")
    digest = hashlib.sha256(data).hexdigest()
    return ProblemSet(
        name=file.name,
        problems=tuple(problems),
        origin={"path": str(file), "sha256": digest, "problems": len(problems)},
    )


def read_fewshot_problems(path: Path, flag: str = "--fewshot-path") -> ProblemSet:
    """Worked examples, from a file or from a folder's train split."""
    return read_problems(split_file(path, "train", flag) if path.is_dir() else path, flag=flag)


def split_file(folder: Path, split: str, flag: str) -> Path:
    """The one file of `split` in `folder`; UsageError if there is none, or several."""
    found = sorted({file for pattern in SPLIT_FILES for file in folder.glob(pattern.format(split=split))})
    if len(found) != 1:
        wanted = " or ".join(pattern.format(split=split) for pattern in SPLIT_FILES)
        has = "none" if not found else ", ".join(file.name for file in found[:4])
        raise UsageError(f"{flag} {folder}: a folder needs one {wanted}, and it has {has}; name a file")
    return found[0]


def _read(file: Path, flag: str) -> bytes:
    try:
        # A FIFO would be waited for without end, and a device never ends.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise UsageError(f"{flag} {file} is no regular file")
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{flag} {file}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{flag} {file} is larger than {MAX_FILE_BYTES >> 20} MiB, which no such file is")
    return data


def _json_rows(file: Path, data: bytes, flag: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{flag} {file}, line {number} is not JSON: {error}") from None


def _parquet_rows(file: Path, data: bytes, flag: str) -> Iterator[tuple[str, Any]]:
    try:
        pyarrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(
            f"{flag} {file} is parquet, which needs pyarrow (pip install pyarrow); a .jsonl file needs nothing"
        ) from None
    try:
        opened = parquet.ParquetFile(pyarrow.BufferReader(data))
        missing = [name for name in ("question", "answer") if name not in opened.schema_arrow.names]
        if missing:
            raise UsageError(f"{flag} {file} has no column {missing[0]!r}; it needs question and answer")
        number = 0
        for batch in opened.iter_batches(batch_size=1024, columns=["question", "answer"]):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{flag} {file} cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _problem(row: Any, where: str) -> Problem:
    if not isinstance(row, dict):
        raise UsageError(f'{where} must be an object with "question" and "answer"')
    texts: list[str] = []
    for name in ("question", "answer"):
        text = row.get(name)
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f'{where}: "{name}" must be a text, got {_short(text)}')
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError(f'{where}: "{name}" has half a surrogate pair, which is no text')
        texts.append(text)
    if "#### " not in texts[1]:
        raise UsageError(f'{where}: "answer" must end in "#### number", got {_short(texts[1][-60:])}')
    return Problem(*texts)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
