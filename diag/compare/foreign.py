"""Results of other tools as request records, so that they are scored like a run of `atom bench`.

Their files come from anywhere: every value is checked, and an error names the file and the place.
"""

from __future__ import annotations

from pathlib import Path

from atom.diag.compare.recorded import Recorded
from atom.recipes.errors import UsageError

__all__ = ["read_foreign"]


def read_foreign(path: Path) -> Recorded:
    """UsageError if `path` is no result of a tool that is known."""
    raise UsageError(f"{path} is no run directory, and no result of another tool that is known")
