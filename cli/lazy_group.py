"""Groups of commands whose modules are imported when they are asked for, so that `atom --version` is quick and a load
does not wait for the imports of all others.

A command is a module of this package with a function of the command's name, and, where it has them, `CONTEXT_SETTINGS`
and `EXAMPLES`; or, where it has subcommands itself, with a `typer.Typer` called `app`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import typer
from typer.core import TyperGroup

__all__ = ["HELP_OPTIONS", "LazyGroup"]

HELP_OPTIONS: Final = {"help_option_names": ["-h", "--help"]}


class LazyGroup(TyperGroup):
    """Derive from it and say which commands there are."""

    MODULES: ClassVar[Mapping[str, str]] = {}
    """Command → module of this package, in the order of the help."""

    def list_commands(self, ctx: Any) -> list[str]:
        modules = self.MODULES.items()
        return [name for name, module in modules if importlib.util.find_spec(f"atom.cli.{module}") is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"atom.cli.{self.MODULES[cmd_name]}")
        group = getattr(module, "app", None)
        if group is None:
            settings = {**HELP_OPTIONS, **getattr(module, "CONTEXT_SETTINGS", {})}
            group = typer.Typer(add_completion=False, rich_markup_mode="rich")
            function = getattr(module, cmd_name.replace("-", "_"))
            group.command(cmd_name, context_settings=settings, epilog=getattr(module, "EXAMPLES", None))(function)
        command = typer.main.get_command(group)
        command.name = cmd_name
        for one in (command, *getattr(command, "commands", {}).values()):
            one.help = _unwrapped(one.help)
        return command


def _unwrapped(text: str | None) -> str | None:
    """A docstring's paragraphs as lines: typer would keep the line breaks of all but the first."""
    return text and re.sub(r"(?<!\n)\n(?!\n)", " ", text)
