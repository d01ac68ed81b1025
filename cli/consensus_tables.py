"""The tables of `atom trace-consensus`, from its document (`diag/consensus/document.py`). The verdict is first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from atom.cli.ab_causal_tables import causal_tables
from atom.cli.render import Table, number

__all__ = ["consensus_tables"]

Document = Mapping[str, Any]
MOST_RANKS: Final = 16
"""Rows of a table by rank; of more, those that waited longest are shown."""
UNSUPPORTED: Final = "†"


def consensus_tables(document: Document) -> list[Table]:
    verdict = document["verdict"]
    tables = [Table("", (), (), verdict["details"], [verdict["sentence"]])]
    tables += _troubles(document)
    tables.append(_arms(document))
    tables += causal_tables({"causal": [document["causal"]]} if document["causal"] else {})
    tables += _accumulated(document)
    for group in document["groups"]:
        tables += _group(document, group)
    tables += [*_lifecycle(document), *_safety(document), *_resources(document), *_scope(document)]
    if document["notes"]:
        tables.append(Table("", (), (), document["notes"]))
    return [one for one in tables if one.rows or one.lead or one.notes]


# ---- arms


def _troubles(document: Document) -> Iterator[Table]:
    notes = []
    for arm in document["arms"]:
        if arm["divergences"]:
            some = ", ".join(arm["divergent"][:3])
            notes.append(
                f"DIVERGED: {arm['label']}: {arm['divergences']} ended differently on different ranks ({some})"
            )
        if arm["order_differs"]:
            notes.append(f"DIVERGED: {arm['label']}: ranks applied commits in different orders")
        if arm["censored"]:
            notes.append(f"CENSORED: {arm['label']}: {'; '.join(arm['reasons'][:3])}")
        lost = [f"{arm[name]:,} {what}" for name, what in _LOST if arm[name]]
        if lost:
            notes.append(f"INCOMPLETE: {arm['label']}: {', '.join(lost)}")
    if notes:
        yield Table("", (), (), notes)


_LOST: Final = (
    ("dropped", "events dropped by the ranks"),
    ("damaged", "lines that could not be read"),
    ("unread", "events beyond what is read"),
)


def _arms(document: Document) -> Table:
    rows = []
    for arm in document["arms"]:
        waits = [one for one in arm["wait_s"] if one is not None]
        rows.append(
            [
                _arm_name(arm),
                _counted(arm),
                _rate(arm),
                "–" if arm["pct_of_control"] is None else f"{arm['pct_of_control']:.2f}",
                number(max(waits)) if waits else "–",
                f"{max(waits) / arm['wall_s']:.1%}" if waits and arm["wall_s"] > 0 else "–",
                number(sum(waits)) if waits else "–",
            ]
        )
    group = next((arm["group"] for arm in document["arms"] if arm["group"]), "pp").upper()
    columns = ("arm", "completed", "req/s", "% of\ncontrol", "most (s)", "of wall", "Σ ranks (s)")
    notes = []
    if any(arm["runs"] > 1 for arm in document["arms"]):
        notes.append("requests are summed over runs; throughput and waits are medians, with the runs' range")
    return Table("arms", columns, rows, notes, groups=(("", 3), (f"{group} wait", 3)))


def _arm_name(arm: Mapping[str, Any]) -> str:
    mode = "" if arm["mode"] in (arm["label"], "collectives") else f" ({arm['mode']})"
    runs = "" if arm["runs"] == 1 else f", {arm['runs']} runs"
    return f"{arm['label']}{'' if mode == ' (none)' else mode}{runs}"


def _counted(arm: Mapping[str, Any]) -> str:
    if arm["completed"] is None:
        return "–"
    text = f"{arm['completed']:,}/{arm['total']:,}" if arm["total"] is not None else f"{arm['completed']:,}"
    more = [f"{arm[name]:,} {name}" for name in ("failed", "cancelled") if arm[name]]
    return ", ".join([text, *more, *(["censored"] if arm["censored"] else [])])


def _rate(arm: Mapping[str, Any]) -> str:
    runs = arm["requests_per_s_runs"]
    text = number(arm["requests_per_s"])
    return f"{text} ({number(min(runs))} … {number(max(runs))})" if len(runs) > 1 else text


# ---- waits


def _accumulated(document: Document) -> Iterator[Table]:
    """The documents' table: seconds that each rank waited, by arm."""
    arms = [arm for arm in document["arms"] if any(one is not None for one in arm["wait_s"])]
    if len(arms) < 2:
        return
    size = max(len(arm["wait_s"]) for arm in arms)
    ranks = _shown(size, [max(_at(arm["wait_s"], rank) or 0.0 for arm in arms) for rank in range(size)])
    rows = [[f"rank {rank}", *(number(_at(arm["wait_s"], rank)) for arm in arms)] for rank in ranks]
    yield Table(
        "accumulated wait per rank (s)",
        ("", *(arm["label"] for arm in arms)),
        rows,
        ["in asynchronous and local-only arms: time inside publish and poll", *_left_out(size, ranks)],
    )


def _at(values: Sequence[float | None], rank: int) -> float | None:
    return values[rank] if rank < len(values) else None


def _shown(size: int, weights: Sequence[float]) -> list[int]:
    if size <= MOST_RANKS:
        return list(range(size))
    return sorted(sorted(range(size), key=lambda rank: -weights[rank])[:MOST_RANKS])


def _left_out(size: int, ranks: Sequence[int]) -> list[str]:
    return [f"{size - len(ranks):,} more ranks, which waited less, are in the JSON"] if len(ranks) < size else []


def _group(document: Document, group: Mapping[str, Any]) -> Iterator[Table]:
    title = f"{document['subject']}: {group['group'].upper()}"
    some = {one["rank"]: one for one in group["ranks"]}
    if not any(one["wait_s"] for one in group["ranks"]):
        return
    size = max(some) + 1
    shown = _shown(size, [some[rank]["wait_s"] if rank in some else 0.0 for rank in range(size)])
    rows = [_wait_row(some[rank]) for rank in shown if rank in some]
    columns: tuple[str, ...] = ("rank", "calls", "wait (s)", "of wall", "mean", "p50", "p99", "max", "≥ 100 ms")
    groups: tuple[tuple[str, int], ...] = (("", 3), ("one call (ms)", 4), ("", 1))
    if not any(one["call"]["n"] for one in group["ranks"]):
        rows, columns, groups = [[row[0], row[2], row[3]] for row in rows], ("rank", "wait (s)", "of wall"), ()
    notes = [*_left_out(size, shown)]
    if any(UNSUPPORTED in cell for row in rows for cell in row):
        notes.append(f"{UNSUPPORTED} fewer than 10 samples beyond this quantile")
    if not group["meets"]:
        notes.append("these calls wait for no other rank")
    yield Table(f"{title} wait", columns, rows, notes, groups=groups)
    if group["meets"] and any(any(row) for row in group["late_arriver"]):
        yield _matrix(title, group, shown)
        yield from _lateness(title, group, [some[rank] for rank in shown if rank in some])


def _wait_row(one: Mapping[str, Any]) -> list[str]:
    call = one["call"]
    return [
        f"{one['rank']}" if one["stage"] in (one["rank"], None) else f"{one['rank']} (stage {one['stage']})",
        f"{call['n']:,}",
        number(one["wait_s"]),
        "–" if one["share"] is None else f"{one['share']:.1%}",
        *(_ms(call, name) for name in ("mean_s", "p50_s", "p99_s", "max_s")),
        f"{one['slow']:,}",
    ]


def _ms(call: Mapping[str, Any], name: str) -> str:
    value = call[name]
    if value is None:
        return "–"
    supported = call["supported"].get(name.removesuffix("_s"), True)
    return f"{number(value * 1e3)}{'' if supported else ' ' + UNSUPPORTED}"


def _matrix(title: str, group: Mapping[str, Any], shown: Sequence[int]) -> Table:
    late = group["late_arriver"]
    culprits = [rank for rank in range(len(late)) if any(row[rank] for row in late)][:MOST_RANKS]
    rows = [[f"rank {waiter}", *(number(late[waiter][rank]) for rank in culprits)] for waiter in shown]
    rows.append(["all ranks", *(number(sum(row[rank] for row in late)) for rank in culprits)])
    notes = []
    if group["late_from"] == "totals":
        notes.append("no call was recorded on all ranks: the totals, put down to the rank that waited least")
    else:
        unmatched = f", {group['calls_unmatched']:,} are not" if group["calls_unmatched"] else ""
        notes.append(f"{group['calls_matched']:,} calls are recorded on every rank{unmatched}")
    columns = ("waiter", *(f"for rank {rank}" for rank in culprits))
    return Table(f"{title}: who waited for whom (s)", columns, rows, notes)


def _lateness(title: str, group: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    if group["offsets"] is None:
        return
    controlled = group["offsets"]["of_control"]
    structural, rest = ("pipeline", "came with\nthis arm") if controlled else ("in every\ncall", "varies")
    rows = [
        [
            f"{one['rank']}",
            f"{one['last']:,}",
            f"{one['first']:,}",
            number(one["skew_s"]),
            number(one["structural_s"]),
            number(one["changed_s"]),
            number(one["longest_gap_s"]),
        ]
        for one in ranks
    ]
    phases = group["late_phases_s"]
    whole = sum(phases.values())
    notes = [f"{'pipeline' if controlled else 'in every call'}: {group['offsets']['basis']}"]
    if whole:
        told = ", ".join(f"{name} {number(one)} s ({one / whole:.0%})" for name, one in list(phases.items())[:6])
        notes.append(f"rank {group['late_rank']} between its calls: {told}")
    columns = ("rank", "last in", "first in", "all", structural, rest, "longest time\nbetween calls (s)")
    yield Table(
        f"{title}: what the waits are", columns, rows, notes, groups=(("", 2), ("lost to late ranks (s)", 3), ("", 1))
    )


# ---- lifecycle


def _lifecycle(document: Document) -> Iterator[Table]:
    steps = document["lifecycle"]
    if not steps:
        return
    control = any(one["control"] for one in steps)
    rows = []
    for one in steps:
        ranks = {rank: some["p50_s"] for rank, some in one["ranks"].items() if some["p50_s"] is not None}
        slowest = max(ranks, key=lambda rank: ranks[rank]) if ranks else "–"
        cells = [one["step"], f"{one['n']:,}", *(_ms(one, name) for name in ("p50_s", "p95_s", "p99_s", "max_s"))]
        cells += [slowest, number(ranks[slowest] * 1e3) if ranks else "–"]
        if control:
            cells.append("–" if one["control"] is None else number((one["control"]["p50_s"] or 0.0) * 1e3))
        rows.append(cells)
    columns = ["step", "n", "p50", "p95", "p99", "max", "rank", "p50", *(["p50"] if control else [])]
    groups = [("", 1), ("all ranks (ms)", 4), ("slowest (ms)", 2)]
    groups += [(document["control"], 1)] if control else []
    notes = []
    if (votes := document["votes"]) is not None:
        last = ", ".join(f"rank {rank} {count:,}" for rank, count in list(votes["last_voter"].items())[:MOST_RANKS])
        notes.append(f"first to last vote on a request: p50 {_ms(votes['spread'], 'p50_s')} ms; last to vote: {last}")
        if votes["last_vote_to_commit"]["n"]:
            decided = votes["last_vote_to_commit"]
            notes.append(f"last vote to first commit: p50 {_ms(decided, 'p50_s')} ms, p99 {_ms(decided, 'p99_s')} ms")
    if any(UNSUPPORTED in cell for row in rows for cell in row):
        notes.append(f"{UNSUPPORTED} fewer than 10 samples beyond this quantile")
    yield Table(f"{document['subject']}: a request's life", columns, rows, notes, groups=groups)


# ---- safety and resources


def _safety(document: Document) -> Iterator[Table]:
    arms = [arm for arm in document["arms"] if arm["mode"] in ("async", "blocking", "local-only")]
    if not arms:
        return
    rows = [
        [
            arm["label"],
            _count(arm["divergences"]),
            _count(arm["incomplete"]),
            {True: "the same", False: "differs", None: "–"}[arm["same_order"]],
            _count(arm["released_before_commit"]),
            _count(arm["abandoned"]),
            _count(arm["pending_sends"]),
        ]
        for arm in arms
    ]
    notes = [f"{arm['label']}: applied-order digests {_digests(arm['digests'])}" for arm in arms if any(arm["digests"])]
    columns = (
        "arm",
        "ended\ndifferently",
        "not on\nall ranks",
        "order",
        "released\nearly",
        "abandoned",
        "pending\nsends",
    )
    yield Table("safety", columns, rows, notes, text_columns=(3,))


def _digests(digests: Sequence[str | None]) -> str:
    known = [one for one in digests if one]
    if len(known) == len(digests) and len(set(known)) == 1:
        return f"{known[0][:12]} on every rank"
    return ", ".join("–" if one is None else one[:12] for one in digests[:MOST_RANKS])


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _resources(document: Document) -> Iterator[Table]:
    arms = [arm for arm in document["arms"] if any(one is not None for one in arm["cpu_s"]) or arm["blocks_held"]]
    if not arms:
        return
    rows = []
    for arm in arms:
        held = [one["block_s"] for one in arm["blocks_held"] if one["block_s"] is not None]
        after = [
            one["after_transfer_block_s"] for one in arm["blocks_held"] if one["after_transfer_block_s"] is not None
        ]
        most = [one["most"] for one in arm["blocks_held"] if one["most"] is not None]
        cpu = [number(one) for one in arm["cpu_s"][:MOST_RANKS]]
        rows.append(
            [
                arm["label"],
                number(arm["wall_s"]),
                " / ".join(cpu),
                _count(max(most)) if most else "–",
                number(sum(held)) if held else "–",
                number(sum(after)) if after else "–",
            ]
        )
    columns = ("arm", "wall (s)", "CPU (s) by rank", "most on\na rank", "block-s", "after its\ntransfer")
    groups = (("", 2), ("KV blocks held", 3))
    yield Table("processors and blocks", columns, rows, text_columns=(2,), groups=groups)


def _scope(document: Document) -> Iterator[Table]:
    """The qualified scope, of an arm whose trace has it."""
    for arm in document["arms"]:
        scope = arm["facts"].get("scope")
        rows = [_scope_row(one) for one in scope if isinstance(one, dict)] if isinstance(scope, list) else []
        if rows and arm["facts"].get("asked_mode") == "async":
            yield Table(
                f"{arm['label']}: qualified scope",
                ("dimension", "qualified value", "this run"),
                rows,
                text_columns=(1, 2),
            )
            return


def _scope_row(one: Mapping[str, Any]) -> list[str]:
    mark = "" if one.get("holds") is True else ": outside"
    return [str(one.get("dimension"))[:80], str(one.get("qualified"))[:80], f"{str(one.get('value'))[:80]}{mark}"]
