"""What became of the GC hook in one session, process by process, for `run.json`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.bench.rundir import RunDirectory
from atom.diag.gc_records import read_gc_records
from atom.diag.hooked_processes import hooked_processes
from atom.recipes.processes import read_stat

if TYPE_CHECKING:
    from atom.diag.attach import Attached

__all__ = ["HookReport"]


class HookReport:
    """Collects what is known of the hook; `conclude` writes it down when the server's captures are complete.

    `outside`: nobody tries to put it in, but a server that was started with it by hand may record all the same.
    """

    def __init__(self, run_dir: RunDirectory, *, wanted: bool, action: str | None, outside: bool = False) -> None:
        self._run_dir = run_dir
        self._wanted = wanted
        self._outside = outside
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
        if not self._wanted and not self._outside:
            return []
        server = self._run_dir.server
        _name_api(server, listeners, anywhere=self._outside)
        processes = hooked_processes(server)
        why_not = {one.pid: self._refusals.get(one.pid, one.reason) for one in processes if not one.hooked}
        if self._outside and not any(one.hooked for one in processes):
            self._how = "outside"
            why_not = dict.fromkeys(why_not, "measured from outside: no hook")
        self._write(
            {
                "pid": one.pid,
                "role": one.role,
                "hooked": one.hooked,
                "reason": None if one.hooked else why_not[one.pid],
            }
            for one in processes
        )
        if not self._wanted:
            return []
        left = [] if self._left is None else [f"the GC hook could not be taken out again: {self._left}"]
        if any(server.glob("gc-api-*.jsonl")):
            return left
        if self._problem is not None:
            return [f"the GC hook could not be attached: {self._problem}", *left]
        why = next((why_not[one.pid] for one in processes if one.role == "api" and not one.hooked), None)
        return [f"the GC hook did not load in the API process{f' ({why})' if why else ''}: no GC figures", *left]

    def _write(self, processes: Iterable[dict[str, Any]]) -> None:
        facts = {"how": self._how, "action": self._action, "problem": self._problem, "processes": list(processes)}
        self._run_dir.write_run_json({"gc_hook": facts})


def _name_api(server: Path, listeners: Sequence[int], *, anywhere: bool) -> None:
    """Rename the records of the processes that listen, if no other process is known as the API process.

    In a container a process has another pid, and the same start time. Where no listener can be seen at all and may be
    `anywhere`, a record that is the only one is the server's.
    """
    records = list(server.glob("gc-*.jsonl"))
    if any(path.name.startswith("gc-api-") for path in records):
        return
    named = [path for pid in listeners for path in _records_of(server, pid)]
    if anywhere and not named:
        starts = {stat.start_ticks for pid in listeners if (stat := read_stat(pid)) is not None}
        same = {process.pid for process in read_gc_records(server) if process.start_ticks in starts}
        named = [path for pid in same for path in _records_of(server, pid)]
        if not listeners and len(records) == 1 and records[0].name.startswith("gc-other-"):
            named = records
    for path in named:
        with contextlib.suppress(OSError):
            path.rename(server / path.name.replace("gc-other-", "gc-api-", 1))


def _records_of(server: Path, pid: int) -> list[Path]:
    return [*server.glob(f"gc-other-{pid}.jsonl"), *server.glob(f"gc-other-{pid}.*.jsonl")]
