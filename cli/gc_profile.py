"""`atom gc-profile`: is garbage collection this server's problem? The options are here, with what may not be combined.

The command has a subcommand (`replay`, in `cli/gc_profile_replay.py`) and is one itself, so it is a group whose default
is the profile. Running a server under observation is `cli/gc_profile_run.py`, reading runs that are there
`cli/gc_profile_read.py`, what is written and shown `cli/gc_publish.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from atom.cli import load_options as load
from atom.cli import options as opt
from atom.cli.bench_checks import check_numbers, check_prompt_tokens, check_texts
from atom.cli.gc_profile_choices import Source, check_combination, given_source, profile_target, work_factory
from atom.cli.gc_profile_read import profile_directories
from atom.cli.gc_profile_replay import REPLAY_EXAMPLES, replay
from atom.cli.gc_profile_run import ArmsRun, Measurement, ProfileRun, print_environment
from atom.cli.gc_publish import ProfileOutput
from atom.cli.load_options import LOAD, SERVER
from atom.diag.gc_hook import check_action
from atom.diag.gc_profile.arms import what_if_arms
from atom.diag.gc_profile.gates import parse_gates
from atom.diag.server_under_test import PidTarget, UrlTarget
from atom.recipes.errors import UsageError
from atom.recipes.recipe import Recipe

__all__ = ["app"]

PROFILE: Final = "Profile"
_DEFAULT: Final = "profile"
_FOREIGN: Final = "atom.gc_profile.after_dashes"

HELP: Final = (
    "Say whether garbage collection is a server's problem, and what is.\n\n"
    "Starts a server with a hook in every Python process of it (a command after `--`, or --recipe), attaches to one "
    "that runs (--pid), watches one from outside (--url), or reads run directories again, several side by side. "
    "Without --num-prompts nothing is sent but `/metrics` and `/health` requests: the traffic is yours, and the "
    "profile ends after --duration, or with Ctrl-C. With --num-prompts the load is that of `atom bench random`.\n\n"
    "`atom gc-profile replay` shows what such a problem looks like."
)
EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom gc-profile --duration 10m -- vllm serve MODEL --port 8000\n\n"
    "  atom gc-profile --num-prompts 2000 --input-len 2048 --output-len 64 --max-concurrency 64 -- vllm serve MODEL\n\n"
    "  atom gc-profile --recipe embedded --num-prompts 200 --what-if freeze\n\n"
    "  atom gc-profile --pid 4711 --duration 5m --window 1m\n\n"
    "  atom gc-profile --url http://127.0.0.1:8000 --duration 90s\n\n"
    "  atom gc-profile atom-runs/latest --fail-if 'gen2_share>1%' --junit gates.xml\n\n"
    "  atom gc-profile replay --num-prompts 2000\n\n"
    "Exit status: 0 all is well · 1 the run failed, or the server died · 2 wrong usage · 3 a gate of --fail-if failed "
    "· 4 no valid evidence, or a gate without an answer · 130 interrupted. Ctrl-C is the normal end of a profile "
    "without --duration and load, and no interruption."
)


class _Group(TyperGroup):
    """What names no subcommand is the profile's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands and args[0] != _DEFAULT
        return super().parse_args(ctx, args if named else [_DEFAULT, *args])


class _Profile(TyperCommand):
    """Called by the group's name; what follows `--` is kept apart from the arguments before it."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        above = getattr(parent, "parent", None)
        return super().make_context(parent.info_name if above else info_name, args, parent=above or parent, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.no_args_is_help = not args
        if "--" in args:
            split = args.index("--")
            ctx.meta[_FOREIGN] = args[split + 1 :]
            args = args[:split]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Group, help=HELP, rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]}
)
app.command("replay", epilog=REPLAY_EXAMPLES)(replay)


@app.command(_DEFAULT, cls=_Profile, help=HELP, epilog=EXAMPLES, hidden=True)
def gc_profile(
    ctx: typer.Context,
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN_DIR", help="Run directories to read again.")] = None,
    # ---- server
    recipe: load.RecipeOption = None,
    set_: load.SetOption = None,
    devices: load.DevicesOption = None,
    ready_timeout: load.ReadyTimeoutOption = None,
    pid: Annotated[
        int | None, typer.Option(metavar="PID", help="Attach to this running server.", rich_help_panel=SERVER)
    ] = None,
    attach_method: Annotated[
        str, typer.Option(help="How to attach: auto, gdb or remote-exec.", rich_help_panel=SERVER)
    ] = "auto",
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            "--base-url",
            metavar="URL",
            help="A running server, seen from outside; with --pid or a command: where it listens.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    print_env: Annotated[
        bool,
        typer.Option(
            "--print-env",
            help="Print the variables and the path that bring the hook into a container, and exit.",
            rich_help_panel=SERVER,
        ),
    ] = False,
    model: load.ModelOption = None,
    backend: load.BackendOption = "openai",
    endpoint: load.EndpointOption = None,
    api_key: load.ApiKeyOption = None,
    header: load.HeaderOption = None,
    insecure: load.InsecureOption = False,
    # ---- profile
    duration: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Watch this long, such as 10m; a load starts no request after it.",
            rich_help_panel=PROFILE,
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Length of a row; default: a sixth of the run.", rich_help_panel=PROFILE),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="ACTION",
            help=(
                "Run a second server under the same load (--num-prompts) whose collectors do this once it begins: "
                "freeze, freeze:SECONDS, disable or threshold:G0,G1,G2."
            ),
            rich_help_panel=PROFILE,
        ),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPR", help="A gate such as 'gen2_share>1%'; repeatable. Exit status 3.", rich_help_panel=PROFILE
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the tables call this run.", rich_help_panel=PROFILE)
    ] = None,
    seed: opt.SeedOption = 0,
    # ---- load
    num_prompts: Annotated[
        int | None, typer.Option(help="Send this many requests; default: no load.", rich_help_panel=LOAD)
    ] = None,
    random_input_len: load.InputLenOption = 1024,
    random_output_len: load.OutputLenOption = 128,
    random_range_ratio: load.RangeRatioOption = 0.0,
    num_warmups: load.NumWarmupsOption = 0,
    max_concurrency: load.MaxConcurrencyOption = None,
    request_rate: load.RequestRateOption = "inf",
    ignore_eos: load.IgnoreEosOption = False,
    extra_body: load.ExtraBodyOption = None,
    # ---- output
    output_dir: opt.OutputDirOption = None,
    json_path: opt.JsonOption = None,
    markdown: opt.MarkdownOption = None,
    junit: opt.JunitOption = None,
    html: opt.HtmlOption = None,
    quiet: opt.QuietOption = False,
) -> int:
    given: dict[str, Any] = {**locals(), "foreign": ctx.meta.get(_FOREIGN)}
    source = given_source(given)
    check_combination(given, source)
    opt.check_outputs(json_path, markdown, junit, html=html)
    gates = parse_gates(fail_if or [])
    given["duration"] = opt.parse_duration("--duration", duration)
    window_s = opt.parse_duration("--window", window)
    output = ProfileOutput(
        json=json_path,
        markdown=markdown,
        junit=junit,
        html=html,
        step_summary=opt.step_summary(),
        quiet=quiet,
        gates=gates,
        window_s=window_s,
        seed=seed,
    )
    if source is Source.RUN_DIRS:
        return profile_directories(runs or [], label, output)
    if source is Source.PRINT_ENV:
        return print_environment(output_dir)
    check_numbers(given)
    check_texts(given)
    if num_prompts is not None:
        check_prompt_tokens({**given, "random_prefix_len": 0})
    target, launch = profile_target(given, source)
    measurement = Measurement(target=target, launch=launch, work=work_factory(given, launch), quiet=quiet)
    facts = {"name": "gc-profile", "label": label or _described(target)}
    if what_if is None:
        return ProfileRun(
            name="gc-profile", facts=facts, measurement=measurement, directory=output_dir, output=output
        ).run()
    action = _action(what_if)
    return ArmsRun(
        name="gc-what-if",
        facts={"name": "gc-profile --what-if", "what_if": action},
        measurement=measurement,
        arms=what_if_arms(action),
        directory=output_dir,
        output=output,
        compare=action,
    ).run()


def _described(target: Recipe | UrlTarget | PidTarget) -> str:
    """What the tables call a run without a label."""
    if isinstance(target, PidTarget):
        return f"pid {target.pid}"
    return target.name if isinstance(target, Recipe) else target.base_url


def _action(text: str) -> str:
    try:
        return check_action(text)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"--what-if {text}: {error}") from None
