"""`atom trace-consensus report`: what recorded runs say. `diag/consensus/sources.py` finds the arms in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from atom.cli import options as opt
from atom.cli.consensus_publish import ConsensusOutput, publish_consensus
from atom.diag.consensus.document import arms_of, consensus_document
from atom.diag.consensus.sources import find_recordings

__all__ = ["report"]

EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom trace-consensus report atom-runs/latest\n\n"
    "  atom trace-consensus report control/ treatment/ --control control --markdown\n\n"
    "  atom trace-consensus report rank0.pt.trace.json.gz rank1.pt.trace.json.gz --perfetto timeline.json\n\n"
    "  atom trace-consensus report atom-runs/latest --json - | jq -r .verdict.sentence\n\n"
    "Exit status: 0 · 2 nothing that can be read · 3 ranks ended a request differently, or applied commits in "
    "different orders."
)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories, directories of traces, or files of one run's ranks."),
    ],
    control: Annotated[
        str | None, typer.Option(metavar="ARM", help="The arm to compare with; default: the one called control.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Write a timeline for ui.perfetto.dev: a track per rank, arrows from votes to commits.",
            rich_help_panel=opt.OUTPUT,
        ),
    ] = None,
    json_path: opt.JsonOption = None,
    markdown: opt.MarkdownOption = None,
    quiet: opt.QuietOption = False,
) -> int:
    """Say who waited for whom in runs that were recorded.

    Reads traces of this engine or in its documented format, PyTorch profiler traces, Flight Recorder dumps as JSON, and
    records of the PMPI recorder. Of a run with several arms, the one with the blocking agreement is explained, and
    compared with the others.
    """
    opt.check_outputs(json_path, markdown, None, perfetto=perfetto)
    arms = arms_of(find_recordings(runs), control)
    document: dict[str, Any] = consensus_document(arms)
    output = ConsensusOutput(
        json=json_path, markdown=markdown, perfetto=perfetto, step_summary=opt.step_summary(), quiet=quiet
    )
    return publish_consensus(document, arms, output)
