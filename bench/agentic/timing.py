"""How a replay spaces the turns of a session: pauses from one end to the next start, long ones shortened; and the
moment `t*` at which a lane's first session is entered."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np

from atom.bench.agentic.model import Session

__all__ = ["Cut", "Timeline", "cut_at", "cut_time", "timeline"]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of one session in a replay; indexed [agent][turn]."""

    start_s: tuple[tuple[float, ...], ...]
    """When each turn began, after gaps were shortened."""
    pause_s: tuple[tuple[float, ...], ...]
    """From the last end among what a turn waits for (its agent's previous turn, the turn that spawned its agent,
    agents that it joins) to its own start; 0 where the recording shows no pause."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A session entered in the middle."""

    at_s: float
    next_turn: tuple[int, ...]
    """Per agent, the first turn that begins at or after `at_s`; its number of turns if there is none."""


def timeline(session: Session, idle_gap_cap: float | None) -> Timeline:
    """Gaps between consecutive starts anywhere in the tree that are longer than `idle_gap_cap` seconds are shortened
    to it, so that the agents of a tree keep their order and their overlaps."""
    shift = _shifts(session, idle_gap_cap)
    starts = tuple(tuple(turn.start_s - shift[turn.start_s] for turn in agent.turns) for agent in session.agents)
    ends = [
        [start + turn.duration_s for start, turn in zip(starts[a], agent.turns, strict=True)]
        for a, agent in enumerate(session.agents)
    ]
    spawned_by = session.spawned_by

    def pause(a: int, k: int) -> float:
        waits_for = [ends[child][-1] for child in session.agents[a].turns[k].joins]
        if k > 0:
            waits_for.append(ends[a][k - 1])
        elif a in spawned_by:
            parent, turn = spawned_by[a]
            waits_for.append(ends[parent][turn])
        return max(0.0, starts[a][k] - max(waits_for)) if waits_for else 0.0

    pauses = tuple(tuple(pause(a, k) for k in range(len(agent.turns))) for a, agent in enumerate(session.agents))
    return Timeline(starts, pauses)


def _shifts(session: Session, cap: float | None) -> dict[float, float]:
    """Seconds that each start moves forward."""
    starts = sorted({turn.start_s for agent in session.agents for turn in agent.turns})
    shift = dict.fromkeys(starts, 0.0)
    if cap is not None:
        total = 0.0
        for before, start in itertools.pairwise(starts):
            total += max(0.0, start - before - cap)
            shift[start] = total
    return shift


def cut_time(times: Timeline, session: Session, lane: int, seed: int, min_ratio: float, max_ratio: float) -> float:
    """Where lane number `lane` enters: uniform between the two shares of the time from the tree's first start to its
    last, from (seed, session, lane) alone. Drawn as AIPerf draws it, so that both enter a recording at one point."""
    first = min(starts[0] for starts in times.start_s)
    last = max(starts[-1] for starts in times.start_s)
    low, high = (first + ratio * (last - first) for ratio in (min_ratio, max_ratio))
    if not high > low:
        return low
    digest = hashlib.sha256(f"{seed}:{session.name}:{lane}".encode()).digest()
    return float(np.random.default_rng(int.from_bytes(digest[:8], "big")).uniform(low, high))


def cut_at(session: Session, times: Timeline, at_s: float) -> Cut:
    """Agents that no turn before `at_s` has spawned are at their first turn."""
    next_turn: list[int] = []
    spawned_by = session.spawned_by
    for agent, starts in enumerate(times.start_s):
        begun = agent not in spawned_by or spawned_by[agent][1] < next_turn[spawned_by[agent][0]]
        first = next((k for k, start in enumerate(starts) if start >= at_s), len(starts))
        next_turn.append(first if begun else 0)
    return Cut(at_s, tuple(next_turn))
