"""`atom doctor`: what this machine has, and what is missing and what that switches off. The looking is
`diag/environment.py`."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from atom.cli.options import JsonOption, QuietOption, check_writable
from atom.diag.environment import Finding, State, examine

__all__ = ["app", "doctor"]

app = typer.Typer(add_completion=False)

_MARKS: Final = {State.OK: "[green]✓[/]", State.MISSING: "[yellow]–[/]", State.WARNING: "[red]![/]"}


@app.command("doctor", epilog="Examples:\n\n  atom doctor\n\n  atom doctor --json -")
def doctor(json_path: JsonOption = None, quiet: QuietOption = False) -> None:
    """Say what this machine has, what is missing, and what that switches off.

    It never fails because something is missing, and changes nothing.
    """
    check_writable("--json", json_path)
    findings = examine()
    if json_path is not None:
        text = json.dumps({"schema_version": "1.0", "findings": [asdict(one) for one in findings]})
        if json_path == "-":
            print(text)
        else:
            Path(json_path).write_text(text + "\n", encoding="utf-8")
    if not quiet and json_path != "-":
        _print(findings)


def _print(findings: list[Finding]) -> None:
    console = Console(highlight=False)
    for section, members in itertools.groupby(findings, key=lambda one: one.section):
        console.print(f"[bold]{section}[/]")
        table = Table(show_header=False, box=None, padding=(0, 1))
        table.add_column(width=1)
        table.add_column(no_wrap=True, min_width=16)
        table.add_column(overflow="fold")
        for one in members:
            table.add_row(_MARKS[one.state], escape(one.name), escape(one.value))
        console.print(table)
        console.print()
    _print_consequences(console, findings)


def _print_consequences(console: Console, findings: list[Finding]) -> None:
    for state, title, joint in (
        (State.WARNING, "look at", ": "),
        (State.MISSING, "missing, and what it switches off", ": "),
    ):
        chosen = [one for one in findings if one.state is state]
        if chosen:
            console.print(f"[bold]{title}[/]")
        for one in chosen:
            console.print(f"  {escape(one.name)}{joint}{escape(one.consequence or '')}", soft_wrap=True)
