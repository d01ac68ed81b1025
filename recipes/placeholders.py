"""Filling `{placeholders}`: a recipe and what was asked for become a concrete command, environment and set of ports.

Known to every recipe: `{src}` import root of the version under test (put first on PYTHONPATH by recipes that use it),
`{model} {host} {port} {devices} {python}`, `{port_file}` a path the server writes its port to, `{label}` the run's
label, `{scratch}` a directory that lives as long as the server, `{env}` (an argument of its own in `exec`: becomes
`env NAME=VALUE …`), the names under `ports` and the names under `variables`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atom.recipes.errors import UsageError
from atom.recipes.recipe import RESERVED_PLACEHOLDERS, Argv, Recipe
from atom.recipes.schema import FieldPath, RecipeDocument

__all__ = ["Expansion", "check_placeholders", "expand", "resolve_variables", "uses"]

_PLACEHOLDER: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """A recipe made concrete."""

    prepare: list[list[str]]
    command: list[str]
    stop_command: list[str] | None
    env: dict[str, str]
    """The whole environment of the server."""
    recipe_env: dict[str, str]
    """What of it the recipe and the caller set, for the record."""
    cwd: str | None


def check_placeholders(recipe: Recipe, document: RecipeDocument) -> None:
    """Raise UsageError for a placeholder nobody fills."""
    known = RESERVED_PLACEHOLDERS | set(recipe.variables) | set(recipe.ports)
    for path, text in _strings(recipe):
        for name in _names(document, path, text):
            if name not in known:
                raise document.error(
                    path, f"has the unknown placeholder {{{name}}}; known here: {', '.join(sorted(known))}"
                )
            if name == "env" and (path[0] != "exec" or text != "{env}"):
                raise document.error(path, "has {env}, which is only allowed as an argument of its own in `exec`")


def _names(document: RecipeDocument, path: FieldPath, text: str) -> Iterator[str]:
    for match in _PLACEHOLDER.finditer(text):
        if match[0] in "{}":
            raise document.error(path, f"has a single {match[0]!r} in {text!r}; write it twice to mean the character")
        if match[1] is not None:
            yield match[1]


def _strings(recipe: Recipe) -> Iterator[tuple[FieldPath, str]]:
    for index, argv in enumerate(recipe.prepare):
        yield from ((("prepare", index), word) for word in argv)
    yield from ((("command",), word) for word in recipe.command)
    yield from ((("exec",), word) for word in recipe.exec)
    yield from ((("stop", "command"), word) for word in recipe.stop.command or ())
    yield from ((("env", name), value) for name, value in recipe.env.items() if value is not None)
    if recipe.cwd is not None:
        yield ("cwd",), recipe.cwd


def uses(recipe: Recipe, placeholder: str) -> bool:
    """Whether the recipe has `{placeholder}` anywhere."""
    return any(match[1] == placeholder for _, text in _strings(recipe) for match in _PLACEHOLDER.finditer(text))


def resolve_variables(recipe: Recipe, given: Mapping[str, str]) -> dict[str, str]:
    """Values of the recipe's own placeholders; UsageError for an unknown name or a missing value."""
    unknown = sorted(set(given) - set(recipe.variables) - {"python", "src"})
    if unknown:
        known = sorted({*recipe.variables, "python", "src"})
        raise UsageError(f"--set {unknown[0]}=…: recipe {recipe.name} has no such variable; it has {', '.join(known)}")
    values = dict(given)
    for name, variable in recipe.variables.items():
        from_env = os.environ.get(variable.env) if variable.env else None
        value = given.get(name) or from_env or variable.default
        if value is None:
            also = f" or the environment variable {variable.env}" if variable.env else ""
            about = f" ({variable.help})" if variable.help else ""
            raise UsageError(f"recipe {recipe.name} needs a value for `{name}`{about}: give --set {name}=VALUE{also}")
        values[name] = value
    return values


def expand(
    recipe: Recipe,
    values: Mapping[str, str | None],
    *,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    python_path: Sequence[Path] = (),
    devices: str | None = None,
) -> Expansion:
    """Fill all placeholders. A value of None means "not given": using it is an error that says how to give it.

    `env` and `python_path` (put first on PYTHONPATH) are the caller's, and win over the recipe's.
    """

    def fill(text: str) -> str:
        def value_of(match: re.Match[str]) -> str:
            if match[1] is None:
                return match[0][0]
            value = values[match[1]]
            if value is None:
                raise UsageError(f"recipe {recipe.name} needs {_HOW_TO_GIVE.get(match[1], match[1])}")
            return value

        return _PLACEHOLDER.sub(value_of, text)

    own_env = {name: None if value is None else fill(value) for name, value in recipe.env.items()}
    if devices is not None:
        own_env.update(dict.fromkeys(recipe.devices_env, devices))
    own_env.update(env or {})
    if python_path:
        parts = [*map(str, python_path), own_env.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")]
        own_env["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
    whole = {name: value for name, value in {**os.environ, **own_env}.items() if value is not None}
    set_here = {name: value for name, value in own_env.items() if value is not None}
    command = [fill(word) for word in recipe.command] + list(extra_args)
    return Expansion(
        prepare=[[fill(word) for word in argv] for argv in recipe.prepare],
        command=_prefixed(recipe.exec, fill, set_here, command),
        stop_command=None if recipe.stop.command is None else [fill(word) for word in recipe.stop.command],
        env=whole,
        recipe_env=set_here,
        cwd=None if recipe.cwd is None else fill(recipe.cwd),
    )


_HOW_TO_GIVE: Final = {
    "model": "a model: give its directory or file after the recipe's name (`atom serve RECIPE MODEL`)",
    "devices": "devices: give --devices, such as --devices 0,1",
    "src": "a source tree: give --set src=DIR",
}


def _prefixed(prefix: Argv, fill: Callable[[str], str], env: Mapping[str, str], command: list[str]) -> list[str]:
    if not prefix:
        return command
    words: list[str] = []
    for word in prefix:
        if word == "{env}":
            words += ["env", *(f"{name}={value}" for name, value in env.items())]
        else:
            words.append(fill(word))
    if Path(words[0]).name == "ssh":
        # ssh joins its arguments with spaces and hands them to a shell over there: quote what is meant for it.
        split = prefix.index("{env}") if "{env}" in prefix else len(words)
        return [*words[:split], shlex.join([*words[split:], *command])]
    return [*words, *command]
