"""The replay of one session tree, as a state machine: which turns may begin, given which have ended.

No clock and no I/O: `bench/agentic/driver.py` sends what is ready and says when it ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from atom.bench.agentic.model import Session
from atom.bench.agentic.timing import Cut, Timeline

__all__ = ["Ready", "SessionRun"]


class Ready(NamedTuple):
    """A turn whose predecessors have all ended."""

    agent: int
    turn: int
    after_ns: int | None
    """When the last of them ended; None: before the replay's start, from which `pause_ns` counts then."""
    pause_ns: int


@dataclass(slots=True)
class _Gate:
    """A turn that waits for agents."""

    turn: int
    waits_for: set[int]
    after_ns: int | None


class SessionRun:
    """One replay. A turn begins after its agent's previous one, sub-agents after the turn that spawns them, a joining
    turn after the agents that it joins, however any of them ended. An agent may be stopped early: its later turns, and
    the agents these would have spawned, are left out."""

    def __init__(
        self,
        session: Session,
        times: Timeline,
        cut: Cut | None = None,
        idle_gap_cap: float | None = None,
        after_ns: int | None = None,
    ) -> None:
        """`cut`: enter in the middle; what began before it counts as done, and the first pause is at most
        `idle_gap_cap` seconds. `after_ns`: when the first turn may begin; None: with the replay's phase."""
        self.session = session
        self._times = times
        self._live: set[int] = set()
        self._over: set[int] = set()
        self._gates: dict[int, _Gate] = {}
        self._ready: dict[int, Ready] = {}
        self._primers: list[tuple[int, int]] = []
        if cut is None:
            self._live.add(0)
            self._arm(0, 0, after_ns)
        else:
            self._enter(cut, idle_gap_cap)

    @property
    def done(self) -> bool:
        """No turn is under way or will ever be ready."""
        return not self._live

    @property
    def primers(self) -> list[tuple[int, int]]:
        """(agent, turn) of the last turn before the cut of each agent that goes on after it."""
        return self._primers

    @property
    def waiting(self) -> bool:
        """Some turn is ready."""
        return bool(self._ready)

    def take_ready(self) -> list[Ready]:
        """All ready turns, in the order of the recording. Each has to be sent, or its agent stopped."""
        ready = sorted(self._ready.values(), key=self._recorded)
        self._ready.clear()
        return ready

    def take_first(self) -> Ready:
        """The ready turn that the recording began first."""
        return self._ready.pop(min(self._ready.values(), key=self._recorded).agent)

    def ended(self, agent: int, turn: int, at_ns: int) -> None:
        """A turn's answer is complete, or has failed."""
        turns = self.session.agents[agent].turns
        for child in turns[turn].spawns:
            if child not in self._over:
                self._live.add(child)
                self._arm(child, 0, at_ns)
        if turn + 1 < len(turns):
            self._arm(agent, turn + 1, at_ns)
        else:
            self._finish(agent, at_ns)

    def stop(self, agent: int, at_ns: int) -> None:
        """No further turn of `agent`; its sub-agents that have begun go on."""
        self._ready.pop(agent, None)
        self._gates.pop(agent, None)
        if agent in self._live:
            self._finish(agent, at_ns)

    def _recorded(self, ready: Ready) -> tuple[float, int]:
        return self._times.start_s[ready.agent][ready.turn], ready.agent

    def _arm(self, agent: int, turn: int, at_ns: int | None) -> None:
        waits_for = set(self.session.agents[agent].turns[turn].joins) - self._over
        if waits_for:
            self._gates[agent] = _Gate(turn, waits_for, at_ns)
        else:
            self._ready[agent] = Ready(agent, turn, at_ns, round(self._times.pause_s[agent][turn] * 1e9))

    def _finish(self, agent: int, at_ns: int) -> None:
        self._live.discard(agent)
        self._over.add(agent)
        for waiting, gate in list(self._gates.items()):
            gate.waits_for.discard(agent)
            if not gate.waits_for:
                del self._gates[waiting]
                after = at_ns if gate.after_ns is None else max(at_ns, gate.after_ns)
                self._arm(waiting, gate.turn, after)

    def _enter(self, cut: Cut, idle_gap_cap: float | None) -> None:
        agents = self.session.agents
        spawned_by = self.session.spawned_by
        for agent, next_turn in enumerate(cut.next_turn):
            begun = agent not in spawned_by or spawned_by[agent][1] < cut.next_turn[spawned_by[agent][0]]
            if begun and next_turn == len(agents[agent].turns):
                self._over.add(agent)
            elif begun:
                self._live.add(agent)
        offsets = {}
        for agent in sorted(self._live):
            next_turn = cut.next_turn[agent]
            if next_turn > 0:
                self._primers.append((agent, next_turn - 1))
            self._arm(agent, next_turn, None)
            if agent in self._ready:
                offsets[agent] = self._times.start_s[agent][next_turn] - cut.at_s
        shift = max(0.0, min(offsets.values()) - idle_gap_cap) if idle_gap_cap is not None else 0.0
        for agent, offset in offsets.items():
            self._ready[agent] = self._ready[agent]._replace(pause_ns=round((offset - shift) * 1e9))
