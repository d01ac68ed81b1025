"""Options of every command that loads a server, or starts one from a recipe. What they mean together is
`cli/load_choices.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atom.cli.load_choices import BACKENDS

__all__ = [
    "EVIDENCE",
    "LOAD",
    "SAMPLING",
    "SERVER",
    "ApiKeyOption",
    "BackendOption",
    "BurstinessOption",
    "ContinuousUsageStatsOption",
    "DatasetPathOption",
    "DevicesOption",
    "DisableShuffleOption",
    "EndpointOption",
    "ExtraBodyOption",
    "FailedRequestThresholdOption",
    "HeaderOption",
    "IgnoreEosOption",
    "InputLenOption",
    "InsecureOption",
    "MaxConcurrencyOption",
    "ModelOption",
    "NoOversampleOption",
    "NumWarmupsOption",
    "OutputLenOption",
    "PrefixLenOption",
    "PromptTypeOption",
    "RangeRatioOption",
    "ReadyTimeoutOption",
    "RecipeOption",
    "RequestRateOption",
    "RequestTimeoutOption",
    "SetOption",
    "TemperatureOption",
    "TimeScaleOption",
    "TimestampsOption",
    "TokenizerOption",
    "VocabSizeOption",
]

SERVER, LOAD, SAMPLING, EVIDENCE = "Server", "Load", "Sampling", "Evidence"

RecipeOption = Annotated[
    str | None,
    typer.Option(help="Start this recipe's server for the run: a name or a file.", rich_help_panel=SERVER),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A variable of the recipe; repeatable.", rich_help_panel=SERVER),
]
DevicesOption = Annotated[
    str | None, typer.Option(help="Devices for the recipe's server, such as 0,1.", rich_help_panel=SERVER)
]
ReadyTimeoutOption = Annotated[
    float | None, typer.Option(help="Seconds until the recipe's server must be healthy.", rich_help_panel=SERVER)
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Model name; default: asked from /v1/models.", rich_help_panel=SERVER),
]
BackendOption = Annotated[
    str,
    typer.Option("--backend", "--endpoint-type", help=f"What to speak: {', '.join(BACKENDS)}.", rich_help_panel=SERVER),
]
EndpointOption = Annotated[
    str | None, typer.Option(help="API path; default: the backend's own.", rich_help_panel=SERVER)
]
ApiKeyOption = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Bearer key.", rich_help_panel=SERVER)
]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="NAME=VALUE", help="Extra header; repeatable.", rich_help_panel=SERVER),
]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="Accept any TLS certificate.", rich_help_panel=SERVER)]
RequestTimeoutOption = Annotated[
    float, typer.Option(help="Seconds from sent to the end of a response.", rich_help_panel=SERVER)
]
InputLenOption = Annotated[
    int, typer.Option("--random-input-len", "--input-len", help="Prompt tokens.", rich_help_panel=LOAD)
]
OutputLenOption = Annotated[
    int,
    typer.Option("--random-output-len", "--output-len", help="Output tokens (max_tokens).", rich_help_panel=LOAD),
]
RangeRatioOption = Annotated[
    float, typer.Option(help="Lengths vary from mean × (1−r) to mean × (1+r); below 1.", rich_help_panel=LOAD)
]
PrefixLenOption = Annotated[
    int, typer.Option(help="Tokens that all prompts share, before the others.", rich_help_panel=LOAD)
]
VocabSizeOption = Annotated[
    int | None,
    typer.Option(
        help="Draw token ids below this; default: what the server says, else ids 256 to 30,000.",
        rich_help_panel=LOAD,
    ),
]
DatasetPathOption = Annotated[Path, typer.Option(metavar="FILE", help="The file.", rich_help_panel=LOAD)]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="A tokenizer.json, or the directory that holds it: text of exact lengths.",
        rich_help_panel=LOAD,
    ),
]
PromptTypeOption = Annotated[
    str | None,
    typer.Option(
        "--prompt-type",
        "--random-prompt",
        help="ids (default) or text; chat is always text.",
        rich_help_panel=LOAD,
    ),
]
DisableShuffleOption = Annotated[
    bool, typer.Option("--disable-shuffle", help="Take prompts in the file's order.", rich_help_panel=LOAD)
]
NoOversampleOption = Annotated[
    bool,
    typer.Option(
        "--no-oversample", help="Send no prompt twice, though fewer than --num-prompts.", rich_help_panel=LOAD
    ),
]
TimestampsOption = Annotated[
    bool,
    typer.Option(
        "--use-trace-timestamps/--no-use-trace-timestamps",
        help="Send each request at its recorded time; without: as the arrival options say.",
        rich_help_panel=LOAD,
    ),
]
TimeScaleOption = Annotated[
    float,
    typer.Option(
        "--time-scale",
        "--mooncake-slowdown-factor",
        help="Multiply recorded gaps: 2 is half the request rate, 0.5 twice.",
        rich_help_panel=LOAD,
    ),
]
NumWarmupsOption = Annotated[
    int, typer.Option(help="Requests before the measured phase, not counted.", rich_help_panel=LOAD)
]
MaxConcurrencyOption = Annotated[
    int | None, typer.Option(help="Most requests at once; default: no limit.", rich_help_panel=LOAD)
]
RequestRateOption = Annotated[str, typer.Option(help="Requests per second; inf: no schedule.", rich_help_panel=LOAD)]
BurstinessOption = Annotated[
    float, typer.Option(help="Shape of the gamma distributed gaps; 1: Poisson.", rich_help_panel=LOAD)
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Generate to max_tokens.", rich_help_panel=SAMPLING)
]
ExtraBodyOption = Annotated[
    str | None, typer.Option(metavar="JSON", help="Fields added to every request.", rich_help_panel=SAMPLING)
]
ContinuousUsageStatsOption = Annotated[
    bool,
    typer.Option(
        "--continuous-usage-stats",
        help="Ask for usage in each chunk: exact tokens per chunk.",
        rich_help_panel=SAMPLING,
    ),
]
TemperatureOption = Annotated[float, typer.Option(help="0: greedy.", rich_help_panel=SAMPLING)]
FailedRequestThresholdOption = Annotated[
    float, typer.Option(help="Share of failed requests above which the run is not valid.", rich_help_panel=EVIDENCE)
]
