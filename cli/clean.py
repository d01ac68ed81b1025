"""`atom clean`: sweep what interrupted runs left on this machine. Finding it is `recipes/leftovers.py`, and of
checkouts `diag/compare/source.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from atom.cli.options import JsonOption, QuietOption, check_writable
from atom.diag.compare.source import StaleCheckout, stale_checkouts, sweep_checkouts
from atom.recipes.errors import RunError
from atom.recipes.leftovers import Leftovers, find_leftovers, sweep

__all__ = ["app", "clean"]

app = typer.Typer(add_completion=False)


@app.command("clean", epilog="Examples:\n\n  atom clean --dry-run\n\n  atom clean --cache")
def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be swept")] = False,
    cache: Annotated[
        bool, typer.Option("--cache", help="also remove complete checkouts of git refs, with builds and compile caches")
    ] = False,
    json_path: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Sweep processes, containers, temporary directories and half-made checkouts that interrupted runs left.

    Processes and containers are found by their label, never by name, and only if
    the supervisor that answers for them is gone: a running server is never touched.
    A checkout that a comparison has in use is left alone.
    """
    check_writable("--json", json_path)
    leftovers = find_leftovers()
    remaining = [] if dry_run else sweep(leftovers)
    checkouts = stale_checkouts(unused=cache)
    if not dry_run:
        checkouts = sweep_checkouts(checkouts)
    if not quiet and json_path != "-":
        _print(leftovers, checkouts, dry_run)
    if json_path is not None:
        text = json.dumps(
            {
                "dry_run": dry_run,
                "processes": [
                    {"pid": one.pid, "label": one.label, "command": one.command} for one in leftovers.processes
                ],
                "containers": [
                    {"engine": one.engine, "id": one.id, "label": one.label} for one in leftovers.containers
                ],
                "directories": [str(one.path) for one in leftovers.scratch],
                "checkouts": [str(one.path) for one in checkouts],
                "left_alone": leftovers.owned,
                "remaining": [one.pid for one in remaining],
            }
        )
        if json_path == "-":
            print(text)
        else:
            Path(json_path).write_text(text + "\n", encoding="utf-8")
    if remaining:
        pids = ", ".join(str(process.pid) for process in remaining)
        raise RunError(
            f"these processes could not be ended: {pids}; they may wait in the kernel, or belong to another user"
        )


def _print(leftovers: Leftovers, checkouts: Sequence[StaleCheckout], dry_run: bool) -> None:
    verb = "would end" if dry_run else "ended"
    for process in leftovers.processes:
        print(f"{verb} pid {process.pid}: {process.command[:100]}")
    verb = "would remove" if dry_run else "removed"
    for scratch in leftovers.scratch:
        print(f"{verb} {scratch.path}")
    for container in leftovers.containers:
        print(f"{verb} {container.engine} container {container.id[:12]}")
    for checkout in checkouts:
        print(f"{verb} {checkout.path}{' (half made)' if checkout.half_made else ''}")
    if not (leftovers.processes or leftovers.scratch or leftovers.containers or checkouts):
        print("nothing to sweep")
    if leftovers.owned:
        print(f"{leftovers.owned} processes of running servers left alone", file=sys.stderr)
