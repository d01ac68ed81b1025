"""One row per process of the server: what its hook and its samples say, and why it has no hook if it has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from atom.bench.records import is_count
from atom.diag.gc_profile.evidence import Evidence
from atom.diag.gc_profile.missing import damaged_hooks
from atom.diag.gc_profile.model import HookedProcess
from atom.diag.hooked_processes import hooked_processes
from atom.diag.server_captures import Passes, ProcessSamples

__all__ = ["process_rows"]

_ORDER: Final = ("api", "core", "worker", "other")
_DAMAGED: Final = "the hook's record of it cannot be read"
_LOST: Final = "the hook's record of it is missing"


def process_rows(evidence: Evidence) -> tuple[HookedProcess, ...]:
    """API processes first. A process that was only seen by its hook, or only by its samples, has a row too."""
    hooked: dict[int, Passes] = {}
    for passes in evidence.captures.passes:  # of a pid with several records the one that saw most of the span
        known = hooked.get(passes.process.pid)
        if known is None or _watched(evidence, passes) >= _watched(evidence, known):
            hooked[passes.process.pid] = passes
    sampled = {samples.pid: samples for samples in evidence.captures.processes}
    reasons = dict(_noted(evidence.run))
    if not {*sampled} <= {*hooked, *reasons}:  # a session that did not end, or was not ours
        seen = hooked_processes(evidence.run_dir.server)
        reasons = {**{one.pid: one.reason for one in seen if not one.hooked}, **reasons}
    unread = {pid: (role, _DAMAGED) for pid, role in damaged_hooks(evidence.captures).items()}
    unread |= {pid: (role, _LOST) for pid, role in evidence.lost_hooks.items()}
    rows = [
        _row(evidence, pid, hooked.get(pid), sampled.get(pid), reasons.get(pid), unread.get(pid))
        for pid in {*hooked, *sampled, *unread}
    ]
    return tuple(sorted(rows, key=lambda row: (_rank(row.role), row.pid)))


def _rank(role: str) -> int:
    return _ORDER.index(role) if role in _ORDER else len(_ORDER)


def _watched(evidence: Evidence, passes: Passes) -> int:
    return passes.watched_ns(evidence.start_ns, evidence.end_ns) if evidence.duration_s > 0 else 0


def _why_not_watched(passes: Passes) -> str:
    if not passes.complete:
        return "passes that its hook wrote cannot be read"
    return "it was watched for less than half of the span"


def _noted(run: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Why the hook was not in a process, as the session wrote it down at its end."""
    hook = run.get("gc_hook")
    processes = hook.get("processes") if isinstance(hook, dict) else None
    for one in processes if isinstance(processes, list) else ():
        if isinstance(one, dict) and is_count(one.get("pid")) and isinstance(one.get("reason"), str):
            yield one["pid"], one["reason"]


def _row(
    evidence: Evidence,
    pid: int,
    passes: Passes | None,
    samples: ProcessSamples | None,
    reason: str | None,
    unread: tuple[str, str] | None,
) -> HookedProcess:
    """`unread`: role, and what became of the record, of a process whose hook's record is lost or damaged."""
    role = passes.process.role if passes is not None else samples.role if samples is not None else "other"
    command = samples.command if samples is not None and samples.command else ""
    rss = samples.rss_last_mb(evidence.start_ns, evidence.end_ns) if samples is not None else None
    if passes is None:
        return HookedProcess(
            pid=pid,
            role=unread[0] if samples is None and unread is not None else role,
            command=command,
            hooked=unread is not None,
            reason=unread[1] if unread is not None else reason or "the hook did not load in it",
            rss_mb=rss,
        )
    process, watched = passes.process, _watched(evidence, passes)
    seconds = passes.seconds(evidence.start_ns, evidence.end_ns) if watched else None
    return HookedProcess(
        pid=pid,
        role=role,
        command=command or process.command,
        hooked=True,
        reason=_why_not_watched(passes) if not watched else "",
        python=process.python,
        collector=process.collector,
        thresholds=process.last_thresholds,
        frozen=process.frozen,
        action=process.action,
        gen2_passes=len(passes.pauses_ms(evidence.start_ns, evidence.end_ns)) if watched else None,
        gen2_seconds=seconds,
        gen2_share=None if seconds is None else seconds / (watched / 1e9),
        rss_mb=rss,
        hook_cpu_share=process.hook_cpu_share,
    )
