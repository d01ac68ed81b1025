"""What the record of an agentic request says of its place in its session tree: `RequestRecord.tags`, read and checked.
`bench/agentic/driver.py` writes them; docs/agentic.md says what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atom.bench.records import RequestRecord, is_count

__all__ = ["AgentTags"]


@dataclass(frozen=True, slots=True)
class AgentTags:
    """Beside a record's `lane`, `session` (one agent's conversation in one replay) and `turn` (of that agent)."""

    trace: str
    """Name of the recording."""
    root: str
    """The session tree: one replay of a recording."""
    agent: str
    depth: int
    """0 for the main agent."""
    parent: str | None
    """Conversation of the agent that spawned it."""
    lane_session: int | None
    """How many trees the lane had before this one."""
    recorded_len: int | None
    """Tokens of the recorded prompt."""
    cached_blocks: int | None
    blocks: int | None
    """Of the prompt: those that an unlimited cache would have, and all."""
    cached_tokens: int | None
    """Tokens of the former."""

    @property
    def conversation(self) -> str:
        """As AIPerf names the requests of one agent of a recording."""
        return self.trace if self.parent is None else f"{self.trace}::sa:{self.agent}"

    @classmethod
    def of(cls, record: RequestRecord) -> AgentTags | None:
        """None where the record has none, or something else in their place: run directories come from anywhere."""
        tags: Mapping[str, Any] = record.tags or {}
        texts = [tags.get(name) for name in ("trace", "root", "agent")]
        parent, depth = tags.get("parent"), tags.get("depth")
        if not all(isinstance(text, str) for text in texts) or not isinstance(parent, str | None):
            return None
        if not is_count(depth):
            return None
        return cls(
            trace=str(texts[0]),
            root=str(texts[1]),
            agent=str(texts[2]),
            depth=int(depth or 0),
            parent=parent,
            lane_session=_count(tags, "lane_session"),
            recorded_len=_count(tags, "trace_input_len"),
            cached_blocks=_count(tags, "theoretical_cached_blocks"),
            blocks=_count(tags, "theoretical_blocks"),
            cached_tokens=_count(tags, "theoretical_cached_tokens"),
        )


def _count(tags: Mapping[str, Any], name: str) -> int | None:
    value = tags.get(name)
    return value if is_count(value) else None
