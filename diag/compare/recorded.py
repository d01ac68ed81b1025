"""What one arm's run left behind, whoever recorded it: request records on one clock, the measured phase, the load.

A run directory of `atom bench` is read here; what other tools wrote becomes the same records in `compare/foreign.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from atom.bench.accounting import Counts
from atom.bench.client_window import read_client_window
from atom.bench.load import DEFAULT_FAILED_REQUEST_THRESHOLD
from atom.bench.records import RequestRecord, read_records
from atom.bench.run_facts import checked_run
from atom.bench.rundir import RunDirectory, Validity
from atom.diag.compare.window import Window, steady_window
from atom.recipes.errors import AtomError

__all__ = ["Recorded", "load_of", "read_recorded", "run_facts_of"]

_MAX_RUN_JSON: Final = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One run."""

    path: Path
    tool: str
    """Who recorded it: `atom`, `vllm bench serve`, `AIPerf`."""
    records: Sequence[RequestRecord]
    """Of the measured phase, in the order in which they were sent."""
    start_ns: int
    end_ns: int
    """The measured phase: its start, and the end of its last request."""
    clock: str | None
    """Runs of one clock may be laid over each other; None: of no known one."""
    load: Mapping[str, Any]
    """As run.json describes it."""
    counts: Counts
    ended: bool = True
    """The client came to its end; False: it was killed."""
    interrupted: bool = False
    server_gone: str | None = None
    validity: Validity | None = Validity.VALID
    """What it was sealed with; None: a run that was killed."""
    reasons: Sequence[str] = ()
    damaged: Mapping[str, int] = field(default_factory=dict)
    """File → lines that cannot be read."""
    notes: Sequence[str] = ()
    """What has to be known of another tool's figures."""

    @property
    def planned(self) -> int | None:
        """Requests that the load was to have; None of a load that lasts for a time."""
        return None if self.load.get("duration_s") is not None else self.load.get("num_prompts")

    @property
    def threshold(self) -> float:
        said = self.load.get("failed_request_threshold")
        return DEFAULT_FAILED_REQUEST_THRESHOLD if said is None else float(said)

    @property
    def whole(self) -> Window:
        """The measured phase."""
        return Window(self.start_ns, self.end_ns + 1, False)

    def steady(self) -> Window:
        return steady_window(self.records, self.load, self.start_ns, self.end_ns)


def read_recorded(path: Path) -> Recorded:
    """A run directory, or a result of another tool. UsageError names the file that cannot be read, and why."""
    if (path / "run.json").is_file():
        return _read_run(RunDirectory.open(path))
    from atom.diag.compare.foreign import read_foreign

    return read_foreign(path)


def _read_run(run_dir: RunDirectory) -> Recorded:
    run = checked_run(run_dir)
    damaged: Counter[str] = Counter()
    records = sorted(read_records(run_dir, damaged=damaged), key=lambda one: (one.sent_ns or 0, one.index))
    window = read_client_window(run_dir, run, damaged)
    ends = [one.end_ns for one in records if one.end_ns is not None]
    starts = [one.sent_ns for one in records if one.sent_ns is not None]
    end = max(ends, default=window.end_ns or 0)
    start = window.start_ns or run.get("measured_start_ns") or min(starts, default=end)
    sealed = run.get("validity")
    return Recorded(
        path=run_dir.path,
        tool="atom",
        records=records,
        start_ns=start,
        end_ns=max(start, end),
        clock=_clock(run),
        load=run.get("load") or {},
        counts=Counts.of(
            Counter(one.outcome for one in records),
            started=window.started if window.started is not None else len(records),
            sent=window.sent if window.sent is not None else len(starts),
        ),
        ended=window.ended,
        interrupted=window.interrupted,
        server_gone=window.server_gone,
        validity=None if sealed is None else Validity(sealed),
        reasons=run.get("reasons") or (),
        damaged=damaged,
    )


def _clock(run: Mapping[str, Any]) -> str | None:
    boot = (run.get("host") or {}).get("boot_id")
    return boot if isinstance(boot, str) and boot else None


def run_facts_of(path: Path) -> Mapping[str, Any]:
    """run.json as it is, unchecked; empty where there is none that can be read."""
    file = path / "run.json"
    try:
        if not file.is_file():  # a pipe would never end
            return {}
        with file.open("rb") as source:
            run = json.loads(source.read(_MAX_RUN_JSON))
    except (OSError, ValueError, RecursionError):
        return {}
    return run if isinstance(run, dict) else {}


@lru_cache(maxsize=4096)
def load_of(path: Path) -> Mapping[str, Any]:
    """The load of a run or of another tool's result, as far as it says; a run that is over does not change."""
    if (path / "run.json").is_file():
        load = run_facts_of(path).get("load")
        return load if isinstance(load, dict) else {}
    try:
        return read_recorded(path).load
    except AtomError:
        return {}
