"""Watching a server that others load: what takes the place of a load in a session, and sends nothing.

It marks the observed span as a load marks its measured phase (`measured_start_ns` of run.json, and the two events in
`client/observer.jsonl`), so that every reader finds it.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from atom.bench.rundir import RunDirectory
from atom.bench.runner import LoadOutcome
from atom.diag.server_under_test import ServerUnderTest

__all__ = ["observe"]

_SLICE_S: Final = 0.25
"""A wait in slices: a signal's handler runs between two of them, wherever it arrived."""


def observe(
    server: ServerUnderTest, duration_s: float | None, stop: threading.Event, run_dir: RunDirectory
) -> LoadOutcome:
    """Wait until `duration_s` is over (None: for ever), `stop` is set, or the server dies, whichever is first.

    `stop` and a death end an observation of a given duration early (`interrupted`); without one, `stop` is how it
    ends. A signal handler that sets `stop` is the caller's.
    """
    died = threading.Event()
    with run_dir.client_writer("observer") as writer:
        started_ns = time.monotonic_ns()
        writer.append({"kind": "measured_start", "t_ns": started_ns, "requests": 0})
        run_dir.write_run_json({"load": {"name": "observe", "duration_s": duration_s}, "measured_start_ns": started_ns})
        server.call_when_dead(died.set)
        deadline = None if duration_s is None else time.monotonic() + duration_s
        cut_short = True
        try:
            while not stop.is_set() and not died.is_set():
                left = _SLICE_S if deadline is None else min(deadline - time.monotonic(), _SLICE_S)
                if left <= 0:
                    break
                stop.wait(left)
            cut_short = died.is_set() or (duration_s is not None and stop.is_set())
        finally:
            server.forget_callbacks()
            ended_ns = time.monotonic_ns()
            counters = dict.fromkeys(("started", "sent", "completed", "failed", "cancelled"), 0)
            writer.append(
                {
                    "kind": "measured_end",
                    "t_ns": ended_ns,
                    **counters,
                    "interrupted": cut_short,
                    "running_integral_ns": 0,
                }
            )
    return LoadOutcome(
        started_ns=started_ns,
        ended_ns=ended_ns,
        started=0,
        sent=0,
        completed=0,
        failed=0,
        cancelled=0,
        interrupted=cut_short,
        first_error=None,
    )
