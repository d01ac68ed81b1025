"""The text that a running process is made to run."""

from __future__ import annotations

from pathlib import Path

from atom.diag import attach_text, gc_hook


def test_every_module_of_the_hook_is_in_the_text() -> None:
    folder = Path(gc_hook.__file__).parent
    assert sorted(attach_text._MODULES) == sorted(path.stem for path in folder.glob("*.py"))
