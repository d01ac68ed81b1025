"""Whether a run is evidence: self-checks, the client's own condition, failures, and the verdict they add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from atom.bench.accounting import Counts
from atom.bench.metrics import MIN_BEYOND, RATES, Figure, percentile
from atom.bench.rundir import Validity
from atom.bench.schedule import Kept

__all__ = ["Check", "Client", "Verdict", "judge"]

MAX_CPU_SHARE: Final = 0.9
"""Of the event-loop thread: above this, what is measured is the client."""
MIN_LAG_MS: Final[Mapping[float, float]] = {50.0: 5.0, 99.0: 10.0}
"""Quantile → lag that is never held against the client: timers of an event loop fire up to a millisecond late, and on a
machine shared with the server the scheduler adds its own slices."""
MAX_LAG_SHARE: Final = 0.25
"""Lag beyond that counts when it exceeds this share of what is measured at the same quantile."""
LITTLE_TOLERANCE: Final = 0.01
MAX_REACTION_SHARE: Final = 0.1
MIN_REACTION_MS: Final = 5.0
"""How late the client may notice the end of a response, beside the mean E2EL and whatever it is: a closed loop whose
lanes rest for longer is another load than the one asked for."""
COALESCED_SHARE: Final = 0.01
"""Chunks that came in one read with an earlier one: above this, the ends of the ITL's distribution are theirs."""
LITTLE_MIN_REQUESTS: Final = 50
LITTLE_MIN_LATENCIES: Final = 10
"""Requests, and duration in mean latencies, below which a mean concurrency says nothing about a steady state."""


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """How the load generator itself fared: one process, or (`merged`) all of them."""

    cpu_share: float | None
    """Of several processes, the busiest one's: a mean would hide the one that cannot keep up."""
    lag_ms: Sequence[float]
    send_lag_ms: Sequence[float]
    worker: str | None = None
    """Whose this is; of several, whose CPU share it is."""
    parts: Sequence[Client] = ()
    """Several processes, one by one."""

    @classmethod
    def merged(cls, parts: Sequence[Client]) -> Client:
        if len(parts) == 1:
            return replace(parts[0], worker=None)
        busiest = max(parts, key=lambda part: part.cpu_share or 0.0, default=None)
        return cls(
            cpu_share=None if busiest is None else busiest.cpu_share,
            lag_ms=[lag for part in parts for lag in part.lag_ms],
            send_lag_ms=[lag for part in parts for lag in part.send_lag_ms],
            worker=None if busiest is None else busiest.worker,
            parts=parts,
        )

    def each(self) -> list[dict[str, Any]]:
        """Worker by worker, for JSON."""
        return [
            {
                "worker": part.worker,
                "cpu_share": part.cpu_share,
                "p99_client_lag_ms": percentile(part.lag_ms, 99),
                "p99_send_lag_ms": percentile(part.send_lag_ms, 99),
            }
            for part in self.parts
        ]

    def figures(self) -> dict[str, Figure]:
        values: dict[str, tuple[float | None, int]] = {
            "client_cpu_share": (self.cpu_share, 1),
            "p99_client_lag_ms": (percentile(self.lag_ms, 99), len(self.lag_ms)),
            "max_client_lag_ms": (percentile(self.lag_ms, 100), len(self.lag_ms)),
            "p99_send_lag_ms": (percentile(self.send_lag_ms, 99), len(self.send_lag_ms)),
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
    notes: list[str]
    """What speaks against figures that are not the point of the run."""


def judge(
    counts: Counts,
    client: Client,
    figures: Mapping[str, Figure],
    *,
    threshold: float,
    interrupted: bool,
    ended: bool,
    recorded: tuple[int, int],
    wall_s: float,
    busy_ns: int | None,
    planned: int | None = None,
    timed: bool = True,
    sends: bool = True,
    gone: str | None = None,
    unanswered: int = 0,
    errors: Sequence[Mapping[str, Any]] = (),
    more_reasons: Sequence[str] = (),
    schedule: Kept | None = None,
) -> Verdict:
    """`planned`: requests of the whole load. `schedule`: its arrivals beside what became of them. `threshold`: share of
    failed requests allowed. `recorded`: how many records were sent and ended, and the sum of these times in
    nanoseconds. `timed`: False for a load whose answers count and not their times, which a saturated client makes no
    worse. `sends`: False for one that only looks on. `gone`: why the load gave up on the server. `unanswered`: requests
    that the end of the grace period cut in a longer wait for their first token than any that completed. `errors`:
    classes of failures, the most frequent one first. `more_reasons`: what the load itself has against its run.
    """
    checks = [_accounting(counts, ended=ended), _little(recorded, wall_s, busy_ns)]
    if schedule is not None and ended:
        checks.append(_schedule(schedule))
    reasons: list[str] = []
    if interrupted:
        of = f" of {planned}" if planned is not None else ""
        reasons.append(f"the load ended early: {counts.started}{of} requests were started")
    elif not ended:
        reasons.append("the run did not come to its end: figures are over what was recorded")
    ran = counts.completed + counts.failed
    all_failed = counts.completed == 0 and counts.failed > 0
    none_completed = ended and not interrupted and counts.completed == 0
    if gone is not None:
        reasons.append(gone)
    if all_failed:
        reasons.append(f"all {counts.failed} requests failed{_mostly(errors)}")
    elif none_completed and counts.started:
        reasons.append(f"no request completed: {counts.cancelled} were cancelled, {counts.failed} failed")
    elif none_completed and sends:
        reasons.append("no request was started")
    elif ran and counts.failed / ran > threshold:
        reasons.append(
            f"{counts.failed} of {ran} requests failed ({counts.failed / ran:.1%}), "
            f"more than --failed-request-threshold {threshold:g} allows{_mostly(errors)}"
        )
    if unanswered and not all_failed and counts.completed:
        share = (counts.failed + unanswered) / (ran + unanswered)
        if share > threshold:
            reasons.append(
                f"{unanswered} requests had no token when --grace-period was over, after a longer wait than any that "
                f"completed: with the failed {share:.1%}, more than --failed-request-threshold {threshold:g} allows"
            )
    saturation = _saturation(client, figures)
    reasons += [*(saturation if timed else ()), *more_reasons]
    if checks[0].ok is False:
        reasons.append(f"requests are unaccounted for: {checks[0].detail}")
    if checks[1].ok is False:
        reasons.append(f"Little's law does not hold between the client's count and its records: {checks[1].detail}")
    reasons += [f"the requested rate was not held: {c.detail}" for c in checks[2:] if c.ok is False]
    if all_failed or gone is not None or (none_completed and counts.started):
        validity = Validity.FAILED
    elif interrupted or not ended:
        validity = Validity.INTERRUPTED
    else:
        validity = Validity.NOT_VALID if reasons else Validity.VALID
    notes = [] if timed else [f"no time here is valid evidence: {reason}" for reason in saturation]
    return Verdict(validity, reasons, checks, notes)


def _mostly(errors: Sequence[Mapping[str, Any]]) -> str:
    if not errors:
        return ""
    first, message = errors[0], str(errors[0]["message"])
    return f" ({first['count']} × {first['class']}: {message[:120]}{'…' if len(message) > 120 else ''})"


def _accounting(counts: Counts, *, ended: bool) -> Check:
    if not ended:
        return Check("accounting", None, f"{counts.sum}; the run did not come to its end")
    return Check("accounting", counts.adds_up, counts.equation)


def _schedule(schedule: Kept) -> Check:
    """A concurrency limit that holds requests back is asked for, and not the client's failure to send in time."""
    return Check("request_rate", schedule.ok if schedule.ok or not schedule.held_back else None, schedule.detail())


def _little(recorded: tuple[int, int], wall_s: float, busy_ns: int | None) -> Check:
    """Little's law: the mean number of requests at once = their rate × their mean time in the system.

    Both sides are of the requests that were sent, over the whole time of each, so there are no edges to cut: the left
    side was summed up live, the right side is of the records: they differ by records that are lost or wrong. How late
    the client noticed an end is a figure of its own (`mean_reaction_ms`).
    """
    name = "littles_law"
    sent, total_ns = recorded
    if busy_ns is None:
        return Check(name, None, "not checked: the client did not end, or counts no requests as they run")
    if sent < LITTLE_MIN_REQUESTS:
        return Check(name, None, f"not checked: {sent} requests were sent, {LITTLE_MIN_REQUESTS} are needed")
    latency_s = total_ns / 1e9 / sent
    if wall_s < LITTLE_MIN_LATENCIES * latency_s:
        lasted = f"{wall_s:.3g} s are {wall_s / latency_s:.1f} mean latencies"
        return Check(name, None, f"not checked: {lasted}, {LITTLE_MIN_LATENCIES} are needed")
    counted, predicted = busy_ns / 1e9 / wall_s, sent / wall_s * latency_s
    residual = (busy_ns - total_ns) / max(1, busy_ns)
    detail = (
        f"mean concurrency {counted:.2f} as counted, rate × mean latency {predicted:.2f} from {sent} records, residual "
        f"{residual:+.2%}; from sent to ended, time to connect not included"
    )
    return Check(name, abs(busy_ns - total_ns) <= LITTLE_TOLERANCE * busy_ns, detail)


def _saturation(client: Client, figures: Mapping[str, Figure]) -> list[str]:
    """A client that is late sends late, reads chunks together that came apart, and, where the kernel stamps no
    arrivals, stamps them late: so lag is held against the latencies at the same quantile. Of several processes each is
    judged by itself: one that cannot keep up spoils its share of the figures."""
    parts = client.parts or (client,)
    busy = {part: part.cpu_share for part in parts if (part.cpu_share or 0.0) > MAX_CPU_SHARE}
    reasons = _worst(busy, "event loop used {value:.0%} of a CPU")
    for q, floor_ms in MIN_LAG_MS.items():
        ttft, itl = _value(figures, f"p{q:g}_ttft_ms"), _value(figures, f"p{q:g}_itl_ms")
        shortest = min((value for value in (ttft, itl) if value is not None), default=None)
        late = {part: _held_against(part.lag_ms, q, shortest, floor_ms) for part in parts}
        reasons += _worst(late, f"event loop was {{value:.1f}} ms late at p{q:g}, {shortest or 0:.1f} ms are measured")
        sent = {part: _held_against(part.send_lag_ms, q, ttft, floor_ms) for part in parts}
        reasons += _worst(sent, f"requests were sent {{value:.1f}} ms late at p{q:g}, TTFT is {ttft or 0:.1f} ms")
    return [*reasons, *_coalesced(parts, figures), *_reaction(figures)]


def _coalesced(parts: Sequence[Client], figures: Mapping[str, Figure]) -> list[str]:
    """Chunks that waited for a late client are read together, and all but the last get a stamp that is not theirs. A
    server that sends several at once is not the client's fault: its loop is then not late."""
    together, itl = figures.get("coalesced_share"), _value(figures, "median_itl_ms")
    if together is None or together.value is None or itl is None or together.value <= COALESCED_SHARE:
        return []
    if together.value * together.n < MIN_BEYOND:
        return []
    late = {part: lag for part in parts if (lag := _late_beyond(part.lag_ms, 99, itl / 2)) is not None}
    return _worst(
        late,
        f"event loop was {{value:.1f}} ms late at p99, and {together.value:.1%} of chunks {itl:.1f} ms apart were read "
        "together",
    )


def _reaction(figures: Mapping[str, Figure]) -> list[str]:
    reaction, e2el = figures.get("mean_reaction_ms"), _value(figures, "mean_e2el_ms")
    if reaction is None or reaction.value is None or e2el is None or reaction.n < LITTLE_MIN_REQUESTS:
        return []
    if reaction.value <= max(MIN_REACTION_MS, MAX_REACTION_SHARE * e2el):
        return []
    return [
        f"client saturated: it took note of a response's end {reaction.value:.1f} ms late on average, E2EL is "
        f"{e2el:.1f} ms"
    ]


def _worst(found: Mapping[Client, float | None], words: str) -> list[str]:
    """The reason that the worst of the processes gives, if any does. None: nothing is held against this one."""
    guilty = [(value, part) for part, value in found.items() if value is not None]
    if not guilty:
        return []
    value, part = max(guilty, key=lambda one: one[0])
    who = "its" if part.worker is None else f"worker {part.worker}'s"
    more = f" (the worst of {len(guilty)} such workers)" if len(guilty) > 1 else ""
    return [f"client saturated: {who} {words.format(value=value)}{more}"]


def _held_against(lags: Sequence[float], q: float, latency: float | None, floor_ms: float) -> float | None:
    """The lag at quantile `q` if it matters beside `latency`."""
    return None if latency is None else _late_beyond(lags, q, max(floor_ms, MAX_LAG_SHARE * latency))


def _late_beyond(lags: Sequence[float], q: float, limit: float) -> float | None:
    """The lag at quantile `q` if it is beyond `limit`. As with every quantile here, a handful of samples proves
    nothing: at least ten have to be that late."""
    late = int(np.count_nonzero(np.asarray(lags) > limit))
    lag = percentile(lags, q)
    return lag if lag is not None and lag > limit and late >= MIN_BEYOND else None


def _value(figures: Mapping[str, Figure], name: str) -> float | None:
    return figures[name].value if name in figures else None
