"""One figure of the server's side, with its unit, its definition and how many observations it rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ServerFigure"]


@dataclass(frozen=True, slots=True)
class ServerFigure:
    key: str
    label: str
    """Of the table's row; figures of one label share it."""
    value: float | None
    unit: str
    definition: str
    n: int
    part: str = ""
    """Which one of its row it is: `mean`, `most`."""
    role: str = ""
    """Of a further endpoint that tells it; "" for the loaded server."""
    detail: bool = False
    """Not in the table, which has to stay short."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
