"""One run directory as the analysis needs it: the observed span, the captures, and the requests as columns.

The observed span is the measured phase of the load (of an observation without a load, of that); of a killed run it goes
up to the last sign of life, and where nothing says when it began, from the first line of a capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from atom.bench.metrics import Samples
from atom.bench.records import Outcome, RequestRecord, read_records
from atom.bench.run_facts import checked_run
from atom.bench.rundir import RunDirectory
from atom.diag.gc_profile.missing import cut_records, lost_captures, lost_hooks, lost_requests
from atom.diag.gc_profile.words import duration, joined
from atom.diag.gc_records import check_books
from atom.diag.measured_phase import MeasuredPhase
from atom.diag.server_captures import FloatArray, Passes, ProcessSamples, ServerCaptures

__all__ = ["Evidence", "Requests", "read_evidence"]

FINISHED: Final = "requests_finished"
"""Among a scrape's values: requests that the server has finished since it started, by its own count."""
UNSEEN_NS: Final = 2_500_000_000
"""A record of a process that was killed ends up to this much before it, without anything being wrong."""
UNSEEN_SHARE: Final = 0.01
"""Of the span that a hook which left may have missed without a word."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Completed requests of the span. Times in seconds since its start; columns of one group have one length."""

    sent_s: FloatArray
    first_s: FloatArray
    ttft_ms: FloatArray
    prompt_tokens: FloatArray
    """0 where neither the server nor the plan says."""
    end_s: FloatArray
    """Ascending, on its own: when requests were complete."""
    gap_from_s: FloatArray
    gap_to_s: FloatArray
    """Consecutive arrivals of one stream, pooled over requests."""
    arrived_s: FloatArray
    arrived_tokens: FloatArray
    failed: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a run directory holds about [start_ns, end_ns)."""

    run_dir: RunDirectory
    run: Mapping[str, Any]
    start_ns: int
    end_ns: int
    captures: ServerCaptures
    passes: Passes | None
    """Of the busiest API process; None if none was watched."""
    samples: ProcessSamples | None
    requests: Requests | None
    """None if no request was recorded."""
    damage: tuple[str, ...]
    """What cannot be read or does not add up. Such a run is not valid, whatever it was sealed as."""
    notes: tuple[str, ...]
    lost_hooks: Mapping[int, str]
    """Pid → role of the processes that were hooked, and of which no record is there."""

    @property
    def watched_s(self) -> float | None:
        """How much of the span the hook saw, where that is notably less than all of it; else None."""
        own = [one for one in self.captures.passes if one.process.role == "api" and one.complete]
        if self.passes is not None:
            own = [self.passes]
        if not own or self.end_ns <= self.start_ns:
            return None
        best = max(own, key=lambda one: one.seen_ns(self.start_ns, self.end_ns))
        seen_ns, process = best.seen_ns(self.start_ns, self.end_ns), best.process
        late_ns = max(0, process.installed_ns - self.start_ns)
        left = process.end is not None or self.passes is None
        tolerated = UNSEEN_SHARE * (self.end_ns - self.start_ns)
        early_ns = self.end_ns - self.start_ns - late_ns - seen_ns
        missed = late_ns > tolerated or early_ns > (tolerated if left else UNSEEN_NS)
        return seen_ns / 1e9 if missed else None

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def seconds(self, times_ns: Any) -> FloatArray:
        """Times of CLOCK_MONOTONIC as seconds since the start of the span."""
        since: FloatArray = (np.asarray(times_ns, dtype=np.int64) - self.start_ns) / 1e9
        return since

    def why_no_pass(self) -> str:
        """Why no API process's passes are known, in a clause; empty if they are."""
        if self.passes is not None:
            return ""
        own = [one for one in self.captures.passes if one.process.role == "api"]
        lost = [f"server/gc-api-{pid}.jsonl" for pid, role in self.lost_hooks.items() if role == "api"]
        if lost and not own:
            return f"the hook's record of passes is missing ({joined(lost)})"
        files = [name for name in self.captures.damaged if name.startswith("server/gc-api-")]
        if any(not one.complete for one in own) or (files and not own):
            where = joined(files) or "the record in server/"
            return f"the hook's record of passes is damaged ({where}: passes that it wrote cannot be read)"
        return "the GC hook saw less than half of the span" if own else "no GC hook was in the API process"

    def begun_passes(self) -> tuple[FloatArray, FloatArray]:
        """Of the passes that began in the span: seconds since its start, and the pause in ms."""
        if self.passes is None:
            return np.array([]), np.array([])
        start, stop = self.passes.start_ns, self.passes.stop_ns
        begun = (start >= self.start_ns) & (start < self.end_ns)
        return self.seconds(start[begun]), (stop[begun] - start[begun]) / 1e6

    def finished(self, at_s: FloatArray) -> FloatArray | None:
        """How many requests were complete at each of these times: from the records, else by the server's own count
        (interpolated between scrapes); None if nobody counted."""
        if self.requests is not None and len(self.requests.end_s):
            return np.searchsorted(self.requests.end_s, at_s, side="right").astype(np.float64)
        counted = self.captures.scrapes.values.get(FINISHED)
        if counted is None:
            return None
        known = ~np.isnan(counted)
        times, counts = self.seconds(self.captures.scrapes.sent_ns[known]), counted[known]
        if len(counts) < 2 or np.any(np.diff(counts) < 0) or counts[-1] == counts[0]:
            return None
        finished: FloatArray = np.interp(at_s, times, counts - counts[0])
        return finished


def read_evidence(run_dir: RunDirectory) -> Evidence:
    """Everything in the directory; what is damaged or missing is said in the notes."""
    run = checked_run(run_dir)
    captures = ServerCaptures.read(run_dir.server)
    damaged: Counter[str] = Counter()
    records = _columns(read_records(run_dir, damaged=damaged))
    damaged.update(captures.damaged)
    damage = [f"{n} unreadable {'line' if n == 1 else 'lines'} in {name}" for name, n in sorted(damaged.items())]
    damage += [problem for one in captures.passes for problem in check_books(one.process)]
    damage += [*lost_requests(run_dir, records.outcomes), *lost_captures(run_dir, run), *cut_records(captures)]
    lost = lost_hooks(run_dir, run, captures)
    damage += [f"server/gc-{role}-{pid}.jsonl is missing: the process was hooked" for pid, role in lost.items()]
    start_ns, end_ns, span_notes = _span(run_dir, captures, records)
    passes = captures.api_passes(start_ns, end_ns)
    evidence = Evidence(
        run_dir=run_dir,
        run=run,
        start_ns=start_ns,
        end_ns=end_ns,
        captures=captures,
        passes=passes,
        samples=captures.api_samples(start_ns, end_ns),
        requests=records.since(start_ns) if records.ended_ns else None,
        damage=tuple(damage),
        notes=tuple(span_notes),
        lost_hooks=lost,
    )
    watched_s = evidence.watched_s
    if watched_s is None:
        return evidence
    seen = f"the collector was seen for {duration(watched_s)} of {duration(evidence.duration_s)}"
    return replace(evidence, notes=(*evidence.notes, seen))


# ---- requests ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Records:
    """What was read from the request records, before the span is known."""

    samples: Samples
    sent_ns: list[int]
    first_ns: list[int]
    completed_ns: list[int]
    prompt_tokens: list[int]
    ended_ns: list[int]
    """Of all requests, whatever became of them."""
    failed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, record: RequestRecord) -> None:
        if record.end_ns is not None:
            self.ended_ns.append(record.end_ns)
        self.outcomes[record.outcome] += 1
        self.failed += record.outcome == Outcome.FAILED
        if record.outcome != Outcome.COMPLETED:
            return
        assert record.sent_ns is not None
        assert record.first_ns is not None
        assert record.end_ns is not None
        self.samples.add(record, {})
        self.sent_ns.append(record.sent_ns)
        self.first_ns.append(record.first_ns)
        self.completed_ns.append(record.end_ns)
        prompt = record.prompt_tokens if record.prompt_tokens is not None else record.input_len
        self.prompt_tokens.append(prompt or 0)

    def since(self, start_ns: int) -> Requests:
        start_s = start_ns / 1e9
        arrivals = self.samples.tokens_at
        empty = np.array([])
        sent = (np.array(self.sent_ns, dtype=np.int64) - start_ns) / 1e9
        first = (np.array(self.first_ns, dtype=np.int64) - start_ns) / 1e9
        return Requests(
            sent_s=sent,
            first_s=first,
            ttft_ms=(first - sent) * 1e3,
            prompt_tokens=np.array(self.prompt_tokens, dtype=np.float64),
            end_s=np.sort((np.array(self.completed_ns, dtype=np.int64) - start_ns) / 1e9),
            gap_from_s=np.concatenate([empty, *(times[:-1] for times, _ in arrivals)]) - start_s,
            gap_to_s=np.concatenate([empty, *(times[1:] for times, _ in arrivals)]) - start_s,
            arrived_s=np.concatenate([empty, *(times for times, _ in arrivals)]) - start_s,
            arrived_tokens=np.concatenate([empty, *(tokens for _, tokens in arrivals)]),
            failed=self.failed,
        )


def _columns(records: Iterable[RequestRecord]) -> _Records:
    columns = _Records(Samples(), [], [], [], [], [])
    for record in records:
        columns.add(record)
    return columns


# ---- the span ----------------------------------------------------------------------------------------------------


def _span(run_dir: RunDirectory, captures: ServerCaptures, records: _Records) -> tuple[int, int, list[str]]:
    phase, notes = MeasuredPhase.read(run_dir), []
    start, end = phase.start_ns, phase.end_ns
    if start is None:
        start = min(records.sent_ns, default=None)
    if start is None:
        start = captures.first_sign_ns()
        if start is not None:
            notes.append("no measured phase is recorded: the span is that of the captures")
    if end is None:
        signs = [phase.last_line_ns, *records.ended_ns, captures.last_sign_ns()]
        end = max((sign for sign in signs if sign is not None), default=None)
        if end is not None:
            notes.append("the run did not come to its end: the span goes up to the last sign of life")
    if start is None or end is None or end <= start:
        return 0, 0, ["nothing was recorded"]
    return start, end, notes
