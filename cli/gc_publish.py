"""Where profiles go: page, terminal, JSON, Markdown, JUnit, the step summary of a CI job; and what the gates say."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from atom.bench.rundir import write_text
from atom.cli.gc_tables import gate_table, profile_tables
from atom.cli.publish import Attempts, TableConsole, append_step_summary, show_tables, write_or_print
from atom.cli.render import Table, markdown, number
from atom.diag.gc_profile.arms import Change, RecordedRun, changes
from atom.diag.gc_profile.export import profile_json, profile_junit
from atom.diag.gc_profile.gates import Gate, GateResult, check_gates, gate_status
from atom.diag.gc_profile.model import Profile
from atom.diag.gc_profile.page import write_page
from atom.diag.gc_profile.profile import profile_run
from atom.recipes.errors import ExitStatus

__all__ = ["ProfileOutput", "make_profiles", "publish_profiles"]

JSON_NAME: Final = "gc-profile.json"
PAGE_NAME: Final = "gc-profile.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOutput:
    """What was asked for, of any profile."""

    json: str | None = None
    markdown: str | None = None
    junit: Path | None = None
    html: Path | None = None
    """None: in the run directory."""
    step_summary: Path | None = None
    quiet: bool = False
    gates: Sequence[Gate] = ()
    window_s: float | None = None
    seed: int = 0

    @property
    def owns_stdout(self) -> bool:
        """Whether standard output is for a format of its own, so that no table may go there."""
        return "-" in (self.json, self.markdown, str(self.junit))


def make_profiles(runs: Sequence[RecordedRun], output: ProfileOutput) -> list[Profile]:
    """A profile of each run. UsageError for the first that is none."""
    return [profile_run(run.path, window_s=output.window_s, label=run.label, seed=output.seed) for run in runs]


def publish_profiles(
    profiles: Sequence[Profile],
    output: ProfileOutput,
    *,
    home: Path | None,
    compare: str | None = None,
) -> ExitStatus:
    """Write and show everything; returns what the gates say (0, 3 or 4).

    `home` is the run directory that gets page and JSON, as far as it can be written; None: no run's own. `compare`
    says what the second profile changed against the first. What cannot be written keeps nothing else from being
    written; RunError names it at the end.
    """
    results = check_gates(profiles, output.gates)
    changed = [] if compare is None or len(profiles) < 2 else changes(profiles[0], profiles[1])
    attempt = Attempts()
    text = json.dumps(_document(profiles, results, changed), indent=2, allow_nan=False) + "\n"
    page = output.html
    if home is not None and os.access(home, os.W_OK):
        attempt(lambda: write_text(home / JSON_NAME, text))
        page = page or home / PAGE_NAME
    if output.json is not None:
        attempt(partial(write_or_print, output.json, text))
    more = [*_change_tables(compare, changed, profiles), *([gate_table(results)] if results else [])]
    place = [Table("", (), (), [f"page: {page}"])] if page is not None else []
    tables = [*profile_tables(profiles), *more]
    if page is not None:
        attempt(partial(write_page, page, profiles, tables))
    written = markdown([*tables, *place])
    if output.markdown is not None:
        attempt(partial(write_or_print, output.markdown, written))
    if output.junit is not None:
        attempt(partial(write_or_print, output.junit, profile_junit(profiles, results)))
    if output.step_summary is not None:
        append_step_summary(output.step_summary, written + "\n")
    attempt(lambda: _show(profiles, [*more, *place], output))
    if output.quiet or output.owns_stdout:
        _complain(results)
    attempt.raise_failures()
    return gate_status(results)


def _document(profiles: Sequence[Profile], results: Sequence[GateResult], changed: Sequence[Change]) -> dict[str, Any]:
    document = profile_json(profiles, results)
    if changed:
        document["changes"] = {
            change.key: {"before": change.before, "after": change.after, "relative": change.relative}
            for change in changed
        }
    return document


def _change_tables(compare: str | None, changed: Sequence[Change], profiles: Sequence[Profile]) -> list[Table]:
    if compare is None or not changed:
        return []
    rows = [
        [f"{one.label} ({one.unit})", number(one.before), number(one.after), _relative(one.relative)] for one in changed
    ]
    note = (
        "as measured in one run of each, one after the other: no evidence of small differences, which two runs of one "
        "server have too"
    )
    return [Table(f"what {compare} changes", ("figure", profiles[0].label, profiles[1].label, "change"), rows, [note])]


def _relative(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}".replace("-", "−")


def _show(profiles: Sequence[Profile], more: Sequence[Table], output: ProfileOutput) -> None:
    if output.quiet or output.owns_stdout:
        return
    console = TableConsole()
    show_tables([*profile_tables(profiles, width=console.width), *more], console)


def _complain(results: Sequence[GateResult]) -> None:
    """Where no table is shown, standard error says which gates did not pass."""
    for result in results:
        if result.outcome != "passed":
            print(f"gate {result.outcome}: {result.gate} ({result.arm}): {result.reason}", file=sys.stderr)
