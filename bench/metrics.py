"""What the printed figures mean, and how they follow from request records. The definitions here are the ones that
summary.json, the tables and docs/definitions.md show; the formulas are below them in the same order."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.records import Outcome, RequestRecord

__all__ = [
    "DISTRIBUTIONS",
    "MIN_BEYOND",
    "RATES",
    "Figure",
    "Samples",
    "collect",
    "distribution",
    "is_supported",
    "percentile",
]

FloatArray = npt.NDArray[np.float64]

DISTRIBUTIONS: Final[Mapping[str, str]] = {
    "ttft": "time to first token: first token-bearing chunk − request sent",
    "ttft_scheduled": "first token-bearing chunk − the time at which the arrival schedule wanted the request sent",
    "tpot": "(last token-bearing chunk − first) / (output tokens − 1), one value per request with 2 tokens or more",
    "itl": (
        "gap between consecutive arrivals of token-bearing chunks of one stream, pooled over requests; chunks that "
        "came in one read are one arrival"
    ),
    "per_token_itl": "that gap ÷ the tokens of the later arrival, where the tokens of each chunk are known",
    "connect": (
        "time to open a connection (TCP and TLS), one value per request that had to open one, whatever became of it; "
        "over before the request is sent, so in no other latency but TTFT from schedule"
    ),
    "e2el": "end-to-end latency: last token-bearing chunk − request sent",
}
"""All in milliseconds, over completed requests of the measured phase (`connect`: over all)."""

RATES: Final[Mapping[str, tuple[str, str]]] = {
    "requested_rate": ("req/s", "requests − 1 ÷ time from the first to the last scheduled one, of those sent"),
    "achieved_rate": ("req/s", "that ÷ the slope of sent over due times (least squares)"),
    "request_throughput": ("req/s", "completed requests ÷ wall time of the measured phase"),
    "output_throughput": ("tok/s", "Σ output tokens of completed requests ÷ wall time of the measured phase"),
    "total_token_throughput": ("tok/s", "Σ (prompt + output tokens) of completed requests ÷ wall time"),
    "request_goodput": ("req/s", "completed requests that meet every SLO of --goodput ÷ wall time"),
    "max_output_tokens_per_s": ("tok/s", "most output tokens in any one second"),
    "max_concurrent_requests": ("requests", "most requests between sent and ended at one moment"),
    "duration": ("s", "wall time of the measured phase: its start to the end of its last request"),
    "completed": ("requests", "requests that ended well"),
    "failed": ("requests", "requests with an error, a broken stream or no token"),
    "cancelled": ("requests", "requests that this client ended on purpose"),
    "started": ("requests", "requests begun in the measured phase: a connection was taken or opened for them"),
    "sent": (
        "requests",
        "requests of the measured phase whose bytes went out; those without a connection did not",
    ),
    "total_input_tokens": ("tokens", "Σ prompt tokens of completed requests (usage; where missing, as planned)"),
    "total_output_tokens": ("tokens", "Σ output tokens of completed requests (usage; where missing, one per chunk)"),
    "tokens_per_chunk": ("tokens", "Σ output tokens ÷ Σ token-bearing chunks, over completed requests"),
    "coalesced_share": (
        "fraction",
        "token-bearing chunks that arrived in one read with an earlier one of their stream",
    ),
    "merged_share": ("fraction", "token-bearing chunks that carry more than one token, where the server says how many"),
    "cached_share": ("fraction", "Σ cached prompt tokens ÷ Σ prompt tokens, where usage has both"),
    "theoretical_cached_share": (
        "fraction",
        "Σ prompt tokens that a prefix cache without end would have ÷ Σ prompt tokens, of a trace's completed requests",
    ),
    "mean_concurrency": (
        "requests",
        "requests between sent and ended, averaged over the measured phase, counted live",
    ),
    "client_cpu_share": (
        "fraction",
        "CPU time of the client's event-loop thread ÷ wall time; of several workers the busiest",
    ),
    "p99_client_lag_ms": ("ms", "99th percentile of how late a timer of the client's event loop fires"),
    "max_client_lag_ms": ("ms", "longest delay of a timer of the client's event loop"),
    "mean_reaction_ms": (
        "ms",
        "mean time from the end of a response until the client took note: in a closed loop the server waits for it",
    ),
    "kernel_stamp_share": (
        "fraction",
        "reads whose time of arrival is the kernel's receive timestamp; the others are stamped when they are read",
    ),
    "p99_send_lag_ms": ("ms", "99th percentile of: sent − (time at which it could be sent) − connect"),
}

MIN_BEYOND: Final = 10
"""Samples that have to lie beyond a quantile for it to say something."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One printed number."""

    value: float | None
    unit: str
    n: int
    definition: str
    supported: bool = True
    """False: a quantile with fewer than ten samples beyond it."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Samples:
    """What the records of completed requests hold, pooled. Milliseconds."""

    def __init__(self) -> None:
        self.ttft = array("d")
        self.ttft_scheduled = array("d")
        self.tpot = array("d")
        self.itl = array("d")
        self.per_token_itl = array("d")
        self.e2el = array("d")
        self.connect = array("d")
        self.chunks = 0
        self.coalesced = 0
        self.counted_chunks = 0
        self.merged = 0
        self.output_tokens = 0
        self.input_tokens = 0
        self.cached_of = self.cached = 0
        self.theoretical_of = self.theoretical = 0
        self.good = 0
        self.tokens_at: list[tuple[FloatArray, FloatArray]] = []
        """Per request: arrival times (s since the epoch of the clock) and tokens that came with them."""

    def add(self, record: RequestRecord, slo_ms: Mapping[str, float]) -> None:
        times = np.asarray(record.chunk_ns, dtype=np.int64)
        self.output_tokens += record.output_tokens or 0
        prompt = record.prompt_tokens if record.prompt_tokens is not None else record.input_len
        self.input_tokens += prompt or 0
        if record.cached_tokens is not None and record.prompt_tokens is not None:
            self.cached += record.cached_tokens
            self.cached_of += record.prompt_tokens
        theoretical = (record.tags or {}).get("theoretical_cached_tokens")
        if type(theoretical) is int and prompt:
            self.theoretical += theoretical
            self.theoretical_of += prompt
        values = self._latencies(record)
        self.good += all(values.get(name, np.inf) <= limit for name, limit in slo_ms.items())
        if len(times):
            self._arrivals(record, times)

    def _latencies(self, record: RequestRecord) -> dict[str, float]:
        values: dict[str, float] = {}
        first, last, sent = record.first_ns, record.last_ns, record.sent_ns
        if first is None or last is None or sent is None:
            return values
        values["ttft"] = (first - sent) / 1e6
        values["e2el"] = (last - sent) / 1e6
        if record.scheduled_ns is not None:
            values["ttft_scheduled"] = (first - record.scheduled_ns) / 1e6
        if record.output_tokens is not None and record.output_tokens > 1 and last > first:
            # All of it in one read has no time per token; 0 would be the best there is.
            values["tpot"] = (last - first) / 1e6 / (record.output_tokens - 1)
        for name, value in values.items():
            getattr(self, name).append(value)
        # An SLO on TPOT cannot be missed by a request of a single token.
        return values if (record.output_tokens or 0) > 1 else {"tpot": 0.0, **values}

    def _arrivals(self, record: RequestRecord, times: npt.NDArray[np.int64]) -> None:
        starts = np.flatnonzero(np.diff(times, prepend=times[0] - 1))
        gaps = np.diff(times[starts]) / 1e6
        self.chunks += len(times)
        self.coalesced += len(times) - len(starts)
        self.itl.frombytes(gaps.tobytes())
        tokens: FloatArray | None = None
        if record.chunk_tokens is not None:
            tokens = np.asarray(record.chunk_tokens, dtype=np.float64)
            self.counted_chunks += len(times)
            self.merged += int(np.count_nonzero(tokens > 1))
        elif record.output_tokens == len(times):
            tokens = np.ones(len(times))
        if tokens is not None:
            arrived = np.add.reduceat(tokens, starts)
            self.per_token_itl.frombytes((gaps / np.maximum(arrived[1:], 1)).tobytes())
        else:
            share = (record.output_tokens or len(times)) / len(times)
            arrived = np.diff(np.append(starts, len(times))) * share
        self.tokens_at.append((times[starts] / 1e9, arrived))


def collect(records: Iterable[RequestRecord], slo_ms: Mapping[str, float]) -> Samples:
    """Pool the completed requests among `records`."""
    samples = Samples()
    for record in records:
        if record.outcome == Outcome.COMPLETED:
            samples.add(record, slo_ms)
    return samples


def percentile(values: Sequence[float], q: float) -> float | None:
    """The `q`-th percentile (0 … 100), linear between neighbours; None of nothing."""
    return float(np.percentile(np.asarray(values), q)) if len(values) else None


def is_supported(n: int, percentile: float) -> bool:
    return round(n * (100 - percentile), 6) >= 100 * MIN_BEYOND


def distribution(name: str, values: Sequence[float] | array[float], percentiles: Sequence[float]) -> dict[str, Figure]:
    """`{mean,median,std,pNN}_<name>_ms` → figure. Percentiles by linear interpolation (NumPy's default)."""
    data: FloatArray = np.asarray(values, dtype=np.float64)
    n, what = len(data), DISTRIBUTIONS[name]

    def figure(value: Any, how: str, supported: bool = True) -> Figure:
        return Figure(float(value) if n else None, "ms", n, f"{how} of {what}", supported and n > 0)

    figures = {
        f"mean_{name}_ms": figure(data.mean() if n else 0, "mean"),
        f"median_{name}_ms": figure(np.median(data) if n else 0, "median", is_supported(n, 50)),
        f"std_{name}_ms": figure(data.std() if n else 0, "standard deviation"),
    }
    for q in percentiles:
        figures[f"p{q:g}_{name}_ms"] = figure(
            np.percentile(data, q) if n else 0, f"{q:g}th percentile", is_supported(n, q)
        )
    return figures
