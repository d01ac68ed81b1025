"""Proof that an arm's server ran the arm's own code.

An interpreter takes a module that a checkout lacks from wherever else it is installed, without a word: a namespace
package has parts in several places, an editable install of the same project is on every path, and a regular package of
the same name elsewhere hides the checkout altogether. Two things are looked at: before the first run, what the recipe's
interpreter would find (`refuse_foreign_modules`); after each run, what the server's processes had loaded, as the hook
recorded it (`origin_problems`; `diag/gc_hook/origins.py`).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from atom.bench.regular_file import read_regular
from atom.diag.compare.model import Arm
from atom.recipes.errors import RunError, UsageError
from atom.recipes.placeholders import expand, resolve_variables
from atom.recipes.recipe import Recipe
from atom.recipes.resolve import resolve_recipe

__all__ = ["origin_problems", "packages_of", "refuse_foreign_modules"]

_MAX_BYTES: Final = 16 << 20
_SHOWN: Final = 3

_REACHABLE: Final = r"""
import importlib.util, json, os, sys
sys.dont_write_bytecode = True
SUFFIXES = tuple(__import__("importlib.machinery").machinery.all_suffixes())

def modules(name, folder, depth=0):
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return
    for entry in entries:
        path = os.path.join(folder, entry)
        if entry.endswith(SUFFIXES):
            stem = entry.split(".")[0]
            yield (name if stem == "__init__" else name + "." + stem), path
        elif entry.isidentifier() and entry != "__pycache__" and depth < 20 and os.path.isdir(path):
            yield from modules(name + "." + entry, path, depth + 1)

found = {}
for package in sys.argv[1:]:
    try:
        spec = importlib.util.find_spec(package)
    except ImportError as error:
        spec, why = None, str(error)
    if spec is None:
        found[package] = None
        continue
    one = found[package] = {}
    for folder in spec.submodule_search_locations or ():
        for name, path in modules(package, folder):
            one.setdefault(name, os.path.realpath(path))
    if spec.origin and spec.has_location:
        one[package] = os.path.realpath(spec.origin)
print(json.dumps(found))
"""


def refuse_foreign_modules(arm: Arm, recipe: Recipe) -> None:
    """RunError if the recipe's interpreter, started as the server will be, would find a module of the packages that
    must come from the checkout anywhere else. Imports no module of theirs."""
    packages = recipe.source_tree.packages
    if not packages or recipe.exec or arm.checkout is None:
        return
    found = _reachable(arm, recipe)
    for package in packages:
        modules = found.get(package)
        if modules is None:
            raise RunError(f"{package} is not in {arm.src}: {arm.spec} has no such package there")
        if foreign := foreign_modules(modules, Path(arm.checkout)):
            raise RunError(
                f"{_told(foreign)}, and not from {arm.spec}'s checkout in {arm.checkout}; {_way_out(foreign, recipe)}"
            )


def _reachable(arm: Arm, recipe: Recipe) -> Mapping[str, Mapping[str, str] | None]:
    variables = resolve_variables(recipe, arm.variables)
    python = arm.python or variables.get("python") or sys.executable
    values: dict[str, str | None] = {
        **dict.fromkeys((*recipe.ports, "port", "host", "port_file", "label", "scratch"), ""),
        "devices": "",
        "model": recipe.model or "",
        **variables,
        "python": python,
        "src": arm.src,
    }
    start = expand(recipe, values, env=arm.env)
    command = [python, "-c", _REACHABLE, *recipe.source_tree.packages]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
            env=start.env, cwd=start.cwd,
        )  # fmt: skip
        if done.returncode == 0:
            found: Mapping[str, Mapping[str, str] | None] = json.loads(done.stdout.splitlines()[-1])
            return found
        problem = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        problem = str(error)
    raise RunError(f"{python} cannot tell where its modules come from: {problem}")


def foreign_modules(modules: Mapping[str, str], checkout: Path) -> dict[str, str]:
    """Those whose file is not under the checkout, links resolved."""
    root = os.path.realpath(checkout)
    return {name: file for name, file in modules.items() if not _is_under(os.path.realpath(file), root)}


def _way_out(foreign: Mapping[str, str], recipe: Recipe) -> str:
    """What a person can do about it."""
    here = os.path.realpath(recipe.cwd or os.curdir)
    if (
        recipe.cwd is None
        and recipe.env.get("PYTHONSAFEPATH") is None
        and any(_is_under(f, here) for f in foreign.values())
    ):
        return (
            "`python -m` takes what lies in the current directory first: start this elsewhere, or give recipe "
            f'{recipe.name} `env: {{PYTHONSAFEPATH: "1"}}`'
        )
    return f'recipe {recipe.name} must find {{src}} first, such as with `env: {{PYTHONPATH: "{{src}}"}}`'


def _is_under(file: str, root: str) -> bool:
    return file.startswith(root + os.sep)


def _told(foreign: Mapping[str, str]) -> str:
    shown = [f"module {name} comes from {file}" for name, file in sorted(foreign.items())[:_SHOWN]]
    more = f" (and {len(foreign) - _SHOWN} more)" if len(foreign) > _SHOWN else ""
    return "; ".join(shown) + more


# ---- after a run ---------------------------------------------------------------------------------------------------


def origin_problems(
    run_dir: Path,
    arm: Arm,
    recipe: str | None = None,
    known: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Why this run does not show the arm's own code; empty for an arm without a checkout, and where every process that
    runs the packages of its recipe had them from there. `recipe`: of the load, for an arm that has none of its own.
    `known`: packages by recipe; the file of one that is not there is read."""
    name = arm.recipe or recipe
    if arm.checkout is None or name is None:
        return []
    try:
        packages = tuple(map(str, known[name])) if name in known else packages_of(name)
    except (UsageError, TypeError):
        return [f"source not proven: recipe {name} cannot be read any more, so it is not known which code was to run"]
    if not packages:
        return []
    problems = []
    proven = set[str]()
    for record in read_origins(run_dir):
        if foreign := foreign_modules(record["modules"], Path(arm.checkout)):
            who = f"{record['role']} process {record['pid']}"
            problems.append(f"foreign modules: in the {who} {_told(foreign)}, not from the checkout of {arm.spec}")
        proven |= {package for package in packages if _has(record["modules"], package)}
    missing = [package for package in packages if package not in proven]
    if missing and not problems:
        problems.append(
            f"source not proven: no process of the server recorded where {', '.join(missing)} came from, so it may not "
            f"be that of {arm.spec}"
        )
    return problems


@functools.cache
def packages_of(recipe: str) -> tuple[str, ...]:
    """Packages that must come from the checkout of whatever runs with this recipe. UsageError if there is none."""
    return resolve_recipe(recipe).source_tree.packages


def _has(modules: Iterable[str], package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in modules)


def read_origins(run_dir: Path) -> list[dict[str, Any]]:
    """What the processes of a run recorded; damaged records are left out."""
    found = []
    for path in sorted((run_dir / "server").glob("origins-*.json")):
        try:
            raw = json.loads(read_regular(path, _MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(raw, dict) and isinstance(raw.get("modules"), dict):
            modules = {str(name): str(file) for name, file in raw["modules"].items()}
            texts = {name: str(raw.get(name, ""))[:200] for name in ("role", "pid", "executable", "python")}
            found.append({**texts, "modules": modules})
    return found


def interpreters(run_dirs: Sequence[Path]) -> list[str]:
    """Interpreters that the server's processes ran in, with their versions."""
    seen = {f"{one['executable']} ({one['python']})" for run_dir in run_dirs for one in read_origins(run_dir)}
    return sorted(seen)
