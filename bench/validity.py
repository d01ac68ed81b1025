"""Whether a run is evidence: self-checks, the client's own condition, failures, and the verdict they add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from atom.bench.metrics import MIN_BEYOND, RATES, Figure
from atom.bench.rundir import Validity

__all__ = ["Check", "Client", "Counts", "Verdict", "judge"]

MAX_CPU_SHARE: Final = 0.9
"""Of the event-loop thread: above this, what is measured is the client."""
MIN_LAG_MS: Final[Mapping[float, float]] = {50.0: 5.0, 99.0: 10.0}
"""Quantile → lag that is never held against the client: timers of an event loop fire up to a millisecond late, and on a
machine shared with the server the scheduler adds its own slices."""
MAX_LAG_SHARE: Final = 0.25
"""Lag beyond that counts when it exceeds this share of what is measured at the same quantile."""
LITTLE_TOLERANCE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Counts:
    sent: int
    completed: int
    failed: int
    cancelled: int


@dataclass(frozen=True, slots=True)
class Client:
    """How the load generator itself fared."""

    cpu_share: float | None
    lag_ms: Sequence[float]
    send_lag_ms: Sequence[float]

    def figures(self) -> dict[str, Figure]:
        values: dict[str, tuple[float | None, int]] = {
            "client_cpu_share": (self.cpu_share, 1),
            "p99_client_lag_ms": (_percentile(self.lag_ms, 99), len(self.lag_ms)),
            "max_client_lag_ms": (_percentile(self.lag_ms, 100), len(self.lag_ms)),
            "p99_send_lag_ms": (_percentile(self.send_lag_ms, 99), len(self.send_lag_ms)),
        }
        return {name: Figure(value, RATES[name][0], n, RATES[name][1]) for name, (value, n) in values.items()}


@dataclass(frozen=True, slots=True)
class Check:
    """One self-check. `ok` is None where there was nothing to check."""

    name: str
    ok: bool | None
    detail: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    validity: Validity
    reasons: list[str]
    checks: list[Check]


def judge(
    counts: Counts,
    client: Client,
    figures: Mapping[str, Figure],
    *,
    threshold: float,
    interrupted: bool,
    ended: bool,
    latency_ms: float | None,
    wall_s: float,
    busy_ns: int | None,
    planned: int | None = None,
) -> Verdict:
    """`planned`: requests of the whole load. `threshold`: share of failed requests allowed.

    `latency_ms`: mean time from sent to ended, of all requests."""
    checks = [_accounting(counts, ended=ended), _little(counts, latency_ms, wall_s, busy_ns)]
    reasons: list[str] = []
    if interrupted:
        of = f" of {planned}" if planned is not None else ""
        reasons.append(f"the load ended early: {counts.sent}{of} requests were started")
    elif not ended:
        reasons.append("the run did not come to its end: figures are over what was recorded")
    ran = counts.completed + counts.failed
    all_failed = counts.completed == 0 and counts.failed > 0
    if all_failed:
        reasons.append(f"all {counts.failed} requests failed")
    elif ran and counts.failed / ran > threshold:
        reasons.append(
            f"{counts.failed} of {ran} requests failed ({counts.failed / ran:.1%}), "
            f"more than --failed-request-threshold {threshold:g} allows"
        )
    reasons += _saturation(client, figures)
    if checks[0].ok is False:
        reasons.append(f"requests are unaccounted for: {checks[0].detail}")
    if all_failed:
        validity = Validity.FAILED
    elif interrupted or not ended:
        validity = Validity.INTERRUPTED
    else:
        validity = Validity.NOT_VALID if reasons else Validity.VALID
    return Verdict(validity, reasons, checks)


def _accounting(counts: Counts, *, ended: bool) -> Check:
    total = counts.completed + counts.failed + counts.cancelled
    detail = f"{counts.completed} completed + {counts.failed} failed + {counts.cancelled} cancelled = {total}"
    if not ended:
        return Check("accounting", None, f"{detail}; the run did not come to its end")
    return Check("accounting", total == counts.sent, f"{detail}, sent {counts.sent}")


def _little(counts: Counts, latency_ms: float | None, wall_s: float, busy_ns: int | None) -> Check:
    """Little's law: the mean number of requests at once = their rate × their mean time in the system. The left side is
    counted while the load runs, the right side comes from the records; what differs is time lost in the client."""
    if not busy_ns or latency_ms is None or wall_s <= 0:
        return Check("littles_law", None, "nothing to compare")
    concurrency = busy_ns / 1e9 / wall_s
    rate = (counts.completed + counts.failed + counts.cancelled) / wall_s
    predicted = rate * latency_ms / 1e3
    residual = (concurrency - predicted) / concurrency
    detail = f"concurrency {concurrency:.2f}, rate × mean latency {predicted:.2f}, residual {residual:+.2%}"
    return Check("littles_law", abs(residual) <= LITTLE_TOLERANCE, detail)


def _saturation(client: Client, figures: Mapping[str, Figure]) -> list[str]:
    """A late stamp shifts the quantile it falls into, so lag is held against the latencies at the same quantile."""
    reasons: list[str] = []
    if client.cpu_share is not None and client.cpu_share > MAX_CPU_SHARE:
        reasons.append(f"client saturated: its event loop used {client.cpu_share:.0%} of a CPU")
    for q, floor_ms in MIN_LAG_MS.items():
        ttft, itl = _value(figures, f"p{q:g}_ttft_ms"), _value(figures, f"p{q:g}_itl_ms")
        shortest = min((value for value in (ttft, itl) if value is not None), default=None)
        if (lag := _held_against(client.lag_ms, q, shortest, floor_ms)) is not None:
            reasons.append(
                f"client saturated: its event loop was {lag:.1f} ms late at p{q:g}, {shortest:.1f} ms are measured"
            )
        if (lag := _held_against(client.send_lag_ms, q, ttft, floor_ms)) is not None:
            reasons.append(f"client saturated: requests were sent {lag:.1f} ms late at p{q:g}, TTFT is {ttft:.1f} ms")
    return reasons


def _held_against(lags: Sequence[float], q: float, latency: float | None, floor_ms: float) -> float | None:
    """The lag at quantile `q` if it matters beside `latency`. As with every quantile here, a handful of samples proves
    nothing: at least ten have to be that late."""
    if latency is None or len(lags) == 0:
        return None
    limit = max(floor_ms, MAX_LAG_SHARE * latency)
    late = int(np.count_nonzero(np.asarray(lags) > limit))
    lag = _percentile(lags, q)
    return lag if lag is not None and lag > limit and late >= MIN_BEYOND else None


def _value(figures: Mapping[str, Figure], name: str) -> float | None:
    return figures[name].value if name in figures else None


def _percentile(values: Sequence[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if len(values) else None
