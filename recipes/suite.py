"""Suites: named lists of loads for comparisons, as YAML in `recipes/suites/` or anywhere.

A suite says which subcommand of `atom bench` a load is and with which options; whether those are right is known to the
command line alone (`cli/ab_loads.py`), which checks them before anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from atom.recipes.errors import UsageError
from atom.recipes.schema import SUITE, read_document

__all__ = ["Suite", "builtin_suites", "default_suite", "load_suite", "resolve_suite"]


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    description: str
    loads: tuple[dict[str, Any], ...]
    """Each by the fields of the schema; what is not given is left out. Arguments and variables are texts."""
    source: str
    """The file."""


def load_suite(path: str | Path) -> Suite:
    """Read and check one suite file; UsageError names file, line, field and what would be right."""
    document = read_document(Path(path), SUITE)
    data = document.data
    seen: set[str] = set()
    for number, load in enumerate(data["loads"]):
        if load["name"] in seen:
            raise document.error(
                ("loads", number, "name"), f"is {load['name']!r} again; each load has a name of its own"
            )
        seen.add(load["name"])
    return Suite(
        name=data["name"],
        description=data.get("description", ""),
        loads=tuple(_texts(load) for load in data["loads"]),
        source=document.source,
    )


def _texts(load: dict[str, Any]) -> dict[str, Any]:
    """What a process is given is text, also where YAML reads a number."""
    result = dict(load)
    if "server_args" in load:
        result["server_args"] = [str(one) for one in load["server_args"]]
    if "env" in load:
        result["env"] = {name: str(value) for name, value in load["env"].items()}
    return result


def builtin_suites() -> dict[str, Path]:
    """Name to file of the suites that come with the package."""
    folder = Path(str(resources.files("atom.recipes"))) / "suites"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def resolve_suite(name_or_path: str) -> Suite:
    """A built-in suite by its name, or a suite file by its path."""
    builtin = builtin_suites()
    if name_or_path in builtin:
        return load_suite(builtin[name_or_path])
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return load_suite(name_or_path)
    raise UsageError(f"no suite {name_or_path!r}; there are {', '.join(builtin)}, or give the path of a .yaml file")


def default_suite(*, gpus: int, own_servers: bool) -> str:
    """The name of the suite that takes minutes on this machine.

    `own_servers`: the arms bring their servers (recipes, URLs, refs with a recipe), so that a suite must not choose
    one. Without them the arms are refs of this project, whose engine computes on CPUs.
    """
    if not own_servers:
        return "cpu"
    return "gpu" if gpus else "small"
