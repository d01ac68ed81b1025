"""`atom gc-profile RUN_DIR…`: profiles of runs that are there, side by side. Nothing of a run is changed; its own page
and JSON are made anew where they can be written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from atom.bench.rundir import RunDirectory, Validity
from atom.cli.gc_publish import ProfileOutput, make_profiles, publish_profiles
from atom.diag.gc_profile.arms import RecordedRun, recorded_runs
from atom.diag.gc_profile.model import Profile
from atom.recipes.errors import ExitStatus, UsageError

__all__ = ["profile_directories"]


def profile_directories(paths: Sequence[Path], label: str | None, output: ProfileOutput) -> int:
    """The exit status: 4 where a run is no valid evidence, whatever the gates say of it; else theirs."""
    runs: list[RecordedRun] = []
    for path in paths:
        found = recorded_runs(path)
        if label is not None and len(found) > 1:
            raise UsageError(f"--label names one run, and {path} has {len(found)} arms, which name themselves")
        several = len(paths) > 1 and len(found) > 1
        runs += [RecordedRun(run.path, label or _label(run, path if several else None)) for run in found]
    profiles, kept = _readable(runs, output)
    home = paths[0] if len(paths) == 1 else None
    gates = publish_profiles(profiles, output, home=home, compare=_compared(paths, kept))
    found_wanting = _no_evidence(paths, profiles)
    if found_wanting and (output.quiet or output.owns_stdout):  # else the tables say so
        print(f"not valid: {'; '.join(found_wanting)}", file=sys.stderr)
    return ExitStatus.INVALID if found_wanting else gates


def _no_evidence(paths: Sequence[Path], profiles: Sequence[Profile]) -> list[str]:
    """The runs that are none, and what they are: the profiles, then directories whose other arms are missing."""
    states = [(profile.label, profile.validity) for profile in profiles]
    found = [(label, state) for label, state in states if state != Validity.VALID]
    if not found:
        whole = [(path.name, RunDirectory.open(path).read_run_json().get("validity")) for path in paths]
        found = [(name, state) for name, state in whole if state != Validity.VALID]
    return [f"{name} ({state or 'not sealed: it did not come to its end'})" for name, state in found]


def _label(run: RecordedRun, parent: Path | None) -> str | None:
    if run.label is None:
        label = RunDirectory.open(run.path).read_run_json().get("label")
        return label if isinstance(label, str) and label else None
    return run.label if parent is None else f"{parent.name} {run.label}"


def _readable(runs: Sequence[RecordedRun], output: ProfileOutput) -> tuple[list[Profile], list[RecordedRun]]:
    """Arms that were cut off before they recorded anything are left out and named; a single run must be readable."""
    if len(runs) == 1:
        return make_profiles(runs, output), list(runs)
    profiles: list[Profile] = []
    kept: list[RecordedRun] = []
    trouble: list[str] = []
    for run in runs:
        try:
            profiles += make_profiles([run], output)
            kept.append(run)
        except UsageError as error:
            trouble.append(str(error))
    if not profiles:
        raise UsageError(trouble[0])
    for message in trouble:
        print(f"warning: left out: {message}", file=sys.stderr)
    return profiles, kept


def _compared(paths: Sequence[Path], runs: Sequence[RecordedRun]) -> str | None:
    """What the second arm did, if this is a `--what-if` of its own."""
    if len(paths) != 1 or len(runs) != 2:
        return None
    action = RunDirectory.open(paths[0]).read_run_json().get("what_if")
    return action if isinstance(action, str) else None
