"""`atom trace-consensus run`: a context pipeline under each way of agreeing, over MPI, and what that says. The arms are
`diag/consensus/arms.py`; what is shown of them is what `report` shows of any recording."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from atom.bench.provenance import command_line, provenance
from atom.bench.rundir import RunDirectory
from atom.cli import options as opt
from atom.cli.consensus_publish import ConsensusOutput, publish_consensus
from atom.cli.run_place import RunPlace
from atom.diag.consensus.arms import ARMS, MOST_RANKS, ArmsPlan, run_arms
from atom.diag.consensus.document import arms_of, consensus_document
from atom.diag.consensus.launcher import find_launcher
from atom.diag.consensus.sources import find_recordings
from atom.recipes.errors import UsageError

__all__ = ["EXAMPLES", "run"]

PIPELINE: Final = "Pipeline"
MODEL: Final = "Model of a stage"
FAULTS: Final = "Faults"
EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom trace-consensus run\n\n"
    "  atom trace-consensus run --pp 4 --requests 512 --arms control,blocking,local-only,async\n\n"
    "  atom trace-consensus run --stage-ms 10,40,10,10 --arms control,blocking --repeats 1\n\n"
    "  atom trace-consensus run --failures 0.02 --timeouts 0.01 --json -\n\n"
    "  atom trace-consensus run --mpiexec 'srun --mpi=pmi2'\n\n"
    "Exit status: 0 measured · 1 a rank failed, and is named · 2 wrong usage · 3 ranks ended a request differently · "
    "130 interrupted."
)


def run(
    pp: Annotated[int, typer.Option("--pp", metavar="N", help="Pipeline stages.", rich_help_panel=PIPELINE)] = 4,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Shards of a stage.", rich_help_panel=PIPELINE)] = 1,
    requests: Annotated[
        int, typer.Option("--requests", metavar="N", help="Requests per run.", rich_help_panel=PIPELINE)
    ] = 128,
    arms: Annotated[
        str,
        typer.Option(metavar="NAMES", help=f"Arms, in this order, of {', '.join(ARMS)}.", rich_help_panel=PIPELINE),
    ] = ",".join(ARMS),
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", help="Runs of each arm, in turn.", rich_help_panel=PIPELINE)
    ] = 3,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            "--micro-batches",
            metavar="N",
            help="Requests on their way from the first stage to the last's end at a time; default: one per stage.",
            rich_help_panel=PIPELINE,
        ),
    ] = None,
    depth: Annotated[
        int,
        typer.Option(
            "--depth",
            metavar="N",
            help="Requests in flight: admitted, and their blocks not released.",
            rich_help_panel=PIPELINE,
        ),
    ] = 16,
    blocks: Annotated[
        int,
        typer.Option(
            "--blocks", metavar="N", help="KV blocks that a request holds on a rank.", rich_help_panel=PIPELINE
        ),
    ] = 128,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", help="All arms of a repeat have the same; the next has one more.", rich_help_panel=PIPELINE
        ),
    ] = 0,
    mpiexec: Annotated[
        str | None,
        typer.Option(
            "--mpiexec",
            metavar="COMMAND",
            help="What takes -n RANKS PROGRAM; default: the mpiexec of mpi4py's MPI.",
            rich_help_panel=PIPELINE,
        ),
    ] = None,
    deadline: Annotated[
        str,
        typer.Option(
            "--deadline",
            metavar="TIME",
            help="Without progress for so long all ranks fail together.",
            rich_help_panel=PIPELINE,
        ),
    ] = "60s",
    stage_ms: Annotated[
        str,
        typer.Option(
            "--stage-ms",
            metavar="MS[,MS…]",
            help="Forward time of a request: of the first stage, or of each.",
            rich_help_panel=MODEL,
        ),
    ] = "10",
    gaps: Annotated[
        str | None,
        typer.Option(
            "--gaps",
            metavar="A:B:…",
            help="How much later each stage enters than the one before, in units of --stage-ms; default: 1:…:1:2.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    jitter: Annotated[
        float,
        typer.Option("--jitter", metavar="F", help="Times are spread over ± this fraction.", rich_help_panel=MODEL),
    ] = 0.05,
    transfer_ms: Annotated[
        float, typer.Option("--transfer-ms", metavar="MS", help="Time of a transfer.", rich_help_panel=MODEL)
    ] = 60.0,
    failures: Annotated[
        float,
        typer.Option(
            "--failures", metavar="F", help="Fraction of a rank's transfers that fail.", rich_help_panel=FAULTS
        ),
    ] = 0.0,
    timeouts: Annotated[
        float,
        typer.Option(
            "--timeouts", metavar="F", help="Fraction that gets stuck until it is cancelled.", rich_help_panel=FAULTS
        ),
    ] = 0.0,
    timeout_ms: Annotated[
        float,
        typer.Option("--timeout-ms", metavar="MS", help="When a transfer is overdue.", rich_help_panel=FAULTS),
    ] = 2000.0,
    output_dir: opt.OutputDirOption = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Write a timeline of one run for ui.perfetto.dev.", rich_help_panel=opt.OUTPUT
        ),
    ] = None,
    json_path: opt.JsonOption = None,
    markdown: opt.MarkdownOption = None,
    quiet: opt.QuietOption = False,
) -> int:
    """Run a context pipeline over MPI under each way of agreeing on transfers, and say who waited for whom.

    The scheduler loop, the messages, the agreement and the retention of blocks are real, and traced. What a device and
    a network would do takes stated times, which are slept: waiting ranks take no processor from a late one, and no
    accelerator is needed. Early stages could run the next request instead of waiting, so waiting costs throughput.
    """  # fmt: skip
    given: dict[str, Any] = dict(locals())
    opt.check_outputs(json_path, markdown, None, perfetto=perfetto)
    plan = _plan(given)
    launcher = find_launcher(mpiexec)
    place = RunPlace(output_dir, "trace-consensus")
    run_dir = place.run_dir
    run_dir.write_run_json(
        {
            "name": "trace-consensus run",
            "plan": asdict(plan),
            "launcher": launcher.describe(),
            **provenance(command_line()),
        }
    )

    def say(line: str) -> None:
        if not quiet:
            with contextlib.suppress(OSError):
                print(line, file=sys.stderr, flush=True)

    for line in _described(plan, launcher.describe()):
        say(line)
    run_arms(plan, run_dir, launcher, say)
    say(f"recorded in {run_dir.path}")
    return _report(run_dir, given)


def _plan(given: dict[str, Any]) -> ArmsPlan:
    deadline_s = opt.parse_duration("--deadline", given["deadline"])
    assert deadline_s is not None  # it has a default
    names = ("pp", "tp", "requests", "jitter", "transfer_ms", "failures", "timeouts", "timeout_ms", "depth", "blocks")
    return ArmsPlan(
        arms=[name.strip() for name in given["arms"].split(",") if name.strip()],
        stage_ms=_stage_times(given["stage_ms"], given["gaps"], given["pp"]),
        micro_batches=given["pp"] if given["micro_batches"] is None else given["micro_batches"],
        seed=given["seed"],
        repeats=given["repeats"],
        deadline_s=deadline_s,
        **{name: given[name] for name in names},
    )


def _stage_times(stage_ms: str, gaps: str | None, pp: int) -> list[float]:
    """A stage enters as much later than the one before as its own forward takes."""
    if not 2 <= pp <= MOST_RANKS:
        raise UsageError(f"--pp must be from 2 (one stage waits for nobody) to {MOST_RANKS}, got {pp}")
    times = _numbers("--stage-ms", stage_ms, ",")
    if len(times) > 1:
        if gaps is not None:
            raise UsageError("--gaps are in units of the first stage's time: give --stage-ms one time with it")
        return times
    relative = [1.0] * (pp - 2) + [2.0] if gaps is None else _numbers("--gaps", gaps, ":")
    if len(relative) != pp - 1:
        raise UsageError(f"--gaps {gaps} has {len(relative)} gaps; between {pp} stages (--pp) there are {pp - 1}")
    return [times[0], *(times[0] * one for one in relative)]


def _numbers(flag: str, text: str, separator: str) -> list[float]:
    try:
        return [float(part) for part in text.split(separator)]
    except ValueError:
        raise UsageError(f"{flag} takes numbers separated by {separator!r}, got {text!r}") from None


def _described(plan: ArmsPlan, launcher: str) -> list[str]:
    stages = ", ".join(f"{one:g}" for one in plan.stage_ms)
    shards = f" × {plan.tp} shards" if plan.tp > 1 else ""
    return [
        f"{plan.pp} stages{shards} of {stages} ms (stated, slept; ± {plan.jitter:.0%}), transfers of "
        f"{plan.transfer_ms:g} ms",
        f"{plan.requests} requests, at most {plan.micro_batches} in the pipeline and {plan.depth} not released, seed "
        f"{plan.seed}",
        f"{len(plan.arms)} arms × {plan.repeats} runs, about {plan.seconds():.0f} s, with {launcher}",
    ]


def _report(run_dir: RunDirectory, given: dict[str, Any]) -> int:
    """As `atom trace-consensus report` says it, and the run's summary.json."""
    arms = arms_of(find_recordings([run_dir.path]))
    document = consensus_document(arms)
    run_dir.write_summary(document)
    output = ConsensusOutput(
        json=given["json_path"],
        markdown=given["markdown"],
        perfetto=given["perfetto"],
        step_summary=opt.step_summary(),
        quiet=given["quiet"],
    )
    return publish_consensus(document, arms, output)
