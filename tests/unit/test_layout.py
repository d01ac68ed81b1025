"""The house rules that a reader relies on: rooms, the direction of imports, file sizes, docstrings."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "engine", "bench", "diag", "recipes")
#: Each room and the rooms that it may import. `engine` and the tools meet only over HTTP, files and process control.
ALLOWED: dict[str, set[str]] = {
    "cli": {"diag", "bench", "recipes"},
    "diag": {"bench", "recipes"},
    "bench": {"recipes"},
    "recipes": set(),
    "engine": set(),
}
MAX_LINES = 650


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # The GC hook is a package that is also loaded by its path, under another name.
            stands_alone = node.level == 1 and path.parent == ROOT / "diag" / "gc_hook"
            assert node.level == 0 or stands_alone, f"{path}: relative import"
            if node.module == "atom":
                yield from (f"atom.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module


def test_rooms_are_reachable_through_the_link_farm() -> None:
    links = {path.name: path for path in (ROOT / ".src" / "atom").iterdir()}
    assert sorted(links) == sorted(ROOMS)
    for room, link in links.items():
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.resolve() == (ROOT / room).resolve()


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sources():
        room = path.relative_to(ROOT).parts[0]
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] == "atom" and len(parts) > 1 and parts[1] not in ALLOWED[room] | {room}:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_files_stay_small_and_say_what_they_are() -> None:
    wrong = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) > MAX_LINES:
            wrong.append(f"{path.relative_to(ROOT)}: {lines} lines")
        if not ast.get_docstring(ast.parse(text)):
            wrong.append(f"{path.relative_to(ROOT)}: no module docstring")
    assert not wrong, "\n".join(wrong)


UNPICKLED = {"bench/workers.py", "bench/worker.py"}
"""A parent's own object, in an anonymous file that its children inherit: nobody else can have written it."""


def test_nothing_unpickles() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources()
        for module in imported_modules(path)
        if module.split(".")[0] in {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
        and str(path.relative_to(ROOT)) not in UNPICKLED
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["atom.cli.main", "atom.diag.session", "atom.engine.server.args"])
def test_light_modules_do_not_pull_heavy_ones(module: str) -> None:
    """The base distribution has neither torch nor MPI, and `--help` has to be quick where they are installed."""
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'mpi4py', 'numba', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'pulled {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / ".src")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
