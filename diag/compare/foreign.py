"""Results of other tools as request records, so that they are scored like a run of `atom bench`: the JSON of
`vllm bench serve --save-result --save-detailed` (`atom bench` writes it too), and AIPerf's `profile_export.jsonl` with,
beside it, `profile_export_aiperf.json`.

These files come from anywhere: every value is checked, and an error names the file and the place. Their clocks are not
known to be one, so runs of them are never laid over each other. What is scored are this project's definitions, applied
to the times that the other tool noted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from atom.bench.accounting import Counts
from atom.bench.agentic.aiperf_records import record_of_line
from atom.bench.aiperf_export import RECORDS_FILE, SUMMARY_FILE
from atom.bench.clocks import ClockOffset, OffsetMeasurement
from atom.bench.records import MEASURED, Outcome, RequestRecord, is_count
from atom.bench.regular_file import read_regular
from atom.bench.rundir import JsonlFile
from atom.bench.wall_clock import WallClock
from atom.diag.compare.recorded import Recorded
from atom.recipes.errors import UsageError

__all__ = ["read_foreign"]

MOST_BYTES: Final = 2 << 30
"""Of a JSON file, which is read in one."""
_MOST_S: Final = 1e9
_VLLM_LISTS: Final = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "errors")
_CLOSED: Final = ("concurrency", "user_centric")
"""AIPerf's types of phases without a schedule."""


def read_foreign(path: Path) -> Recorded:
    """UsageError if `path` is no result of a tool that is known."""
    if (path / RECORDS_FILE).is_file():
        return _aiperf(path / RECORDS_FILE)
    if path.name == SUMMARY_FILE and path.with_name(RECORDS_FILE).is_file():
        return _aiperf(path.with_name(RECORDS_FILE))
    if path.is_file() and path.suffix == ".jsonl":
        return _aiperf(path)
    if path.is_file():
        return _vllm(path, _read_json(path))
    if path.is_dir():
        raise UsageError(f"{path} is no run directory, and has no {RECORDS_FILE} of AIPerf")
    raise UsageError(f"{path}: there is no such file or directory")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, MOST_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            what = "holds several results (--append-result): split it into one file each"
            raise UsageError(f"{path} {what}") from None
        raise UsageError(f"{path} is not one JSON object: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object")
    return value


def _vllm(path: Path, result: Mapping[str, Any]) -> Recorded:
    if "ttfts" not in result and "mean_ttft_ms" in result:
        raise UsageError(f"{path} has no requests one by one: save it with --save-result --save-detailed")
    columns = {name: result.get(name) for name in _VLLM_LISTS}
    missing = [name for name, column in columns.items() if not isinstance(column, list)]
    if missing == ["start_times"]:
        raise UsageError(f"{path} has no start_times: save it with a newer vLLM")
    if missing:
        raise UsageError(f"{path} is no result of vllm bench serve: it has no list {missing[0]}")
    lengths = {len(column or ()) for column in columns.values()}
    if len(lengths) > 1:
        raise UsageError(f"{path}: {', '.join(_VLLM_LISTS)} must be lists of one length, they have {sorted(lengths)}")
    rate = result.get("request_rate")
    scheduled = isinstance(rate, int | float) and math.isfinite(rate)
    queued = result.get("queue_times")
    records = []
    for i in range(lengths.pop()):
        try:
            record = _vllm_record(i, {name: column[i] for name, column in columns.items() if column is not None})
            if scheduled and record.sent_ns is not None:
                waited = _ns(queued[i], "queue_times") if isinstance(queued, list) and i < len(queued) else 0
                record.scheduled_ns = max(0, record.sent_ns - waited)
        except ValueError as error:
            raise UsageError(f"{path}, request {i}: {error}") from None
        records.append(record)
    load: dict[str, Any] = {
        "name": "vllm bench serve",
        "num_prompts": _count(result.get("num_prompts")) or len(records),
        "max_concurrency": _count(result.get("max_concurrency")),
        "request_rate": rate if scheduled else "inf",
        "input_tokens": sum(one.input_len or 0 for one in records),
        "model": result.get("model_id") if isinstance(result.get("model_id"), str) else None,
        "ramp": {} if isinstance(result.get("ramp_up_strategy"), str) else None,
    }
    notes = ["recorded by vllm bench serve: chunks that came in one read are one arrival here, and no gap of 0"]
    return _recorded(path, "vllm bench serve", records, load, notes)


def _vllm_record(index: int, row: Mapping[str, Any]) -> RequestRecord:
    """ValueError says what is wrong. A request that failed before it was sent has no times."""
    failed = bool(row["errors"]) or not row["ttfts"]
    sent = (
        None
        if row["start_times"] is None or (failed and not row["start_times"])
        else _ns(row["start_times"], "start_times")
    )
    record = RequestRecord(index=index, sent_ns=sent, end_ns=sent, input_len=_count(row["input_lens"]))
    if failed or sent is None:
        record.error_class, record.error_message = "error", str(row["errors"])[:500] if row["errors"] else "no token"
        return record
    gaps = row["itls"]
    if not isinstance(gaps, list):
        raise ValueError("itls must be a list")
    record.outcome = Outcome.COMPLETED
    record.first_ns = sent + _ns(row["ttfts"], "ttfts")
    record.chunk_ns = list(accumulate((_ns(gap, "itls") for gap in gaps), initial=record.first_ns))
    record.last_ns = record.end_ns = record.chunk_ns[-1]
    record.output_tokens = _count(row["output_lens"])
    return record


def _ns(seconds: object, name: str) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < _MOST_S:
        raise ValueError(f"{name}: must be a time in seconds, got {str(seconds)[:40]!r}")
    return round(seconds * 1e9)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and is_count(value) else None


def _aiperf(path: Path) -> Recorded:
    file, damaged = JsonlFile(path), 0
    clock = WallClock(0, 0)  # as it is: nanoseconds since 1970
    records: list[RequestRecord] = []
    for index, line in enumerate(file):
        try:
            record = record_of_line(index, line, clock)
            record.prompt_tokens = record.prompt_tokens or _input_tokens(line)
        except ValueError:
            damaged += 1
            continue
        if record.phase == MEASURED:
            records.append(record)
    if not records:
        raise UsageError(f"{path} has no request of AIPerf's profiling phase")
    # From their beginning on: times of streams go through floating-point seconds, too coarse for those since 1970.
    first = min(moment for one in records for moment in (one.ready_ns, one.sent_ns) if moment is not None)
    for record in records:
        record.shift(ClockOffset((OffsetMeasurement(first, -first, 0),)))
    summary_file = path.with_name(SUMMARY_FILE)
    summary = _read_json(summary_file) if summary_file.is_file() else {}
    load, scheduled = _aiperf_load(summary)
    if scheduled:
        for record in records:
            record.scheduled_ns = record.ready_ns if record.ready_ns is not None else record.sent_ns
    bad = damaged + file.damaged
    return _recorded(
        path,
        "AIPerf",
        records,
        load,
        ["recorded by AIPerf: events of one read of its client have one time"],
        damaged={path.name: bad} if bad else {},
        interrupted=summary.get("was_cancelled") is True,
    )


def _input_tokens(line: Mapping[str, Any]) -> int | None:
    metric = (line.get("metrics") or {}).get("input_sequence_length")
    return _count(metric.get("value")) if isinstance(metric, dict) else None


def _aiperf_load(summary: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The load as its configuration says it, as far as it does; and whether its requests had a schedule."""
    config = summary.get("input_config")
    phases = config.get("phases") if isinstance(config, dict) else None
    profiling = [
        phase
        for phase in (phases if isinstance(phases, list) else ())
        if isinstance(phase, dict) and phase.get("kind", phase.get("name")) in ("profiling", None)
    ]
    phase = profiling[-1] if profiling else {}
    duration, requests = phase.get("duration"), _count(phase.get("requests"))
    kind = phase.get("type")
    limit = _count(phase.get("concurrency"))
    load = {
        "name": "AIPerf",
        "num_prompts": requests,
        "duration_s": float(duration) if isinstance(duration, int | float) and requests is None else None,
        "max_concurrency": limit,
    }
    return load, isinstance(kind, str) and kind not in _CLOSED


def _recorded(
    path: Path,
    tool: str,
    records: Sequence[RequestRecord],
    load: Mapping[str, Any],
    notes: Sequence[str],
    *,
    damaged: Mapping[str, int] | None = None,
    interrupted: bool = False,
) -> Recorded:
    sent = [one.sent_ns for one in records if one.sent_ns is not None]
    ends = [one.end_ns for one in records if one.end_ns is not None]
    start, end = min(sent, default=0), max(ends, default=0)
    outcomes = Counter(one.outcome for one in records)
    return Recorded(
        path=path,
        tool=tool,
        records=sorted(records, key=lambda one: (one.sent_ns or 0, one.index)),
        start_ns=start,
        end_ns=max(start, end),
        clock=None,
        load=load,
        counts=Counts.of(outcomes, started=len(records), sent=len(sent)),
        interrupted=interrupted,
        damaged=damaged or {},
        notes=notes,
    )
