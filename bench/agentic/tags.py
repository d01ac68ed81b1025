"""What the record of an agentic request keeps of its place in its session tree, in `RequestRecord.tags`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from atom.bench.records import RequestRecord, is_count

__all__ = ["AgentTags"]


@dataclass(frozen=True, slots=True)
class AgentTags:
    """Beside `lane`, `session` (this replay of a recording: unique in the load) and `turn` (of its agent)."""

    trace: str
    """Name of the recording."""
    agent: int
    """Index in the session's agents; 0 is the main one."""
    agent_name: str
    depth: int
    """0 for the main agent."""
    parent: int | None
    """Index of the agent that spawned it."""
    hit_blocks: int
    """Blocks of the prompt that an infinite cache would have."""
    blocks: int
    """Blocks of the prompt."""

    @property
    def conversation(self) -> str:
        """As AIPerf names an agent's requests."""
        return self.trace if self.parent is None else f"{self.trace}::sa:{self.agent_name}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, record: RequestRecord) -> AgentTags | None:
        """None where the record has none, or something else in their place: run directories come from anywhere."""
        tags: Mapping[str, Any] = record.tags or {}
        names = (tags.get("trace"), tags.get("agent_name"))
        numbers = [tags.get(name) for name in ("agent", "depth", "hit_blocks", "blocks")]
        parent = tags.get("parent")
        if not all(isinstance(name, str) for name in names) or not all(map(is_count, numbers)):
            return None
        if parent is not None and not is_count(parent):
            return None
        agent, depth, hit, blocks = (int(number) for number in numbers if number is not None)
        return cls(str(names[0]), agent, str(names[1]), depth, parent, min(hit, blocks), blocks)
