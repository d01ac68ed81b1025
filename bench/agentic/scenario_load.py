"""An agentic load as its command describes it: with the scenario it is run for, and where its sessions come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atom.bench.agentic.load import AgenticLoad
from atom.bench.driver import Driver
from atom.bench.load import LoadSpec

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

    def size(self) -> int | None:
        return self.load.size()

    def describe(self) -> dict[str, Any]:
        return {
            **self.load.describe(),
            "scenario": self.scenario,
            "scenario_conflicts": list(self.conflicts),
            "client": self.client,
            **self.traces,
        }

    def driver(self, spec: LoadSpec) -> Driver:
        return self.load.driver(spec)
