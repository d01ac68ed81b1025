"""Where a run's directory is: the one that was asked for, or a new one in `atom-runs/` that `latest` points to.

A run that never started gives its place back, so that a corrected command can take it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Final

from atom.bench.rundir import RunDirectory
from atom.recipes.errors import UsageError

__all__ = ["DEFAULT_FOLDER", "RunPlace"]

DEFAULT_FOLDER: Final = Path("atom-runs")
LATEST: Final = "latest"


class RunPlace:
    """Creates the directory of a run called `name`; `wanted` is `--output-dir`, None for a new one in
    `DEFAULT_FOLDER`. UsageError if it holds a run already or cannot be made. `prepared`: what run.json calls a run that
    was only prepared, whose directory may be taken."""

    def __init__(self, wanted: Path | None, name: str, *, prepared: str | None = None) -> None:
        self._prepared = prepared
        self._found: frozenset[Path] | None = None
        """What was in the directory before; None: it did not exist."""
        self._made_folder = False
        self._previous_latest: str | None = None
        self._default = wanted is None
        path = self._new(name) if wanted is None else self._asked(wanted)
        self.run_dir = RunDirectory(path)
        if self._default:
            with contextlib.suppress(OSError):
                self._previous_latest = str((DEFAULT_FOLDER / LATEST).readlink())
            _point_latest(path.name)

    def give_back(self) -> None:
        """Remove what this object made, and only that."""
        path = self.run_dir.path
        with contextlib.suppress(OSError):
            for entry in _entries(path) - (self._found or frozenset()):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink(missing_ok=True)
            if self._found is None:
                path.rmdir()
            if not self._default:
                return
            if self._previous_latest is not None:
                _point_latest(self._previous_latest)
            elif (DEFAULT_FOLDER / LATEST).is_symlink():
                (DEFAULT_FOLDER / LATEST).unlink()
            if self._made_folder:
                DEFAULT_FOLDER.rmdir()

    def _new(self, name: str) -> Path:
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        try:
            self._made_folder = not DEFAULT_FOLDER.exists()
            DEFAULT_FOLDER.mkdir(exist_ok=True)
            for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
                path = DEFAULT_FOLDER / f"{stem}{suffix}"
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                    return path
        except OSError as error:
            raise UsageError(
                f"{DEFAULT_FOLDER}/ cannot be made here: {error.strerror}; choose a directory with --output-dir"
            ) from None
        raise UsageError(f"{DEFAULT_FOLDER}/{stem}-999 exists; choose a directory with --output-dir")

    def _asked(self, path: Path) -> Path:
        if (path / "run.json").exists() and not self._is_prepared(path):
            raise UsageError(f"--output-dir {path} holds a run already; choose another directory")
        if path.is_dir():
            try:
                self._found = _entries(path)
            except OSError as error:
                raise UsageError(f"--output-dir {path}: {error.strerror}") from None
        return path

    def _is_prepared(self, path: Path) -> bool:
        return self._prepared is not None and RunDirectory.open(path).read_run_json().get("name") == self._prepared


def _entries(path: Path) -> frozenset[Path]:
    """What is in a directory, and in those of its folders that a run writes to."""
    folders = [path, *(path / name for name in ("requests", "server", "client"))]
    return frozenset(entry for folder in folders if folder.is_dir() for entry in folder.iterdir())


def _point_latest(target: str) -> None:
    """Make `latest` a relative link to `target`, atomically. What is no link stays; a file system without links has
    none."""
    link = DEFAULT_FOLDER / LATEST
    if link.exists() and not link.is_symlink():
        return
    temporary = DEFAULT_FOLDER / f".{LATEST}.{os.getpid()}"
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(link)
