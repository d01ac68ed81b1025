"""`atom gc-profile replay`: what a collector problem looks like, on this machine, in minutes. The experiment is
`diag/gc_profile/arms.py`; its servers are run by `cli/gc_profile_run.py`."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer

from atom.cli import load_options as load
from atom.cli import options as opt
from atom.cli.bench_checks import check_numbers, check_prompt_tokens
from atom.cli.gc_profile_run import ArmsRun, Measurement, minutes
from atom.cli.gc_publish import ProfileOutput
from atom.cli.load_choices import LOAD_DEFAULTS, random_load, server_choice
from atom.cli.load_run import LoadRunner
from atom.cli.progress import StatusLine
from atom.diag.gc_profile.arms import FAULTS, REPLAY_ARMS, Arm, ReplayLoad, StepTime, faulty_arm, select_arms
from atom.diag.gc_profile.gates import parse_gates
from atom.recipes.errors import UsageError
from atom.recipes.launcher import LaunchOptions
from atom.recipes.resolve import resolve_recipe

__all__ = ["REPLAY_EXAMPLES", "replay"]

EXPERIMENT: Final = "Experiment"
RECIPE: Final = "simulated"
MAX_SCALE: Final = 10_000.0
DEFAULT: Final = ReplayLoad()
REPLAY_EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom gc-profile replay\n\n"
    "  atom gc-profile replay --num-prompts 2000 --arms clean,retention,gauges,both\n\n"
    "  atom gc-profile replay --scale 7 --faults gauges --output-dir half-an-hour"
)


def replay(
    scale: Annotated[
        float,
        typer.Option(help="Factor on the step time; 7: half an hour an arm.", rich_help_panel=EXPERIMENT),
    ] = 1.0,
    num_prompts: Annotated[
        int, typer.Option(help="Requests per arm.", rich_help_panel=EXPERIMENT)
    ] = DEFAULT.num_prompts,
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Faults of the faulty arm: {', '.join(FAULTS)}; default: both.",
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Arms to run, in this order, of {', '.join(REPLAY_ARMS)}; default: clean,both.",
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    random_input_len: load.InputLenOption = DEFAULT.input_len,
    random_output_len: load.OutputLenOption = DEFAULT.output_len,
    max_concurrency: load.MaxConcurrencyOption = DEFAULT.concurrency,
    seed: opt.SeedOption = 0,
    set_: load.SetOption = None,
    ready_timeout: load.ReadyTimeoutOption = None,
    window: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Length of a row; default: a sixth of an arm.", rich_help_panel=EXPERIMENT),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPR", help="A gate such as 'clean:gen2_share>1%'; repeatable.", rich_help_panel=EXPERIMENT
        ),
    ] = None,
    output_dir: opt.OutputDirOption = None,
    json_path: opt.JsonOption = None,
    markdown: opt.MarkdownOption = None,
    junit: opt.JunitOption = None,
    html: opt.HtmlOption = None,
    quiet: opt.QuietOption = False,
) -> int:
    """Run 20,000 requests of 2,048/64 at concurrency 64 against the simulated engine, clean and with faults injected.

    The faults are those that made a real API process spend a third of its time in collections: finished sequences that
    stay on a queue nobody reads, and a metric series per request. Every arm has a fresh server, the same interpreter,
    collector settings, load and seed; /metrics is scraped once a second. No model is run, and every table says so.
    """
    given: dict[str, Any] = dict(locals())
    check_numbers(given)
    check_prompt_tokens({**given, "random_prefix_len": 0, "num_warmups": 0})
    opt.check_outputs(json_path, markdown, junit, html=html)
    if not 0 < scale <= MAX_SCALE:
        raise UsageError(f"--scale must be above 0 and at most {MAX_SCALE:,.0f}, got {scale:g}")
    chosen = _arms(arms, faults)
    experiment = ReplayLoad(
        num_prompts=num_prompts,
        input_len=random_input_len,
        output_len=random_output_len,
        concurrency=max_concurrency or DEFAULT.concurrency,
        step_time=StepTime().scaled(scale),
    )
    output = ProfileOutput(
        json=json_path,
        markdown=markdown,
        junit=junit,
        html=html,
        step_summary=opt.step_summary(),
        quiet=quiet,
        gates=parse_gates(fail_if or [], [arm.label for arm in chosen]),
        window_s=opt.parse_duration("--window", window),
        seed=seed,
    )
    if not quiet:
        print(_plan(experiment, chosen), file=sys.stderr)
    return ArmsRun(
        name="gc-replay",
        facts={"name": "gc-profile replay", "scale": scale},
        measurement=_measurement(experiment, given),
        arms=chosen,
        directory=output_dir,
        output=output,
        arm_seconds=experiment.seconds,
    ).run()


def _arms(arms: str | None, faults: str | None) -> list[Arm]:
    if arms is not None and faults is not None:
        raise UsageError("--arms names all arms, --faults those of the one beside clean: give one of them")
    if faults is not None:
        return select_arms(["clean", faulty_arm(_names(faults))])
    return select_arms(_names(arms if arms is not None else "clean,both"))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _plan(experiment: ReplayLoad, arms: list[Arm]) -> str:
    """What will happen, before it does."""
    return (
        f"{experiment.num_prompts:,} requests of {experiment.input_len:,}/{experiment.output_len:,} at concurrency "
        f"{experiment.concurrency} against the simulated engine ({experiment.step_ms:.3g} ms a step); {len(arms)} "
        f"arm{'s' * (len(arms) > 1)} of about {minutes(experiment.seconds)}, one after the other: "
        f"{', '.join(arm.label for arm in arms)}; {minutes(len(arms) * experiment.seconds)} in all"
    )


def _measurement(experiment: ReplayLoad, given: dict[str, Any]) -> Measurement:
    launch = LaunchOptions(
        variables=opt.parse_pairs("--set", given["set_"] or []),
        extra_args=experiment.server_arguments(),
        ready_timeout_s=given["ready_timeout"],
    )
    options = {
        **LOAD_DEFAULTS,
        "recipe": RECIPE,
        "num_prompts": experiment.num_prompts,
        "random_input_len": experiment.input_len,
        "random_output_len": experiment.output_len,
        "max_concurrency": experiment.concurrency,
        "seed": given["seed"],
        "ignore_eos": True,
    }
    server, load_factory = server_choice(options, launch), random_load(options)

    def work(line: StatusLine) -> LoadRunner:
        return LoadRunner(name="random", server=server, load=load_factory, line=line, quiet=given["quiet"])

    return Measurement(target=resolve_recipe(RECIPE), launch=launch, work=work, quiet=given["quiet"])
