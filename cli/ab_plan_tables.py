"""The plan of a comparison as it is shown before anything runs, and by `--dry-run`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from atom.bench.redact import redact_arguments
from atom.cli.render import Table
from atom.diag.compare.load_document import shape_of
from atom.diag.compare.metrics import METRICS
from atom.diag.compare.model import Arm, ArmKind, Load
from atom.diag.compare.plan import Plan
from atom.recipes.cpus import format_cpus

__all__ = ["commit_text", "duration_text", "plan_tables"]

MOST_SHOWN: Final = 12
"""Pairs of the schedule."""


def plan_tables(plan: Plan) -> list[Table]:
    """What will be done, in which order, and about how long it takes."""
    return [
        Table("plan", ("", "value"), list(_facts(plan))),
        _arms(plan),
        _loads(plan),
        _schedule(plan),
    ]


def _facts(plan: Plan) -> Iterator[list[str]]:
    yield ["compares", "; ".join(f"{one.base} → {one.head}" for one in plan.comparisons)]
    if any(arm.kind is not ArmKind.RECORDED for arm in plan.arms):
        yield ["halves" if len(plan.placement.halves) > 1 else "machine", "; ".join(_half(plan))]
    yield ["why so", plan.placement.reason]
    swap = (
        "each run again with the halves swapped" if plan.placement.concurrent else "each run again in the other order"
    )
    pairs = f"{plan.pairs} per load" + (f", {swap}" if plan.swap else ", not swapped")
    if plan.until_decided:
        pairs += f"; more until it is decided, at most {plan.max_pairs}"
    yield ["pairs", pairs]
    yield [
        "A/A control",
        f"{plan.aa_pairs} {'pair' if plan.aa_pairs == 1 else 'pairs'} of the base against itself first"
        if plan.aa_pairs
        else "none (--aa N)",
    ]
    yield ["seed", str(plan.seed)]
    seconds = plan.expected_seconds()
    yield ["expected time", "not known" if seconds is None else f"about {duration_text(seconds)}"]
    if plan.deadline_s is not None:
        yield ["deadline", _deadline(plan, plan.deadline_s)]
    for gate in plan.gates:
        yield ["gate", _gate(gate)]
    if (outputs := plan.extras.get("outputs_text")) is not None:
        yield ["greedy outputs", str(outputs)]
    for name in ("tests", "accuracy", "gc"):
        if (text := plan.extras.get(f"{name}_text")) is not None:
            yield [name, str(text)]
    for key, lines in (plan.extras.get("confounded") or {}).items():
        for line in lines:
            yield [f"confounded, {key}", str(line)]
    for note in plan.extras.get("notes") or []:
        yield ["note", str(note)]


def _deadline(plan: Plan, deadline_s: float) -> str:
    limit = duration_text(deadline_s)
    told = f"{limit}: no pair begins that would not end by then"
    times = {pair.key: [plan.seconds_of(run) for run in pair.runs] for pair in plan.schedule}
    pairs = [None if None in one else sum(filter(None, one)) for one in times.values()]
    known = [one for one in pairs if one is not None]
    if pairs and len(known) < len(pairs):
        return f"{told}; time per pair not known: the first one of a load may exceed {limit}"
    if known and min(known) > deadline_s:
        return f"{told}, and a pair takes about {duration_text(min(known))}"
    return told


def _half(plan: Plan) -> Iterator[str]:
    for half in plan.placement.halves:
        parts = [half.name]
        if half.devices is not None:
            parts.append(f"GPUs {half.devices}")
        if half.server_cpus:
            parts.append(f"server on CPUs {format_cpus(half.server_cpus)}")
        if half.client_cpus:
            parts.append(f"client on CPUs {format_cpus(half.client_cpus)}")
        yield ", ".join(parts)


def _gate(gate: Mapping[str, Any]) -> str:
    if "section" in gate:
        return str(gate["section"])
    name = gate.get("metric")
    title = "each load's primary metric" if name is None else METRICS[name].title
    where = f" under {gate['load']}" if gate.get("load") else ""
    return f"{title}{where} at most {gate['slower_pct']:g}% slower"


def _arms(plan: Plan) -> Table:
    rows, notes = [], []
    for arm in plan.arms:
        changes = "; ".join(_changes(arm)) or "–"
        rows.append([arm.label, arm.role, arm.spec, commit_text(arm.provenance), changes])
        notes += [f"{arm.label}: {note}" for note in arm.provenance.get("notes") or []]
    return Table("arms", ("arm", "role", "source", "commit", "of its own"), rows, notes, text_columns=(1, 2, 3, 4))


def commit_text(facts: Mapping[str, Any]) -> str:
    """Of an arm: its commit, or that of the working tree below its changes, whose own one nobody else knows."""
    if facts.get("dirty"):
        return f"{str(facts.get('head') or facts.get('sha') or '')[:12]} + changes"
    return str(facts.get("sha") or "")[:12]


def _changes(arm: Arm) -> Iterator[str]:
    if arm.recipe is not None and arm.recipe != arm.spec:
        yield f"recipe {arm.recipe}"
    for name, value in (("image", arm.image), ("python", arm.python)):
        if value is not None:
            yield f"{name} {value}"
    if arm.env:
        yield " ".join(redact_arguments([f"{name}={value}" for name, value in arm.env.items()]))
    if arm.variables:
        yield " ".join(redact_arguments([f"{name}={value}" for name, value in arm.variables.items()]))
    if arm.server_args:
        yield shlex.join(redact_arguments(arm.server_args))


def _loads(plan: Plan) -> Table:
    rows = [[load.name, shape_of(load), load.recipe or "the arms'", *_declared(load)] for load in plan.loads]
    columns = ("load", "what", "recipe", "decides", "margin")
    return Table("loads", columns, rows, text_columns=(1, 2, 3))


def _declared(load: Load) -> list[str]:
    if load.section == "accuracy":
        return ["accuracy", "–"]
    return [METRICS[load.primary].title, f"±{load.margin_pct:g}%"]


def _schedule(plan: Plan) -> Table:
    sure = [pair for pair in plan.schedule if not plan.is_extra(pair)]
    between = " | " if plan.placement.concurrent else ", "
    rows = []
    for number, pair in enumerate(sure[:MOST_SHOWN], 1):
        runs = [sorted(matched.runs, key=lambda run: (run.half, run.order)) for matched in pair.runs]
        rows.append([str(number), pair.load, "; then ".join(between.join(run.arm for run in both) for both in runs)])
    more = len(sure) - MOST_SHOWN
    notes = [f"and {more} more pairs"] if more > 0 else []
    what = "on the first | second half" if plan.placement.concurrent else "one after the other"
    return Table("schedule", ("pair", "load", what), rows, notes, text_columns=(1, 2))


def duration_text(seconds: float) -> str:
    """`45 s`, `12 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
