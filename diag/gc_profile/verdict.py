"""Is garbage collection the problem? One or two sentences with their numbers, and yes, no, or not known.

Yes: passes take 1% of the wall clock (over the span, in its last whole window, or in another process of the server), or
explain a tenth of the slow tokens beyond chance, or get longer with every request. No: they were watched, and none of
that. What fewer pauses would do to throughput is not answered here: stalls also batch requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from atom.diag.gc_profile.causes import COSTLY_SHARE, Findings, costs
from atom.diag.gc_profile.model import Cause, CauseKind, HookedProcess
from atom.diag.gc_profile.stalls import said, unexplained_stalls
from atom.diag.gc_profile.words import PassWords, amount, counted, duration, figure, pass_words, per_cent

__all__ = ["judge"]

LEAST_SECONDS: Final = 10.0
"""Watched for less, a server without passes says nothing."""


def judge(findings: Findings, causes: Sequence[Cause], processes: Sequence[HookedProcess]) -> tuple[str, bool | None]:
    """The verdict, and whether collection is the problem. A stall that is none of collection's is told as well."""
    verdict, is_problem = _judge(findings, causes, processes)
    passes = findings.evidence.passes
    words = pass_words(passes.process.collector if passes is not None else None)
    return f"{verdict} {said(unexplained_stalls(findings.evidence), words)}".rstrip(), is_problem


def _judge(findings: Findings, causes: Sequence[Cause], processes: Sequence[HookedProcess]) -> tuple[str, bool | None]:
    totals, passes = findings.totals, findings.evidence.passes
    costly = costs(findings)
    others = [one for one in processes if one.role != "api" and one.hooked and (one.gen2_share or 0.0) >= COSTLY_SHARE]
    if passes is None and not others:
        return _unknown(findings), None
    words = pass_words(passes.process.collector if passes is not None else others[0].collector)
    spent = _spent(findings, words, sum(one.role == "api" for one in processes))
    ask = "" if any(one.action for one in processes) else f" {_ASK}"
    if costly or others:
        parts = [f"Garbage collection is a problem here: {spent}", *_slow(findings, costly)]
        parts += [f"{one.role} process {one.pid} spends {one.gen2_share:.1%} of its time in them" for one in others]
        return f"{'; '.join(parts)}.{ask}", True
    grown = [growth for name in ("gen2_pause_ms", "gen2_share") if (growth := findings.grows(name)) is not None]
    if grown:
        more = "every request" if grown[0].per != "minute" else "every minute"
        return f"Garbage collection becomes a problem here: {spent}. It is little yet, but more with {more}.{ask}", True
    if (findings.evidence.watched_s or totals.duration_s) < LEAST_SECONDS:
        return f"Too short to say: {spent}.", None
    found = f"{spent}{_no_overlap(findings)}"
    if any(cause.kind is CauseKind.HEAP_GROWS for cause in causes):
        return (
            f"Garbage collection is not your problem yet: {found}. But the heap grows, and each pass walks it.",
            False,
        )
    rest = " What else was found stands below." if causes else ""
    return f"Garbage collection is not your problem: {found}.{rest}", False


_ASK: Final = "What the server would do without the pauses is not known from this run; --what-if freeze measures it."


def _spent(findings: Findings, words: PassWords, api_processes: int) -> str:
    totals, windows = findings.totals, findings.windows
    if totals.gen2_share is None:
        return f"{words.many} of the API process were not watched"
    busiest = f" in the busiest of {api_processes} API processes" if api_processes > 1 else ""
    watched = findings.evidence.watched_s
    span = duration(totals.duration_s) if watched is None else f"the {duration(watched)} that were watched"
    passes = totals.gen2_passes or 0
    if not passes and not totals.gen2_seconds:
        nowhere = f" in any of {api_processes} API processes" if api_processes > 1 else ""
        return f"there was no {words.one}{nowhere} in {span}"
    began = counted(passes, words.one, words.many) if passes else f"the end of a longer {words.one}"
    text = f"{began} took {duration(totals.gen2_seconds or 0.0)} of {span} ({per_cent(totals.gen2_share)}){busiest}"
    if totals.gen2_max_pause_ms is not None and passes > 1:
        text += f", the longest {figure(totals.gen2_max_pause_ms)} ms"
    seen = [window.gen2_share for window in windows if window.gen2_share is not None]
    late = findings.late_share or 0.0
    if len(seen) > 1 and totals.gen2_share < COSTLY_SHARE <= late:
        whole = "" if late == seen[-1] else " whole one"
        text += f", from {per_cent(seen[0])} in the first window to {per_cent(late)} in the last{whole}"
    elif len(seen) > 1 and findings.grows("gen2_share") is not None:
        text += f", from {per_cent(seen[0])} in the first window to {per_cent(seen[-1])} in the last"
    pause = findings.grows("gen2_pause_ms")
    if pause is not None and pause.first is not None and pause.last is not None:
        text += (
            f"; a pass took {amount(pause.first, pause.unit)} at first and {amount(pause.last, pause.unit)} at the end"
        )
    return text


def _slow(findings: Findings, costly: Sequence[str]) -> list[str]:
    parts = []
    for kind, overlaps in findings.overlaps.items():
        passes = overlaps.passes
        if kind not in costly or passes is None:
            continue
        lift = f", {figure(passes.lift)} times what chance gives" if passes.lift is not None else ""
        parts.append(f"{passes.found:,} of {counted(overlaps.events.slow, f'slow {kind}')} were in one{lift}")
    return parts


def _no_overlap(findings: Findings) -> str:
    """What passes, where there were any, have to do with slow tokens."""
    known = [(overlaps.passes, overlaps.events.slow) for overlaps in findings.overlaps.values()]
    pairs = [(passes, slow) for passes, slow in known if passes is not None]
    slow = sum(slow for _, slow in pairs)
    if not pairs or not findings.totals.gen2_passes:
        return ""
    if not slow:
        return "; no token was slow"
    found, expected = sum(passes.found for passes, _ in pairs), sum(passes.expected for passes, _ in pairs)
    tokens, chance = counted(slow, "slow token"), figure(expected) if expected >= 0.1 else "none"
    if not found:
        return f"; none of {tokens} was in one" if slow > 1 else "; the one slow token was in none"
    return f"; {found:,} of {tokens} {'was' if found == 1 else 'were'} in one, {chance} by chance"


def _unknown(findings: Findings) -> str:
    text = f"Whether garbage collection is the problem is not known: {findings.evidence.why_no_pass()}"
    worst = max((window.health_max_ms or 0.0 for window in findings.windows), default=0.0)
    return f"{text}; from outside, a /health probe waited {figure(worst)} ms at most." if worst else f"{text}."
