"""An agentic load as its command describes it: with the scenario it is run for, and where its sessions come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atom.bench.agentic.load import AgenticLoad
from atom.bench.agentic.model import Damage
from atom.bench.driver import Driver
from atom.bench.load import Api, LoadSpec

__all__ = ["ScenarioLoad"]


@dataclass(frozen=True, kw_only=True)
class ScenarioLoad:
    """`load`, and what run.json says beside it."""

    load: AgenticLoad
    scenario: str | None
    conflicts: tuple[str, ...]
    """Options that go against it, which --unsafe-override let through."""
    client: str
    traces: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Why → how many recorded sessions are not replayed."""
    nonce_drawn: bool = False
    """For this run alone, not given."""

    def size(self) -> int | None:
        return self.load.size()

    def describe(self) -> dict[str, Any]:
        return {
            **self.load.describe(),
            "scenario": self.scenario,
            "scenario_conflicts": list(self.conflicts),
            "client": self.client,
            **self.traces,
            "sessions_left_out": dict(self.left_out),
            "source": {"notes": self._notes()},
        }

    def _notes(self) -> list[str]:
        load = self.load
        notes = [f"{count:,} recorded sessions were left out: {why}" for why, count in self.left_out.items()]
        if orphans := sum(session.orphans for session in load.sessions):
            notes.append(f"{orphans:,} sub-agents were left out: recorded before any turn of their parent")
        damage = sum((Counter(session.damage) for session in load.sessions), Counter[Damage]())
        notes += [f"{count:,} recorded {'turn' if count == 1 else 'turns'} {what}" for what, count in damage.items()]
        if self.nonce_drawn:
            notes.append(f"markers are of this run alone: --cache-bust-nonce {load.nonce} gives the same prompts again")
        if self.client != "native" or load.api is not Api.CHAT:
            return notes
        if load.tokenizer is None:
            notes.append("prompts have as many words as were tokens recorded: --tokenizer makes each word one token")
        if load.overhead is not None:
            return notes
        return [*notes, "what the server's chat template adds to each message comes on top of the recorded length"]

    def driver(self, spec: LoadSpec) -> Driver:
        return self.load.driver(spec)
