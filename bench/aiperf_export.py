"""A run in AIPerf's files: a line per request in `profile_export.jsonl`, statistics in `profile_export_aiperf.json`.

AIPerf's own readers (`aiperf plot`, `aiperf analyze swim-lane`) take them. Its definitions apply there, not those of
`bench/metrics.py`: its inter_token_latency is one value per request (our TPOT), its inter_chunk_latency the gaps of one
stream, its times those of the wall clock. What was not measured is left out. Nothing in these files claims that AIPerf
made them: they name no version of it, and a scenario's `submission_valid` is false. docs/agentic.md has the mapping.
"""

from __future__ import annotations

import json
import shlex
import uuid
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from atom.bench.agentic.tags import AgentTags
from atom.bench.arrivals import ArrivalPattern, Ramp
from atom.bench.records import MEASURED, Outcome, RequestRecord, read_records
from atom.bench.run_facts import checked_run
from atom.bench.rundir import RunDirectory, write_json
from atom.bench.wall_clock import WallClock
from atom.recipes.errors import RunError, UsageError

__all__ = ["RECORDS_FILE", "SCHEMA_VERSION", "SUMMARY_FILE", "export_aiperf"]

RECORDS_FILE: Final = "profile_export.jsonl"
SUMMARY_FILE: Final = "profile_export_aiperf.json"
SCHEMA_VERSION: Final = "1.4"
"""Of AIPerf 0.13's JsonExportData."""
_PERCENTILES: Final = (1, 5, 10, 25, 50, 75, 90, 95, 99)

_UNITS: Final[Mapping[str, str]] = {
    "request_latency": "ms",
    "time_to_first_token": "ms",
    "time_to_second_token": "ms",
    "inter_token_latency": "ms",
    "inter_chunk_latency": "ms",
    "decode_duration": "ms",
    "input_sequence_length": "tokens",
    "output_sequence_length": "tokens",
    "output_token_throughput_per_user": "tokens/sec/user",
    "prefill_throughput_per_user": "tokens/sec/user",
    "e2e_output_token_throughput": "tokens/sec/user",
    "usage_prompt_tokens": "tokens",
    "usage_completion_tokens": "tokens",
    "usage_total_tokens": "tokens",
    "usage_prompt_cache_read_tokens": "tokens",
}
"""Tag of a request's metric → its unit."""

_FORMATS: Final[Mapping[str, str]] = {
    "mooncake": "mooncake_trace",
    "bailian": "bailian_trace",
    "burstgpt": "burst_gpt_trace",
}
"""A trace's format → AIPerf's name of it."""
_RAMP_STEPS: Final = 16
"""Straight pieces of an exponential ramp."""

Value = float | int | list[float]


def export_aiperf(run_dir: RunDirectory, summary: Mapping[str, Any], directory: Path) -> None:
    """Write both files into `directory`, from `run_dir`'s records and its `summary`. RunError names a file that cannot
    be written."""
    run = checked_run(run_dir)
    clock = WallClock.of_run(run)
    measured, warmup = _Statistics(), _Statistics()
    numbers = _Numbers()
    path = directory / RECORDS_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for record in read_records(run_dir, None):
                metrics = request_metrics(record)
                (measured if record.phase == MEASURED else warmup).add(record, metrics)
                line = _line(record, metrics, clock, numbers)
                if line is not None:
                    file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
    except OSError as error:
        raise RunError(f"cannot write {error.filename or path}: {error.strerror}") from None
    write_json(directory / SUMMARY_FILE, _summary(run_dir, run, summary, clock, measured, warmup))


def request_metrics(record: RequestRecord) -> dict[str, Value]:
    """Tag → value of one completed request; empty for any other."""
    if record.outcome != Outcome.COMPLETED:
        return {}
    values: dict[str, Value] = {}
    prompt = record.prompt_tokens if record.prompt_tokens is not None else record.input_len
    output = record.output_tokens
    for tag, tokens in (
        ("input_sequence_length", prompt),
        ("output_sequence_length", output),
        ("usage_prompt_tokens", record.prompt_tokens),
        ("usage_completion_tokens", output if record.tokens_from == "usage" else None),
        ("usage_prompt_cache_read_tokens", record.cached_tokens),
    ):
        if tokens is not None:
            values[tag] = tokens
    if record.prompt_tokens is not None and record.tokens_from == "usage" and output is not None:
        values["usage_total_tokens"] = record.prompt_tokens + output
    if record.sent_ns is not None and record.first_ns is not None and record.last_ns is not None:
        ttft, decode = record.first_ns - record.sent_ns, record.last_ns - record.first_ns
        values |= _times(record.chunk_ns, ttft, decode, prompt, output)
    return values


def _times(
    chunk_ns: Sequence[int], ttft_ns: int, decode_ns: int, prompt: int | None, output: int | None
) -> dict[str, Value]:
    latency_ns = ttft_ns + decode_ns
    values: dict[str, Value] = {
        "request_latency": latency_ns / 1e6,
        "time_to_first_token": ttft_ns / 1e6,
        "decode_duration": decode_ns / 1e6,
    }
    gaps = (np.diff(np.unique(np.asarray(chunk_ns, dtype=np.int64))) / 1e6).tolist()
    if gaps:
        values["time_to_second_token"] = gaps[0]
        values["inter_chunk_latency"] = gaps
    if output is not None and output > 1 and decode_ns > 0:  # else all of them came in one read: not known
        values["inter_token_latency"] = decode_ns / 1e6 / (output - 1)
        values["output_token_throughput_per_user"] = (output - 1) * 1e9 / decode_ns
    if prompt is not None and ttft_ns > 0:
        values["prefill_throughput_per_user"] = prompt * 1e9 / ttft_ns
    if output is not None and latency_ns > 0:
        values["e2e_output_token_throughput"] = output * 1e9 / latency_ns
    return values


class _Numbers:
    """Sessions numbered in the order in which their first request ended, and stable ids for what AIPerf names by
    UUIDs."""

    def __init__(self) -> None:
        self._sessions: dict[str, int] = {}

    def session(self, name: str) -> int:
        return self._sessions.setdefault(name, len(self._sessions))


def _uuid(*parts: object) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(map(str, parts))))


def _line(
    record: RequestRecord, metrics: Mapping[str, Value], clock: WallClock, numbers: _Numbers
) -> dict[str, Any] | None:
    """None for a request that never began: AIPerf has no record of such."""
    start = record.sent_ns if record.sent_ns is not None else record.ready_ns
    if start is None:
        return None
    tags = AgentTags.of(record)
    chain = f"{record.phase}/{record.index}" if record.session is None else record.session
    cancelled = record.outcome == Outcome.CANCELLED
    end = record.end_ns if record.end_ns is not None else start
    metadata: dict[str, Any] = {
        "session_num": numbers.session(chain),
        "x_request_id": _uuid(record.phase, record.worker, record.index),
        "x_correlation_id": _uuid(chain),
        "conversation_id": record.session if tags is None else tags.conversation,
        "turn_index": record.turn,
        "source_trace_id": None if tags is None else tags.trace,
        "credit_issued_ns": None if record.ready_ns is None else clock.wall_ns(record.ready_ns),
        "request_start_ns": clock.wall_ns(start),
        "request_end_ns": clock.wall_ns(max(start, end)),
        "worker_id": f"worker_{record.worker}",
        "record_processor_id": f"atom_{record.worker}",
        "benchmark_phase": "profiling" if record.phase == MEASURED else "warmup",
        "was_cancelled": cancelled,
        "cancellation_time_ns": clock.wall_ns(end) if cancelled else None,
        "agent_depth": 0 if tags is None else tags.depth,
    }
    if tags is not None:
        metadata["root_correlation_id"] = _uuid(tags.root)
        if tags.parent is not None:
            metadata["parent_correlation_id"] = _uuid(tags.parent)
    return {
        "metadata": {name: value for name, value in metadata.items() if value is not None},
        "metrics": {tag: {"value": value, "unit": _UNITS[tag]} for tag, value in metrics.items()},
        "error": _error(record),
    }


def _error(record: RequestRecord) -> dict[str, Any] | None:
    if record.error_class is None or record.outcome != Outcome.FAILED:
        return None
    return {"code": record.status, "type": record.error_class, "message": record.error_message or record.error_class}


@dataclass(slots=True)
class _Statistics:
    """What the JSON says about the requests of one phase."""

    values: dict[str, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[tuple[int | None, str, str]] = field(default_factory=Counter)
    cached: list[int] = field(default_factory=lambda: [0, 0])
    """Cached prompt tokens and prompt tokens, of completed requests of which both are known."""
    theoretical: list[int] = field(default_factory=lambda: [0, 0])
    """Cached blocks and blocks, of completed requests."""

    def add(self, record: RequestRecord, metrics: Mapping[str, Value]) -> None:
        self.outcomes[record.outcome] += 1
        for tag, value in metrics.items():
            if isinstance(value, list):
                self.values[tag].extend(value)
            else:
                self.values[tag].append(value)
        if {"usage_prompt_cache_read_tokens", "usage_prompt_tokens"} <= metrics.keys():
            self.cached[0] += record.cached_tokens or 0
            self.cached[1] += record.prompt_tokens or 0
        error = _error(record)
        if error is not None:
            self.errors[error["code"], error["type"], error["message"]] += 1
        tags = AgentTags.of(record)
        if tags is not None and tags.blocks and record.outcome == Outcome.COMPLETED:
            self.theoretical[0] += min(tags.cached_blocks or 0, tags.blocks)
            self.theoretical[1] += tags.blocks

    def metrics(self) -> dict[str, dict[str, Any]]:
        return {tag: _distribution(values, _UNITS[tag]) for tag, values in self.values.items()}

    def total(self, tag: str) -> int | None:
        return round(sum(self.values[tag])) if tag in self.values else None


def _distribution(values: Sequence[float], unit: str) -> dict[str, Any]:
    data = np.asarray(values, dtype=np.float64)
    return {
        "unit": unit,
        "avg": float(data.mean()),
        **{f"p{q}": float(value) for q, value in zip(_PERCENTILES, np.percentile(data, _PERCENTILES), strict=True)},
        "min": float(data.min()),
        "max": float(data.max()),
        "std": float(data.std()),
        "count": len(data),
        "sum": float(data.sum()),
    }


def _summary(
    run_dir: RunDirectory,
    run: Mapping[str, Any],
    summary: Mapping[str, Any],
    clock: WallClock,
    measured: _Statistics,
    warmup: _Statistics,
) -> dict[str, Any]:
    load = summary["load"]
    identity = _uuid(run_dir.path.name, run.get("start_time"), run.get("start_ns"))
    ended = summary["validity"] not in ("interrupted",)
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "benchmark_id": identity[:12],
        "input_config": _input_config(load, summary),
        "run_info": {
            "benchmark_id": identity[:12],
            "random_seed": load.get("seed"),
            "trial": 0,
            "cli_command": shlex.join(map(str, run.get("command") or [])),
        },
        "was_cancelled": not ended,
        "is_complete": ended,
        "error_summary": [
            {"error_details": {"code": code, "type": kind, "message": message}, "count": count}
            for (code, kind, message), count in measured.errors.most_common()
        ],
        "start_time": _iso(clock.wall_ns(summary["start_ns"])),
        "end_time": _iso(clock.wall_ns(summary["end_ns"])),
        "metadata": _metadata(load, summary),
        **measured.metrics(),
        **dict(_derived(measured, summary)),
    }
    if not ended:
        result["incomplete_reason"] = "; ".join(summary["reasons"]) or "interrupted"
    if warmup.outcomes:
        result["warmup_metrics"] = warmup.metrics()
    return result


def _metadata(load: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """What made the files. A scenario's result of this client is none of AIPerf's submissions."""
    told: dict[str, Any] = {"generator": "atom", "validity": summary["validity"], "reasons": list(summary["reasons"])}
    scenario = load.get("scenario")
    if scenario is not None:
        reasons = ["not_produced_by_aiperf", *(load.get("scenario_conflicts") or ())]
        told |= {"scenario": scenario, "submission_valid": False, "submission_invalid_reasons": reasons}
    return told


def _iso(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1e9).isoformat()  # local time without zone, as AIPerf writes


def _input_config(load: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """The load as AIPerf's configuration would say it: what its readers look for."""
    phase: dict[str, Any] = {"name": "profiling", "kind": "profiling", **_arrivals(load)}
    concurrency = load.get("concurrency") or load.get("max_concurrency")
    if (
        concurrency is not None or phase["type"] == "concurrency"
    ):  # in a closed loop without a limit all are sent at once
        phase["concurrency"] = concurrency or load.get("num_prompts") or 1
    for name, key in (("requests", "num_prompts"), ("duration", "duration_s"), ("grace_period", "grace_period_s")):
        if load.get(key) is not None:
            phase[name] = load[key]
    return {
        "models": {"items": [{"name": str(load.get("model") or summary["server"].get("model") or "model")}]},
        "endpoint": {"urls": [str(load.get("base_url") or "")], "type": load.get("api"), "streaming": True},
        "datasets": [_dataset(load)],
        "phases": [phase],
        "artifacts": {"dir": ".", "slice_duration": load.get("slice_duration_s") or 1.0},
    }


def _arrivals(load: Mapping[str, Any]) -> dict[str, Any]:
    """When requests begin, as AIPerf's types of phases have it."""
    source = load.get("source") or {}
    if source.get("timestamps_used") is True:
        return {"type": "fixed_schedule"}
    rate, ramp = load.get("request_rate"), load.get("ramp")
    rates: dict[str, Any] | None = {"rate": rate} if isinstance(rate, int | float) else None
    if ramp is not None:
        rates = _rate_series(ramp, load.get("num_prompts"))
    if rates is None:
        return {"type": "concurrency"}
    pattern = load.get("arrival_pattern")
    if pattern == ArrivalPattern.GAMMA:
        return {"type": "gamma", "smoothness": load.get("burstiness") or 1.0, **rates}
    return {"type": "constant" if pattern == ArrivalPattern.CONSTANT else "poisson", **rates}


def _rate_series(told: Mapping[str, Any], count: int | None) -> dict[str, Any] | None:
    """A ramp as points between which the rate is linear. None for what is no ramp."""
    try:
        ramp = Ramp(told.get("strategy", ""), told.get("start_rps") or 0.0, told.get("end_rps") or 0.0)
    except UsageError:
        return None
    duration = ramp.duration_s(count or 1)
    steps = 1 if ramp.strategy == "linear" else _RAMP_STEPS
    return {
        "rate_series": {
            "points": [{"time_s": duration * k / steps, "qps": ramp.rate_at(k / steps)} for k in range(steps + 1)]
        }
    }


def _dataset(load: Mapping[str, Any]) -> dict[str, Any]:
    """AIPerf asks for one; what the load really sent is in run.json. A format that it does not read is not named."""
    source = load.get("source") or {}
    file = source.get("dataset")
    if isinstance(load.get("input_file"), str):
        return {"name": "main", "type": "file", "path": load["input_file"], "format": "weka_trace"}
    if isinstance(file, dict) and isinstance(file.get("path"), str):
        format_ = _FORMATS.get(str(source.get("trace_format")))
        named = {} if format_ is None else {"format": format_}
        return {"name": "main", "type": "file", "path": file["path"], **named}
    return {"name": "main", "type": "synthetic"}


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def _derived(measured: _Statistics, summary: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The scalars of the run. AIPerf's `benchmark_duration` is the wall time of the measured phase here."""
    wall = (summary["end_ns"] - summary["start_ns"]) / 1e9
    done, failed = measured.outcomes[Outcome.COMPLETED], measured.outcomes[Outcome.FAILED]
    prompt, output = measured.total("input_sequence_length"), measured.total("output_sequence_length")
    used, cached = measured.total("usage_prompt_tokens"), measured.total("usage_prompt_cache_read_tokens")
    both = None if prompt is None or output is None else prompt + output

    def rate(amount: float | None) -> float | None:
        return None if amount is None or wall <= 0 else amount / wall

    scalars: list[tuple[str, str, float | None]] = [
        ("request_count", "requests", done),
        ("error_request_count", "requests", failed or None),
        ("completed_request_count", "requests", done + failed),
        ("request_error_rate", "%", 100 * failed / (done + failed) if done + failed else None),
        ("benchmark_duration", "sec", wall),
        ("request_throughput", "requests/sec", rate(done)),
        ("output_token_throughput", "tokens/sec", rate(output)),
        ("input_token_throughput", "tokens/sec", rate(prompt)),
        ("total_token_throughput", "tokens/sec", rate(both)),
        ("total_isl", "tokens", prompt),
        ("total_osl", "tokens", output),
        ("total_usage_prompt_tokens", "tokens", used),
        ("total_usage_completion_tokens", "tokens", measured.total("usage_completion_tokens")),
        ("total_usage_prompt_cache_read_tokens", "tokens", cached),
        ("overall_usage_prompt_cache_read_pct", "%", _percent(*measured.cached)),
    ]
    goodput = summary["figures"].get("request_goodput", {}).get("value")
    if goodput is not None:
        scalars.append(("goodput", "requests/sec", goodput))
        scalars.append(("good_request_count", "requests", round(goodput * wall)))
    for tag, unit, value in scalars:
        if value is not None:
            yield tag, {"unit": unit, "avg": float(value)}
    hit, blocks = measured.theoretical
    if blocks:
        yield "theoretical_prefix_cache_hit", {"unit": "%", "avg": 100 * hit / blocks, "count": blocks, "sum": hit}
