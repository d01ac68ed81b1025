"""From a run directory to its figures: everything a table, a gate or a script reads, each with unit, definition and n.

Works on what was recorded, so a run that was killed is summed up like one that ended. What the figures mean is in
`bench/metrics.py`; whether they may be believed is decided in `bench/validity.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from atom.bench.accounting import Counts
from atom.bench.agentic.report import AgenticSection, agentic_section, replays_sessions
from atom.bench.client_window import ClientWindow, WorkerWindow, read_client_window
from atom.bench.clocks import clock_notes
from atom.bench.gsm8k.section import AccuracySection, accuracy_section, asks_word_problems
from atom.bench.load import DEFAULT_FAILED_REQUEST_THRESHOLD
from atom.bench.metrics import DISTRIBUTIONS, RATES, Figure, FloatArray, Samples, collect, distribution
from atom.bench.notes import notes_of
from atom.bench.records import UNFINISHED, Outcome, RequestRecord, read_records
from atom.bench.run_facts import checked_run
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.schedule import Kept, kept
from atom.bench.slices import slice_width_s, slices_of
from atom.bench.validity import Client, Verdict, judge

__all__ = ["DEFAULT_PERCENTILES", "summarize"]

DEFAULT_PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0)
_FROM_RECORDS: Final = "Σ (ended − sent) of the records ÷ wall time: the client did not count it live"


def summarize(
    run_dir: RunDirectory,
    *,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    extra: Mapping[str, Mapping[str, Any]] | None = None,
    more_notes: Sequence[str] = (),
    write: bool = True,
) -> dict[str, Any]:
    """Sum up `run_dir`, write summary.json (unless told not to) and return it.

    `extra` adds figures of the server's side, ready made, and `more_notes` what is to be said about them.
    A sealed run keeps its verdict: whoever sealed it may have known more than the records say. But a directory that was
    damaged since is no valid evidence. UsageError for a file that this version cannot read, by name.
    """
    run = checked_run(run_dir)
    load: dict[str, Any] = run.get("load") or {}
    damaged: Counter[str] = Counter()
    records = list(read_records(run_dir, damaged=damaged))
    window = read_client_window(run_dir, run, damaged)
    start, end = _bounds(window, run, records)
    wall = max(0, end - start) / 1e9
    slo = load.get("goodput_ms") or {}
    samples = collect(records, slo)
    samples.connect.extend(record.connect_ns / 1e6 for record in records if record.connect_ns is not None)
    outcomes = Counter(record.outcome for record in records)
    figures: dict[str, Figure] = {}
    for name in DISTRIBUTIONS:
        values = getattr(samples, name)
        if len(values) or name not in ("ttft_scheduled", "per_token_itl", "connect"):
            figures |= distribution(name, values, sorted({*percentiles, 50.0, 99.0}))
    schedule, time_in_system = kept(records), _time_in_system(records)
    figures |= _rates(samples, outcomes, records, wall, window, slo, schedule, time_in_system[1])
    counted_live = window.busy_ns is not None or figures["mean_concurrency"].value is None
    client = _client(window, records)
    figures |= client.figures()
    figures |= _stamping(window)
    counts = Counts.of(
        outcomes,
        started=window.started if window.started is not None else len(records),
        sent=window.sent if window.sent is not None else _sent(records),
    )
    accuracy: AccuracySection | None = None
    if asks_word_problems(load):
        accuracy = accuracy_section(run_dir, run, load, records, (start, end))
        figures |= accuracy.figures
    agentic: AgenticSection | None = None
    if replays_sessions(load):
        cut_short = window.interrupted or not window.ended
        agentic = agentic_section(run_dir, load, records, start, interrupted=cut_short)
        figures |= agentic.figures
    errors = _errors(records)
    verdict = judge(
        counts,
        client,
        figures,
        threshold=_or(load.get("failed_request_threshold"), DEFAULT_FAILED_REQUEST_THRESHOLD),
        interrupted=window.interrupted,
        ended=window.ended,
        recorded=time_in_system,
        wall_s=wall,
        busy_ns=window.busy_ns,
        planned=load.get("num_prompts"),
        timed=accuracy is None,
        sends=load.get("name") != "observe",
        gone=window.server_gone,
        unanswered=_unanswered(records, max(samples.ttft, default=0.0)),
        errors=errors,
        more_reasons=[reason for section in (accuracy, agentic) if section is not None for reason in section.reasons],
        schedule=schedule,
    )
    damage = _damage(run_dir, run, window, damaged, verdict)
    validity, reasons = _verdict(run, verdict, [*damage, *(() if accuracy is None else accuracy.damage)])
    summary: dict[str, Any] = {
        "title": load.get("name") if accuracy is None else accuracy.title,
        "load": load,
        "server": run.get("target") or {},
        "validity": str(validity),
        "reasons": reasons,
        "checks": [check.as_dict() for check in verdict.checks],
        "notes": [
            *(load.get("source") or {}).get("notes", []),
            *notes_of(load, samples, records, figures),
            *clock_notes(run),
            *verdict.notes,
            *([] if counted_live else [f"mean concurrency is {_FROM_RECORDS}"]),
            *more_notes,
        ],
        "errors": errors,
        "server_gone": window.server_gone,
        "anomalies": dict(sum((Counter(record.anomalies) for record in records), Counter())),
        "workers": client.each(),
        "start_ns": start,
        "end_ns": end,
        "figures": {**{name: figure.as_dict() for name, figure in figures.items()}, **(extra or {})},
        "slices": slices_of(records, samples, start, end, slice_width_s(load.get("slice_duration_s"))).as_dict(),
    }
    if accuracy is not None:
        summary["accuracy"] = accuracy.content
    if agentic is not None:
        summary["agentic"] = agentic.content
    if write:
        run_dir.write_summary(summary)
    return summary


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _verdict(run: Mapping[str, Any], verdict: Verdict, damage: Sequence[str]) -> tuple[Validity, list[str]]:
    sealed = run.get("validity")
    validity = Validity(sealed) if sealed is not None else verdict.validity
    reasons = list(run.get("reasons") or ()) if sealed is not None else verdict.reasons
    if damage and validity is Validity.VALID:
        validity = Validity.NOT_VALID
    return validity, [*reasons, *(reason for reason in damage if reason not in reasons)]


def _damage(
    run_dir: RunDirectory, run: Mapping[str, Any], window: ClientWindow, damaged: Mapping[str, int], verdict: Verdict
) -> list[str]:
    """What is missing from the directory or spoiled in it, whatever was thought of the run when it was sealed."""
    reasons = [f"{n} unreadable {'line' if n == 1 else 'lines'} in {name}" for name, n in sorted(damaged.items())]
    sealed = run.get("validity") == Validity.VALID
    present = {path.stem for path in run_dir.request_files()}
    for name, worker in window.workers.items():
        if worker.started and name not in present:
            reasons.append(f"requests/{name}.jsonl is missing: {worker.started} requests were started")
    if sealed and not window.ended:
        reasons.append("client/*.jsonl is missing or incomplete: how the run ended is not known")
    if sealed:
        reasons += [f"{check.name} does not hold: {check.detail}" for check in verdict.checks if check.ok is False]
    return reasons


def _bounds(window: ClientWindow, run: Mapping[str, Any], records: Sequence[RequestRecord]) -> tuple[int, int]:
    """Start of the measured phase and the end of its last request."""
    ends = [record.end_ns for record in records if record.end_ns is not None]
    starts = [record.sent_ns for record in records if record.sent_ns is not None]
    end = max(ends, default=window.end_ns or 0)
    start = window.start_ns or run.get("measured_start_ns") or min(starts, default=end)
    return start, max(start, end)


def _rates(
    samples: Samples,
    outcomes: Mapping[str, int],
    records: Sequence[RequestRecord],
    wall: float,
    window: ClientWindow,
    slo: Mapping[str, float],
    schedule: Kept | None,
    recorded_ns: int,
) -> dict[str, Figure]:
    """`recorded_ns`: Σ (ended − sent) of the records, where no client counted it live."""
    completed = outcomes[Outcome.COMPLETED]

    def per_second(amount: float) -> float | None:
        return amount / wall if wall > 0 else None

    def ratio(part: float, whole: float) -> float | None:
        return part / whole if whole else None

    busy_ns = window.busy_ns
    if busy_ns is None and window.ended:
        busy_ns = recorded_ns
    values: dict[str, tuple[float | None, int]] = {
        "duration": (wall, 1),
        **(
            {}
            if schedule is None
            else {
                "requested_rate": (schedule.requested, schedule.n),
                "achieved_rate": (schedule.achieved, schedule.n),
            }
        ),
        "started": (window.started if window.started is not None else len(records), len(records)),
        "sent": (window.sent if window.sent is not None else _sent(records), len(records)),
        "completed": (completed, len(records)),
        "failed": (outcomes[Outcome.FAILED], len(records)),
        "cancelled": (outcomes[Outcome.CANCELLED], len(records)),
        "total_input_tokens": (samples.input_tokens, completed),
        "total_output_tokens": (samples.output_tokens, completed),
        "request_throughput": (per_second(completed), completed),
        "output_throughput": (per_second(samples.output_tokens), completed),
        "total_token_throughput": (per_second(samples.input_tokens + samples.output_tokens), completed),
        "request_goodput": (per_second(samples.good) if slo else None, completed),
        "max_output_tokens_per_s": (_most_tokens_per_second(samples) if wall >= 1 else None, completed),
        "max_concurrent_requests": (_most_at_once(records), len(records)),
        "tokens_per_chunk": (ratio(samples.output_tokens, samples.chunks), samples.chunks),
        "coalesced_share": (ratio(samples.coalesced, samples.chunks), samples.chunks),
        "merged_share": (ratio(samples.merged, samples.counted_chunks), samples.counted_chunks),
        "cached_share": (ratio(samples.cached, samples.cached_of), samples.cached_of),
        **(
            {"theoretical_cached_share": (ratio(samples.theoretical, samples.theoretical_of), samples.theoretical_of)}
            if samples.theoretical_of
            else {}
        ),
        "mean_concurrency": (ratio(busy_ns / 1e9, wall) if busy_ns is not None else None, 1),
    }
    figures = {name: Figure(value, *_unit(name, n)) for name, (value, n) in values.items()}
    if busy_ns is not None and window.busy_ns is None:
        figures["mean_concurrency"] = replace(figures["mean_concurrency"], definition=_FROM_RECORDS)
    return figures


def _unit(name: str, n: int) -> tuple[str, int, str]:
    unit, definition = RATES[name]
    return unit, n, definition


def _most_tokens_per_second(samples: Samples) -> float | None:
    """In any one second, wherever it begins."""
    if not samples.tokens_at:
        return None
    times: FloatArray = np.concatenate([times for times, _ in samples.tokens_at])
    tokens: FloatArray = np.concatenate([tokens for _, tokens in samples.tokens_at])
    order = np.argsort(times)
    times, so_far = times[order], np.concatenate([[0.0], np.cumsum(tokens[order])])
    within = np.searchsorted(times, times + 1.0, side="left")
    return float((so_far[within] - so_far[:-1]).max())


def _most_at_once(records: Sequence[RequestRecord]) -> int | None:
    edges = [(r.sent_ns, 1) for r in records if r.sent_ns is not None and r.end_ns is not None]
    edges += [(r.end_ns, -1) for r in records if r.sent_ns is not None and r.end_ns is not None]
    if not edges:
        return None
    return int(np.cumsum([step for _, step in sorted(edges)]).max())


def _sent(records: Sequence[RequestRecord]) -> int:
    return sum(record.sent_ns is not None for record in records)


def _unanswered(records: Sequence[RequestRecord], longest_ttft_ms: float) -> int:
    """Requests cut by the end of the grace period in a longer wait for their first token than any that completed: those
    that were sent just before it are cut in every run."""
    return sum(
        r.error_class == UNFINISHED
        and r.first_ns is None
        and r.sent_ns is not None
        and r.end_ns is not None
        and (r.end_ns - r.sent_ns) / 1e6 > longest_ttft_ms
        for r in records
    )


def _time_in_system(records: Sequence[RequestRecord]) -> tuple[int, int]:
    """How many were sent and ended, and Σ (ended − sent) in nanoseconds."""
    times = [r.end_ns - r.sent_ns for r in records if r.end_ns is not None and r.sent_ns is not None]
    return len(times), sum(times)


def _client(window: ClientWindow, records: Sequence[RequestRecord]) -> Client:
    late: dict[str, list[float]] = {}
    for r in records:
        if r.sent_ns is not None and r.ready_ns is not None and not r.retries:
            late.setdefault(r.worker, []).append((r.sent_ns - r.ready_ns - (r.connect_ns or 0)) / 1e6)
    names = [*window.workers, *(name for name in late if name not in window.workers)]
    return Client.merged(
        [
            Client(cpu_share=worker.cpu_share, lag_ms=worker.lag_ms, send_lag_ms=late.get(name, ()), worker=name)
            for name, worker in ((name, window.workers.get(name, WorkerWindow())) for name in names)
        ]
    )


def _stamping(window: ClientWindow) -> dict[str, Figure]:
    """Where times of arrival come from, and how late the client noticed that a response was over."""
    (kernel, read), reaction_ns, sent = window.stamps, window.reaction_ns, window.sent or 0
    values: dict[str, tuple[float | None, int]] = {
        "kernel_stamp_share": (kernel / (kernel + read) if kernel + read else None, kernel + read),
        "mean_reaction_ms": (reaction_ns / 1e6 / sent if reaction_ns is not None and sent else None, sent),
    }
    return {name: Figure(value, *_unit(name, n)) for name, (value, n) in values.items()}


def _errors(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Classes of error, most frequent first, each with the message seen most."""
    messages: dict[str, Counter[str]] = {}
    for record in records:
        if record.outcome == Outcome.FAILED:
            messages.setdefault(record.error_class or "?", Counter())[record.error_message or ""] += 1
    classes = [
        {"class": name, "count": seen.total(), "message": seen.most_common(1)[0][0]} for name, seen in messages.items()
    ]
    return sorted(classes, key=lambda entry: -entry["count"])
