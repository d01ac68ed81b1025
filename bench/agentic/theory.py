"""What an infinite prefix cache would find of each prompt: the bound that a server's real hit rate is held against.

Counted in whole blocks of the recording, over one session tree in the order of its recorded starts: a prompt finds its
longest prefix of blocks that any agent of the tree has sent before. That is AIPerf's definition for these traces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atom.bench.agentic.load import CacheBust
from atom.bench.agentic.model import Session

__all__ = ["Hits", "hit_rate", "replayed_hits", "session_hits"]


@dataclass(frozen=True, slots=True)
class Hits:
    """Of one prompt, in blocks."""

    cached: int
    total: int


def session_hits(session: Session) -> tuple[tuple[Hits, ...], ...]:
    """[agent][turn]; every agent's blocks count as sent once its turn has begun."""
    seen: set[int] = set()
    found: list[list[Hits]] = [[] for _ in session.agents]
    for agent, _, turn in session.walk():
        # The blocks it kept were sent by this agent's previous turn.
        cached, fresh = turn.kept_blocks, turn.new_blocks.tolist()
        for block in fresh:
            if block not in seen:
                break
            cached += 1
        seen.update(fresh)
        found[agent].append(Hits(cached, turn.kept_blocks + len(fresh)))
    return tuple(map(tuple, found))


def replayed_hits(hits: Hits, session: Session, agent: int, bust: CacheBust, *, seen_before: bool) -> Hits:
    """`hits` as the replay's markers leave them. `seen_before`: an earlier session of the load replayed this recording.

    A marker in front of everything, or a recording that was not replayed before: what the tree itself has sent. No
    marker: then all of it was sent before. A marker after the system prompt: then only that was.
    """
    if not seen_before or bust is CacheBust.SYSTEM_PREFIX:
        return hits
    if bust is CacheBust.NONE:
        return Hits(hits.total, hits.total)
    system = math.ceil(session.agents[agent].system_len / session.block_size)
    return Hits(max(hits.cached, min(system, hits.total)), hits.total)


def hit_rate(session: Session) -> float | None:
    """Cached share of all blocks of the session's prompts; None where it has none."""
    hits = [hit for agent in session_hits(session) for hit in agent]
    total = sum(hit.total for hit in hits)
    return sum(hit.cached for hit in hits) / total if total else None
