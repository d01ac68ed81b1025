"""Is garbage collection the problem? One or two sentences with their numbers, and yes, no, or not known.

Yes: passes take 1% of the wall clock (over the span, in its last window, or in another process of the server), or
explain a tenth of the slow tokens beyond chance, or get longer with every request. No: they were watched, and none of
that. What fewer pauses would do to throughput is not answered here: stalls also batch requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from atom.diag.gc_profile.causes import COSTLY_SHARE, Findings, costs
from atom.diag.gc_profile.model import Cause, CauseKind, HookedProcess

__all__ = ["judge"]

LEAST_SECONDS: Final = 10.0
"""Watched for less, a server without passes says nothing."""


def judge(
    findings: Findings, causes: Sequence[Cause], processes: Sequence[HookedProcess], what: str
) -> tuple[str, bool | None]:
    """The verdict, and whether collection is the problem. `what`: what passes over old objects are called here."""
    totals = findings.totals
    costly = costs(findings)
    others = [one for one in processes if one.role != "api" and one.hooked and (one.gen2_share or 0.0) >= COSTLY_SHARE]
    if findings.evidence.passes is None and not others:
        return _unknown(findings), None
    grown = [name for name in ("gen2_pause_ms", "gen2_share") if findings.grows(name)]
    if costly or others:
        parts = [f"Garbage collection is a problem here: {_spent(findings, what)}", *_slow(findings, costly)]
        parts += [f"{one.role} process {one.pid} spends {one.gen2_share:.1%} of its time in them" for one in others]
        return f"{'; '.join(parts)}. {_ASK}", True
    if grown:
        spent = _spent(findings, what)
        return (
            f"Garbage collection becomes a problem here: {spent}, little yet, but more with every request. {_ASK}",
            True,
        )
    if totals.duration_s < LEAST_SECONDS:
        return f"Too short to say: {_spent(findings, what)}.", None
    found = f"{_spent(findings, what)}{_no_overlap(findings)}"
    if any(cause.kind is CauseKind.HEAP_GROWS for cause in causes):
        return (
            f"Garbage collection is not your problem yet: {found}. But the heap grows, and each pass walks it.",
            False,
        )
    rest = " What else was found stands below." if causes else ""
    return f"Garbage collection is not your problem: {found}.{rest}", False


_ASK: Final = "What the server would do without the pauses is not known from this run; --what-if freeze measures it."


def _spent(findings: Findings, what: str) -> str:
    totals, windows = findings.totals, findings.windows
    if totals.gen2_share is None:
        return f"{what} of the API process were not watched"
    passes = totals.gen2_passes or 0
    if not passes and not totals.gen2_seconds:
        return f"there were no {what} in {totals.duration_s:,.0f} s"
    spent = f"{totals.gen2_seconds:.3g} s of {totals.duration_s:,.0f} s"
    text = f"{passes:,} {what} took {spent} ({_share(totals.gen2_share)})"
    if totals.gen2_max_pause_ms is not None:
        text += f", the longest {totals.gen2_max_pause_ms:,.0f} ms"
    seen = [window for window in windows if window.gen2_share is not None] or [windows[-1]]
    rises = findings.grows("gen2_share") is not None or totals.gen2_share < COSTLY_SHARE <= (seen[-1].gen2_share or 0.0)
    if rises and len(seen) > 1:
        first, last = _share(seen[0].gen2_share), _share(seen[-1].gen2_share)
        text += f", from {first} in the first window to {last} in the last"
    pause = findings.grows("gen2_pause_ms")
    if pause is not None:
        text += f"; a pass took {pause.first:,.0f} ms at first and {pause.last:,.0f} ms at the end"
    return text


def _share(value: float | None) -> str:
    assert value is not None
    return f"{value:.1%}" if value >= 0.001 else f"{value:.2%}"


def _slow(findings: Findings, costly: Sequence[str]) -> list[str]:
    parts = []
    for kind, overlaps in findings.overlaps.items():
        passes = overlaps.passes
        if kind not in costly or passes is None:
            continue
        lift = f", {passes.lift:.1f} times what chance gives" if passes.lift is not None else ""
        parts.append(f"{passes.found:,} of {overlaps.events.slow:,} slow {_PLURAL[kind]} were in one{lift}")
    return parts


_PLURAL: Final = {"first token": "first tokens", "chunk gap": "chunk gaps"}


def _no_overlap(findings: Findings) -> str:
    known = [overlaps for overlaps in findings.overlaps.values() if overlaps.passes is not None]
    if not known:
        return ""
    found = sum(overlaps.passes.found for overlaps in known if overlaps.passes is not None)
    slow = sum(overlaps.events.slow for overlaps in known)
    expected = sum(overlaps.passes.expected for overlaps in known if overlaps.passes is not None)
    if not found:
        return f"; none of {slow:,} slow tokens was in one"
    return f"; {found:,} of {slow:,} slow tokens were in one, {expected:,.0f} would be by chance"


def _unknown(findings: Findings) -> str:
    text = "Whether garbage collection is the problem is not known: no GC hook was in the API process"
    worst = max((window.health_max_ms or 0.0 for window in findings.windows), default=0.0)
    return f"{text}; from outside, /health waited {worst:,.0f} ms at most." if worst else f"{text}."
