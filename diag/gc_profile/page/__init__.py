"""The page of a profile: self-contained HTML with the tables, readable without scripts, and charts over one time axis.

Template, layout script and series live here; style and chart drawing are those of `bench/report/`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Final, Protocol

from atom.bench.rundir import write_text
from atom.diag.gc_profile.model import Profile
from atom.diag.gc_profile.names import arm_names
from atom.diag.gc_profile.page.series import arm_series

__all__ = ["PageTable", "write_page"]


class PageTable(Protocol):
    """A table as `cli/render.py` describes it; its cells are ready to print."""

    @property
    def title(self) -> str: ...
    @property
    def columns(self) -> Sequence[str]: ...
    @property
    def rows(self) -> Sequence[Sequence[str]]: ...
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def lead(self) -> Sequence[str]: ...
    @property
    def groups(self) -> Sequence[tuple[str, int]]: ...
    def is_numeric(self, column: int) -> bool: ...


_JUDGED: Final[Mapping[bool | None, tuple[str, str]]] = {
    True: ("bad", "GC is a problem"),
    False: ("good", "GC is not the problem"),
    None: ("warn", "GC: could not be told"),
}


def write_page(path: Path, profiles: Sequence[Profile], tables: Sequence[PageTable]) -> None:
    """Write the page of `profiles` to `path`; the series are read from each profile's run directory, whose absence
    leaves its charts empty. RunError if the file cannot be written."""
    names = [name.full for name in arm_names(profiles)]
    data = {"arms": [arm_series(profile, name) for profile, name in zip(profiles, names, strict=True)]}
    # Above the charts: the verdict and the windows, which may be several tables where there are several arms.
    upper = 2
    while upper < len(tables) and tables[upper].groups:
        upper += 1
    parts = {
        "<!--title-->": html.escape(_title(names)),
        "<!--head-->": _head(profiles, names),
        "<!--upper-->": "\n".join(map(_section, tables[:upper])),
        "<!--lower-->": "\n".join([*map(_section, tables[upper:]), _origins(profiles, names)]),
    }
    folder, shared = resources.files("atom.diag.gc_profile.page"), resources.files("atom.bench.report")
    page = (folder / "page.html").read_text(encoding="utf-8")
    for where, name in ((shared, "style.css"), (shared, "charts.js"), (folder, "profile.js")):
        page = page.replace(f"/*{name}*/", (where / name).read_text(encoding="utf-8"))
    # Inside <script> only "<" can end the data; the page's script sets every text as text, never as markup.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    # What comes from a run goes in last and once, so that a label that looks like a placeholder stays a label.
    pieces = {"/*data*/null": text, **parts}
    write_text(path, _filled(page, pieces))


def _filled(page: str, pieces: dict[str, str]) -> str:
    """The page with each placeholder replaced in one pass."""
    result: list[str] = []
    rest = page
    while True:
        found = [(at, mark) for mark in pieces if (at := rest.find(mark)) >= 0]
        if not found:
            return "".join([*result, rest])
        at, mark = min(found)
        result += [rest[:at], pieces[mark]]
        rest = rest[at + len(mark) :]


def _title(names: Sequence[str]) -> str:
    return "gc-profile · " + " vs ".join(names)


def _head(profiles: Sequence[Profile], names: Sequence[str]) -> str:
    badges = []
    for profile, name in zip(profiles, names, strict=True):
        kind, word = _JUDGED[profile.is_problem]
        badges.append((kind, f"{name}: {word}" if len(profiles) > 1 else word))
    if any(profile.simulated for profile in profiles):
        badges.append(("warn", "simulated executor: no model was run"))
    spans = "".join(f'<span class="badge {kind}">{html.escape(word)}</span>' for kind, word in badges)
    return f"<h1>{html.escape(_title(names))}{spans}</h1>"


def _section(table: PageTable) -> str:
    parts = [f"<h2>{html.escape(table.title)}</h2>"] if table.title else []
    parts += [f'<p class="lead">{html.escape(sentence)}</p>' for sentence in table.lead]
    if table.columns:
        head = f"<thead>{_group_row(table)}<tr>{_cells(table, table.columns, 'th')}</tr></thead>"
        body = "".join(f"<tr>{_cells(table, row, 'td')}</tr>" for row in table.rows)
        opening = '<table class="grouped">' if table.groups else "<table>"
        parts.append(f'<div class="scroll">{opening}{head}<tbody>{body}</tbody></table></div>')
    if table.notes:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
        parts.append(f'<ul class="notes">{notes}</ul>')
    return "\n".join(parts)


def _group_row(table: PageTable) -> str:
    if not table.groups:
        return ""
    names = "".join(f'<th class="group" colspan="{n}">{html.escape(name)}</th>' for name, n in table.groups)
    return f"<tr><th></th>{names}</tr>"


def _cells(table: PageTable, cells: Sequence[str], tag: str) -> str:
    """Line breaks are kept in headers, where they were made to keep a column narrow."""
    starts = {1 + sum(n for _, n in table.groups[:i]) for i in range(len(table.groups))}
    parts = []
    for index, cell in enumerate(cells):
        classes = ["num"] * table.is_numeric(index) + ["first"] * (index in starts)
        lines = cell.strip().split("\n") if tag == "th" else [" ".join(cell.split())]
        text = "<br>".join(map(html.escape, lines))
        named = f' class="{" ".join(classes)}"' if classes else ""
        parts.append(f"<{tag}{named}>{text}</{tag}>")
    return "".join(parts)


def _origins(profiles: Sequence[Profile], names: Sequence[str]) -> str:
    rows = [(name, p.directory, p.validity or "not sealed") for name, p in zip(names, profiles, strict=True)]
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "<tr><th>arm</th><th>run directory</th><th>validity</th></tr>"
    table = f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'
    return f"<h2>where it comes from</h2>\n{table}"
