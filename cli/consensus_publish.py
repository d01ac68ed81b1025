"""Where what `atom trace-consensus` found goes: terminal, JSON, Markdown, timeline, the step summary of a CI job."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from atom.cli.consensus_tables import consensus_tables
from atom.cli.publish import Attempts, TableConsole, append_step_summary, show_tables, write_or_print
from atom.cli.render import markdown
from atom.diag.consensus.document import exit_status
from atom.diag.consensus.outcome import ArmRuns
from atom.diag.consensus.perfetto import perfetto_trace
from atom.recipes.errors import ExitStatus

__all__ = ["ConsensusOutput", "publish_consensus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsensusOutput:
    """What was asked for."""

    json: str | None = None
    markdown: str | None = None
    perfetto: Path | None = None
    step_summary: Path | None = None
    quiet: bool = False

    @property
    def owns_stdout(self) -> bool:
        return "-" in (self.json, self.markdown, str(self.perfetto))


def publish_consensus(document: Mapping[str, Any], arms: Sequence[ArmRuns], output: ConsensusOutput) -> ExitStatus:
    """Write and show everything; returns 0, or 3 on divergence. RunError for what could not be written, at the end."""
    attempt = Attempts()
    tables = consensus_tables(document)
    if output.json is not None:
        attempt(partial(write_or_print, output.json, json.dumps(document, indent=2, allow_nan=False) + "\n"))
    if output.markdown is not None:
        attempt(partial(write_or_print, output.markdown, markdown(tables)))
    if output.perfetto is not None:
        subject = next(one for one in arms if one.label == document["subject"])
        text = json.dumps(perfetto_trace(subject.typical), separators=(",", ":"), allow_nan=False)
        attempt(partial(write_or_print, output.perfetto, text + "\n"))
    if output.step_summary is not None:
        append_step_summary(output.step_summary, markdown(tables) + "\n")
    if not output.quiet and not output.owns_stdout:
        attempt(lambda: show_tables(tables, TableConsole()))
    status = exit_status(document)
    if status is not ExitStatus.OK and (output.quiet or output.owns_stdout):
        for arm in document["arms"]:
            if arm["divergences"] or arm["order_differs"]:
                what = f"{arm['divergences']} requests ended differently" if arm["divergences"] else "orders differ"
                print(f"diverged: {arm['label']}: {what}", file=sys.stderr)
    attempt.raise_failures()
    return status
