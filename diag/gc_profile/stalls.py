"""Stalls of the server that passes do not explain: how long `/health` went without an answer, from outside.

A stall lasts from when the first probe that waited was sent until an answer came. A probe that is given up says no
more than that it is not over: the next one goes on waiting for the same thing. What scrapes and tokens waited for is
`causes.py` and `attribution.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from atom.diag.gc_profile.evidence import Evidence
from atom.diag.gc_profile.words import PassWords, counted, duration

__all__ = ["Stall", "said", "unexplained_stalls"]

LEAST_S: Final = 1.0
LEAST_RATIO: Final = 10.0
"""Of the median probe: where every probe is slow, a slow one is no stall."""
EXPLAINED: Final = 0.5
"""Of a stall, that passes cover: then the passes are what it was."""


@dataclass(frozen=True, slots=True)
class Stall:
    start_s: float
    length_s: float
    in_passes_s: float | None
    """Covered by passes of the API process; None where they are not known."""
    ended: bool
    """Whether an answer came after it, within the span."""


def unexplained_stalls(evidence: Evidence) -> tuple[Stall, ...]:
    """Longest first; empty without a `/health` that ever answered."""
    health = evidence.captures.health
    part = health.window(evidence.start_ns, evidence.end_ns)
    sent, answered = evidence.seconds(health.sent_ns[part]), health.answered[part]
    if not answered.any():
        return ()
    latency_s = health.latency_ms[part] / 1e3
    least = max(LEAST_S, LEAST_RATIO * float(np.median(latency_s[answered])))
    found: list[Stall] = []
    since: float | None = None
    for at, took, answer in zip(sent.tolist(), latency_s.tolist(), answered.tolist(), strict=True):
        since = at if since is None else since
        if answer:
            found += _stall(evidence, since, min(at + took, evidence.duration_s), least, ended=True)
            since = None
    if since is not None:
        found += _stall(evidence, since, evidence.duration_s, least, ended=False)
    return tuple(sorted(found, key=lambda stall: -stall.length_s))


def _stall(evidence: Evidence, start_s: float, stop_s: float, least_s: float, *, ended: bool) -> list[Stall]:
    length = stop_s - start_s
    if length < least_s:
        return []
    passes = evidence.passes
    inside = (
        None
        if passes is None
        else passes.seconds(evidence.start_ns + round(start_s * 1e9), evidence.start_ns + round(stop_s * 1e9))
    )
    if inside is not None and inside >= EXPLAINED * length:
        return []
    return [Stall(start_s, length, inside, ended)]


def said(stalls: tuple[Stall, ...], words: PassWords) -> str:
    """One sentence about the longest; empty if there is none."""
    if not stalls:
        return ""
    longest = stalls[0]
    text = f"The server did not answer /health for {duration(longest.length_s)} at {duration(longest.start_s)}"
    if not longest.ended:
        text += ", up to the end"
    if longest.in_passes_s is not None and longest.in_passes_s > 0:
        text += f", of which {words.many} explain {duration(longest.in_passes_s)}"
    elif longest.in_passes_s is not None:
        text += f", with no {words.one} meanwhile"
    if len(stalls) > 1:
        text += f"; it is the longest of {counted(len(stalls), 'such stall')}"
    return f"{text}."
