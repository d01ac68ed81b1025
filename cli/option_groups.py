"""Groups of options that commands share, and `with_options`, which gives them to a command.

A group is a function that is never called: its parameters are the options. The options themselves are described in
`cli/load_options.py` and `cli/options.py`; what they mean together is `cli/load_choices.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from atom.bench.load import DEFAULT_FAILED_REQUEST_THRESHOLD
from atom.cli import load_options as load
from atom.cli import options as opt
from atom.cli.load_options import EVIDENCE, LOAD, SAMPLING, SERVER

__all__ = [
    "arrival_options",
    "evidence_options",
    "limit_options",
    "output_options",
    "sampling_options",
    "server_options",
    "with_options",
]

OUTPUT = opt.OUTPUT
Group = Callable[..., None]
Command = Callable[..., int]


def with_options(*groups: Group) -> Callable[[Command], Command]:
    """Give a command the options of `groups`, after its own: they arrive in its `**given`, by parameter name.

    A command of this kind takes a `typer.Context`, its own options, and `**given`. An option of its own takes the place
    of one of the same name in a group.
    """

    def decorate(command: Command) -> Command:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        mine = {p.name for p in own}
        shared = [p for group in groups for p in inspect.signature(group).parameters.values() if p.name not in mine]
        names = [p.name for p in (*own, *shared)]
        assert len(names) == len(set(names)), f"{command.__name__} has an option twice: {sorted(names)}"
        hints = {
            name: hint for f in (*groups, command) for name, hint in get_type_hints(f, include_extras=True).items()
        }

        @functools.wraps(command)
        def run(*args: Any, **given: Any) -> int:
            return command(*args, **given)

        parameters = [
            p.replace(annotation=hints[p.name], kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in (*own, *shared)
        ]
        required_first = sorted(parameters, key=lambda p: p.default is not p.empty)
        run.__signature__ = inspect.Signature(required_first, return_annotation=int)  # type: ignore[attr-defined]
        run.__annotations__ = {name: hints[name] for name in (*names, "return") if name in hints}
        return run

    return decorate


def server_options(
    recipe: load.RecipeOption = None,
    set_: load.SetOption = None,
    devices: load.DevicesOption = None,
    ready_timeout: load.ReadyTimeoutOption = None,
    server_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Environment of the recipe's server alone; repeatable.", rich_help_panel=SERVER
        ),
    ] = None,
    server_env_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The same as a JSON object in a file (- for standard input): command lines are visible to everybody.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    server_cpus: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="CPUs for the recipe's server, such as 0-3,8.", rich_help_panel=SERVER),
    ] = None,
    client_cpus: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="CPUs for the load generator and what it records.", rich_help_panel=LOAD),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            "--base-url",
            "--url",
            "-u",
            help="A server that runs already: http://host:port. Repeatable: requests go to each in turn.",
            rich_help_panel=SERVER,
        ),
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
    server_metrics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ROLE=]URL",
            help="A further /metrics to scrape, such as prefill=http://host:port; repeatable.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    gpu_telemetry: Annotated[
        bool | None,
        typer.Option(
            "--gpu-telemetry/--no-gpu-telemetry",
            help="Sample this host's GPUs; default: if the server runs here, and there are some.",
            rich_help_panel=SERVER,
        ),
    ] = None,
) -> None:
    """Which server, and how to speak to it."""


def limit_options(
    num_warmups: load.NumWarmupsOption = 0,
    warmup_duration: Annotated[
        float | None,
        typer.Option(help="Seconds of warm-up requests, instead of a number of them.", rich_help_panel=LOAD),
    ] = None,
    max_concurrency: load.MaxConcurrencyOption = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration", "--benchmark-duration", help="Start no request after this many seconds.", rich_help_panel=LOAD
        ),
    ] = None,
    grace_period: Annotated[
        float | None,
        typer.Option(
            "--grace-period",
            "--benchmark-grace-period",
            help="Cancel what still runs this many seconds after --duration; default: wait for it.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    request_cancellation_rate: Annotated[
        float, typer.Option(help="Share of requests that are cancelled on purpose, 0 to 1.", rich_help_panel=LOAD)
    ] = 0.0,
    request_cancellation_delay: Annotated[
        float, typer.Option(help="Seconds after which they are.", rich_help_panel=LOAD)
    ] = 0.0,
    seed: opt.SeedOption = 0,
    workers: Annotated[
        int, typer.Option(help="Processes that share the load, each with its part of it.", rich_help_panel=LOAD)
    ] = 1,
) -> None:
    """How much, for how long, by how many processes."""


def arrival_options(
    request_rate: load.RequestRateOption = "inf",
    arrival_pattern: Annotated[
        str | None,
        typer.Option(
            "--arrival-pattern",
            "--request-rate-mode",
            help="poisson (default), gamma (with --burstiness) or constant.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    burstiness: load.BurstinessOption = 1.0,
    ramp_up_strategy: Annotated[
        str | None,
        typer.Option(help="The rate changes over the run: linear or exponential.", rich_help_panel=LOAD),
    ] = None,
    ramp_up_start_rps: Annotated[
        float | None, typer.Option(help="Requests per second at its start.", rich_help_panel=LOAD)
    ] = None,
    ramp_up_end_rps: Annotated[float | None, typer.Option(help="And at its end.", rich_help_panel=LOAD)] = None,
    concurrency_ramp_duration: Annotated[
        float | None,
        typer.Option(
            help="Seconds over which a closed loop comes to its --max-concurrency, one lane after the other.",
            rich_help_panel=LOAD,
        ),
    ] = None,
) -> None:
    """When requests are sent."""


def sampling_options(
    ignore_eos: load.IgnoreEosOption = False,
    temperature: load.TemperatureOption = 0.0,
    top_p: Annotated[float | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    min_p: Annotated[float | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities per token.", rich_help_panel=SAMPLING)] = None,
    extra_body: load.ExtraBodyOption = None,
    continuous_usage_stats: load.ContinuousUsageStatsOption = False,
) -> None:
    """What every request asks for."""


def evidence_options(
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS", help="SLO on ttft, tpot or e2el in ms; repeatable.", rich_help_panel=EVIDENCE
        ),
    ] = None,
    failed_request_threshold: load.FailedRequestThresholdOption = DEFAULT_FAILED_REQUEST_THRESHOLD,
    slice_duration: Annotated[
        float, typer.Option(help="Seconds per slice of the time series in the summary.", rich_help_panel=EVIDENCE)
    ] = 1.0,
    percentile_metrics: Annotated[
        str, typer.Option(help="Latencies that --json has: ttft,tpot,itl,e2el.", rich_help_panel=EVIDENCE)
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles that --json has.", rich_help_panel=EVIDENCE)
    ] = "50,90,95,99",
) -> None:
    """What the run has to show."""


def probe_options(
    probe_outputs: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="After the load, ask N fixed prompts one by one at temperature 0 and keep the answers.",
            rich_help_panel=EVIDENCE,
        ),
    ] = 0,
) -> None:
    """What is asked of the server beside the load."""


def output_options(
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
    export_aiperf: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write AIPerf's profile_export.jsonl and profile_export_aiperf.json there.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Where results go."""
