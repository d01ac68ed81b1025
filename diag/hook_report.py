"""What became of the GC hook in one session, process by process, for `run.json`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.bench.rundir import JsonlFile, RunDirectory
from atom.diag.gc_records import read_gc_records

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
        hooked = {process.pid: process.role for process in read_gc_records(server)}
        sampled, refusals = _sampled(server), {**_failures(server), **self._refusals}
        processes = [
            {
                "pid": pid,
                "role": hooked.get(pid, role),
                "hooked": pid in hooked,
                "reason": None if pid in hooked else refusals.get(pid, why),
            }
            for pid, (role, why) in sampled.items()
        ]
        self._write(processes)
        left = [] if self._left is None else [f"the GC hook could not be taken out again: {self._left}"]
        if "api" in hooked.values():
            return left
        if self._problem is not None:
            return [f"the GC hook could not be attached: {self._problem}", *left]
        refused = (refusals[pid] for pid, (role, _) in sampled.items() if role == "api" and pid in refusals)
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
        with contextlib.suppress(OSError):
            (server / f"gc-other-{pid}.jsonl").rename(server / f"gc-api-{pid}.jsonl")


def _failures(server: Path) -> dict[int, str]:
    """What hooks that could not start in their process left behind."""
    found = {}
    for path in server.glob("gc-failed-*.json"):
        for line in JsonlFile(path):
            pid, error = line.get("pid"), line.get("error")
            if isinstance(pid, int) and isinstance(error, str):
                found[pid] = error[:300]
    return found


def _sampled(server: Path) -> dict[int, tuple[str, str]]:
    """Every process of the server that was seen: its last role, and why it might not be hooked."""
    found: dict[int, tuple[str, str]] = {}
    for line in JsonlFile(server / "process.jsonl"):
        pid, role, exe = line.get("pid"), line.get("role"), line.get("exe")
        if not isinstance(pid, int) or not isinstance(role, str):
            continue
        why = found[pid][1] if pid in found else _unhooked(exe)
        found[pid] = (role, why)
    return found


def _unhooked(exe: object) -> str:
    if not isinstance(exe, str):
        return "its program is not known"
    name = Path(exe).name
    if not name.startswith(("python", "pypy")):
        return f"{name} is no Python interpreter"
    return "the hook did not load (isolated interpreter, or ended too soon)"
