"""`atom bench sharegpt`: conversations from a file in the ShareGPT format."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from atom.cli import load_options as load
from atom.cli.bench_command import SERVER_ARGUMENTS, bench
from atom.cli.dataset_choices import sharegpt_load
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

__all__ = ["CONTEXT_SETTINGS", "EXAMPLES", "sharegpt"]

CONTEXT_SETTINGS: Final = SERVER_ARGUMENTS
EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom bench sharegpt --dataset-path ShareGPT_V3_unfiltered_cleaned_split.json --tokenizer ./model\n\n"
    "  atom bench sharegpt --dataset-path chats.json --sharegpt-output-len 128 --backend openai-chat --request-rate 4"
)


@with_options(
    server_options, arrival_options, limit_options, sampling_options, evidence_options, probe_options, output_options
)
def sharegpt(
    ctx: typer.Context,
    dataset_path: load.DatasetPathOption,
    num_prompts: Annotated[int, typer.Option(help="Requests.", rich_help_panel=LOAD)] = 1000,
    sharegpt_output_len: Annotated[
        int | None,
        typer.Option(
            "--sharegpt-output-len",
            "--output-len",
            help="Output tokens of every request; default: as long as the recorded answer.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    sharegpt_min_len: Annotated[
        int, typer.Option(help="Leave out shorter prompts, and shorter answers.", rich_help_panel=LOAD)
    ] = 4,
    sharegpt_max_prompt_len: Annotated[
        int, typer.Option(help="Leave out longer prompts.", rich_help_panel=LOAD)
    ] = 1024,
    sharegpt_max_total_len: Annotated[
        int, typer.Option(help="Leave out more prompt and output tokens together.", rich_help_panel=LOAD)
    ] = 2048,
    tokenizer: load.TokenizerOption = None,
    disable_shuffle: load.DisableShuffleOption = False,
    no_oversample: load.NoOversampleOption = False,
    **given: Any,
) -> int:
    """Prompts of a ShareGPT file: the first human turn that is answered; the answer's length is the output length.

    Without --tokenizer, lengths are estimated from characters.
    """
    given |= {
        "ctx": ctx,
        "dataset_path": dataset_path,
        "num_prompts": num_prompts,
        "sharegpt_output_len": sharegpt_output_len,
        "sharegpt_min_len": sharegpt_min_len,
        "sharegpt_max_prompt_len": sharegpt_max_prompt_len,
        "sharegpt_max_total_len": sharegpt_max_total_len,
        "tokenizer": tokenizer,
        "disable_shuffle": disable_shuffle,
        "no_oversample": no_oversample,
    }
    return bench("sharegpt", given, sharegpt_load)
