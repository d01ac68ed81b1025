"""The run directory: where every command that measures puts what it recorded, readable after `kill -9` at any moment.

Layout and field meanings are in docs/run_directory.md. This file owns the files' mechanics: creation, one writer per
JSON Lines file, atomic replacement of JSON files, readers that tolerate a torn line, and the schema version. What goes
into the lines lives with who writes them (`bench/records.py`, `diag/`).
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from atom.bench.redact import redact
from atom.recipes.errors import RunError, UsageError

__all__ = [
    "SCHEMA_VERSION",
    "JsonlFile",
    "JsonlWriter",
    "RunDirectory",
    "Validity",
    "check_schema_version",
    "read_jsonl",
    "write_json",
]

SCHEMA_VERSION: Final = "1.0"
"""`major.minor` of everything in a run directory. Fields may be added within a major version."""


class Validity(StrEnum):
    """What a run is worth as evidence. `run.json` has null while it runs and after a kill."""

    VALID = "valid"
    NOT_VALID = "not valid"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class JsonlWriter:
    """Appends JSON objects, one a line, each in one `write(2)`: what was appended survives `kill -9`.

    One writer per file, enforced by an advisory lock; a second one raises UsageError. If the file ends in a torn line
    (its writer was killed), the torn line is closed first, so that it spoils no other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise UsageError(f"{path} is being written by another process; choose another --output-dir") from None
        except OSError:
            pass  # a file system without locks
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            try:
                os.write(self._fd, b"\n")
            except OSError as error:
                self.close()
                raise RunError(f"cannot write {path}: {error.strerror}") from None

    def append(self, record: Mapping[str, Any]) -> None:
        self.append_line(json.dumps(record, separators=(",", ":"), allow_nan=False))

    def append_line(self, line: str) -> None:
        """Append one serialized object (no newline in it). RunError if the file system refuses."""
        data = memoryview(line.encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}") from None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class JsonlFile:
    """Iterates the objects of a JSON Lines file. After the iteration `malformed` says how many lines were skipped
    because they were torn or no JSON object; `torn` whether the last line is an object that was cut off. What is no
    regular file (a FIFO would be waited for without end) is not read, and counts as one such line."""

    path: Path
    line: int = field(default=0, init=False)
    """Number of the line that was yielded last, from 1."""
    malformed: int = field(default=0, init=False)
    torn: bool = field(default=False, init=False)

    @property
    def damaged(self) -> int:
        """`malformed` without a torn last line, which a killed writer leaves."""
        return self.malformed - self.torn

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.line, self.malformed, self.torn = 0, 0, False
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            self.malformed = 1
            return
        with os.fdopen(fd, "rb") as file:
            for self.line, line in enumerate(file, 1):
                if line.isspace():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    value = None
                if isinstance(value, dict):
                    yield value
                else:
                    self.malformed += 1
                    self.torn = not line.endswith(b"\n") and line.lstrip().startswith(b"{")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file; torn and foreign lines are skipped, a missing file is empty."""
    return iter(JsonlFile(path))


def write_json(path: Path, value: Mapping[str, Any], *, mode: int | None = None) -> None:
    """Replace `path` atomically: a reader sees the old content or the new one, never a part."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write_text(path, text, mode=mode)


def write_text(path: Path, text: str, *, mode: int | None = None) -> None:
    """Replace `path` atomically with `text`, keeping the file's mode unless another one is given. RunError if the file
    system refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode is None:
            mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(file.fileno(), mode)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


def check_schema_version(value: object, where: Path | str) -> None:
    """Raise UsageError if `value` is no version, or of a newer major version than this reader's."""
    major = str(value).partition(".")[0]
    if not isinstance(value, str) or not major.isdigit():
        raise UsageError(f"{where}: schema_version must look like {SCHEMA_VERSION!r}, got {value!r}")
    if int(major) > int(SCHEMA_VERSION.partition(".")[0]):
        raise UsageError(
            f"{where}: schema_version {value} is newer than this atom reads ({SCHEMA_VERSION}); upgrade atom"
        )


class RunDirectory:
    """One run's directory. `RunDirectory(path)` creates it (or opens the one that is there, for instance the one a
    session made), `RunDirectory.open(path)` only opens. Paths are attributes; nothing is cached, so several objects
    may stand for one directory."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        self.run_json = self.path / "run.json"
        self.summary_json = self.path / "summary.json"
        self.report_html = self.path / "report.html"
        self.requests = self.path / "requests"
        self.server = self.path / "server"
        self.client = self.path / "client"
        self.trace = self.path / "trace"
        self.arms = self.path / "arms"
        if create:
            self._create()
        self.read_run_json()

    def _create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for folder in (self.requests, self.server, self.client):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output-dir {self.path}: cannot create it: {error.strerror}") from None
        if not self.run_json.exists():
            write_json(self.run_json, {"schema_version": SCHEMA_VERSION, "validity": None, "reasons": []})

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open an existing run directory; UsageError if it is none or of a newer schema."""
        if not (Path(path) / "run.json").is_file():
            raise UsageError(f"{path} is no run directory: it has no run.json")
        return cls(path, create=False)

    def arm(self, label: str, run: int) -> RunDirectory:
        """The directory of one arm's run of a comparison."""
        return RunDirectory(self.arms / label / f"run-{run}")

    def read_run_json(self) -> dict[str, Any]:
        return _read_versioned(self.run_json)

    def write_run_json(self, fields: Mapping[str, Any]) -> None:
        """Merge `fields` into run.json (top level), without their secrets, and replace it atomically. One process at a
        time."""
        content = self.read_run_json() if self.run_json.exists() else {}
        write_json(self.run_json, {"schema_version": SCHEMA_VERSION, **content, **redact(fields)})

    def seal(self, validity: Validity | str, reasons: Sequence[str] = ()) -> None:
        """Say that the run is over and what it is worth. A run without this was killed."""
        self.write_run_json(
            {
                "validity": str(Validity(validity)),
                "reasons": list(reasons),
                "end_time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "end_ns": time.monotonic_ns(),
            }
        )

    @property
    def sealed(self) -> bool:
        return self.read_run_json().get("validity") is not None

    def requests_writer(self, worker: str = "0") -> JsonlWriter:
        return JsonlWriter(self.requests / f"{worker}.jsonl")

    def client_writer(self, worker: str = "0") -> JsonlWriter:
        return JsonlWriter(self.client / f"{worker}.jsonl")

    def request_files(self) -> list[Path]:
        return sorted(self.requests.glob("*.jsonl"))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.summary_json, {"schema_version": SCHEMA_VERSION, **summary})

    def read_summary(self) -> dict[str, Any]:
        if not self.summary_json.is_file():
            raise UsageError(f"{self.path} has no summary.json yet: `atom report {self.path}` writes it")
        return _read_versioned(self.summary_json)


def _read_versioned(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold a JSON object")
    check_schema_version(content.get("schema_version"), path)
    return content
