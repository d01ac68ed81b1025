"""Which processes of a server the GC hook was in, and why it was not in the others.

From the run's `server/` directory alone: `process.jsonl` has every process that was seen, `gc-*.jsonl` the hooked ones,
`attach.jsonl` and `gc-failed-*.json` what went wrong. A short-lived process may be in none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atom.bench.records import is_count
from atom.bench.rundir import JsonlFile
from atom.diag.attach import ATTACH_FILE
from atom.diag.gc_profile.model import HookedProcess
from atom.diag.gc_records import GcProcess, read_gc_records
from atom.diag.python_process import isolating_option, isolation_reason

__all__ = ["hooked_processes"]

SHORT_S: Final = 2.5
"""Within this the hook writes its first line, if nothing makes it write one earlier."""
_MB: Final = 1 << 20
_OTHER_PROGRAMS: Final = re.compile(
    r"(?:ba|da|z|c|k)?sh|sleep|cat|tee|tail|env|tini|dumb-init|nvidia-\S+|gdb|gcc|g\+\+|cc1\S*|ld|as|ninja|git"
)


@dataclass(slots=True)
class _Seen:
    """One process as the sampler saw it."""

    pid: int
    start_ticks: int | None
    role: str
    command: str
    name: str
    exe: str | None
    obstacle: str | None
    first_ns: int
    last_ns: int
    rss_bytes: int | None


def hooked_processes(server_dir: Path) -> list[HookedProcess]:
    """Every process of the server that was seen, by pid; the figures of passes are left out (None).

    A process that became another program by exec counts once, as what it was last. A hooked process that the sampler
    did not see (in a container, where it has another pid; or too short-lived) is listed under its own pid.
    """
    seen = _seen(server_dir)
    hooked = _hooked(server_dir)
    failed = _failures(server_dir)
    attached = _attached(server_dir)
    end_ns = max((one.last_ns for one in seen), default=0)
    processes = []
    for one in seen:
        record = hooked.pop(_match(one, hooked), None)
        if record is not None:
            processes.append(_with_hook(one, record))
        else:
            processes.append(_without_hook(one, _reason(one, failed, attached, end_ns)))
    processes += [_with_hook(None, record) for record in hooked.values()]
    return sorted(processes, key=lambda one: (one.pid, not one.hooked))


def _with_hook(seen: _Seen | None, record: GcProcess) -> HookedProcess:
    return HookedProcess(
        pid=record.pid if seen is None else seen.pid,
        role=seen.role if seen is not None and record.role == "other" else record.role,
        command=record.command if seen is None or not seen.command else seen.command,
        hooked=True,
        reason="attached while it ran: what came before is not known" if record.attached else "",
        python=record.python,
        collector=record.collector,
        thresholds=record.last_thresholds,
        frozen=record.frozen,
        action=record.action,
        rss_mb=None if seen is None or seen.rss_bytes is None else seen.rss_bytes / _MB,
        hook_cpu_share=record.hook_cpu_share,
    )


def _without_hook(seen: _Seen, reason: str) -> HookedProcess:
    return HookedProcess(
        pid=seen.pid,
        role=seen.role,
        command=seen.command,
        hooked=False,
        reason=reason,
        rss_mb=None if seen.rss_bytes is None else seen.rss_bytes / _MB,
    )


# ---- why not ---------------------------------------------------------------------------------------------------------


def _reason(seen: _Seen, failed: Mapping[int, str], attached: Mapping[int, str] | None, end_ns: int) -> str:
    """The most certain reason first: what was reported, what was seen of the process, what its command says."""
    if seen.pid in failed:
        return f"the hook did not load: {failed[seen.pid]}"
    if attached and attached.get(seen.pid):
        return attached[seen.pid]
    if _no_python(seen):
        return f"not a Python process ({Path(seen.exe).name if seen.exe else seen.name})"
    if attached is not None:
        return "was not there, or not running Python, when the hook was attached"
    if seen.obstacle is not None:
        return seen.obstacle
    if option := isolating_option(seen.command.split()):
        return isolation_reason(option)
    if seen.last_ns < end_ns and seen.last_ns - seen.first_ns < SHORT_S * 1e9:
        return f"ended within {SHORT_S} s, before the hook's first line"
    return "the hook wrote nothing: not loaded (environment or PYTHONPATH changed?), or it could not write"


def _no_python(seen: _Seen) -> bool:
    if seen.obstacle is not None:
        return seen.obstacle.startswith("not a Python process")
    program = Path(seen.exe).name if seen.exe else Path(seen.command.partition(" ")[0]).name
    # A title (`VLLM::Worker`), or a program that embeds the interpreter, may be anything.
    return _OTHER_PROGRAMS.fullmatch(program) is not None


# ---- what was recorded -----------------------------------------------------------------------------------------------


def _seen(server_dir: Path) -> list[_Seen]:
    found: dict[tuple[int, int | None], _Seen] = {}
    current: dict[int, tuple[int, int | None]] = {}
    for line in JsonlFile(server_dir / "process.jsonl"):
        pid, t_ns = line.get("pid"), line.get("t_ns")
        if not isinstance(pid, int) or not isinstance(t_ns, int):
            continue
        if "start_ticks" in line or pid not in current:  # its first line
            ticks = line.get("start_ticks")
            current[pid] = (pid, ticks if isinstance(ticks, int) else None)
        seen = found.get(current[pid])
        if seen is None:
            seen = found[current[pid]] = _Seen(*current[pid], "other", "", "", None, None, t_ns, t_ns, None)
        _update(seen, line, t_ns)
    return list(found.values())


def _update(seen: _Seen, line: Mapping[str, Any], t_ns: int) -> None:
    seen.last_ns = t_ns
    if is_count(line.get("rss_bytes")):
        seen.rss_bytes = line["rss_bytes"]
    for name in ("role", "command", "name", "exe"):
        if isinstance(line.get(name), str):
            setattr(seen, name, line[name])
    if "hook_obstacle" in line:
        obstacle = line["hook_obstacle"]
        seen.obstacle = obstacle if isinstance(obstacle, str) else None


def _hooked(server_dir: Path) -> dict[int, GcProcess]:
    """By position. Of a process's records (before and after an exec, or a detach) the last."""
    last: dict[tuple[int, int | None], GcProcess] = {}
    for record in sorted(read_gc_records(server_dir), key=lambda one: one.installed_ns):
        last[record.pid, record.start_ticks] = record
    return dict(enumerate(last.values()))


def _match(seen: _Seen, hooked: Mapping[int, GcProcess]) -> int:
    """The record of this process; -1 if there is none. Start times tell apart what had the same pid, and are the same
    inside a container, where the pid is another."""
    same_pid = [at for at, one in hooked.items() if one.pid == seen.pid]
    for at in same_pid:
        if None in (hooked[at].start_ticks, seen.start_ticks) or hooked[at].start_ticks == seen.start_ticks:
            return at
    same_start = [at for at, one in hooked.items() if seen.start_ticks and one.start_ticks == seen.start_ticks]
    return same_start[0] if len(same_start) == 1 and hooked[same_start[0]].command[:200] == seen.command[:200] else -1


def _failures(server_dir: Path) -> dict[int, str]:
    found = {}
    for path in server_dir.glob("gc-failed-*.json"):
        try:
            raw = json.loads(path.read_bytes()[: 1 << 16])
        except (OSError, ValueError):
            continue
        if isinstance(raw, dict) and is_count(raw.get("pid")):
            found[raw["pid"]] = str(raw.get("error"))[:500]
    return found


def _attached(server_dir: Path) -> dict[int, str] | None:
    """Reasons by pid of processes that could not be attached to; None if nobody attached."""
    if not (server_dir / ATTACH_FILE).exists():
        return None
    lines = [line for line in JsonlFile(server_dir / ATTACH_FILE) if is_count(line.get("pid"))]
    return {line["pid"]: str(line.get("reason") or "") for line in lines if line.get("ok") is not True}
