"""`atom bench custom`: requests from a JSONL file of one's own."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from atom.cli import load_options as load
from atom.cli.bench_command import SERVER_ARGUMENTS, bench
from atom.cli.dataset_choices import custom_load
from atom.cli.load_options import LOAD
from atom.cli.option_groups import (
    arrival_options,
    evidence_options,
    limit_options,
    output_options,
    probe_options,
    sampling_options,
    server_options,
    with_options,
)

__all__ = ["CONTEXT_SETTINGS", "EXAMPLES", "custom"]

CONTEXT_SETTINGS: Final = SERVER_ARGUMENTS
EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom bench custom --dataset-path prompts.jsonl --custom-output-len 256 --max-concurrency 16\n\n"
    "  atom bench custom --dataset-path chats.jsonl --backend openai-chat --disable-shuffle --request-rate 2"
)


@with_options(
    server_options, arrival_options, limit_options, sampling_options, evidence_options, probe_options, output_options
)
def custom(
    ctx: typer.Context,
    dataset_path: load.DatasetPathOption,
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests; default: every line once.", rich_help_panel=LOAD)
    ] = None,
    custom_output_len: Annotated[
        int | None,
        typer.Option(
            "--custom-output-len",
            "--output-len",
            help="Output tokens of every request; default, and -1: what the lines say.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    tokenizer: load.TokenizerOption = None,
    disable_shuffle: load.DisableShuffleOption = False,
    no_oversample: load.NoOversampleOption = False,
    use_trace_timestamps: load.TimestampsOption = True,
    time_scale: load.TimeScaleOption = 1.0,
    **given: Any,
) -> int:
    """One request for each line of a JSONL file.

    A line is {"prompt": text or token ids}, {"messages": […]} or {"body": {…}} as in OpenAI's batch files, with
    output_tokens or max_tokens, and perhaps a timestamp in milliseconds.
    """
    given |= {
        "ctx": ctx,
        "dataset_path": dataset_path,
        "num_prompts": num_prompts,
        "custom_output_len": custom_output_len,
        "tokenizer": tokenizer,
        "disable_shuffle": disable_shuffle,
        "no_oversample": no_oversample,
        "use_trace_timestamps": use_trace_timestamps,
        "time_scale": time_scale,
    }
    return bench("custom", given, custom_load)
