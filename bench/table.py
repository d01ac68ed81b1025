"""A table as a person reads it, described once: `cli/render.py` prints it, `bench/report/tables.py` has it as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Table"]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns with their units in the header; cells are ready to print. `notes` stand below it.

    Of more than two columns all but the first are numbers, set right, unless `text_columns` has their index. A line
    break in a header breaks it on the terminal alone, and a hyphen before it is there for that. `lead` has sentences
    that stand above the rows; a table without columns is its sentences.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())
    lead: Sequence[str] = field(default=())
    text_columns: Sequence[int] = field(default=())
    groups: Sequence[tuple[str, int]] = field(default=())
    """(name, how many columns), from the second column on; the name stands above them, in Markdown before each."""

    def is_numeric(self, column: int) -> bool:
        return column > 0 and len(self.columns) > 2 and column not in self.text_columns

    @property
    def headers(self) -> list[str]:
        """The columns' headers in one line, each with the name of its group."""
        names = [name for name, columns in self.groups for _ in range(columns)] or [""] * (len(self.columns) - 1)
        flat = [" ".join(column.replace("-\n", "").split()) for column in self.columns]
        return [f"{name}: {header}" if name else header for name, header in zip(["", *names], flat, strict=True)]
