"""`atom bench random`: prompts of random tokens or words."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from atom.cli import load_options as load
from atom.cli.bench_checks import check_prompt_tokens
from atom.cli.bench_command import bench
from atom.cli.load_choices import random_load
from atom.cli.load_options import LOAD
from atom.cli.option_groups import (
    arrival_options,
    evidence_options,
    limit_options,
    output_options,
    sampling_options,
    server_options,
    with_options,
)

__all__ = ["EXAMPLES", "random"]

EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom bench random --recipe embedded --random-input-len 128 --random-output-len 64 --num-prompts 32\n\n"
    "  atom bench random --port 8000 --input-len 2048 --output-len 64 --max-concurrency 64 --ignore-eos\n\n"
    "  atom bench random --base-url http://host:8000 --request-rate 10 --goodput ttft:500 tpot:30 --json result.json"
)


@with_options(server_options, arrival_options, limit_options, sampling_options, evidence_options, output_options)
def random(
    ctx: typer.Context,
    random_input_len: load.InputLenOption = 1024,
    random_output_len: load.OutputLenOption = 128,
    random_range_ratio: load.RangeRatioOption = 0.0,
    random_prefix_len: load.PrefixLenOption = 0,
    vocab_size: load.VocabSizeOption = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.", rich_help_panel=LOAD)] = 1000,
    **given: Any,
) -> int:
    """Random token ids (or, for chat, random words) of given lengths, in a closed or open loop.

    With --recipe, arguments after `--` go to the server, and --model says what it serves.
    """
    given |= {
        "ctx": ctx,
        "random_input_len": random_input_len,
        "random_output_len": random_output_len,
        "random_range_ratio": random_range_ratio,
        "random_prefix_len": random_prefix_len,
        "vocab_size": vocab_size,
        "num_prompts": num_prompts,
    }
    return bench("random", given, random_load, check=check_prompt_tokens)
