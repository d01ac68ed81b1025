"""`atom bench`: one load against a server that runs already, or that a recipe starts and stops. The loads are a command
and a file each; what they have in common is `cli/bench_command.py` and `cli/bench_run.py`."""

from __future__ import annotations

from typing import Final

import typer

from atom.cli import bench_agentic, bench_custom, bench_gsm8k, bench_random, bench_sharegpt, bench_sweep, bench_trace

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Load a server and say what it did.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

SERVER_ARGUMENTS: Final = {"allow_extra_args": True}
"""What stands after `--` goes to a recipe's server."""


@app.callback()
def _bench() -> None:
    """Load a server and say what it did."""


app.command("random", epilog=bench_random.EXAMPLES, context_settings=SERVER_ARGUMENTS)(bench_random.random)
app.command("sharegpt", epilog=bench_sharegpt.EXAMPLES, context_settings=SERVER_ARGUMENTS)(bench_sharegpt.sharegpt)
app.command("custom", epilog=bench_custom.EXAMPLES, context_settings=SERVER_ARGUMENTS)(bench_custom.custom)
app.command("trace", epilog=bench_trace.EXAMPLES, context_settings=SERVER_ARGUMENTS)(bench_trace.trace)
app.command("gsm8k", epilog=bench_gsm8k.EXAMPLES, context_settings=SERVER_ARGUMENTS)(bench_gsm8k.gsm8k)
app.command("sweep", epilog=bench_sweep.EXAMPLES, context_settings=SERVER_ARGUMENTS)(bench_sweep.sweep)
app.command("aiperf-agentic", epilog=bench_agentic.EXAMPLES, context_settings=SERVER_ARGUMENTS)(
    bench_agentic.aiperf_agentic
)
