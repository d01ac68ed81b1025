"""The tables of a profile that explain it: growth, what the API process did while tokens were slow, the processes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from rich.cells import cell_len

from atom.cli.gc_cells import NONE, Arm, cut, fitted, gathered, latency, pause, share, titled, two_lines
from atom.cli.render import Table, count, number, table_width
from atom.diag.gc_profile.model import Growth, GrowthVerdict, HookedProcess, SlowEvents
from atom.diag.gc_profile.names import one_line
from atom.diag.gc_profile.words import joined

__all__ = ["attribution_tables", "growth_tables", "process_table", "short_command"]

_LONGEST_COMMAND: Final = 44
_SHORTEST_COMMAND: Final = 20
_LEAST_OF_PROCESSES: Final = (
    *("\npython", "\nthresholds", "gen-2\nshare", "\nwhat-if", "\ncollector"),
    *("\ncommand", "\nfrozen", "gen-2\ntime (s)", "gen-2\npasses", "RSS\n(MB)"),
)
_MOST_FAMILIES: Final = 5
_MOST_PIDS: Final = 6


# ---- growth ------------------------------------------------------------------------------------------------------


def growth_tables(arms: Sequence[Arm], width: int | None) -> list[Table]:
    """One table; where that is too wide, one per arm, and what could not be told in the notes alone."""
    if not any(arm.profile.growth for arm in arms):
        return []
    told = any(_is_told(growth) for arm in arms for growth in arm.profile.growth.values())
    table = _growth_table(arms, only_told=not told)
    if width is None or table_width(table) <= width:
        return [table]
    if len(arms) > 1:
        return [table for arm in arms for table in growth_tables([arm], width)]
    table = _growth_table(arms, only_told=True)
    slope = [column for column in table.columns if "slope" in column]
    return [fitted(table, width, ("\nper", "\ninterval", *slope))]


def _growth_table(arms: Sequence[Arm], *, only_told: bool = False) -> Table:
    several = len(arms) > 1
    units = {growth.per for arm in arms for growth in arm.profile.growth.values()}
    per = one_line(units.pop()) if len(units) == 1 else None
    rows: list[list[str]] = []
    reasons: dict[GrowthVerdict, list[tuple[str, str]]] = {}
    for quantity in dict.fromkeys(quantity for arm in arms for quantity in arm.profile.growth):
        label = ""
        for arm in arms:
            growth = arm.profile.growth.get(quantity)
            if growth is None:
                continue
            if _is_told(growth) or not only_told:
                named = "" if _with_unit(growth) == label else (label := _with_unit(growth))
                head = [named, arm.name] if several else [named]
                rows.append([*head, *_growth_cells(growth), *([one_line(growth.per)] if per is None else [])])
            if growth.reason and _needs_its_reason(growth):
                who = f"{one_line(growth.label)}{f' ({arm.name})' if several else ''}"
                reasons.setdefault(growth.verdict, []).append((one_line(growth.reason), who))
    slope = f"slope per\n{per}" if per is not None else "\nslope"
    columns = ["\nquantity", *(["\narm"] if several else []), "\nverdict", slope, "\ninterval", "\nfirst → last"]
    notes = _levels(arms) if rows else []
    for verdict, why_and_who in sorted(reasons.items()):
        notes += [f"{verdict}: {', '.join(who)}: {why}" for why, who in gathered(why_and_who)]
    notes += [note for arm in arms for note in (*_few_passes(arm, several), *_families(arm, several))]
    text_columns = (1, 2) if several else (1,)
    columns += ["\nper"] if per is None else []
    return Table(titled("growth", arms), columns if rows else (), rows, notes, text_columns=text_columns)


def _is_told(growth: Growth) -> bool:
    """In a row rather than by a note: what a note says of the others is why there is nothing to tell."""
    return growth.verdict != GrowthVerdict.NOT_ENOUGH_DATA or not growth.reason


def _needs_its_reason(growth: Growth) -> bool:
    """What could not be told, what rises without being called growth, and what may rise for all that is known."""
    rises = growth.slope_low is not None and growth.slope_low > 0
    return growth.verdict == GrowthVerdict.NOT_ENOUGH_DATA or (
        growth.verdict == GrowthVerdict.FLAT and (rises or growth.excludes_rise is False)
    )


def _with_unit(growth: Growth) -> str:
    unit = {"fraction": "", "share": "", "bytes": "KB"}.get(growth.unit, growth.unit)
    label = one_line(growth.label)
    return f"{label} ({one_line(unit)})" if unit and f"({unit})" not in label and unit not in label.split() else label


def _growth_cells(growth: Growth) -> list[str]:
    fraction = growth.unit in ("fraction", "share")
    per_unit = 1024 if growth.unit == "bytes" else 1

    def shown(value: float | None, *, sign: bool = False) -> str:
        if value is None:
            return NONE
        text = f"{value:.2%}" if fraction else number(value / per_unit, 3)
        return f"+{text}" if sign and value > 0 else text

    def seen(value: float) -> str:
        return f"{value:,.0f}" if value.is_integer() and not fraction and per_unit == 1 else shown(value)

    interval = NONE
    if growth.slope_low is not None and growth.slope_high is not None:
        interval = f"{shown(growth.slope_low, sign=True)} to {shown(growth.slope_high, sign=True)}"
    ends = NONE if growth.first is None or growth.last is None else f"{seen(growth.first)} → {seen(growth.last)}"
    verdict = "GROWS" if growth.verdict == GrowthVerdict.GROWS else str(growth.verdict)
    return [verdict, shown(growth.slope, sign=True), interval, ends]


def _few_passes(arm: Arm, several: bool) -> list[str]:
    """Passes one by one, where they are too few for a trend."""
    passes = arm.profile.few_passes
    if len(passes) < 2:
        return []
    pauses, moments = joined([pause(ms) for _, ms in passes]), joined([f"{at:,.0f}" for at, _ in passes])
    longer = all(before < after for (_, before), (_, after) in itertools.pairwise(passes))
    growing = ", each longer than the one before" if longer and len(passes) > 2 else ""
    return [f"the {len(passes)} passes{f' ({arm.name})' if several else ''}: {pauses} ms at {moments} s{growing}"]


def _levels(arms: Sequence[Arm]) -> list[str]:
    levels = {g.confidence for arm in arms for g in arm.profile.growth.values() if g.confidence is not None}
    if not levels:
        return []
    shown = joined([f"{100 * level:.3g}%" for level in sorted(levels)])
    return [
        f"interval: {shown} of a block bootstrap; first, last: the first and last sixth after the warm-up, median "
        "(mean of share, /health, TTFT)"
    ]


def _families(arm: Arm, several: bool) -> list[str]:
    families = sorted(arm.profile.growing_families.items(), key=lambda item: item[1][0] - item[1][1])
    if not families:
        return []
    shown = [f"{one_line(name, limit=80)} {first:,} → {last:,}" for name, (first, last) in families[:_MOST_FAMILIES]]
    more = f" and {len(families) - _MOST_FAMILIES} more" if len(families) > _MOST_FAMILIES else ""
    return [f"families that gained series{f' ({arm.name})' if several else ''}: {', '.join(shown)}{more}"]


# ---- attribution -------------------------------------------------------------------------------------------------


def attribution_tables(arms: Sequence[Arm], width: int | None) -> list[Table]:
    tables = []
    for arm in arms:
        attribution = arm.profile.attribution
        events = [one for one in (attribution.first_tokens, attribution.chunk_gaps) if one is not None]
        if not events and not attribution.note:
            continue
        title = titled("slow tokens: what the API process was doing", [arm])
        notes = [one_line(attribution.note, limit=400)] if attribution.note else []
        if not events:
            tables.append(Table(title, (), (), notes))
            continue
        rows = [row for one in events for row in _slow_rows(one)]
        if attribution.shifts:
            notes.append(
                f"by chance: the same pauses shifted in time, mean of {attribution.shifts:,}; "
                "lift: found ÷ by chance, in brackets the 95% of unrelated pauses"
            )
        lead = [
            f"slow {one.kind}s: over {latency(one.threshold_ms)} ms (typical {latency(one.typical_ms)} ms), "
            f"{one.slow:,} of {one.events:,}, {number(one.excess_s)} s too long in all"
            for one in events
        ]
        columns = ("\nslow", "API process\nwas in", "\nfound", "\nshare", "by\nchance", "\nlift", "excess\n(s)")
        table = Table(title, columns, rows, notes, lead=lead, text_columns=(1,))
        tables.append(fitted(table, width, ("excess\n(s)", "\nshare", "by\nchance", "\nlift")))
    return tables


def _slow_rows(slow: SlowEvents) -> list[list[str]]:
    def part(found: int | None) -> list[str]:
        return [count(found), share(None if found is None or not slow.slow else found / slow.slow)]

    in_pass = [_chance(slow.expected_in_pass), _lift(slow.lift_pass, slow.lift_pass_low, slow.lift_pass_high)]
    in_render = [
        _chance(slow.expected_in_render),
        _lift(slow.lift_render, slow.lift_render_low, slow.lift_render_high),
    ]
    kind = f"{one_line(slow.kind)}s"
    both = [[kind, "both of these", *part(slow.in_both), "", "", ""]] if slow.in_both else []
    return [
        [kind, "a gen-2 pass", *part(slow.in_pass), *in_pass, number(slow.excess_in_pass_s)],
        [kind, "a /metrics render", *part(slow.in_render), *in_render, number(slow.excess_in_render_s)],
        *both,
        [kind, "neither", *part(slow.neither), "", "", ""],
    ]


def _chance(expected: float | None) -> str:
    return NONE if expected is None else f"{expected:,.1f}"


def _lift(lift: float | None, low: float | None, high: float | None) -> str:
    if lift is None:
        return NONE
    interval = "" if low is None or high is None else f" [{low:.2f}–{high:.2f}]"
    return f"{lift:.2f}{interval}"


# ---- processes ---------------------------------------------------------------------------------------------------

_ProcessColumn = tuple[str, Callable[[HookedProcess], str], bool]
"""Header, cell, whether it moves into a note where all hooked processes say the same."""

_PROCESS_COLUMNS: Final[Sequence[_ProcessColumn]] = (
    ("collector", lambda p: one_line(p.collector or "") or NONE, True),
    ("thresholds", lambda p: NONE if p.thresholds is None else "/".join(map(str, p.thresholds)), True),
    ("python", lambda p: one_line(p.python or "", limit=24) or NONE, True),
    ("what-if", lambda p: one_line(p.action or "") or NONE, True),
    ("frozen", lambda p: count(p.frozen), True),
    ("gen-2\npasses", lambda p: count(p.gen2_passes), False),
    ("gen-2\ntime (s)", lambda p: number(p.gen2_seconds), False),
    ("gen-2\nshare", lambda p: share(p.gen2_share), False),
    ("RSS\n(MB)", lambda p: NONE if p.rss_mb is None else f"{p.rss_mb:,.0f}", False),
)


def process_table(arms: Sequence[Arm], width: int | None) -> Table:
    title = titled("processes", arms)
    several = len(arms) > 1
    listed = [(arm, process) for arm in arms for process in arm.profile.processes]
    notes = [
        f"no process{f' of {arm.name}' if several else ''} was seen: measured from outside, or on another host"
        for arm in arms
        if not arm.profile.processes
    ]
    if not listed:
        return Table(title, (), (), notes)
    used, common = _process_columns([process for _, process in listed])
    notes += [f"in every hooked process: {', '.join(common)}"] if common else []
    headers = [*(["\narm"] if several else []), "\npid", "\nrole", "\ncommand", "\nhook"]
    headers += [two_lines(header) for header, _, _ in used]
    least = None if width is None else _SHORTEST_COMMAND
    rows = [
        [
            *([arm.name] if several else []),
            *(str(p.pid), one_line(p.role, limit=24), short_command(p.command, least), "yes" if p.hooked else "NO"),
            *(cell(p) for _, cell, _ in used),
        ]
        for arm, p in listed
    ]
    command = 2 + several
    text = [command - 1, command, command + 1]
    text += [command + 2 + i for i, (header, _, _) in enumerate(used) if header in ("collector", "python", "what-if")]
    whole = Table(title, headers, rows, [*notes, *_not_hooked(listed, several)], text_columns=text)
    table = fitted(whole, width, _LEAST_OF_PROCESSES)
    if width is None or "\ncommand" not in table.columns:
        return table
    room: int | None = None  # where each cell has a line of its own
    if table_width(table) <= width:
        taken = max(cell_len(row[command]) for row in table.rows)
        room = min(_LONGEST_COMMAND, width - table_width(table) + max(taken, len("command")))
    filled = [
        [*row[:command], short_command(process.command, room), *row[command + 1 :]]
        for row, (_, process) in zip(table.rows, listed, strict=True)
    ]
    return replace(table, rows=filled)


def _process_columns(processes: Sequence[HookedProcess]) -> tuple[list[_ProcessColumn], list[str]]:
    """The columns that say something, and what all hooked processes have in common instead of a column."""
    hooked = [process for process in processes if process.hooked]
    used: list[_ProcessColumn] = []
    common: list[str] = []
    for header, cell, may_move in _PROCESS_COLUMNS:
        values = {cell(process) for process in (hooked if may_move else processes)}
        if values <= {NONE}:
            continue
        if may_move and len(values) == 1:
            common.append(f"{header} {values.pop()}")
        else:
            used.append((header, cell, may_move))
    return used, common


def _not_hooked(listed: Sequence[tuple[Arm, HookedProcess]], several: bool) -> list[str]:
    without = [
        (
            one_line(p.reason) or "the hook did not load",
            f"{p.pid} ({f'{arm.name}, ' if several else ''}{one_line(p.role)})",
        )
        for arm, p in listed
        if not p.hooked
    ]
    notes = [f"not hooked: {_some(who)}: {why}" for why, who in gathered(without)]
    notes += [f"pid {p.pid}: {one_line(p.reason)}" for _, p in listed if p.hooked and p.reason][:_MOST_PIDS]
    return notes


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_PIDS} more" if len(names) > _MOST_PIDS else ""
    return "pid " + ", ".join(names[:_MOST_PIDS]) + more


def short_command(command: str, room: int | None) -> str:
    """Programs and scripts without their folders, cut to `room` cells: `python3 vllm serve Qwen/Qwen3-8B --po…`. No
    number is cut."""
    words = one_line(command, limit=4000).split()
    for index, word in enumerate(words[:2]):
        if word.startswith("/"):
            words[index] = word.rstrip("/").rpartition("/")[2]
    text = " ".join(words)
    if room is None or cell_len(text) <= room:
        return text
    kept = cut(text, room).removesuffix("…")
    within = kept[-1:].isdigit() and re.match(r"[.,]?\d", text[len(kept) :])
    return (re.sub(r"\d[\d.,]*$", "", kept) if within else kept).rstrip() + "…"
