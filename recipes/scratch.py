"""Temporary directories that say whose they are, so that `atom clean` can remove what an interrupted run left.

A scratch directory holds `owner.json` with the token of the process that made it (`recipes/processes.py`) and, for a
git worktree inside it, the repository to prune.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atom.recipes.processes import OwnerState, owner_state, process_token

__all__ = ["Scratch", "make_scratch", "stale_scratch"]

_PREFIX: Final = "atom-scratch-"
_OWNER_FILE: Final = "owner.json"


@dataclass(frozen=True, slots=True)
class Scratch:
    path: Path
    repository: Path | None = None
    """The git repository whose worktree is inside, if any."""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def make_scratch(*, repository: Path | None = None) -> Scratch:
    """A new directory that only this user can enter, owned by this process."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    owner = {"owner": process_token(), "repository": None if repository is None else str(repository.resolve())}
    (path / _OWNER_FILE).write_text(json.dumps(owner), encoding="utf-8")
    return Scratch(path, repository)


def stale_scratch() -> list[Scratch]:
    """This user's scratch directories whose owner is gone. Links and other users' directories are not looked into."""
    found = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            continue
        try:
            owner = json.loads((path / _OWNER_FILE).read_text(encoding="utf-8"))
            token, repository = str(owner["owner"]), owner["repository"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being made, or not ours
        if owner_state(token) is OwnerState.GONE:
            found.append(Scratch(path, Path(repository) if isinstance(repository, str) else None))
    return found
