"""`atom bench trace`: a recorded trace, at its own times and with its own shared prefixes."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from atom.bench.datasets.trace_formats import FORMATS
from atom.cli import load_options as load
from atom.cli.bench_command import SERVER_ARGUMENTS, bench
from atom.cli.dataset_choices import trace_load
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

__all__ = ["CONTEXT_SETTINGS", "EXAMPLES", "trace"]

CONTEXT_SETTINGS: Final = SERVER_ARGUMENTS
EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom bench trace --dataset-path conversation_trace.jsonl --trace-end 600 --max-input-len 32768\n\n"
    "  atom bench trace --dataset-path BurstGPT_1.csv --time-scale 2 --num-prompts 2000\n\n"
    "  atom bench trace --dataset-path toolagent_trace.jsonl --no-use-trace-timestamps --max-concurrency 32"
)


@with_options(
    server_options, arrival_options, limit_options, sampling_options, evidence_options, probe_options, output_options
)
def trace(
    ctx: typer.Context,
    dataset_path: load.DatasetPathOption,
    trace_format: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(FORMATS)}; default: told from the first line.", rich_help_panel=LOAD),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="The first so many requests; default: all.", rich_help_panel=LOAD)
    ] = None,
    use_trace_timestamps: load.TimestampsOption = True,
    time_scale: load.TimeScaleOption = 1.0,
    trace_start: Annotated[
        float | None, typer.Option(help="Begin this many seconds after the first request.", rich_help_panel=LOAD)
    ] = None,
    trace_end: Annotated[
        float | None, typer.Option(help="End this many seconds after the first request.", rich_help_panel=LOAD)
    ] = None,
    max_input_len: Annotated[
        int | None, typer.Option(help="Leave out requests of more prompt tokens.", rich_help_panel=LOAD)
    ] = None,
    max_output_len: Annotated[
        int | None, typer.Option(help="Leave out requests of more output tokens.", rich_help_panel=LOAD)
    ] = None,
    over_length: Annotated[
        str | None, typer.Option(help="drop (default), or clip: shorten them instead.", rich_help_panel=LOAD)
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens of a block of hash_ids; default: the format's own (512).", rich_help_panel=LOAD),
    ] = None,
    trace_lengths_only: Annotated[
        bool, typer.Option("--trace-lengths-only", help="Prompts that share no prefix.", rich_help_panel=LOAD)
    ] = False,
    prompt_type: load.PromptTypeOption = None,
    tokenizer: load.TokenizerOption = None,
    vocab_size: load.VocabSizeOption = None,
    **given: Any,
) -> int:
    """A recorded trace: the lengths of its requests, their times, and the prefixes that they had in common.

    Reads Mooncake and Bailian JSONL, BurstGPT and Azure LLM inference CSV. Prompts are made up; those whose blocks have
    the same id are the same.
    """
    given |= {
        "ctx": ctx,
        "dataset_path": dataset_path,
        "trace_format": trace_format,
        "num_prompts": num_prompts,
        "use_trace_timestamps": use_trace_timestamps,
        "time_scale": time_scale,
        "trace_start": trace_start,
        "trace_end": trace_end,
        "max_input_len": max_input_len,
        "max_output_len": max_output_len,
        "over_length": over_length,
        "block_size": block_size,
        "trace_lengths_only": trace_lengths_only,
        "prompt_type": prompt_type,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
    }
    return bench("trace", given, trace_load)
