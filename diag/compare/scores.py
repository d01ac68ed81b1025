"""The metrics of one run in its window, each with the standard error of its logarithm; and why a run is no evidence.

Latencies are those of `bench/metrics.py`, of completed requests. `log_se` is what one run knows about itself
(`compare/blocks.py`); how runs differ is for pairs to say (`compare/statistics.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from atom.bench.accounting import Counts
from atom.bench.engine_window import EngineWindow, step_times
from atom.bench.metrics import FloatArray, Samples, collect, is_supported
from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import Validity
from atom.bench.slices import IntArray, stream_arrivals
from atom.diag.compare.blocks import Blocks
from atom.diag.compare.mechanism import run_facts
from atom.diag.compare.metrics import METRICS
from atom.diag.compare.recorded import Recorded, read_recorded
from atom.diag.compare.window import Window, common_windows
from atom.diag.server_captures import read_scrapes

__all__ = ["LOAD_ENDED", "RunScore", "Score", "censored", "score_matched", "score_run"]

LOAD_ENDED: Final = "the load ended early"


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of one run. `value` in the metric's unit."""

    value: float
    log_se: float | None
    """Standard error of log(value) by blocks of time; None where there is too little."""
    n: int
    """Samples (gaps, requests, tokens, steps)."""
    supported: bool = True
    """False: a quantile with fewer than ten samples beyond it."""


@dataclass(frozen=True, slots=True)
class RunScore:
    """What a run is worth in a comparison."""

    metrics: Mapping[str, Score]
    """By name of `compare/metrics.py`; what was not measured is not there."""
    counts: Counts
    window: Window
    censored: Sequence[str] = ()
    """Why its throughput is raw, and it can be no winner."""
    invalid: Sequence[str] = ()
    """Why it is no valid evidence: the client was saturated, lines are damaged."""
    notes: Sequence[str] = ()
    facts: Mapping[str, float] = field(default_factory=dict)
    """What it did in the window besides (`compare/mechanism.py`)."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "metrics": {name: asdict(score) for name, score in self.metrics.items()},
            "counts": asdict(self.counts),
            "window": {**self.window.as_dict(), "seconds": self.window.seconds},
            "censored": list(self.censored),
            "invalid": list(self.invalid),
            "notes": list(self.notes),
            "facts": dict(self.facts),
        }


def score_matched(base: Path | Recorded, head: Path | Recorded, *, concurrent: bool) -> tuple[RunScore, RunScore]:
    """Both runs of a matched run. `concurrent`: they ran at the same time, and are scored on the time in which both
    were in steady state; else, and where they share no clock, each on its own. UsageError as `read_recorded`."""
    runs = _recorded(base), _recorded(head)
    windows = runs[0].steady(), runs[1].steady()
    whole = runs[0].whole, runs[1].whole
    if concurrent and runs[0].clock is not None and runs[0].clock == runs[1].clock:
        windows = common_windows(windows, whole)
    elif not all(one.steady for one in windows):
        windows = common_windows(windows, whole)  # both as a whole
    return score_run(runs[0], windows[0]), score_run(runs[1], windows[1])


def score_run(run: Path | Recorded, window: Window | None = None) -> RunScore:
    """`run`: a run directory, or a result of another tool. `window`: None: its own steady state. UsageError if it
    cannot be read."""
    run = _recorded(run)
    window = run.steady() if window is None else window
    metrics = _measure(run, window) if window.end_ns > window.start_ns else {}
    return RunScore(
        metrics={name: metrics[name] for name in METRICS if name in metrics},
        counts=run.counts,
        window=window,
        censored=censored(run),
        invalid=_invalid(run),
        notes=[*run.notes, *([] if window.note is None else [f"scored on the whole measured phase: {window.note}"])],
        facts=run_facts(run.path, run.records, window),
    )


def censored(run: Path | Recorded) -> list[str]:
    """Why a run is censored: requests of a load of a given number are missing or failed, those of a load of a given
    duration failed beyond its threshold, or it ended early. Requests that the load cancels on purpose do not count."""
    run = _recorded(run)
    counts, reasons = run.counts, []
    done = counts.completed + counts.failed
    if run.server_gone is not None:
        reasons.append(run.server_gone)
    elif run.interrupted:
        reasons.append(LOAD_ENDED)
    elif not run.ended:
        reasons.append("the load did not come to its end")
    if counts.failed and run.planned is not None:
        reasons.append(f"{counts.failed} of {done} requests failed")
    elif done and counts.failed / done > run.threshold:
        reasons.append(f"{counts.failed} of {done} requests failed, more than {run.threshold:.0%}")
    if run.planned is not None and (missing := run.planned - counts.recorded) > 0:
        reasons.append(f"{missing} of {run.planned} requests are missing")
    if not counts.completed:
        reasons.append("no request completed")
    return reasons


def _invalid(run: Recorded) -> list[str]:
    reasons = [] if run.validity is Validity.VALID else list(run.reasons)
    if run.validity is None:
        reasons.append("the run was never sealed: it was killed")
    known = set(reasons)
    damage = [f"{n} unreadable {'line' if n == 1 else 'lines'} in {name}" for name, n in sorted(run.damaged.items())]
    return [*reasons, *(line for line in damage if line not in known)]


def _recorded(run: Path | Recorded) -> Recorded:
    return run if isinstance(run, Recorded) else read_recorded(run)


def _measure(run: Recorded, window: Window) -> dict[str, Score]:
    completed = [one for one in run.records if one.outcome == Outcome.COMPLETED]
    blocks = Blocks(window, _usual_seconds(completed, window))
    outside: list[RequestRecord] = []
    sent_in: list[list[RequestRecord]] = [[] for _ in range(blocks.count)]
    for record in completed:
        if record.sent_ns is not None and window.holds(record.sent_ns):
            sent_in[blocks.of_one(record.sent_ns)].append(record)
        else:
            outside.append(record)
    samples = [collect(part, {}) for part in sent_in]
    return {
        **_latencies(samples, blocks),
        **_arrivals([*samples, collect(outside, {})], window, blocks),
        **_rates(completed, window, blocks),
        **_server_step(run, window),
    }


def _usual_seconds(completed: Sequence[RequestRecord], window: Window) -> float:
    """Mean time in the server of the requests that ended in the window: what a block should cover."""
    times = [
        one.last_ns - one.sent_ns
        for one in completed
        if one.last_ns is not None and one.sent_ns is not None and window.holds(one.last_ns)
    ]
    return float(np.mean(times)) / 1e9 if times else 0.0


def _latencies(samples: Sequence[Samples], blocks: Blocks) -> dict[str, Score]:
    """Of the requests sent in each block."""
    scores: dict[str, Score] = {}
    for name in ("ttft", "tpot", "e2el"):
        parts = [np.asarray(getattr(one, name), dtype=np.float64) for one in samples]
        places = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        scores |= _distribution(name, np.concatenate(parts), places, blocks)
    return scores


def _arrivals(samples: Sequence[Samples], window: Window, blocks: Blocks) -> dict[str, Score]:
    """Gaps and tokens of all streams, by when they arrived."""
    found = [stream_arrivals(one) for one in samples]
    moments, tokens, gaps, later = (np.concatenate([one[i] for one in found]) for i in range(4))
    inside = _inside(later, window)
    scores = _distribution("itl", gaps[inside], blocks.of(later[inside]), blocks)
    inside = _inside(moments, window)
    return scores | _rate("output_throughput", moments[inside], tokens[inside], window, blocks)


def _rates(completed: Sequence[RequestRecord], window: Window, blocks: Blocks) -> dict[str, Score]:
    lasts = np.array([one.last_ns for one in completed if window.holds(one.last_ns)], dtype=np.int64)
    prompts = [
        (one.first_ns, one.prompt_tokens if one.prompt_tokens is not None else one.input_len or 0)
        for one in completed
        if window.holds(one.first_ns)
    ]
    pairs = np.array(prompts, dtype=np.int64).reshape(-1, 2)
    return {
        **_rate("request_throughput", lasts, np.ones(len(lasts)), window, blocks),
        **_rate("input_throughput", pairs[:, 0], pairs[:, 1].astype(np.float64), window, blocks),
    }


def _server_step(run: Recorded, window: Window) -> dict[str, Score]:
    server = run.path / "server"
    if not server.is_dir():
        return {}
    scrapes = read_scrapes(server)
    times = step_times(EngineWindow(scrapes.sent_ns, scrapes.values, window.start_ns, window.end_ns))
    each_ms = times.each_s[np.isfinite(times.each_s)] * 1e3
    if not len(each_ms) or not np.median(each_ms) > 0:
        return {}
    seconds = Blocks(window, window.seconds / len(each_ms))
    places = np.arange(len(each_ms)) * seconds.count // len(each_ms)
    se = seconds.se_of_quantile(places, each_ms, 0.5)
    return {"server_step_p50": Score(float(np.median(each_ms)), se, times.n)}


def _inside(moments_ns: IntArray, window: Window) -> Any:
    return (moments_ns >= window.start_ns) & (moments_ns < window.end_ns)


def _distribution(name: str, values: FloatArray, places: IntArray, blocks: Blocks) -> dict[str, Score]:
    """The registered metrics of the distribution `name`, in milliseconds."""
    scores: dict[str, Score] = {}
    for full, metric in METRICS.items():
        if full.rpartition("_")[0] != name or not len(values):
            continue
        q = metric.quantile
        value = float(values.mean() if q is None else np.quantile(values, q))
        if value <= 0:
            continue  # a ratio to nothing says nothing
        se = blocks.se_of_mean(places, values) if q is None else blocks.se_of_quantile(places, values, q)
        scores[full] = Score(value, se, len(values), q is None or is_supported(len(values), q * 100))
    return scores


def _rate(name: str, moments: IntArray, amounts: FloatArray, window: Window, blocks: Blocks) -> dict[str, Score]:
    total = float(amounts.sum())
    if total <= 0:
        return {}
    se = blocks.se_of_total(blocks.of(moments), amounts)
    return {name: Score(total / window.seconds, se, len(moments))}
