"""2 × 2 crossover of source and runtime: does a difference come from the code, from what it runs on, or from both
together? The four cells are the base, the head, and the head's source on the base's runtime and the other way round.

Log values are compared, so effects are percentages and an interaction is a ratio of ratios: with a, b, c, d the log
values of (base source, base runtime), (head, base), (base, head), (head, head), the source's main effect is
((b − a) + (d − c)) / 2, the runtime's ((c − a) + (d − b)) / 2, and the interaction (d − c) − (b − a).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from atom.diag.compare.contrasts import Contrast, Network
from atom.diag.compare.model import Arm, ArmKind, Comparison
from atom.diag.compare.outcomes import ArmOutcome
from atom.diag.compare.statistics import Estimate
from atom.recipes.errors import UsageError

__all__ = ["CROSSED", "cells_of", "crossed_arms", "crossed_comparisons", "crossover_section"]

CROSSED: Final = ("head-on-base-runtime", "base-on-head-runtime")
"""Labels and roles of the two arms that `--cross` adds."""
SOURCE_FIELDS: Final = ("kind", "spec", "src", "checkout")
RUNTIME_FIELDS: Final = ("recipe", "python", "image", "variables", "env", "server_args")
_FACTS: Final = ("repository", "sha", "ref", "subject", "dirty", "head", "commit_time", "notes")
"""Provenance that belongs to the source; all else is the runtime's."""


def crossed_arms(base: Arm, head: Arm) -> tuple[Arm, Arm]:
    """The two missing cells: the head's source on the base's runtime, and the base's source on the head's.

    UsageError if the arms do not differ in both, or are none that can be put together anew.
    """
    for arm in (base, head):
        if arm.kind is not ArmKind.REF:
            raise UsageError(f"--cross needs two git refs, and {arm.label} is a {arm.kind}")
    if all(getattr(base, name) == getattr(head, name) for name in SOURCE_FIELDS) or _same_commit(base, head):
        raise UsageError(f"--cross: {base.label} and {head.label} have the same source, so there is nothing to cross")
    if all(getattr(base, name) == getattr(head, name) for name in RUNTIME_FIELDS):
        raise UsageError(
            f"--cross: {base.label} and {head.label} have the same runtime: give them different images, recipes, "
            "--env or server arguments"
        )
    return _crossed(CROSSED[0], source=head, runtime=base), _crossed(CROSSED[1], source=base, runtime=head)


def _same_commit(base: Arm, head: Arm) -> bool:
    """Under whatever two names. A working tree with changes has a commit of its own."""
    sha = base.provenance.get("sha")
    return sha is not None and sha == head.provenance.get("sha")


def crossed_comparisons(base: Arm, head: Arm) -> list[Comparison]:
    """Base with each of the other three cells: base with head is the comparison that is made anyway."""
    return [Comparison(base=base.label, head=label) for label in (head.label, *CROSSED)]


def _crossed(label: str, *, source: Arm, runtime: Arm) -> Arm:
    facts = {name: value for name, value in runtime.provenance.items() if name not in _FACTS}
    facts.update({name: value for name, value in source.provenance.items() if name in _FACTS})
    cache = runtime.cache and str(Path(runtime.cache).parent / label)
    fields = {name: getattr(runtime, name) for name in RUNTIME_FIELDS}
    fields.update({name: getattr(source, name) for name in SOURCE_FIELDS})
    return dataclasses.replace(source, label=label, role=label, cache=cache, provenance=facts, **fields)


def cells_of(arms: Sequence[Arm]) -> dict[tuple[str, str], Arm] | None:
    """Arms by (source, runtime), each `base` or `head`; None unless all four are there."""
    by_role = {arm.role: arm for arm in arms}
    names = {
        ("base", "base"): "base",
        ("head", "base"): CROSSED[0],
        ("base", "head"): CROSSED[1],
        ("head", "head"): "head",
    }
    return {cell: by_role[role] for cell, role in names.items()} if set(names.values()) <= by_role.keys() else None


def crossover_section(
    arms: Sequence[Arm],
    outcomes: Mapping[str, ArmOutcome],
    estimates: Mapping[tuple[str, str], Estimate],
    *,
    load: str,
    metric: str,
    title: str,
    unit: str,
    level: float = 0.95,
) -> dict[str, Any] | None:
    """Cells, main effects and interaction of one load, as JSON. None where the arms are no crossover.

    `estimates` as for `causal_section`. The base's cell is the geometric mean of its runs (`raw` of each cell), every
    other one that times its effect against the base, so that cells and effects are one fit. An effect that needs a
    cell which is no evidence is null, and `verdict` says which cell: then what the remaining cells tell of source or
    runtime stands in `simple`.
    """
    cells = cells_of(arms)
    if cells is None:
        return None
    bad = {cell: why for cell, arm in cells.items() if (why := _missing(arm, outcomes.get(arm.label)))}
    dropped = {cells[cell].label for cell in bad}
    net = Network({pair: one for pair, one in estimates.items() if not dropped & set(pair)})
    a, b, c, d = (
        cells[cell].label for cell in (("base", "base"), ("head", "base"), ("base", "head"), ("head", "head"))
    )
    contrasts = {
        "source": {b: 0.5, d: 0.5, a: -0.5, c: -0.5},
        "runtime": {c: 0.5, d: 0.5, a: -0.5, b: -0.5},
        "interaction": {d: 1.0, c: -1.0, b: -1.0, a: 1.0},
    }
    effects = {name: _effect(net.contrast(one), level) for name, one in contrasts.items()}
    simple = {
        "source on the base's runtime": (b, a),
        "source on the head's runtime": (d, c),
        "runtime under the base's source": (c, a),
        "runtime under the head's source": (d, b),
    }
    verdict = _verdict(effects, [f"{_named(cell)} {why}" for cell, why in bad.items()])
    told = (outcomes.get(arm.label) for arm in cells.values())
    invalid = list(dict.fromkeys(reason for one in told if one is not None for reason in one.invalid))
    return {
        "load": load,
        "metric": metric,
        "title": title,
        "unit": unit,
        "cells": [
            _cell(cell, arm, outcomes.get(arm.label), bad.get(cell), _fitted(arm, cells["base", "base"], outcomes, net))
            for cell, arm in cells.items()
        ],
        "effects": effects,
        "simple": {name: _effect(net.difference(*pair), level) for name, pair in simple.items()},
        "indicative": any(one.n < 2 for one in estimates.values()),
        "invalid": invalid,
        "verdict": f"not valid ({', '.join(invalid)}): {verdict}" if invalid else verdict,
    }


def _missing(arm: Arm, outcome: ArmOutcome | None) -> str | None:
    """Why a cell is no evidence."""
    if outcome is None:
        return "was not run"
    if not outcome.started:
        return "did not start"
    return None if outcome.valid else "is censored"


def _fitted(arm: Arm, base: Arm, outcomes: Mapping[str, ArmOutcome], net: Network) -> float | None:
    """By the pairs; None where none connect it with the base."""
    start = outcomes.get(base.label)
    if start is None or start.value is None:
        return None
    if arm is base:
        return start.value
    found = net.difference(arm.label, base.label)
    return None if found is None else start.value * math.exp(found.value)


def _cell(
    cell: tuple[str, str], arm: Arm, outcome: ArmOutcome | None, problem: str | None, fitted: float | None
) -> dict[str, Any]:
    raw = None if outcome is None else outcome.value
    return {
        "source": cell[0],
        "runtime": cell[1],
        "arm": arm.label,
        "value": raw if problem or fitted is None else fitted,
        "raw": raw,
        "completed": None if outcome is None else outcome.completed,
        "requests": None if outcome is None else outcome.requests,
        "problem": problem,
        "why": None if outcome is None else outcome.problem or next(iter(outcome.censored), None),
    }


def _effect(found: Contrast | None, level: float) -> dict[str, Any] | None:
    if found is None:
        return None
    low, high = found.interval(level)
    return {"pct": 100 * math.expm1(found.value), "ci_pct": [100 * math.expm1(low), 100 * math.expm1(high)]}


def _named(cell: tuple[str, str]) -> str:
    return f"cell ({cell[0]}'s source, {cell[1]}'s runtime)"


def _verdict(effects: Mapping[str, Mapping[str, Any] | None], bad: Sequence[str]) -> str:
    if bad:
        return "inconclusive: " + "; ".join(bad)
    told = {name: one is not None and _excludes_zero(one["ci_pct"]) for name, one in effects.items()}
    if any(one is None for one in effects.values()):
        return "inconclusive: no comparison connects all four cells"
    if told["interaction"]:
        return "source and runtime act together: neither effect holds by itself"
    if told["source"] and told["runtime"]:
        return "both source and runtime make a difference, each by itself"
    if told["source"] or told["runtime"]:
        return f"the difference comes from the {'source' if told['source'] else 'runtime'}"
    return "no effect is told from zero"


def _excludes_zero(interval: Sequence[float]) -> bool:
    return interval[0] > 0 or interval[1] < 0
