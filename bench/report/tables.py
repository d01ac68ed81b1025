"""Tables of a run as sections of its page: plain HTML, so that they are there without scripts too."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from atom.bench.table import Table

__all__ = ["tables_html"]


def tables_html(tables: Sequence[Table]) -> str:
    """One block per table, with its title, sentences and notes; cells are text, whatever they hold. Empty for none."""
    return "".join(map(_block, tables))


def _block(table: Table) -> str:
    parts = [f"<h2>{escape(table.title)}</h2>"] if table.title else []
    parts += [f'<p class="cap">{escape(sentence)}</p>' for sentence in table.lead]
    if table.columns:
        head = "".join(_cell(table, "th", index, text) for index, text in enumerate(table.headers))
        rows = ("".join(_cell(table, "td", index, text) for index, text in enumerate(row)) for row in table.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        parts.append(f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')
    parts += [f'<p class="{_kind(note)}">{escape(note)}</p>' for note in table.notes]
    return f'<section class="result">{"".join(parts)}</section>'


def _cell(table: Table, tag: str, index: int, text: str) -> str:
    numeric = ' class="num"' if table.is_numeric(index) else ' class="key"' if index == 0 else ""
    return f"<{tag}{numeric}>{escape(text)}</{tag}>"


def _kind(note: str) -> str:
    return "note warn" if note.startswith("NOT VALID") else "note"
