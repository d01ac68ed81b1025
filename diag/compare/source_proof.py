"""Which runs of a comparison, of whatever section, do not show their arm's own code, by load: nothing that they
measured is evidence of the arm. How that is seen in one run is `origins.py`'s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from atom.diag.compare.journal import Records
from atom.diag.compare.origins import origin_problems
from atom.diag.compare.plan import Plan
from atom.recipes.errors import ExitStatus

__all__ = ["PACKAGES", "source_problems"]

PACKAGES: Final = "source_packages"
"""Of a plan's `extras`: recipe → packages that must come from the checkout, as they were when the comparison began."""
_WHOLE: Final = (ExitStatus.OK, ExitStatus.INVALID)


def source_problems(out: Path, plan: Plan, records: Records) -> dict[str, list[str]]:
    """By load, with how many runs each holds for."""
    loads = {run.key: plan.load(run.load) for pair in plan.schedule for run in pair.runs}
    packages = plan.extras.get(PACKAGES)
    known = packages if isinstance(packages, Mapping) else {}
    made: dict[str, int] = {}
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for one in records.current.values():
        load = loads.get(one.matched)
        if load is None or not one.has_records:
            continue
        made[load.name] = made.get(load.name, 0) + 1
        for line in origin_problems(out / one.directory, plan.arm(one.arm), load.recipe, known):
            kind, _, detail = line.partition(": ")
            if one.status not in _WHOLE and kind != "foreign modules":
                continue  # its server may have ended before it could tell
            run = f"{one.arm}'s {one.directory.rpartition('/')[2]}"
            found.setdefault(load.name, {}).setdefault(kind, []).append((run, detail))
    return {
        name: [
            f"{kind} in {len(runs)} of {made[name]} runs, such as {runs[0][0]}: {runs[0][1]}"
            for kind, runs in kinds.items()
        ]
        for name, kinds in found.items()
    }
