"""`atom bench`: one load against a server that runs already, or that a recipe starts and stops. The loads are a command
and a file each; what they have in common is `cli/bench_command.py` and `cli/bench_run.py`."""

from __future__ import annotations

from typing import ClassVar

import typer

from atom.cli.lazy_group import HELP_OPTIONS, LazyGroup

__all__ = ["app"]


class _Loads(LazyGroup):
    MODULES: ClassVar = {
        "random": "bench_random",
        "sharegpt": "bench_sharegpt",
        "custom": "bench_custom",
        "trace": "bench_trace",
        "aiperf-agentic": "bench_agentic",
        "gsm8k": "bench_gsm8k",
        "sweep": "bench_sweep",
    }


app = typer.Typer(
    cls=_Loads,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Load a server and say what it did.",
    context_settings=HELP_OPTIONS,
)


@app.callback()
def _bench() -> None:
    """Load a server and say what it did."""
