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

from atom.bench.load import Api, parse_goodput
from atom.bench.random_load import RandomSource
from atom.cli import options as opt
from atom.cli.bench_checks import check_numbers, check_prompt_tokens, check_texts, parse_extra_body
from atom.cli.bench_run import BenchRun, LoadFactory, ServerChoice
from atom.cli.publish import Output
from atom.recipes.errors import UsageError
from atom.recipes.launcher import LaunchOptions

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Load a server and say what it did.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

SERVER, LOAD, SAMPLING, EVIDENCE, OUTPUT = "Server", "Load", "Sampling", "Evidence", opt.OUTPUT

BACKENDS: Final = {
    "openai": Api.COMPLETIONS,
    "vllm": Api.COMPLETIONS,
    "sglang-oai": Api.COMPLETIONS,
    "openai-chat": Api.CHAT,
    "vllm-chat": Api.CHAT,
    "sglang-oai-chat": Api.CHAT,
}
PATHS: Final = {Api.COMPLETIONS: "/v1/completions", Api.CHAT: "/v1/chat/completions"}

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
    recipe: Annotated[
        str | None,
        typer.Option(help="Start this recipe's server for the run: a name or a file.", rich_help_panel=SERVER),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A variable of the recipe; repeatable.", rich_help_panel=SERVER
        ),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="Devices for the recipe's server, such as 0,1.", rich_help_panel=SERVER)
    ] = None,
    ready_timeout: Annotated[
        float | None, typer.Option(help="Seconds until the recipe's server must be healthy.", rich_help_panel=SERVER)
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="A server that runs already: http://host:port.", rich_help_panel=SERVER)
    ] = None,
    host: Annotated[
        str, typer.Option(help="Host, where --base-url is not given.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port, where --base-url is not given.", rich_help_panel=SERVER)] = 8000,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Model name; default: asked from /v1/models.", rich_help_panel=SERVER),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            "--backend", "--endpoint-type", help=f"What to speak: {', '.join(BACKENDS)}.", rich_help_panel=SERVER
        ),
    ] = "openai",
    endpoint: Annotated[
        str | None, typer.Option(help="API path; default: the backend's own.", rich_help_panel=SERVER)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Bearer key.", rich_help_panel=SERVER)
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="Extra header; repeatable.", rich_help_panel=SERVER),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept any TLS certificate.", rich_help_panel=SERVER)
    ] = False,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds from sent to the end of a response.", rich_help_panel=SERVER)
    ] = 6 * 3600.0,
    # ---- load
    random_input_len: Annotated[
        int, typer.Option("--random-input-len", "--input-len", help="Prompt tokens.", rich_help_panel=LOAD)
    ] = 1024,
    random_output_len: Annotated[
        int,
        typer.Option("--random-output-len", "--output-len", help="Output tokens (max_tokens).", rich_help_panel=LOAD),
    ] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths vary from mean × (1−r) to mean × (1+r); below 1.", rich_help_panel=LOAD)
    ] = 0.0,
    random_prefix_len: Annotated[
        int, typer.Option(help="Tokens that all prompts share, before the others.", rich_help_panel=LOAD)
    ] = 0,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Draw token ids below this; default: what the server says, else ids 256 to 30,000.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.", rich_help_panel=LOAD)] = 1000,
    num_warmups: Annotated[
        int, typer.Option(help="Requests before the measured phase, not counted.", rich_help_panel=LOAD)
    ] = 0,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Most requests at once; default: no limit.", rich_help_panel=LOAD)
    ] = None,
    request_rate: Annotated[
        str, typer.Option(help="Requests per second; inf: no schedule.", rich_help_panel=LOAD)
    ] = "inf",
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distributed gaps; 1: Poisson.", rich_help_panel=LOAD)
    ] = 1.0,
    duration: Annotated[
        float | None, typer.Option(help="Start no request after this many seconds.", rich_help_panel=LOAD)
    ] = None,
    seed: opt.SeedOption = 0,
    # ---- sampling
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate to max_tokens.", rich_help_panel=SAMPLING)
    ] = False,
    temperature: Annotated[float, typer.Option(help="0: greedy.", rich_help_panel=SAMPLING)] = 0.0,
    top_p: Annotated[float | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    min_p: Annotated[float | None, typer.Option(rich_help_panel=SAMPLING)] = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities per token.", rich_help_panel=SAMPLING)] = None,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Fields added to every request.", rich_help_panel=SAMPLING)
    ] = None,
    continuous_usage_stats: Annotated[
        bool,
        typer.Option(
            "--continuous-usage-stats",
            help="Ask for usage in each chunk: exact tokens per chunk.",
            rich_help_panel=SAMPLING,
        ),
    ] = False,
    # ---- evidence
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS", help="SLO on ttft, tpot or e2el in ms; repeatable.", rich_help_panel=EVIDENCE
        ),
    ] = None,
    failed_request_threshold: Annotated[
        float, typer.Option(help="Share of failed requests above which the run is not valid.", rich_help_panel=EVIDENCE)
    ] = 0.1,
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
    return BenchRun(
        name="random",
        server=_server(given),
        load=_random_load(given),
        output=_output(given),
    ).run()


def _server(given: dict[str, Any]) -> ServerChoice:
    _check_address(given)
    if given["backend"] not in BACKENDS:
        raise UsageError(f"--backend must be one of {', '.join(BACKENDS)}; got {given['backend']!r}")
    api = BACKENDS[given["backend"]]
    host = f"[{given['host']}]" if ":" in given["host"] else given["host"]
    return ServerChoice(
        recipe=given["recipe"],
        base_url=(given["base_url"] or f"http://{host}:{given['port']}").rstrip("/").removesuffix("/v1"),
        model=given["model"],
        backend=given["backend"],
        api=api,
        path=given["endpoint"] or PATHS[api],
        api_key=given["api_key"],
        headers=opt.parse_pairs("--header", given["header"] or [], "=:"),
        verify_tls=not given["insecure"],
        request_timeout=given["request_timeout"],
        launch=_launch(given),
    )


def _check_address(given: dict[str, Any]) -> None:
    """One way to say which server, and none of it empty."""
    if given["recipe"] is not None and given["base_url"] is not None:
        raise UsageError("--recipe starts a server of its own, --base-url names one that runs: give one of them")
    for flag in ("--host", "--port"):
        source = given["ctx"].get_parameter_source(flag.removeprefix("--"))
        for other, why in (("--base-url", "names host and port itself"), ("--recipe", "chooses where its server is")):
            if given[other.removeprefix("--").replace("-", "_")] is not None and source.name == "COMMANDLINE":
                raise UsageError(f"{other} {why}, {flag} would be ignored: give one of them")
    for name in ("recipe", "base_url", "host", "model", "endpoint"):
        if given[name] == "":
            raise UsageError(f"--{name.replace('_', '-')} must not be empty")
    if not re.fullmatch(r"[\w.:%-]+", given["host"], re.ASCII):
        raise UsageError(f"--host must be a name or an address, got {given['host']!r}")
    if not 0 < given["port"] < 65536:
        raise UsageError(f"--port must be from 1 to 65535, got {given['port']}")


def _launch(given: dict[str, Any]) -> LaunchOptions:
    """For a recipe. What only a recipe can use is refused without one."""
    arguments = list(given["ctx"].args)
    for flag, value in (
        ("--set", given["set_"] or None),
        ("--devices", given["devices"]),
        ("--ready-timeout", given["ready_timeout"]),
        ("server arguments", arguments or None),
    ):
        if value is not None and given["recipe"] is None:
            raise UsageError(f"{flag}: only for a server that --recipe starts; got {value!r}")
    return LaunchOptions(
        model=given["model"],
        devices=given["devices"],
        variables=opt.parse_pairs("--set", given["set_"] or []),
        extra_args=arguments,
        ready_timeout_s=given["ready_timeout"],
    )


def _random_load(given: dict[str, Any]) -> LoadFactory:
    api = BACKENDS[given["backend"]]
    sampling = {name: given[name] for name in ("temperature", "top_p", "top_k", "min_p") if given[name] is not None}
    if given["logprobs"] is not None:
        sampling |= (
            {"logprobs": given["logprobs"]}
            if api is Api.COMPLETIONS
            else {
                "logprobs": True,
                "top_logprobs": given["logprobs"],
            }
        )
    source = RandomSource(
        num_prompts=given["num_prompts"],
        api=api,
        model=given["model"] or "",
        input_len=given["random_input_len"],
        output_len=given["random_output_len"],
        range_ratio=given["random_range_ratio"],
        prefix_len=given["random_prefix_len"],
        seed=given["seed"],
        vocab_size=given["vocab_size"],
        ignore_eos=given["ignore_eos"],
        continuous_usage_stats=given["continuous_usage_stats"],
        sampling=sampling,
        extra_body=parse_extra_body(given["extra_body"]),
    )
    return LoadFactory(
        source=source,
        options={
            "request_rate": opt.parse_rate(given["request_rate"]),
            "burstiness": given["burstiness"],
            "max_concurrency": given["max_concurrency"],
            "num_warmups": given["num_warmups"],
            "seed": given["seed"],
            "duration": given["duration"],
            "ignore_eos": given["ignore_eos"],
            "keep_text": given["save_detailed"],
            "failed_request_threshold": given["failed_request_threshold"],
            "goodput": parse_goodput(given["goodput"] or []),
        },
    )


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
