"""`atom bench`: one load against a server that runs already, or that a recipe starts and stops.

Composes `diag/session.py` (server, captures) with `bench/runner.py` (load). The options are here, the figures come from
`bench/summary.py`, the tables from `cli/render.py`.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from atom.cli import load_options as load
from atom.cli import options as opt
from atom.cli.bench_checks import check_numbers, check_prompt_tokens, check_texts
from atom.cli.bench_run import BenchRun
from atom.cli.load_choices import check_address, launch_options, random_load, server_choice
from atom.cli.load_options import EVIDENCE, LOAD, SAMPLING, SERVER
from atom.cli.publish import Output
from atom.recipes.errors import UsageError

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Load a server and say what it did.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

OUTPUT = opt.OUTPUT

EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom bench random --recipe embedded --random-input-len 128 --random-output-len 64 --num-prompts 32\n\n"
    "  atom bench random --port 8000 --input-len 2048 --output-len 64 --max-concurrency 64 --ignore-eos\n\n"
    "  atom bench random --base-url http://host:8000 --request-rate 10 --goodput ttft:500 tpot:30 --json result.json"
)


@app.callback()
def _bench() -> None:
    """Load a server and say what it did."""


@app.command("random", epilog=EXAMPLES, context_settings={"allow_extra_args": True})
def random(
    ctx: typer.Context,
    # ---- server
    recipe: load.RecipeOption = None,
    set_: load.SetOption = None,
    devices: load.DevicesOption = None,
    ready_timeout: load.ReadyTimeoutOption = None,
    base_url: Annotated[
        str | None, typer.Option(help="A server that runs already: http://host:port.", rich_help_panel=SERVER)
    ] = None,
    host: Annotated[
        str, typer.Option(help="Host, where --base-url is not given.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port, where --base-url is not given.", rich_help_panel=SERVER)] = 8000,
    model: load.ModelOption = None,
    backend: load.BackendOption = "openai",
    endpoint: load.EndpointOption = None,
    api_key: load.ApiKeyOption = None,
    header: load.HeaderOption = None,
    insecure: load.InsecureOption = False,
    request_timeout: load.RequestTimeoutOption = 6 * 3600.0,
    # ---- load
    random_input_len: load.InputLenOption = 1024,
    random_output_len: load.OutputLenOption = 128,
    random_range_ratio: load.RangeRatioOption = 0.0,
    random_prefix_len: load.PrefixLenOption = 0,
    vocab_size: load.VocabSizeOption = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.", rich_help_panel=LOAD)] = 1000,
    num_warmups: load.NumWarmupsOption = 0,
    max_concurrency: load.MaxConcurrencyOption = None,
    request_rate: load.RequestRateOption = "inf",
    burstiness: load.BurstinessOption = 1.0,
    duration: Annotated[
        float | None, typer.Option(help="Start no request after this many seconds.", rich_help_panel=LOAD)
    ] = None,
    seed: opt.SeedOption = 0,
    # ---- sampling
    ignore_eos: load.IgnoreEosOption = False,
    temperature: load.TemperatureOption = 0.0,
    top_p: Annotated[float | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    min_p: Annotated[float | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities per token.", rich_help_panel=SAMPLING)] = None,
    extra_body: load.ExtraBodyOption = None,
    continuous_usage_stats: load.ContinuousUsageStatsOption = False,
    # ---- evidence
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS", help="SLO on ttft, tpot or e2el in ms; repeatable.", rich_help_panel=EVIDENCE
        ),
    ] = None,
    failed_request_threshold: load.FailedRequestThresholdOption = 0.1,
    percentile_metrics: Annotated[
        str, typer.Option(help="Latencies that --json has: ttft,tpot,itl,e2el.", rich_help_panel=EVIDENCE)
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles that --json has.", rich_help_panel=EVIDENCE)
    ] = "50,90,95,99",
    # ---- output
    output_dir: opt.OutputDirOption = None,
    json_path: opt.JsonOption = None,
    markdown: opt.MarkdownOption = None,
    junit: opt.JunitOption = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write the JSON into --result-dir too.", rich_help_panel=OUTPUT)
    ] = False,
    save_detailed: Annotated[
        bool,
        typer.Option("--save-detailed", help="Keep texts, and per-request lists in the JSON.", rich_help_panel=OUTPUT),
    ] = False,
    result_dir: Annotated[Path | None, typer.Option(help="For --save-result.", rich_help_panel=OUTPUT)] = None,
    result_filename: Annotated[str | None, typer.Option(help="For --save-result.", rich_help_panel=OUTPUT)] = None,
    label: Annotated[str | None, typer.Option(help="Kept in the JSON.", rich_help_panel=OUTPUT)] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Kept in the JSON; repeatable.", rich_help_panel=OUTPUT),
    ] = None,
    quiet: opt.QuietOption = False,
) -> int:
    """Random token ids (or, for chat, random words) of given lengths, in a closed or open loop.

    With --recipe, arguments after `--` go to the server, and --model says what it serves.
    """
    given: dict[str, Any] = dict(locals())
    check_numbers(given)
    check_prompt_tokens(given)
    check_texts(given)
    check_address(given)
    return BenchRun(
        name="random",
        server=server_choice(given, launch_options(given)),
        load=random_load(given),
        output=_output(given),
    ).run()


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = sorted(set(names) - {"ttft", "tpot", "itl", "e2el"})
    if unknown or not names:
        raise UsageError(f"--percentile-metrics knows ttft, tpot, itl and e2el, got {text!r}")
    return names


def _output(given: dict[str, Any]) -> Output:
    result: Path | None = None
    if given["save_result"]:
        name = given["result_filename"] or _result_name(given)
        result = (given["result_dir"] or Path()) / name
    elif given["result_dir"] or given["result_filename"]:
        raise UsageError("--result-dir and --result-filename need --save-result")
    opt.check_outputs(given["json_path"], given["markdown"], given["junit"], save_result=result)
    return Output(
        directory=given["output_dir"],
        json=[path for path in (given["json_path"], result) if path is not None],
        markdown=given["markdown"],
        junit=given["junit"],
        step_summary=opt.step_summary(),
        detailed=given["save_detailed"],
        label=given["label"],
        metadata=opt.parse_pairs("--metadata", given["metadata"] or []),
        percentiles=opt.parse_percentiles(given["metric_percentiles"]),
        metrics=_metrics(given["percentile_metrics"]),
        quiet=given["quiet"],
    )


def _result_name(given: dict[str, Any]) -> str:
    """As `vllm bench serve` names its files."""
    model = re.sub(r"[^\w.-]+", "_", given["model"] or "model")
    limit = f"-concurrency{given['max_concurrency']}" if given["max_concurrency"] else ""
    return f"{given['backend']}-{given['request_rate']}qps{limit}-{model}-{time.strftime('%Y%m%d-%H%M%S')}.json"
