"""What the tables of a profile are made of: arms with their names, and figures as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from rich.cells import cell_len, set_cell_size

from atom.cli.render import SEPARATOR, Table, number, table_width
from atom.diag.gc_profile.model import Profile
from atom.diag.gc_profile.names import arm_names, one_line

__all__ = [
    "NONE",
    "Arm",
    "cut",
    "fitted",
    "gathered",
    "latency",
    "name_arms",
    "not_shown",
    "pause",
    "rate",
    "share",
    "size",
    "titled",
    "two_lines",
]

NONE: Final = "–"
SIMULATED: Final = "SIMULATED executor: no model was run"
MOST_GATHERED: Final = 6
"""Reasons of one kind that are written out."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arm:
    profile: Profile
    name: str
    """In headers: short, and no other arm's."""
    label: str
    """In sentences: the whole label."""
    described: str
    """The label with what was done to this arm's collector."""


def name_arms(profiles: Sequence[Profile]) -> list[Arm]:
    return [
        Arm(profile, name.short, name.label, _described(profile, name.label))
        for profile, name in zip(profiles, arm_names(profiles), strict=True)
    ]


def _described(profile: Profile, label: str) -> str:
    actions = sorted({one_line(process.action) for process in profile.processes if process.action})
    return f"{label} (what-if {', '.join(actions)})" if actions else label


def titled(what: str, arms: Sequence[Arm]) -> str:
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


def gathered(pairs: Iterable[tuple[str, T]]) -> list[tuple[str, list[T]]]:
    found: dict[str, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return list(found.items())[:MOST_GATHERED]


def fitted(table: Table, width: int | None, least: Sequence[str]) -> Table:
    """The table without as many of the columns headed `least` as it takes to fit; the first goes first, and a note
    says which went. None of its groups may be among them. Where that is not enough it stays whole: it will not be
    drawn as columns."""
    gone: list[str] = []
    for header in least:
        if width is None or table_width(_without(table, gone)) <= width:
            break
        gone += [header] if header in table.columns else []
    if not gone or width is None or table_width(_without(table, gone)) > width:
        return table
    for header in reversed(gone):  # a narrow one may fit where a wide one went
        fewer = [one for one in gone if one != header]
        if table_width(_without(table, fewer)) <= width:
            gone = fewer
    return replace(_without(table, gone), notes=[*table.notes, not_shown(gone)])


def not_shown(headers: Iterable[str]) -> str:
    return f"not shown, too wide for this terminal: {', '.join(' '.join(header.split()) for header in headers)}"


def _without(table: Table, headers: Sequence[str]) -> Table:
    kept = [index for index, column in enumerate(table.columns) if column not in headers]
    return replace(
        table,
        columns=[table.columns[index] for index in kept],
        rows=[[row[index] for index in kept] for row in table.rows],
        text_columns=[at for at, index in enumerate(kept) if index in table.text_columns],
    )


def two_lines(header: str) -> str:
    return header if "\n" in header else f"\n{header}"


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
