"""Where the asynchronous agreement is qualified, and what runs elsewhere.

Outside its scope a run takes the blocking agreement, and says so and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from atom.engine.transfer.agreement import Mode

__all__ = ["Dimension", "Scope", "qualify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What a run is, as far as the agreement depends on it."""

    pipeline: int
    """Pipeline stages of a context instance."""
    tensor: int = 1
    context: int = 1
    """Context-parallel ranks."""
    attention_dp: bool = False
    """Whether attention is data parallel, so that only some ranks own a request."""
    control_plane: str = "mpi"
    data_path: str = "shared-memory"
    """`nixl` or `shared-memory`."""
    hierarchical: bool = False
    """Shards of a stage agree first."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """One row of the table of the qualified scope."""

    name: str
    qualified: str
    value: str
    """This run's."""
    holds: bool


_ROWS: Final[tuple[tuple[str, str, Callable[[Scope], str], Callable[[Scope], bool]], ...]] = (
    ("pipeline parallelism", "> 1", lambda s: str(s.pipeline), lambda s: s.pipeline > 1),
    (
        "tensor parallelism",
        "1, or any with the hierarchical agreement",
        lambda s: str(s.tensor) + (", hierarchical" if s.hierarchical else ""),
        lambda s: s.tensor == 1 or s.hierarchical,
    ),
    ("context parallelism", "1", lambda s: str(s.context), lambda s: s.context == 1),
    ("attention data parallelism", "off", lambda s: "on" if s.attention_dp else "off", lambda s: not s.attention_dp),
    ("control plane", "MPI", lambda s: s.control_plane, lambda s: s.control_plane == "mpi"),
    (
        "data path",
        "NIXL (UCX) or shared memory",
        lambda s: s.data_path,
        lambda s: s.data_path in ("nixl", "shared-memory"),
    ),
)


def qualify(scope: Scope, asked: Mode) -> tuple[Mode, list[Dimension], str | None]:
    """The mode that runs, the table, and why it is not the one that was asked for."""
    table = [Dimension(name, qualified, value(scope), holds(scope)) for name, qualified, value, holds in _ROWS]
    outside = [row for row in table if not row.holds]
    if asked != "async" or not outside:
        return asked, table, None
    named = "; ".join(f"{row.name} {row.value}, qualified: {row.qualified}" for row in outside)
    return "blocking", table, f"blocking agreement instead of the asynchronous one: {named}"
