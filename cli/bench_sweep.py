"""`atom bench sweep`: the random load at growing concurrency or request rate, until it is too much."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from atom.bench.redact import redact_arguments, redact_option
from atom.bench.slo import parse_objectives, percentiles_of
from atom.bench.sweep import SECONDS_OF_ARRIVALS, Plan, Swept, parse_plan
from atom.bench.sweep_index import SweepIndex
from atom.cli import load_options as load
from atom.cli.bench_checks import check_numbers, check_prompt_tokens, check_texts, most_prompts
from atom.cli.bench_command import SERVER_ARGUMENTS, Given, bench_output
from atom.cli.load_choices import check_address, launch_options, pin_client, random_load, server_choice
from atom.cli.load_options import EVIDENCE, LOAD
from atom.cli.load_run import LoadFactory
from atom.cli.option_groups import (
    arrival_options,
    evidence_options,
    limit_options,
    output_options,
    sampling_options,
    server_options,
    with_options,
)
from atom.cli.options import OUTPUT
from atom.cli.sweep_run import SweepRun
from atom.recipes.errors import UsageError

__all__ = ["CONTEXT_SETTINGS", "EXAMPLES", "sweep"]

CONTEXT_SETTINGS: Final = SERVER_ARGUMENTS
EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom bench sweep --recipe embedded --max-concurrency 1,2,4,8 --input-len 64 --output-len 32\n\n"
    "  atom bench sweep --port 8000 --max-concurrency auto --slo 'p99_ttft_ms<=500' --slo 'p99_tpot_ms<=50'\n\n"
    "  atom bench sweep --port 8000 --request-rate auto:4-64 --slo 'error_rate<=1%' --fail-below 10\n\n"
    "  atom bench sweep --port 8000 --max-concurrency auto --resume atom-runs/20261130-120000-sweep"
)
LEAST_PROMPTS: Final = 100
PROMPTS_PER_SLOT: Final = 10
_NOT_THE_LOAD: Final = frozenset(
    (
        *("ctx", "resume", "cooldown", "output_dir", "json_path", "markdown", "junit", "save_result", "save_detailed"),
        *("result_dir", "result_filename", "label", "metadata", "quiet", "percentile_metrics", "metric_percentiles"),
        *("api_key", "header", "request_timeout", "ready_timeout"),
    )
)
"""Options that may change when a sweep goes on: they say where results go and how long to wait, or are secret."""


@with_options(server_options, arrival_options, limit_options, sampling_options, evidence_options, output_options)
def sweep(
    ctx: typer.Context,
    max_concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="LIST|auto",
            help="1,2,4,8 or auto[:START[-MOST]]. A single number with --request-rate LIST limits every point.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    request_rate: Annotated[
        str,
        typer.Option(
            metavar="LIST|auto",
            help="Requests per second: 1,2,4 or auto[:START[-MOST]]; inf: no schedule.",
            rich_help_panel=LOAD,
        ),
    ] = "inf",
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPRESSION",
            help="What every point must keep, such as 'p99_ttft_ms<=500' or 'error_rate<=1%'; repeatable.",
            rich_help_panel=EVIDENCE,
        ),
    ] = None,
    fail_below: Annotated[
        float | None, typer.Option(help="Exit status 3 if the knee lies below this.", rich_help_panel=EVIDENCE)
    ] = None,
    resolution: Annotated[
        float, typer.Option(help="auto: how close the knee is bracketed, as a share of it.", rich_help_panel=LOAD)
    ] = 0.1,
    max_points: Annotated[int, typer.Option(help="auto: most points.", rich_help_panel=LOAD)] = 20,
    go_on: Annotated[
        bool, typer.Option("--continue", help="A list: measure all of it, also after a point that is too much.")
    ] = False,
    cooldown: Annotated[float, typer.Option(help="Seconds of rest between points.", rich_help_panel=LOAD)] = 1.0,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Go on with a sweep that was broken off; same options.", rich_help_panel=OUTPUT
        ),
    ] = None,
    random_input_len: load.InputLenOption = 1024,
    random_output_len: load.OutputLenOption = 128,
    random_range_ratio: load.RangeRatioOption = 0.0,
    random_prefix_len: load.PrefixLenOption = 0,
    num_prefixes: Annotated[
        int, typer.Option(help="Different prefixes of that length, used in turn.", rich_help_panel=LOAD)
    ] = 1,
    prompt_type: load.PromptTypeOption = None,
    tokenizer: load.TokenizerOption = None,
    vocab_size: load.VocabSizeOption = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Requests of each point; default: ten per slot, or 30 s (--duration) of arrivals, more where requests "
            "take long, 100 at least.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    **given: Any,
) -> int:
    """Random prompts at growing concurrency or request rate, until an objective breaks: finds the knee.

    One server for all points. Without --slo, concurrency grows until that gains no throughput, and the knee is the
    point of greatest curvature; a request rate is too much once the server does not keep up with it.
    """
    given |= {
        "ctx": ctx,
        "max_concurrency": max_concurrency,
        "request_rate": request_rate,
        "slo": slo,
        "fail_below": fail_below,
        "resolution": resolution,
        "max_points": max_points,
        "go_on": go_on,
        "cooldown": cooldown,
        "resume": resume,
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
    return _sweep(given)


def _sweep(given: Given) -> int:
    _check(given)
    objectives = parse_objectives(given["slo"] or [])
    plan = _plan(given, judged=bool(objectives))
    check_texts(given)
    check_address(given)
    launch = launch_options(given)
    pin_client(given)

    def point(value: float, seed: int, arrivals_s: float) -> LoadFactory:
        fields = _point_options(given, plan.swept, value, seed, arrivals_s)
        check_numbers(fields)
        check_prompt_tokens(fields)
        return random_load(fields)

    output = bench_output(given)
    wanted = sorted({*output.percentiles, *percentiles_of(objectives)})
    return SweepRun(
        server=server_choice(given, launch),
        load=point,
        wanted=plan.values or ((plan.start, plan.most) if _is_closed(given, plan.swept) else (plan.start,)),
        index=SweepIndex(
            plan=plan,
            objectives=objectives,
            fail_below=given["fail_below"],
            options=_recorded(given),
        ),
        output=replace(output, percentiles=wanted),
        seed=given["seed"],
        cooldown_s=given["cooldown"],
        resume=given["resume"],
    ).run()


def _check(given: Given) -> None:
    check_numbers({**given, "max_concurrency": None})
    if given["resume"] is not None and given["output_dir"] is not None:
        raise UsageError("--resume DIR goes on in DIR, --output-dir would be ignored: give one of them")
    if given["save_result"]:
        raise UsageError("--save-result is for one load; a sweep writes sweep.json, and --json PATH")
    if given["export_aiperf"] is not None:
        raise UsageError("--export-aiperf is for one load; a sweep has many")
    if given["ctx"].get_parameter_source("percentile_metrics").name == "COMMANDLINE":
        raise UsageError("--percentile-metrics is for one load; every point of a sweep has all of them")
    for flag, value, low, high in (
        ("--resolution", given["resolution"], 0.001, 1.0),
        ("--max-points", given["max_points"], 1, 1000),
        ("--cooldown", given["cooldown"], 0, 86400),
    ):
        if not low <= value <= high:
            raise UsageError(f"{flag} must be from {low:g} to {high:g}, got {value:g}")
    if given["fail_below"] is not None and not 0 < given["fail_below"] < 1e9:
        raise UsageError(f"--fail-below must be positive, got {given['fail_below']:g}")


def _plan(given: Given, *, judged: bool) -> Plan:
    concurrency, rate = given["max_concurrency"], given["request_rate"]
    swept = _swept(concurrency, rate)
    text = concurrency if swept is Swept.CONCURRENCY else rate
    return parse_plan(
        swept,
        text,
        resolution=given["resolution"],
        max_points=given["max_points"],
        go_on=given["go_on"],
        judged=judged or swept is Swept.RATE,
    )


def _swept(concurrency: str | None, rate: str) -> Swept:
    several = [_is_several(concurrency or ""), _is_several(rate)]
    if all(several):
        raise UsageError("--max-concurrency and --request-rate are both a list or auto: one of them can grow")
    if several[1] or (concurrency is None and rate != "inf"):
        return Swept.RATE
    if concurrency is None:
        raise UsageError("say what is to grow: --max-concurrency 1,2,4,8 or --request-rate 1,2,4 (or auto)")
    return Swept.CONCURRENCY


def _is_closed(given: Given, swept: Swept) -> bool:
    """Whether the search says where it ends."""
    text: str = given[swept.value]
    return text.strip().startswith("auto") and "-" in text


def _is_several(text: str) -> bool:
    return "," in text or text.strip().startswith("auto")


def _point_options(given: Given, swept: Swept, value: float, seed: int, arrivals_s: float) -> Given:
    """The options of `atom bench random` for one point."""
    point = {**given, "seed": seed}
    if swept is Swept.CONCURRENCY:
        point["max_concurrency"] = int(value)
        prompts = PROMPTS_PER_SLOT * int(value)
    else:
        point["request_rate"] = repr(value)
        point["max_concurrency"] = _limit(given["max_concurrency"])
        prompts = math.ceil(value * (given["duration"] or arrivals_s))
        if not given["duration"]:
            # What requests take can lengthen a schedule beyond what a load may have; its usual length has been checked.
            prompts = min(prompts, max(most_prompts(given), math.ceil(value * SECONDS_OF_ARRIVALS)))
    if given["num_prompts"] is None:
        point["num_prompts"] = max(LEAST_PROMPTS, prompts)
    elif swept is Swept.CONCURRENCY and given["num_prompts"] < value:
        raise UsageError(f"--num-prompts {given['num_prompts']} cannot fill --max-concurrency {value:g}")
    return point


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"--max-concurrency must be a whole number from 1 beside a growing rate, got {text!r}")
    return int(text)


def _recorded(given: Given) -> dict[str, Any]:
    """By flag, what has to be the same when the sweep goes on; secrets in it may change."""
    flags = {name: "--continue" if name == "go_on" else f"--{name.strip('_').replace('_', '-')}" for name in given}
    options = {
        flags[name]: redact_option(flags[name], value)
        for name, value in given.items()
        if name not in _NOT_THE_LOAD and value is not None
    }
    arguments = list(given["ctx"].args)
    return options | ({"server arguments": redact_arguments(arguments)} if arguments else {})
