"""`atom ab-compare`: two things under the same load, in matched pairs, with a verdict. The options are in
`cli/ab_options.py`, the plan is `cli/ab_plan.py`'s, the run `cli/ab_run.py`'s, what is shown `cli/ab_publish.py`'s."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from atom.cli import options as opt
from atom.cli.ab_options import (
    arm_options,
    evidence_options,
    further_options,
    load_options,
    output_options,
    request_of,
    schedule_options,
)
from atom.cli.ab_plan import plan_of
from atom.cli.ab_plan_tables import plan_tables
from atom.cli.ab_run import ComparisonRun, open_comparison, say_interrupted
from atom.cli.option_groups import with_options
from atom.cli.options import parse_duration
from atom.cli.publish import Output, TableConsole, show_tables, write_or_print
from atom.cli.render import markdown, print_tables
from atom.diag.compare.plan import Plan
from atom.diag.compare.shown import shown
from atom.recipes.errors import ExitStatus, UsageError

__all__ = ["EXAMPLES", "ab_compare"]

EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom ab-compare main branch\n\n"
    "  atom ab-compare main . --fail-if-slower 2% --junit ab.xml --markdown ab.md\n\n"
    "  atom ab-compare main branch --dry-run\n\n"
    "  atom ab-compare main branch --load 'random --input-len 2048 --output-len 64 --max-concurrency 64' --pairs 5\n\n"
    "  atom ab-compare main branch --tests --accuracy 200 --gc --deadline 50m\n\n"
    "  atom ab-compare v1.2 v1.3 --repo ../engine --recipe engine.yaml --devices 0-3/4-7 --suite documents\n\n"
    "  atom ab-compare base.yaml head.yaml --until-decided\n\n"
    "  atom ab-compare http://127.0.0.1:8000 http://127.0.0.1:8001 --placement serial\n\n"
    "  atom ab-compare run:vllm-main.json run:vllm-branch.json\n\n"
    "  atom ab-compare main branch --arm bypass:local=ref:no-agreement --arm repair:fix=ref:fix\n\n"
    "  atom ab-compare --resume atom-runs/latest\n\n"
    "Exit status: 0 measured, and every gate passed · 1 an arm could not be run · 2 wrong usage · 3 a gate failed · "
    "4 no valid evidence (censored), or a gate that the evidence does not decide · 130 interrupted."
)
_WHERE: Final = frozenset({"output_dir", "json_path", "markdown", "junit", "quiet", "resume", "deadline", "dry_run"})
"""Options that may be given when a comparison goes on."""


@with_options(arm_options, load_options, schedule_options, evidence_options, further_options, output_options)
def ab_compare(
    ctx: typer.Context,
    base: Annotated[
        str | None,
        typer.Argument(
            metavar="[BASE]",
            help="A git ref, a recipe, a URL, a run directory or result file; label=… names it.",
        ),
    ] = None,
    head: Annotated[
        str | None, typer.Argument(metavar="[HEAD]", help="What is compared with it; . is this tree.")
    ] = None,
    **given: Any,
) -> int:
    """Compare two things under the same load: is HEAD faster than BASE, by how much, and is that more than noise?

    Both arms get fresh servers and the same requests, at the same time on two halves of the machine, then with the
    halves swapped: that is a pair. Each load says how it was decided, with a confidence interval over pairs; what
    failed stays in the table as censored and never wins. A git ref is built in a checkout of its own; yours is not
    touched. The plan is printed first, with the time it will take.
    """
    opt.check_outputs(given["json_path"], given["markdown"], given["junit"])
    output = Output(
        directory=given["output_dir"],
        json=[given["json_path"]] if given["json_path"] is not None else [],
        markdown=given["markdown"],
        junit=given["junit"],
        step_summary=opt.step_summary(),
        quiet=given["quiet"],
    )
    if given["resume"] is not None:
        return _resume(ctx, given, output)
    told = {name for name in ctx.params if _is_given(ctx, name)}
    try:
        plan = plan_of(request_of(base, head, given, told))
    except KeyboardInterrupt:
        say_interrupted("nothing was run", quiet=output.quiet)
        raise
    if given["dry_run"]:
        return _dry_run(plan, output)
    _show_plan(plan, output)
    return ComparisonRun(output=output, plan=plan).run()


def _resume(ctx: typer.Context, given: Mapping[str, Any], output: Output) -> int:
    told = [name for name in ctx.params if name not in _WHERE and _is_given(ctx, name)]
    if output.directory is not None:
        raise UsageError("--resume goes on in its own directory: leave out --output-dir")
    run_dir, plan = open_comparison(given["resume"], [_flag(ctx, name) for name in told])
    if given["dry_run"]:
        return _dry_run(plan, output)
    deadline = parse_duration("--deadline", given["deadline"])
    _show_plan(plan, output)
    return ComparisonRun(output=output, plan=plan, resume=run_dir, deadline_s=deadline).run()


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(ctx: typer.Context, name: str) -> str:
    parameter = next(one for one in ctx.command.params if one.name == name)
    return next((one for one in parameter.opts if one.startswith("--")), name.upper())


def _dry_run(plan: Plan, output: Output) -> int:
    tables = plan_tables(plan)
    for path in output.json:
        write_or_print(path, json.dumps(shown(plan.as_dict()), indent=2) + "\n")
    if output.markdown is not None:
        write_or_print(output.markdown, markdown(tables))
    if not output.quiet and not output.owns_stdout:
        show_tables(tables, TableConsole())
    return ExitStatus.OK


def _show_plan(plan: Plan, output: Output) -> None:
    """On standard error: standard output begins with the verdict."""
    if output.quiet:
        return
    console = TableConsole()
    console.stderr = True
    print_tables(plan_tables(plan), console)
    sys.stderr.flush()
