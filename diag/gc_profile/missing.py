"""What a run directory should hold and does not: request records, captures, records of hooks, or the end of one.

The run itself says what there was: the clients count their requests, run.json has the lines of every capture and the
processes that were hooked, and samples of a process go on after a record that was cut. Lines that are there and cannot
be read are counted where they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from atom.bench.accounting import Counts
from atom.bench.records import is_count
from atom.bench.rundir import JsonlFile, RunDirectory
from atom.diag.hooked_processes import hooked_processes
from atom.diag.server_captures import TOTALS_SLACK_NS, ServerCaptures

__all__ = ["cut_records", "damaged_hooks", "lost_captures", "lost_hooks", "lost_requests"]

_CAPTURE: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}\.jsonl")
_HOOK_FILE: Final = re.compile(r"server/gc-(?P<role>.+)-(?P<pid>[0-9]{1,15})\.jsonl")
_CHUNK: Final = 1 << 20


def lost_requests(run_dir: RunDirectory, outcomes: Mapping[str, int]) -> list[str]:
    """Whether as many measured requests are recorded as the clients say that they started.

    `outcomes`: of the records. Nothing is said of a load that did not come to its end."""
    started, ended = 0, False
    for path in sorted(run_dir.client.glob("*.jsonl")):
        if not path.is_file():
            continue
        for line in JsonlFile(path):
            count = line.get("started", line.get("sent"))
            if line.get("kind") == "measured_end" and isinstance(count, int) and is_count(count):
                started, ended = started + count, True
    if not ended:
        return []
    if started and not any(path.is_file() for path in run_dir.request_files()):
        return [f"requests/*.jsonl is missing: {started} requests were started"]
    counts = Counts.of(outcomes, started=started)
    return [] if counts.adds_up else [f"accounting does not hold: {counts.equation}"]


def lost_captures(run_dir: RunDirectory, run: Mapping[str, Any]) -> list[str]:
    """Captures that have fewer lines than run.json says were written."""
    noted = run.get("capture")
    problems = []
    for name, entry in sorted(noted.items()) if isinstance(noted, dict) else ():
        lines = entry.get("lines") if isinstance(entry, dict) else None
        if not is_count(lines) or not lines or not _CAPTURE.fullmatch(name):
            continue
        found = _lines_in(run_dir.server / name)
        if found is None:
            problems.append(f"server/{name} is missing: {lines} lines were written")
        elif found < lines:
            problems.append(f"server/{name} has {found} of the {lines} lines that were written")
    return problems


def lost_hooks(run_dir: RunDirectory, run: Mapping[str, Any], captures: ServerCaptures) -> dict[int, str]:
    """Pid → role of the processes that were hooked by run.json, and of which no record is there. One that is there and
    cannot be read is damaged, not lost."""
    said = dict(_said_hooked(run))
    if not said:
        return {}
    there = {one.process.pid for one in captures.passes}
    there |= {*damaged_hooks(captures)}
    if not {*said} <= there:  # in a container a process has another pid than in its record
        there |= {one.pid for one in hooked_processes(run_dir.server) if one.hooked}
    return {pid: role for pid, role in sorted(said.items()) if pid not in there}


def damaged_hooks(captures: ServerCaptures) -> dict[int, str]:
    """Pid → role of the processes with a damaged record, by the names of the files."""
    found = {}
    for name in captures.damaged:
        if match := _HOOK_FILE.fullmatch(name):
            found[int(match["pid"])] = match["role"]
    return found


def cut_records(captures: ServerCaptures) -> list[str]:
    """Records that stop long before their process did, without saying why.

    Processes of no known role are left out: a launcher may become another program, which ends its record so."""
    last = {one.process.pid: one.process for one in sorted(captures.passes, key=lambda one: one.process.installed_ns)}
    problems = []
    for samples in captures.processes:
        process = last.get(samples.pid)
        if process is None or process.end is not None or process.role == "other" or not len(samples.t_ns):
            continue
        short_ns = int(samples.t_ns[-1]) - process.last_seen_ns
        if short_ns > TOTALS_SLACK_NS:
            problems.append(
                f"server/gc-{process.role}-{process.pid}.jsonl is cut: it ends {short_ns / 1e9:.1f} s before the "
                "process's last sample, and does not say why"
            )
    return problems


def _said_hooked(run: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    hook = run.get("gc_hook")
    processes = hook.get("processes") if isinstance(hook, dict) else None
    for one in processes if isinstance(processes, list) else ():
        if isinstance(one, dict) and is_count(one.get("pid")) and one.get("hooked") is True:
            yield one["pid"], str(one.get("role"))[:20]


def _lines_in(path: Path) -> int | None:
    """None if it is no file, or cannot be read."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
    except OSError:
        return None
