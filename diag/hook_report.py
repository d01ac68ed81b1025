"""What became of the GC hook in one session, process by process, for `run.json`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.bench.rundir import JsonlFile, RunDirectory
from atom.diag.gc_records import GcProcess, read_gc_records

if TYPE_CHECKING:
    from atom.diag.attach import Attached

__all__ = ["HookReport"]


class HookReport:
    """Collects what is known of the hook; `conclude` writes it down when the server's captures are complete."""

    def __init__(self, run_dir: RunDirectory, *, wanted: bool, action: str | None) -> None:
        self._run_dir = run_dir
        self._wanted = wanted
        self._action = action
        self._how = "environment"
        self._refusals: dict[int, str] = {}
        self._problem: str | None = None
        self._left: str | None = None
        if wanted:
            self._write([])

    def attached(self, attached: Sequence[Attached]) -> None:
        """It was put into running processes."""
        self._how = "attach"
        self._refusals = {one.pid: one.reason or "unknown" for one in attached if not one.ok}
        self._write([{"pid": one.pid, "role": one.role, "hooked": one.ok, "reason": one.reason} for one in attached])

    def failed(self, why: str) -> None:
        """It could not be put into any process."""
        self._how, self._problem = "attach", why
        self._write([])

    def left_behind(self, why: str) -> None:
        """It could not be taken out again."""
        self._left = why

    def conclude(self, listeners: Sequence[int]) -> list[str]:
        """Write down which processes were hooked and why others were not. Returns reasons for the run.

        The process that listens is the API process of a server that is not known: its record is named so here.
        """
        if not self._wanted:
            return []
        server = self._run_dir.server
        _name_api(server, listeners)
        sampled, refusals = _sampled(server), {**_failures(server), **self._refusals}
        hooked = _hooked(read_gc_records(server), sampled)
        processes = [
            {
                "pid": pid,
                "role": hooked.get(pid, one.role),
                "hooked": pid in hooked,
                "reason": None if pid in hooked else refusals.get(pid, one.unhooked_because()),
            }
            for pid, one in sampled.items()
        ]
        self._write(processes)
        left = [] if self._left is None else [f"the GC hook could not be taken out again: {self._left}"]
        if "api" in hooked.values():
            return left
        if self._problem is not None:
            return [f"the GC hook could not be attached: {self._problem}", *left]
        refused = (refusals[pid] for pid, one in sampled.items() if one.role == "api" and pid in refusals)
        why = next(refused, None)
        return [f"the GC hook did not load in the API process{f' ({why})' if why else ''}: no GC figures", *left]

    def _write(self, processes: Iterable[dict[str, Any]]) -> None:
        facts = {"how": self._how, "action": self._action, "problem": self._problem, "processes": list(processes)}
        self._run_dir.write_run_json({"gc_hook": facts})


def _name_api(server: Path, listeners: Sequence[int]) -> None:
    """Rename the records of the processes that listen, if no other process is known as the API process."""
    if any(server.glob("gc-api-*.jsonl")):
        return
    for pid in listeners:
        for path in (*server.glob(f"gc-other-{pid}.jsonl"), *server.glob(f"gc-other-{pid}.*.jsonl")):
            with contextlib.suppress(OSError):
                path.rename(server / path.name.replace("gc-other-", "gc-api-", 1))


def _failures(server: Path) -> dict[int, str]:
    """What hooks that could not start in their process left behind."""
    found = {}
    for path in server.glob("gc-failed-*.json"):
        for line in JsonlFile(path):
            pid, error = line.get("pid"), line.get("error")
            if isinstance(pid, int) and isinstance(error, str):
                found[pid] = error[:300]
    return found


@dataclass(slots=True)
class _Sampled:
    """A process of the server that was seen."""

    role: str
    start_ticks: int | None
    exe: str | None

    def unhooked_because(self) -> str:
        if self.exe is None:
            return "its program is not known"
        name = Path(self.exe).name
        if not name.startswith(("python", "pypy")):
            return f"{name} is no Python interpreter"
        return "the hook did not load (isolated interpreter, or ended too soon)"


def _sampled(server: Path) -> dict[int, _Sampled]:
    """By pid, with the last role each had."""
    found: dict[int, _Sampled] = {}
    for line in JsonlFile(server / "process.jsonl"):
        pid, role, ticks, exe = (line.get(name) for name in ("pid", "role", "start_ticks", "exe"))
        if not isinstance(pid, int) or not isinstance(role, str):
            continue
        if pid not in found or isinstance(ticks, int):
            found[pid] = _Sampled(
                role, ticks if isinstance(ticks, int) else None, exe if isinstance(exe, str) else None
            )
        found[pid].role = role
    return found


def _hooked(records: Iterable[GcProcess], sampled: Mapping[int, _Sampled]) -> dict[int, str]:
    """Role by pid as seen from here. In a container a process has another pid for itself, but the same start."""
    found = {}
    for record in records:
        pid = record.pid
        seen = sampled.get(pid)
        if record.start_ticks is not None and (seen is None or seen.start_ticks != record.start_ticks):
            same = [pid for pid, one in sampled.items() if one.start_ticks == record.start_ticks]
            pid = same[0] if len(same) == 1 else pid
        found[pid] = record.role
    return found
