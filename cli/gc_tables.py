"""The tables of `atom gc-profile`: what profiles say, for the terminal, Markdown and the page alike.

The first table is the one that made this command: one row per window, arms side by side. Cells come ready to print;
how a table is drawn is `cli/render.py`, what the figures mean `diag/gc_profile/model.py` and docs/gc_profile.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from rich.cells import cell_len, set_cell_size

from atom.cli.render import SEPARATOR, Table, count, number, table_width
from atom.diag.gc_profile.gates import GateOutcome, GateResult
from atom.diag.gc_profile.model import Growth, GrowthVerdict, HookedProcess, Profile, SlowEvents, Totals, Window
from atom.diag.gc_profile.names import arm_names, one_line

__all__ = ["gate_table", "profile_tables"]

NONE: Final = "–"
SIMULATED: Final = "SIMULATED executor: no model was run"
_WIDEST: Final = 160
"""Cells; of a table that goes to a page or a pull request."""
_LONGEST_COMMAND: Final = 44
_MOST_FAMILIES: Final = 5
_DETAILS: Final = 6
"""Reasons of one kind that are written out."""

T = TypeVar("T")


def profile_tables(profiles: Sequence[Profile], *, width: int | None = None) -> list[Table]:
    """The tables of one or several arms, verdict first. `width`: cells of the terminal; None for Markdown
    and the page, which have room. What does not fit beside each other comes below each other."""
    assert profiles
    arms = _name_arms(profiles)
    return [
        _verdict(arms),
        *_windows(arms, width),
        *_traffic(arms),
        _totals(arms),
        *_growth(arms, width),
        *_attribution(arms),
        _processes(arms, width),
    ]


def gate_table(results: Sequence[GateResult]) -> Table:
    """One row per gate and arm."""
    words = {GateOutcome.PASSED: "ok", GateOutcome.FAILED: "FAILED", GateOutcome.UNANSWERED: "no answer"}
    rows = [
        [one_line(result.gate, 60), one_line(result.arm, 24), result.shown_value, words[result.outcome]]
        for result in results
    ]
    unanswered = [result for result in results if result.outcome == GateOutcome.UNANSWERED]
    notes = [
        f"no answer: {why} ({', '.join(who)})"
        for why, who in _gathered((one_line(r.reason), one_line(r.gate, 60)) for r in unanswered)
    ]
    return Table("gates", ("fail if", "arm", "value", "gate"), rows, notes, text_columns=(1, 3))


@dataclass(frozen=True, slots=True)
class _Arm:
    profile: Profile
    name: str
    """In headers: short, and no other arm's."""
    label: str
    """In sentences: the whole label."""
    described: str
    """The label with what was done to this arm's collector."""


def _name_arms(profiles: Sequence[Profile]) -> list[_Arm]:
    return [
        _Arm(profile, name.short, name.label, _described(profile, name.label))
        for profile, name in zip(profiles, arm_names(profiles), strict=True)
    ]


def _described(profile: Profile, label: str) -> str:
    actions = sorted({one_line(process.action) for process in profile.processes if process.action})
    return f"{label} (what-if {', '.join(actions)})" if actions else label


def _title(what: str, arms: Sequence[_Arm]) -> str:
    """What the table shows, of which arms, and what a reader must not overlook: in every table's title."""
    parts = [what]
    if len(arms) == 1:
        parts.append(arms[0].described)
    elif any(arm.described != arm.name for arm in arms):
        parts.append(", ".join(a.described if a.name == a.label else f"{a.name}: {a.described}" for a in arms))
    simulated = [arm for arm in arms if arm.profile.simulated]
    if simulated:
        which = "" if len(simulated) == len(arms) else f" ({', '.join(arm.name for arm in simulated)})"
        parts.append(SIMULATED + which)
    return SEPARATOR.join(parts)


# ---- verdict -----------------------------------------------------------------------------------------------------


def _verdict(arms: Sequence[_Arm]) -> Table:
    sentences: list[str] = []
    notes: list[str] = []
    for arm in arms:
        profile, who = arm.profile, f"{arm.described}: " if len(arms) > 1 else ""
        if profile.verdict:
            sentences.append(who + one_line(profile.verdict, limit=600))
        for cause in profile.causes:
            advice = f" Next: {one_line(cause.advice, limit=300).rstrip('.')}." if cause.advice else ""
            sentences.append(f"  • {cause.kind}: {_sentence(one_line(cause.statement, limit=600))}{advice}")
        if profile.validity != "valid":
            state = (
                "NOT VALID: not sealed, the run did not end" if profile.validity is None else profile.validity.upper()
            )
            notes.append(f"{state}{f' ({arm.label})' if len(arms) > 1 else ''}")
        notes += (who + one_line(note, limit=500) for note in profile.notes)
    return Table(_title("verdict", arms), (), (), notes, lead=sentences)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


# ---- windows -----------------------------------------------------------------------------------------------------

_Cell = Callable[[Window], str]

_WINDOW_COLUMNS: Final[Sequence[tuple[str, _Cell]]] = (
    ("gen-2\nshare", lambda w: share(w.gen2_share)),
    ("mean gen-2\npause (ms)", lambda w: pause(w.gen2_mean_pause_ms)),
    ("/metrics\np50 (ms)", lambda w: latency(w.metrics_p50_ms)),
    ("API RSS\n(MB)", lambda w: number(w.rss_mb, 0) if w.rss_mb is None else f"{w.rss_mb:,.0f}"),
)

_TRAFFIC_COLUMNS: Final[Sequence[tuple[str, _Cell]]] = (
    ("req/s", lambda w: rate(w.requests_per_s)),
    ("TTFT\nmean (ms)", lambda w: latency(w.ttft_mean_ms)),
    ("TTFT\np99 (ms)", lambda w: latency(w.ttft_p99_ms)),
    ("ITL\np99 (ms)", lambda w: latency(w.itl_p99_ms)),
    ("running\nrequests", lambda w: NONE if w.running_mean is None else f"{w.running_mean:.1f}"),
    ("prompt\ntok/s", lambda w: NONE if w.prompt_tok_per_s is None else f"{w.prompt_tok_per_s:,.0f}"),
    ("/health\nmax (ms)", lambda w: latency(w.health_max_ms)),
    ("API CPU\n(cores)", lambda w: NONE if w.api_cpu is None else f"{w.api_cpu:.2f}"),
)


def _windows(arms: Sequence[_Arm], width: int | None) -> list[Table]:
    """The document's table; arms whose windows are of other lengths, or that do not fit, in tables of their own."""
    tables = [_window_table(group, arms) for group in _side_by_side(arms, width)]
    kinds = {one_line(arm.profile.old_object_passes) for arm in arms} - {"", "gen-2 passes"}
    notes = [f"gen 2 here: {what}" for what in sorted(kinds)]
    if all(window.gen2_share is None for arm in arms for window in arm.profile.windows):
        notes = ["the collector was not seen: no hook in the API process"]
    return [*tables[:-1], replace(tables[-1], notes=[*tables[-1].notes, *notes])]


def _side_by_side(arms: Sequence[_Arm], width: int | None) -> list[Sequence[_Arm]]:
    """As many arms beside each other as fit, the same number in each table; only of the same length of window."""
    groups: list[Sequence[_Arm]] = []
    for window_s in dict.fromkeys(arm.profile.window_s for arm in arms):
        same = [arm for arm in arms if arm.profile.window_s == window_s]
        fitting = [
            n for n in range(1, len(same) + 1) if table_width(_window_table(same[:n], arms)) <= (width or _WIDEST)
        ]
        tables = math.ceil(len(same) / max(fitting, default=1))
        each = math.ceil(len(same) / tables)
        groups += [same[start : start + each] for start in range(0, len(same), each)]
    return groups


def _window_table(group: Sequence[_Arm], arms: Sequence[_Arm]) -> Table:
    several = len(arms) > 1
    unit, labels = _window_labels(group)
    columns = [f"\n{unit}", *(header for _ in group for header, _ in _WINDOW_COLUMNS)]
    rows = []
    for index, label in enumerate(labels):
        row = [label]
        for arm in group:
            window = arm.profile.windows[index] if index < len(arm.profile.windows) else None
            row += [NONE if window is None else cell(window) for _, cell in _WINDOW_COLUMNS]
        rows.append(row)
    groups = [(arm.name, len(_WINDOW_COLUMNS)) for arm in group] if several else []
    return Table(_title("API process over time", group), columns, rows, _lengths(group, unit), groups=groups)


def _window_labels(group: Sequence[_Arm]) -> tuple[str, list[str]]:
    """The unit, and one label per row: `0–5`. A row that ends earlier in some arms has the latest end."""
    longest = max((arm.profile.windows for arm in group), key=len)
    unit, per = ("minutes", 60.0) if group[0].profile.window_s >= 60 else ("seconds", 1.0)
    ends = [
        max(arm.profile.windows[i].end_s for arm in group if i < len(arm.profile.windows)) for i in range(len(longest))
    ]
    return unit, [f"{_moment(w.start_s / per)}–{_moment(end / per)}" for w, end in zip(longest, ends, strict=True)]


def _moment(value: float) -> str:
    """Whole where it nearly is, or long: 29 minutes, not 29.03; else one decimal, or what is needed below 1."""
    if abs(value - round(value)) < 0.05 or value >= 20:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _lengths(group: Sequence[_Arm], unit: str) -> list[str]:
    per = 60.0 if unit == "minutes" else 1.0
    ends = [arm.profile.totals.duration_s / per for arm in group]
    if len({_moment(end) for end in ends}) == 1:
        return []
    return ["observed: " + ", ".join(f"{a.name} {_moment(end)} {unit}" for a, end in zip(group, ends, strict=True))]


def _traffic(arms: Sequence[_Arm]) -> list[Table]:
    """One row per window and arm, so that an arm's rows of a window stand together."""
    used = [
        (header, cell)
        for header, cell in _TRAFFIC_COLUMNS
        if any(cell(window) != NONE for arm in arms for window in arm.profile.windows)
    ]
    if not used:
        return []
    several = len(arms) > 1
    groups = [arms] if len({arm.profile.window_s for arm in arms}) == 1 else [[arm] for arm in arms]
    tables = []
    for group in groups:
        unit, labels = _window_labels(group)
        rows = [
            [label, *([arm.name] if several else []), *(cell(arm.profile.windows[index]) for _, cell in used)]
            for index, label in enumerate(labels)
            for arm in group
            if index < len(arm.profile.windows)
        ]
        columns = [f"\n{unit}", *(["\narm"] if several else []), *(_two_lines(header) for header, _ in used)]
        tables.append(Table(_title("traffic", group), columns, rows, text_columns=(1,) if several else ()))
    return tables


def _two_lines(header: str) -> str:
    return header if "\n" in header else f"\n{header}"


# ---- totals ------------------------------------------------------------------------------------------------------

_TOTAL_ROWS: Final[Sequence[tuple[str, Callable[[Totals], str]]]] = (
    ("observed (s)", lambda t: number(t.duration_s)),
    ("gen-2 passes", lambda t: count(t.gen2_passes)),
    ("gen-2 time (s)", lambda t: number(t.gen2_seconds)),
    ("gen-2 share of wall clock", lambda t: share(t.gen2_share, fine=True)),
    ("mean gen-2 pause (ms)", lambda t: pause(t.gen2_mean_pause_ms)),
    ("max gen-2 pause (ms)", lambda t: pause(t.gen2_max_pause_ms)),
    ("younger passes", lambda t: count(t.young_passes)),
    ("younger passes' time (s)", lambda t: number(t.young_seconds)),
    ("/metrics p50 (ms)", lambda t: latency(t.metrics_p50_ms)),
    ("/metrics series at the end", lambda t: count(t.metrics_series)),
    ("/metrics body at the end (KB)", lambda t: NONE if t.metrics_body_bytes is None else size(t.metrics_body_bytes)),
    ("/metrics scrapes", lambda t: _of_which(t.metrics_scrapes, t.metrics_failed)),
    ("API RSS at the end (MB)", lambda t: NONE if t.rss_mb is None else f"{t.rss_mb:,.0f}"),
    ("requests", lambda t: _of_which(t.requests, t.requests_failed)),
    ("req/s", lambda t: rate(t.requests_per_s)),
    ("TTFT mean (ms)", lambda t: latency(t.ttft_mean_ms)),
    ("TTFT p99 (ms)", lambda t: latency(t.ttft_p99_ms)),
    ("ITL p50 (ms)", lambda t: latency(t.itl_p50_ms)),
    ("ITL p99 (ms)", lambda t: latency(t.itl_p99_ms)),
    ("output tok/s", lambda t: NONE if t.output_tok_per_s is None else f"{t.output_tok_per_s:,.0f}"),
    ("hook's own CPU, API process", lambda t: share(t.hook_cpu_share, fine=True)),
)
_ALWAYS: Final = 6
"""Rows that stand there even if nothing was seen: the question of this command."""


def _totals(arms: Sequence[_Arm]) -> Table:
    rows = []
    for index, (label, cell) in enumerate(_TOTAL_ROWS):
        cells = [cell(arm.profile.totals) for arm in arms]
        if index < _ALWAYS or any(text != NONE for text in cells):
            rows.append([label, *cells])
    columns = ["whole span", *(arm.name for arm in arms)] if len(arms) > 1 else ["whole span", "value"]
    return Table(_title("totals", arms), columns, rows)


def _of_which(all_: int | None, failed: int | None) -> str:
    return count(all_) if not failed else f"{count(all_)} ({count(failed)} failed)"


# ---- growth ------------------------------------------------------------------------------------------------------


def _growth(arms: Sequence[_Arm], width: int | None) -> list[Table]:
    """One table; where that is too wide, one per arm."""
    if not any(arm.profile.growth for arm in arms):
        return []
    table = _growth_table(arms)
    if len(arms) == 1 or width is None or table_width(table) <= width:
        return [table]
    return [_growth_table([arm]) for arm in arms if arm.profile.growth]


def _growth_table(arms: Sequence[_Arm]) -> Table:
    several = len(arms) > 1
    units = {growth.per for arm in arms for growth in arm.profile.growth.values()}
    per = one_line(units.pop()) if len(units) == 1 else None
    rows: list[list[str]] = []
    reasons: list[tuple[str, str]] = []
    for quantity in dict.fromkeys(quantity for arm in arms for quantity in arm.profile.growth):
        for arm in arms:
            growth = arm.profile.growth.get(quantity)
            if growth is None:
                continue
            head = [_with_unit(growth), arm.name] if several else [_with_unit(growth)]
            rows.append([*head, *_growth_cells(growth), *([one_line(growth.per)] if per is None else [])])
            if growth.verdict == GrowthVerdict.NOT_ENOUGH_DATA and growth.reason:
                reasons.append(
                    (one_line(growth.reason), f"{one_line(growth.label)}{f' ({arm.name})' if several else ''}")
                )
    slope = f"slope per\n{per}" if per is not None else "\nslope"
    columns = ["\nquantity", *(["\narm"] if several else []), "\nverdict", slope, "\ninterval", "\nfirst → last"]
    notes = _levels(arms) + [f"not enough data: {', '.join(who)}: {why}" for why, who in _gathered(reasons)]
    notes += [note for arm in arms for note in _families(arm, several)]
    text_columns = (1, 2) if several else (1,)
    columns += ["\nper"] if per is None else []
    return Table(_title("growth", arms), columns, rows, notes, text_columns=text_columns)


def _with_unit(growth: Growth) -> str:
    unit = {"fraction": "", "share": ""}.get(growth.unit, growth.unit)
    label = one_line(growth.label)
    return f"{label} ({one_line(unit)})" if unit and f"({unit})" not in label and unit not in label.split() else label


def _growth_cells(growth: Growth) -> list[str]:
    fraction = growth.unit in ("fraction", "share")

    def shown(value: float | None, *, sign: bool = False) -> str:
        if value is None:
            return NONE
        text = f"{value:.2%}" if fraction else number(value, 3)
        return f"+{text}" if sign and value > 0 else text

    interval = NONE
    if growth.slope_low is not None and growth.slope_high is not None:
        interval = f"{shown(growth.slope_low, sign=True)} to {shown(growth.slope_high, sign=True)}"
    ends = NONE if growth.first is None or growth.last is None else f"{shown(growth.first)} → {shown(growth.last)}"
    verdict = "GROWS" if growth.verdict == GrowthVerdict.GROWS else str(growth.verdict)
    return [verdict, shown(growth.slope, sign=True), interval, ends]


def _levels(arms: Sequence[_Arm]) -> list[str]:
    levels = {g.confidence for arm in arms for g in arm.profile.growth.values() if g.confidence is not None}
    if not levels:
        return []
    shown = " and ".join(f"{100 * level:.3g}%" for level in sorted(levels))
    return [f"interval: {shown} of a block bootstrap; the warm-up is left out"]


def _gathered(pairs: Iterable[tuple[str, T]]) -> list[tuple[str, list[T]]]:
    found: dict[str, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return list(found.items())[:_DETAILS]


def _families(arm: _Arm, several: bool) -> list[str]:
    families = sorted(arm.profile.growing_families.items(), key=lambda item: item[1][0] - item[1][1])
    if not families:
        return []
    shown = [f"{one_line(name, limit=80)} {first:,} → {last:,}" for name, (first, last) in families[:_MOST_FAMILIES]]
    more = f" and {len(families) - _MOST_FAMILIES} more" if len(families) > _MOST_FAMILIES else ""
    return [f"families that gained series{f' ({arm.name})' if several else ''}: {', '.join(shown)}{more}"]


# ---- attribution -------------------------------------------------------------------------------------------------


def _attribution(arms: Sequence[_Arm]) -> list[Table]:
    tables = []
    for arm in arms:
        attribution = arm.profile.attribution
        events = [one for one in (attribution.first_tokens, attribution.chunk_gaps) if one is not None]
        if not events and not attribution.note:
            continue
        title = _title("slow tokens: what the API process was doing", [arm])
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
        columns = ("slow", "API process was in", "found", "share", "by chance", "lift", "excess (s)")
        tables.append(Table(title, columns, rows, notes, lead=lead, text_columns=(1,)))
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


def _processes(arms: Sequence[_Arm], width: int | None) -> Table:
    title = _title("processes", arms)
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
    headers += [_two_lines(header) for header, _, _ in used]
    rows = [
        [
            *([arm.name] if several else []),
            *(str(p.pid), one_line(p.role, limit=24), "", "yes" if p.hooked else "NO"),
            *(cell(p) for _, cell, _ in used),
        ]
        for arm, p in listed
    ]
    left = _LONGEST_COMMAND if width is None else width - table_width(Table("", headers, rows)) + len("command")
    room = max(12, min(_LONGEST_COMMAND, left))
    command = 2 + several
    for row, (_, process) in zip(rows, listed, strict=True):
        row[command] = short_command(process.command, room)
    notes += _not_hooked(listed, several)
    text = [command - 1, command, command + 1]
    text += [command + 2 + i for i, (header, _, _) in enumerate(used) if header in ("collector", "python", "what-if")]
    return Table(title, headers, rows, notes, text_columns=text)


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


def _not_hooked(listed: Sequence[tuple[_Arm, HookedProcess]], several: bool) -> list[str]:
    without = [
        (
            one_line(p.reason) or "the hook did not load",
            f"{p.pid} ({f'{arm.name}, ' if several else ''}{one_line(p.role)})",
        )
        for arm, p in listed
        if not p.hooked
    ]
    notes = [f"not hooked: {_some(who)}: {why}" for why, who in _gathered(without)]
    if len(without) == len(listed):
        notes.append("no process was hooked: nothing is known of its collector")
    return notes


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _DETAILS} more" if len(names) > _DETAILS else ""
    return "pid " + ", ".join(names[:_DETAILS]) + more


def short_command(command: str, room: int) -> str:
    """Programs and scripts without their folders, cut to `room` cells: `python3 vllm serve Qwen/Qwen3-8B --po…`."""
    words = one_line(command, limit=400).split()
    for index, word in enumerate(words[:2]):
        if word.startswith("/"):
            words[index] = word.rstrip("/").rpartition("/")[2]
    return cut(" ".join(words), room)


# ---- cells -------------------------------------------------------------------------------------------------------


def cut(text: str, room: int) -> str:
    return text if cell_len(text) <= room else set_cell_size(text, room - 1).rstrip() + "…"


def share(value: float | None, *, fine: bool = False) -> str:
    """0..1 in percent with one decimal; with `fine` two below 1%."""
    if value is None:
        return NONE
    return f"{value:.2%}" if fine and 0 < abs(value) < 0.01 else f"{value:.1%}"


def pause(value: float | None) -> str:
    """Milliseconds; pauses are told apart by a tenth."""
    return NONE if value is None else f"{value:,.1f}" if value >= 1 or value == 0 else f"{value:.2g}"


def latency(value: float | None) -> str:
    """Milliseconds: whole from 50 on."""
    return NONE if value is None else f"{value:,.0f}" if value >= 50 else f"{value:.1f}"


def rate(value: float | None) -> str:
    return NONE if value is None else number(value, 4)


def size(bytes_: int) -> str:
    return f"{bytes_ / 1024:,.0f}" if bytes_ >= 10_240 else f"{bytes_ / 1024:.1f}"
