"""A summary in the formats of others: the JSON of `vllm bench serve --save-result`, and JUnit XML (`junit.py`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from atom.bench.junit import JunitCase, junit_xml
from atom.bench.records import Outcome, RequestRecord, read_records
from atom.bench.rundir import RunDirectory, Validity

__all__ = ["junit", "vllm_result"]

_COUNTS = ("completed", "failed", "total_input_tokens", "total_output_tokens", "max_concurrent_requests")
_RATES = ("duration", "request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
_LATENCIES = ("ttft", "tpot", "itl", "e2el")


def vllm_result(
    run_dir: RunDirectory,
    summary: Mapping[str, Any],
    *,
    backend: str,
    label: str | None = None,
    metadata: Mapping[str, str] | None = None,
    metrics: tuple[str, ...] = _LATENCIES,
    percentiles: tuple[float, ...] = (99.0,),
    detailed: bool = False,
) -> dict[str, Any]:
    """The keys that `vllm bench serve` saves, with their units (milliseconds, seconds in the detailed lists), and ours
    under `atom`. What was not measured is null, never 0. `metrics` and `percentiles` choose the latency keys."""
    load, run = summary["load"], run_dir.read_run_json()
    figures = {name: figure["value"] for name, figure in summary["figures"].items()}
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": label,
        "model_id": load.get("model"),
        "tokenizer_id": None,
        "num_prompts": load.get("num_prompts"),
        **(metadata or {}),
        "request_rate": load.get("request_rate"),
        "burstiness": load.get("burstiness"),
        "max_concurrency": load.get("max_concurrency"),
    }
    result |= {
        name: _whole(figures.get(name)) if name in _COUNTS else figures.get(name) for name in (*_RATES, *_COUNTS)
    }
    result["max_output_tokens_per_s"] = figures.get("max_output_tokens_per_s")
    result["rtfx"] = None  # of audio models
    for name in metrics:
        for statistic in ("mean", "median", "std", *(f"p{q:g}" for q in percentiles)):
            key = f"{statistic}_{name}_ms"
            result[key] = figures.get(key)
    if detailed:
        result |= _detailed(list(read_records(run_dir)))
    result["atom"] = {
        "schema_version": run["schema_version"],
        "run_directory": str(run_dir.path.absolute()),
        **{key: summary[key] for key in ("validity", "reasons", "notes", "checks", "errors", "anomalies", "server")},
        "load": load,
        "git": run.get("git"),
        "recipe": run.get("recipe"),
        "accuracy": summary.get("accuracy"),
        "agentic": summary.get("agentic"),
        "figures": summary["figures"],
    }
    return result


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _detailed(records: list[RequestRecord]) -> dict[str, list[Any]]:
    """One entry per request, in order of the load. Times in seconds; `start_times` on the clock of time.monotonic."""
    records.sort(key=lambda record: record.index)

    def since_sent(record: RequestRecord, moment: int | None) -> float | None:
        return None if moment is None or record.sent_ns is None else (moment - record.sent_ns) / 1e9

    return {
        "input_lens": [r.prompt_tokens if r.prompt_tokens is not None else r.input_len for r in records],
        "output_lens": [r.output_tokens if r.outcome == Outcome.COMPLETED else 0 for r in records],
        "ttfts": [since_sent(r, r.first_ns) for r in records],
        "itls": [(np.diff(np.unique(np.asarray(r.chunk_ns, dtype=np.int64))) / 1e9).tolist() for r in records],
        "latencies": [since_sent(r, r.last_ns) for r in records],
        "start_times": [None if r.sent_ns is None else r.sent_ns / 1e9 for r in records],
        "generated_texts": [r.text for r in records],
        "errors": ["" if r.error_class is None else f"{r.error_class}: {r.error_message}" for r in records],
    }


def junit(summary: Mapping[str, Any]) -> str:
    """Checks and validity as JUnit XML: one test case per self-check, one for the requests, one for the evidence.
    What a valid run may have, failed requests within the threshold for instance, is no failure here either."""
    valid = summary["validity"] == Validity.VALID
    cases = [
        JunitCase(check["name"], check["detail"] if check["ok"] is False and not valid else None)
        for check in summary["checks"]
    ]
    errors = [f"{e['count']} × {e['class']}: {e['message']}" for e in summary["errors"]]
    cases.append(JunitCase("requests", None if valid else "\n".join(errors) or None))
    cases.append(JunitCase("evidence", None if valid else "\n".join(summary["reasons"]) or str(summary["validity"])))
    figures = json.dumps({name: figure["value"] for name, figure in summary["figures"].items()})
    return junit_xml(f"atom bench {summary['title']}", cases, {"figures": figures})
