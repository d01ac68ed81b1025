"""Flags that README.md and docs/ name, against the commands that have them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from atom.cli import dispatch
from atom.engine.server.args import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FLAG: Final = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")

OF_OTHERS: Final[Mapping[str, str]] = {
    "--no-deps": "pip",
    "--mpi": "srun",
    "--ntasks-per-node": "srun",
    "--gpus": "srun",
    "--level": "the server of an example",
    "--verbose": "the server of an example",
    "--ttft-sla-ms": "named as a flag that there is not",
}


@cache
def options() -> dict[str, set[str]]:
    """The options of each command, by its words after `atom`."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        found[" ".join(words)] = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
        for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
            one = command.get_command(None, name)
            walk(one, (*words, name))
            if one.hidden:  # what the group does without a subcommand
                found[" ".join(words)] |= found[" ".join((*words, name))]

    walk(typer.main.get_command(dispatch.app), ())
    return found


@cache
def of_the_server() -> set[str]:
    return {flag for action in build_parser()._actions for flag in action.option_strings}


@cache
def of_scripts() -> set[str]:
    """Options of the benchmarks in tests/."""
    scripts = (ROOT / "tests" / "benchmarks").glob("*.py")
    return {flag for path in scripts for flag in re.findall(r'"(--[a-z0-9-]+)"', path.read_text(encoding="utf-8"))}


def command_lines(text: str) -> Iterator[str]:
    """Those of `atom` in a page's code blocks, without comments."""
    for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.removeprefix("$ ").startswith("atom "):
                yield line.removeprefix("$ ").partition(" #")[0]


def split(line: str) -> list[str]:
    """Quoted options of a load stay together; a remark beside a command may have an apostrophe."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    known = {*of_the_server(), *of_scripts(), *OF_OTHERS, "--help"}.union(*options().values())
    assert not set(FLAG.findall(page.read_text(encoding="utf-8"))) - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_have_flags_of_their_command(page: Path) -> None:
    wrong = []
    for line in command_lines(page.read_text(encoding="utf-8")):
        words = list(itertools.takewhile(lambda word: word != "--", split(line)))[1:]
        command = max((name for name in options() if " ".join(words).startswith(name)), key=len)
        known = options()[command] | (of_the_server() if command == "serve" else set())
        flags = [word.partition("=")[0] for word in words if FLAG.match(word) and " " not in word]
        wrong += [f"{line}: {flag}" for flag in flags if flag not in {*known, "--help"}]
    assert not wrong, "\n".join(wrong)


def test_flags_of_others_are_named_in_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not set(OF_OTHERS) - set(FLAG.findall(text))
