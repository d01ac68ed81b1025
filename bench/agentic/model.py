"""What a recorded agentic session is: a tree of agents, each a run of turns. Times are the recording's.

How a replay spaces the turns is `bench/agentic/timing.py`; what a turn sends is `bench/agentic/prompts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["Agent", "Damage", "Session", "Turn"]


class Damage(StrEnum):
    """What may be wrong with a recorded turn without making the recording useless."""

    TOO_MANY_BLOCKS = "with more blocks than the prompt has: the further ones are left out"
    NO_BLOCKS = "without any block of the prompt: it shares nothing, in theory and as it is sent"
    BACK_IN_TIME = "at an earlier time than the one listed before"


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request of an agent."""

    input_len: int
    """Prompt tokens."""
    output_len: int
    """Tokens of the answer; at least 1."""
    kept_blocks: int
    """How many blocks of the agent's previous prompt this one begins with (0 in the first turn)."""
    new_blocks: npt.NDArray[np.int64]
    """[blocks] hash ids that follow them. Prompts grow by little, so this is all that is kept of each."""
    start_s: float
    """When it was sent, seconds from the start of the recording."""
    duration_s: float
    """How long the answer took."""
    spawns: tuple[int, ...] = ()
    """Agents that begin once this turn has ended."""
    joins: tuple[int, ...] = ()
    """Agents that must have ended before this turn begins."""
    place: int = 0
    """Where the recording lists it, or the sub-agent it is part of: the order of turns with one `start_s`."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Agent:
    """A conversation of its own inside a session: the main one, or a sub-agent's."""

    name: str
    depth: int
    """0 for the main agent."""
    parent: int | None
    """The agent one of whose turns begins it; None for the main agent."""
    system_len: int
    """Tokens of tools and system prompt at the start of its prompts."""
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Session:
    """One recorded session tree. `agents[0]` is the main agent; parents come before their children."""

    name: str
    block_size: int
    """Tokens per hashed block."""
    scope: str
    """Sessions of one scope mean the same block by the same hash id."""
    agents: tuple[Agent, ...]
    orphans: int = 0
    """Sub-agents that were recorded before any turn of their parent, which therefore nothing begins: left out."""
    damage: Mapping[Damage, int] = field(default_factory=dict)
    """In how many turns there is something wrong."""

    @cached_property
    def num_turns(self) -> int:
        """Requests of the whole tree."""
        return sum(len(agent.turns) for agent in self.agents)

    @cached_property
    def max_total_len(self) -> int:
        """Longest prompt plus its answer, in tokens."""
        return max(turn.input_len + turn.output_len for agent in self.agents for turn in agent.turns)

    @cached_property
    def spawned_by(self) -> dict[int, tuple[int, int]]:
        """Agent → (agent, turn) that spawns it."""
        return {
            child: (a, k)
            for a, agent in enumerate(self.agents)
            for k, turn in enumerate(agent.turns)
            for child in turn.spawns
        }

    def walk(self) -> Iterator[tuple[int, int, Turn]]:
        """(agent, turn, Turn) of the whole tree in the order of the recording."""
        places = [(a, k, turn) for a, agent in enumerate(self.agents) for k, turn in enumerate(agent.turns)]
        return iter(sorted(places, key=lambda at: (at[2].start_s, at[2].place, at[0], at[1])))

    def blocks(self, agent: int, turn: int) -> npt.NDArray[np.int64]:
        """[blocks] hash ids of a turn's prompt."""
        turns = self.agents[agent].turns
        parts: list[npt.NDArray[np.int64]] = []
        wanted = turns[turn].kept_blocks + len(turns[turn].new_blocks)
        at = turn
        while wanted > 0:
            kept = turns[at].kept_blocks
            if wanted > kept:
                parts.append(turns[at].new_blocks[: wanted - kept])
                wanted = kept
            at -= 1
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int64)
