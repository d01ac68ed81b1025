"""The tables of `atom gc-profile`: what profiles say, for the terminal, Markdown and the page alike.

The first table is the one that made this command: one row per window, arms side by side. Cells come ready to print;
the tables that explain them are `cli/gc_detail_tables.py`, how a table is drawn is `cli/render.py`, what the figures
mean `diag/gc_profile/model.py` and docs/gc_profile.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from atom.cli.gc_cells import (
    NONE,
    Arm,
    fitted,
    gathered,
    latency,
    name_arms,
    not_shown,
    pause,
    rate,
    share,
    size,
    titled,
    two_lines,
)
from atom.cli.gc_detail_tables import attribution_tables, growth_tables, process_table
from atom.cli.render import Table, count, number, table_width
from atom.diag.gc_profile.gates import GateOutcome, GateResult
from atom.diag.gc_profile.model import Profile, Totals, Window
from atom.diag.gc_profile.names import one_line

__all__ = ["gate_table", "profile_tables", "window_tables"]

_WIDEST: Final = 160
"""Cells; of a table that goes to a page or a pull request."""


def profile_tables(profiles: Sequence[Profile], *, width: int | None = None) -> list[Table]:
    """The tables of one or several arms, verdict first. `width`: cells of the terminal; None for Markdown
    and the page, which have room. What does not fit beside each other comes below each other."""
    assert profiles
    arms = name_arms(profiles)
    return [
        _verdict(arms),
        *_windows(arms, width),
        *_traffic(arms, width),
        *_totals(arms, width),
        *growth_tables(arms, width),
        *attribution_tables(arms, width),
        process_table(arms, width),
    ]


def window_tables(profiles: Sequence[Profile], *, width: int | None = None) -> list[Table]:
    """Only what the arms did over time: their API processes, then their traffic."""
    assert profiles
    arms = name_arms(profiles)
    return [*_windows(arms, width), *_traffic(arms, width)]


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
        for why, who in gathered((one_line(r.reason), one_line(r.gate, 60)) for r in unanswered)
    ]
    return Table("gates", ("fail if", "arm", "value", "gate"), rows, notes, text_columns=(1, 3))


# ---- verdict -----------------------------------------------------------------------------------------------------


def _verdict(arms: Sequence[Arm]) -> Table:
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
    return Table(titled("verdict", arms), (), (), notes, lead=sentences)


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
_FEWEST_WINDOW_COLUMNS: Final = 2
"""The last go first where the terminal is narrow."""
_LEAST_TRAFFIC: Final = (
    *("API CPU\n(cores)", "ITL\np99 (ms)", "prompt\ntok/s", "running\nrequests"),
    *("/health\nmax (ms)", "TTFT\nmean (ms)", "\nreq/s"),
)


def _windows(arms: Sequence[Arm], width: int | None) -> list[Table]:
    """The document's table; arms whose windows are of other lengths, or that do not fit, in tables of their own."""
    shown = _WINDOW_COLUMNS[: _columns_that_fit(arms, width)]
    tables = [_window_table(group, arms, shown) for group in _side_by_side(arms, width, shown)]
    kinds = {one_line(arm.profile.old_object_passes) for arm in arms} - {"", "gen-2 passes"}
    notes = [f"gen 2 here: {what}" for what in sorted(kinds)]
    if all(window.gen2_share is None for arm in arms for window in arm.profile.windows):
        # Where a hook was there, why its record says nothing stands in the verdict.
        hooked = any(one.hooked and one.role == "api" for arm in arms for one in arm.profile.processes)
        notes = [] if hooked else ["the collector was not seen: no hook in the API process"]
    if len(shown) < len(_WINDOW_COLUMNS):
        notes.append(not_shown(header for header, _ in _WINDOW_COLUMNS[len(shown) :]))
    return [*tables[:-1], replace(tables[-1], notes=[*tables[-1].notes, *notes])]


def _columns_that_fit(arms: Sequence[Arm], width: int | None) -> int:
    """How many columns a table of one arm has room for; all if there are too few to be worth it."""
    for columns in range(len(_WINDOW_COLUMNS), _FEWEST_WINDOW_COLUMNS - 1, -1):
        widest = max(table_width(_window_table([arm], arms, _WINDOW_COLUMNS[:columns])) for arm in arms)
        if width is None or widest <= width:
            return columns
    return len(_WINDOW_COLUMNS)


def _side_by_side(arms: Sequence[Arm], width: int | None, shown: Sequence[tuple[str, _Cell]]) -> list[Sequence[Arm]]:
    """As many arms beside each other as fit, the same number in each table; only of the same length of window."""
    groups: list[Sequence[Arm]] = []
    for window_s in dict.fromkeys(arm.profile.window_s for arm in arms):
        same = [arm for arm in arms if arm.profile.window_s == window_s]
        fitting = [
            n
            for n in range(1, len(same) + 1)
            if table_width(_window_table(same[:n], arms, shown)) <= (width or _WIDEST)
        ]
        tables = math.ceil(len(same) / max(fitting, default=1))
        each = math.ceil(len(same) / tables)
        groups += [same[start : start + each] for start in range(0, len(same), each)]
    return groups


def _window_table(group: Sequence[Arm], arms: Sequence[Arm], shown: Sequence[tuple[str, _Cell]]) -> Table:
    several = len(arms) > 1
    unit, labels = _window_labels(group)
    columns = [f"\n{unit}", *(header for _ in group for header, _ in shown)]
    rows = []
    for index, label in enumerate(labels):
        row = [label]
        for arm in group:
            window = arm.profile.windows[index] if index < len(arm.profile.windows) else None
            row += [NONE if window is None else cell(window) for _, cell in shown]
        rows.append(row)
    groups = [(arm.name, len(shown)) for arm in group] if several else []
    return Table(titled("API process over time", group), columns, rows, _lengths(group, unit), groups=groups)


def _window_labels(group: Sequence[Arm]) -> tuple[str, list[str]]:
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


def _lengths(group: Sequence[Arm], unit: str) -> list[str]:
    per = 60.0 if unit == "minutes" else 1.0
    ends = [arm.profile.totals.duration_s / per for arm in group]
    if len({_moment(end) for end in ends}) == 1:
        return []
    return ["observed: " + ", ".join(f"{a.name} {_moment(end)} {unit}" for a, end in zip(group, ends, strict=True))]


def _traffic(arms: Sequence[Arm], width: int | None) -> list[Table]:
    """One row per window and arm; the window is named in the first of its rows."""
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
            [
                label if arm is present[0] else "",
                *([arm.name] if several else []),
                *(cell(arm.profile.windows[index]) for _, cell in used),
            ]
            for index, label in enumerate(labels)
            for present in [[arm for arm in group if index < len(arm.profile.windows)]]
            for arm in present
        ]
        columns = [f"\n{unit}", *(["\narm"] if several else []), *(two_lines(header) for header, _ in used)]
        table = Table(titled("traffic", group), columns, rows, text_columns=(1,) if several else ())
        tables.append(fitted(table, width, _LEAST_TRAFFIC))
    return tables


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


def _totals(arms: Sequence[Arm], width: int | None) -> list[Table]:
    """As many arms beside each other as fit."""
    for each in range(len(arms), 0, -1):
        tables = [_totals_table(arms[start : start + each]) for start in range(0, len(arms), each)]
        if width is None or max(map(table_width, tables)) <= width:
            break
    return tables


def _totals_table(arms: Sequence[Arm]) -> Table:
    rows = []
    for index, (label, cell) in enumerate(_TOTAL_ROWS):
        cells = [cell(arm.profile.totals) for arm in arms]
        if index < _ALWAYS or any(text != NONE for text in cells):
            rows.append([label, *cells])
    columns = ["whole span", *(arm.name for arm in arms)] if len(arms) > 1 else ["whole span", "value"]
    return Table(titled("totals", arms), columns, rows)


def _of_which(all_: int | None, failed: int | None) -> str:
    return count(all_) if not failed else f"{count(all_)} ({count(failed)} failed)"
