"""`atom bench random`: prompts of random tokens or words."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from atom.cli import load_options as load
from atom.cli.bench_checks import MAX_REQUESTS, check_prompt_tokens
from atom.cli.bench_command import SERVER_ARGUMENTS, Given, bench
from atom.cli.load_choices import arrivals, random_load
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
from atom.recipes.errors import UsageError

__all__ = ["CONTEXT_SETTINGS", "EXAMPLES", "random"]

CONTEXT_SETTINGS: Final = SERVER_ARGUMENTS
EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom bench random --recipe embedded --random-input-len 128 --random-output-len 64 --num-prompts 32\n\n"
    "  atom bench random --port 8000 --input-len 2048 --output-len 64 --max-concurrency 64 --ignore-eos\n\n"
    "  atom bench random --random-prefix-len 4096 --num-prefixes 8 --backend openai-chat --tokenizer ./model\n\n"
    "  atom bench random --base-url http://host:8000 --request-rate 10 --goodput ttft:500 tpot:30 --json result.json"
)


@with_options(
    server_options, arrival_options, limit_options, sampling_options, evidence_options, probe_options, output_options
)
def random(
    ctx: typer.Context,
    random_input_len: Annotated[
        int,
        typer.Option(
            "--random-input-len",
            "--input-len",
            "--prefix-repetition-suffix-len",
            help="Prompt tokens.",
            rich_help_panel=LOAD,
        ),
    ] = 1024,
    random_output_len: Annotated[
        int,
        typer.Option(
            "--random-output-len",
            "--output-len",
            "--prefix-repetition-output-len",
            help="Output tokens (max_tokens).",
            rich_help_panel=LOAD,
        ),
    ] = 128,
    random_range_ratio: load.RangeRatioOption = 0.0,
    random_prefix_len: Annotated[
        int,
        typer.Option(
            "--random-prefix-len",
            "--prefix-repetition-prefix-len",
            help="Tokens that prompts share, before the others.",
            rich_help_panel=LOAD,
        ),
    ] = 0,
    num_prefixes: Annotated[
        int,
        typer.Option(
            "--num-prefixes",
            "--prefix-repetition-num-prefixes",
            help="Different prefixes of that length, used in turn.",
            rich_help_panel=LOAD,
        ),
    ] = 1,
    prompt_type: load.PromptTypeOption = None,
    tokenizer: load.TokenizerOption = None,
    vocab_size: load.VocabSizeOption = None,
    num_prompts: Annotated[
        int,
        typer.Option(
            help="Requests. Not given beside a rate and --duration: as many as are due in it.", rich_help_panel=LOAD
        ),
    ] = 1000,
    **given: Any,
) -> int:
    """Random token ids (or random words: --prompt-type text, chat) of given lengths, in a closed or open loop.

    With --recipe, arguments after `--` go to the server, and --model says what it serves.
    """
    given |= {
        "ctx": ctx,
        "random_input_len": random_input_len,
        "random_output_len": random_output_len,
        "random_range_ratio": random_range_ratio,
        "random_prefix_len": random_prefix_len,
        "num_prefixes": num_prefixes,
        "prompt_type": prompt_type,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "num_prompts": num_prompts,
    }
    return bench("random", given, random_load, check=_check)


def _check(given: Given) -> None:
    """Called with numbers that are in their ranges."""
    chosen = given["ctx"].get_parameter_source("num_prompts")
    if given["duration"] is not None and chosen is not None and chosen.name == "DEFAULT":
        # A rate and a time say how many there are; in a closed loop nobody knows, and the default stands.
        due = arrivals(given).due_within(given["duration"])
        if due is not None and due > MAX_REQUESTS:
            raise UsageError(f"--duration {given['duration']:g} at this --request-rate is {due:,} requests, too many")
        if due is not None:
            given["num_prompts"] = max(1, due)
    check_prompt_tokens(given)
