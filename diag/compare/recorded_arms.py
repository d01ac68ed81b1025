"""What was recorded, as an arm: which runs of another comparison it may be, the commit that they were made at, and the
load that they were made under."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from atom.bench.redact import redact_option
from atom.diag.compare.model import Arm, Load, Purpose
from atom.diag.compare.plan import PLAN_FILE, Plan
from atom.diag.compare.recorded import load_of, run_facts_of
from atom.recipes.errors import UsageError

__all__ = ["RECORDED_LOAD", "arms_of", "compared_runs", "is_comparison", "recorded_load", "recorded_source"]

RECORDED_LOAD: Final = "recorded"
"""Name of the load of arms that are all recorded."""
_OWN_ENGINE: Final = ("embedded", "simulated")
"""Recipes that start this project's engine, from the tree that the client is of."""
_SHAPE: Final = ("num_prompts", "max_concurrency", "request_rate", "random_input_len", "random_output_len")
_PROVENANCE: Final = ("sha", "ref", "subject", "dirty", "commit_time")


def is_comparison(path: Path) -> bool:
    return (path / PLAN_FILE).is_file()


def arms_of(out: Path) -> list[Path]:
    """Directories of the arms of the comparison in `out`."""
    return sorted(one for one in (out / "arms").glob("*") if one.is_dir())


def compared_runs(folder: Path) -> list[Path]:
    """The runs in `arms/LABEL` of a comparison that count: of its one load, pair by pair, without the control's and
    those that were made again. UsageError if they are of several loads."""
    from atom.diag.compare.journal import read_records

    out = folder.parent.parent
    plan, current = Plan.read(out), read_records(out).current
    found: dict[str, list[Path]] = {}
    for pair in sorted(plan.schedule, key=lambda one: one.pair):
        for run in sorted(pair.runs, key=lambda one: one.index):
            for side, part in enumerate(run.runs):
                result = current.get((run.key, side))
                if part.arm != folder.name or pair.purpose is not Purpose.COMPARE or result is None:
                    continue
                if result.has_records:
                    found.setdefault(pair.load, []).append(out / result.directory)
    if len(found) > 1:
        ways = (f"{load}: run:{','.join(map(str, runs))}" for load, runs in found.items())
        raise UsageError(f"{folder} has runs of several loads; name those of one: {'; '.join(ways)}")
    return next(iter(found.values()), [])


# ---- of which commit -------------------------------------------------------------------------------------------------


def recorded_source(runs: Iterable[Path]) -> dict[str, Any]:
    """`sha` and the like, if all these runs say the same commit; with a note if they do not."""
    found = [_source(run) for run in runs]
    shas = dict.fromkeys(str(one["sha"])[:12] for one in found if one)
    if len(shas) > 1:
        return {"notes": [f"its runs are of several commits: {', '.join(shas)}"]}
    return found[0] if found and all(found) else {}


def _source(run: Path) -> dict[str, Any]:
    """Of a run in a comparison by its plan, else by what `atom bench` recorded of a server of this tree."""
    out = run.absolute().parent.parent.parent
    if run.absolute().parent.parent.name == "arms" and is_comparison(out):
        arm = _arm_of(out, run.absolute().parent.name)
        known = {} if arm is None else {name: arm.provenance.get(name) for name in _PROVENANCE}
        return _sound({**known, "sha_from": PLAN_FILE})
    facts = run_facts_of(run)
    recipe, git, command = facts.get("recipe"), facts.get("git"), facts.get("command")
    if not (isinstance(recipe, Mapping) and isinstance(git, Mapping)) or recipe.get("name") not in _OWN_ENGINE:
        return {}
    words = [str(word) for word in command] if isinstance(command, list) else []
    if any(re.fullmatch(r"(--set=)?(src|python)=.*", word, re.DOTALL) for word in words):
        return {}  # its server was of another tree
    return _sound({"sha": git.get("sha"), "ref": git.get("branch"), "dirty": git.get("dirty"), "sha_from": "run.json"})


def _arm_of(out: Path, label: str) -> Arm | None:
    try:
        return next((arm for arm in Plan.read(out).arms if arm.label == label), None)
    except UsageError:
        return None


def _sound(facts: Mapping[str, Any]) -> dict[str, Any]:
    sha = facts.get("sha")
    if not isinstance(sha, str) or not re.fullmatch(r"[0-9a-f]{7,64}", sha):
        return {}
    return {name: one for name, one in facts.items() if isinstance(one, str | bool | int) and len(str(one)) <= 1000}


# ---- under which load ------------------------------------------------------------------------------------------------


def recorded_load(arms: Sequence[Arm]) -> Load:
    """The load of arms that are all recorded: what all their records agree on."""
    loads = [load_of(Path(path)) for arm in arms for path in arm.recorded]
    agreed: dict[str, Any] = {}
    for name in _SHAPE:
        values = [(load.get("source") or {}).get(name, load.get(name)) for load in loads]
        if values and values[0] not in (None, "inf") and all(one == values[0] for one in values):
            agreed[name.replace("_", "-")] = redact_option(name, values[0])
    durations = {load.get("duration_s") for load in loads}
    if len(durations) == 1 and (seconds := durations.pop()) is not None:
        agreed["duration"] = seconds
    return Load(name=RECORDED_LOAD, bench=RECORDED_LOAD, options=agreed)
