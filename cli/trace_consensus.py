"""`atom trace-consensus`: who waited for whom when ranks agree. Its subcommands are a file each."""

from __future__ import annotations

from typing import ClassVar, Final

import typer

from atom.cli.lazy_group import HELP_OPTIONS, LazyGroup

__all__ = ["app"]

HELP: Final = "Say who waited for whom when ranks agree, and whether that wait is the problem."


class _Subcommands(LazyGroup):
    MODULES: ClassVar = {
        "run": "trace_consensus_run",
        "report": "trace_consensus_report",
        "recorder": "trace_consensus_recorder",
    }


app = typer.Typer(
    cls=_Subcommands, no_args_is_help=True, rich_markup_mode="rich", help=HELP, context_settings=HELP_OPTIONS
)


@app.callback()
def _trace_consensus() -> None:
    """Say who waited for whom when ranks agree, and whether that wait is the problem."""
