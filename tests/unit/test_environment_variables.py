"""docs/environment_variables.md against the code, in both directions, and the engine's readers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.engine import envs
from atom.engine.errors import ConfigError

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "engine", "bench", "diag", "recipes")
NAME = re.compile(r"\bATOM_[A-Z][A-Z_]*[A-Z]\b")


def documented() -> dict[str, list[str]]:
    """The other cells of a variable's row by its name."""
    text = (ROOT / "docs" / "environment_variables.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `ATOM_")]
    return {row[0].strip("` "): [cell.strip() for cell in row[1:]] for row in rows}


def sources(*suffixes: str) -> Iterator[Path]:
    for room in ROOMS:
        yield from (path for path in (ROOT / room).rglob("*") if path.suffix in suffixes and path.is_file())


def test_what_the_code_names_is_documented_and_nothing_else() -> None:
    used = set()
    for path in sources(".py", ".yaml", ".yml", ".json", ".html", ".sh"):
        used |= set(NAME.findall(path.read_text(encoding="utf-8")))
    for path in (ROOT / "diag").rglob("*.c"):  # the engine's have macros of such names
        used |= set(NAME.findall(path.read_text(encoding="utf-8")))
    assert set(documented()) == used


def test_rows_of_the_engine_agree_with_its_readers() -> None:
    rows = documented()
    for variable in envs.VARIABLES:
        _read_by, default, meaning = rows[variable.name]
        assert (default, meaning) == (variable.shown_default, variable.meaning), variable.name


def test_every_variable_is_in_the_table_of_the_module() -> None:
    defined = {value.name for value in vars(envs).values() if isinstance(value, envs.Variable)}
    assert {variable.name for variable in envs.VARIABLES} == defined


def test_engine_code_names_its_variables_in_one_place() -> None:
    elsewhere = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for path in sorted((ROOT / "engine").rglob("*.py"))
        if path.name != "envs.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)
    ]
    assert not elsewhere, "\n".join(elsewhere)


@pytest.mark.parametrize("variable", envs.VARIABLES, ids=lambda variable: variable.name)
def test_unset_and_empty_are_the_default(variable: envs.Variable[object]) -> None:
    assert variable.read({}) == variable.read({variable.name: ""}) == variable.default


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (envs.API_KEY, "k", "k"),
        (envs.CPU_KERNELS, "torch", "torch"),
        (envs.FAULTS, "retain-finished, retain-finished", {"retain-finished"}),
        (envs.METRICS_DEVICE_TIMER, "1", True),
        (envs.METRICS_PER_REQUEST_CONTEXT, "0", False),
    ],
)
def test_values_are_read(variable: envs.Variable[object], text: str, value: object) -> None:
    assert variable.read({variable.name: text}) == value


@pytest.mark.parametrize(
    ("variable", "text", "right"),
    [
        (envs.CPU_KERNELS, "fast", "auto, attention or torch"),
        (envs.FAULTS, "retain-finished,gauges", "out of: retain-finished"),
        (envs.METRICS_DEVICE_TIMER, "yes", "1 (on) or 0 (off)"),
        (envs.METRICS_PER_REQUEST_CONTEXT, "true", "1 (on) or 0 (off)"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(
    variable: envs.Variable[object], text: str, right: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        variable.read({variable.name: text})
    assert variable.name in str(caught.value)
    assert right in str(caught.value)
    assert repr(text) in str(caught.value)
