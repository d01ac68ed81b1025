"""From a run directory to its `Profile`. The parts are in `windows.py`, `growth.py`, `attribution.py`, `causes.py`,
`verdict.py`, `processes.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atom.bench.rundir import RunDirectory, Validity
from atom.diag.gc_profile.attribution import attribute
from atom.diag.gc_profile.causes import Findings, family_growth, few_passes, find_causes
from atom.diag.gc_profile.evidence import Evidence, read_evidence
from atom.diag.gc_profile.growth import find_growth
from atom.diag.gc_profile.model import Profile
from atom.diag.gc_profile.processes import process_rows
from atom.diag.gc_profile.verdict import judge
from atom.diag.gc_profile.windows import default_window_s, totals, windows
from atom.diag.server_figures import old_object_passes
from atom.recipes.errors import UsageError

__all__ = ["profile_run"]


def profile_run(
    directory: Path, *, window_s: float | None = None, label: str | None = None, shifts: int = 200, seed: int = 0
) -> Profile:
    """Analyse a run directory. UsageError if it is none, or for a window that fits no run.

    `window_s`: None for about a sixth of the span. `shifts`: how many circular shifts the attribution compares with.
    `seed`: of everything random in the analysis; the same directory and seed give the same profile.
    """
    if window_s is not None and not 0 < window_s < float("inf"):
        raise UsageError(f"--window must be a length of time above zero, got {window_s:g} s")
    evidence = read_evidence(RunDirectory.open(directory))
    length = window_s if window_s is not None else default_window_s(evidence.duration_s)
    attribution, overlaps = attribute(evidence, shifts=shifts, seed=seed)
    findings = Findings(
        evidence=evidence,
        totals=totals(evidence),
        windows=windows(evidence, length),
        growth=find_growth(evidence, seed=seed),
        overlaps=overlaps,
    )
    causes = find_causes(findings)
    processes = process_rows(evidence)
    verdict, is_problem = judge(findings, causes, processes)
    return Profile(
        label=label or evidence.run_dir.path.name,
        directory=str(directory),
        simulated=_simulated(evidence.run),
        old_object_passes=old_object_passes([evidence.passes.process] if evidence.passes else []),
        window_s=length,
        windows=tuple(findings.windows),
        totals=findings.totals,
        growth=findings.growth,
        attribution=attribution,
        causes=causes,
        verdict=verdict,
        is_problem=is_problem,
        processes=processes,
        few_passes=few_passes(evidence),
        growing_families=family_growth(evidence, 0.0),
        validity=_validity(evidence),
        notes=_notes(evidence),
    )


def _simulated(run: Mapping[str, Any]) -> bool:
    """Whether the server says that it runs no model."""
    target = run.get("target")
    if isinstance(target, dict) and target.get("executor") == "simulated":
        return True
    value: Any = run
    for name in ("server", "info", "server_info", "simulated"):
        value = value.get(name) if isinstance(value, dict) else None
    return value is True


def _validity(evidence: Evidence) -> str | None:
    """As the run was sealed, unless its directory was damaged since."""
    sealed: str | None = evidence.run.get("validity")
    return str(Validity.NOT_VALID) if sealed == Validity.VALID and evidence.damage else sealed


def _notes(evidence: Evidence) -> tuple[str, ...]:
    reasons = [str(reason) for reason in evidence.run.get("reasons") or ()]
    notes = [*reasons, *evidence.damage, *evidence.notes]
    failure = evidence.captures.scrapes.outcome(evidence.start_ns, evidence.end_ns).failure
    notes += [failure] if failure else []
    return tuple(dict.fromkeys(notes))
