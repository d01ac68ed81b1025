"""Which quantities rise while the server serves: one verdict each.

"grows" needs three things: the slope's interval lies above zero (`trend.py`, at a level fit for judging all quantities
of a run together), the rise is spread over the whole span instead of one step, and it matters (`_RULES`). The first
part of the span is warm-up and left out. The slope is per 1,000 requests completed, because that is what a leak
follows; per minute where nobody counted requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from atom.diag.gc_profile.evidence import Evidence
from atom.diag.gc_profile.model import Growth, GrowthVerdict
from atom.diag.gc_profile.trend import CONFIDENCE, Trend, fit_trend
from atom.diag.server_captures import FloatArray

__all__ = ["LEAST_REQUESTS", "find_growth", "warm_up_s"]

WARM_UP_PART: Final = 1 / 6
"""Of the span, as the document's first window; but of a short run at least WARM_UP_S, and at most a third."""
WARM_UP_S: Final = 20.0
LEAST_REQUESTS: Final = 50
"""Completed after the warm-up. Fewer say nothing about what a request leaves behind."""
LEAST_SAMPLES: Final = 16
"""Of what is sampled once a second."""
LEAST_PASSES: Final = 6
LEAST_SHARE_BIN_S: Final = 1.0
SHARE_BINS: Final = 48
PASSES_PER_BIN: Final = 2

_Points = tuple[FloatArray, FloatArray]
"""Times in seconds since the start of the span, and values; without missing ones."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """How a quantity is read and what counts as a rise that matters: all of the three minima that are set."""

    quantity: str
    label: str
    unit: str
    points: Callable[[Evidence, float], _Points]
    least: int = LEAST_SAMPLES
    pool: Literal["median", "mean"] = "median"
    ratio: float = 1.0
    """Fitted last ÷ first."""
    rise: float = 0.0
    """Fitted last − first, in the unit."""
    per_thousand: float = 0.0
    """Slope per 1,000 requests, where requests are known."""


def warm_up_s(duration_s: float) -> float:
    return max(WARM_UP_PART * duration_s, min(WARM_UP_S, duration_s / 3))


def find_growth(evidence: Evidence, *, seed: int = 0) -> Mapping[str, Growth]:
    """Quantity → verdict, of every quantity whether seen or not."""
    return {rule.quantity: _judge(rule, evidence, np.random.default_rng([seed, i])) for i, rule in enumerate(_RULES)}


def _judge(rule: _Rule, evidence: Evidence, rng: np.random.Generator) -> Growth:
    start = warm_up_s(evidence.duration_s)
    times, values = rule.points(evidence, start)
    used = (times >= start) & (times <= evidence.duration_s)
    times, values = times[used], values[used]
    requests = evidence.finished(times)
    per = "minute" if requests is None else "1,000 requests"
    x = times / 60 if requests is None else requests / 1000

    def growth(verdict: GrowthVerdict, reason: str, trend: Trend | None = None) -> Growth:
        return Growth(
            quantity=rule.quantity,
            label=rule.label,
            verdict=verdict,
            unit=rule.unit,
            per=per,
            slope=trend.slope if trend else None,
            slope_low=trend.low if trend else None,
            slope_high=trend.high if trend else None,
            confidence=CONFIDENCE if trend else None,
            first=trend.first if trend else None,
            last=trend.last if trend else None,
            n=len(values),
            blocks=trend.blocks if trend else 0,
            reason=reason,
        )

    if len(values) < rule.least:
        seen = "nothing was seen" if not len(values) else f"{len(values)} observed, {rule.least} needed"
        return growth(GrowthVerdict.NOT_ENOUGH_DATA, f"{seen} after the first {start:.0f} s, which are warm-up")
    if requests is not None and requests[-1] - requests[0] < LEAST_REQUESTS:
        done = int(requests[-1] - requests[0])
        return growth(
            GrowthVerdict.NOT_ENOUGH_DATA, f"{done} requests were completed meanwhile, {LEAST_REQUESTS} needed"
        )
    trend = fit_trend(x, values, rng, pool=rule.pool)
    if trend is None:
        return growth(GrowthVerdict.NOT_ENOUGH_DATA, "everything was observed at one moment")
    verdict, reason = _verdict(rule, trend, per)
    return growth(verdict, reason, trend)


def _verdict(rule: _Rule, trend: Trend, per: str) -> tuple[GrowthVerdict, str]:
    rise = trend.last - trend.first
    change = f"{trend.first:,.4g} to {trend.last:,.4g} {rule.unit}"
    if trend.low <= 0:
        why = "no rise" if trend.slope <= 0 else "the slope's interval includes zero"
        return GrowthVerdict.FLAT, f"{why}: {change}"
    if rise < rule.rise or trend.last < rule.ratio * trend.first:
        wanted = [f"{rule.ratio - 1:.0%}"] if rule.ratio > 1 else []
        wanted += [f"{rule.rise:g} {rule.unit}"] if rule.rise else []
        return GrowthVerdict.FLAT, f"the rise is too small to matter: {change}, less than {' and '.join(wanted)}"
    if per != "minute" and trend.slope < rule.per_thousand:
        wanted = [f"{rule.per_thousand:g} {rule.unit} per {per}"]
        return GrowthVerdict.FLAT, f"the rise is too small to matter: {change}, less than {wanted[0]}"
    if not trend.steady:
        return GrowthVerdict.FLAT, f"a step, or up and down, but no steady rise: {change}"
    return GrowthVerdict.GROWS, f"rises in every quarter of the span: {change}"


# ---- the quantities ----------------------------------------------------------------------------------------------

_NONE: Final = (np.array([]), np.array([]))


def _pauses(evidence: Evidence, start_s: float) -> _Points:
    if evidence.passes is None:
        return _NONE
    passes = evidence.passes
    return evidence.seconds(passes.start_ns), (passes.stop_ns - passes.start_ns) / 1e6


def _share(evidence: Evidence, start_s: float) -> _Points:
    """Share of the time in passes, of equal pieces of the span after the warm-up."""
    passes = evidence.passes
    length_s = evidence.duration_s - start_s
    whole = round(length_s * 1e9)
    begun_in = 0 if passes is None else len(passes.pauses_ms(evidence.end_ns - whole, evidence.end_ns))
    # Some passes in each: a piece with one beside a piece with none would be nothing but noise.
    fitting = begun_in // PASSES_PER_BIN if begun_in >= LEAST_PASSES else SHARE_BINS
    bins = int(min(SHARE_BINS, max(fitting, LEAST_SAMPLES), length_s // LEAST_SHARE_BIN_S))
    if passes is None or bins < 1 or passes.watched_ns(evidence.end_ns - whole, evidence.end_ns) < 0.9 * whole:
        return _NONE
    borders = np.linspace(start_s, evidence.duration_s, bins + 1)
    borders_ns = evidence.start_ns + (borders * 1e9).astype(np.int64)
    inside = np.cumsum([0, *(passes.stop_ns - passes.start_ns)])
    # Σ pause before each border: whole passes that began before it, less what of the last lies beyond.
    begun = np.searchsorted(passes.start_ns, borders_ns)
    before = inside[begun].astype(np.float64)
    last = begun > 0
    before[last] -= np.maximum(0, passes.stop_ns[begun[last] - 1] - borders_ns[last])
    return (borders[:-1] + borders[1:]) / 2, np.diff(before) / np.diff(borders_ns)


def _scraped(column: str) -> Callable[[Evidence, float], _Points]:
    def points(evidence: Evidence, start_s: float) -> _Points:
        scrapes = evidence.captures.scrapes
        return _known(evidence.seconds(scrapes.sent_ns), getattr(scrapes, column))

    return points


def _sampled(column: str) -> Callable[[Evidence, float], _Points]:
    def points(evidence: Evidence, start_s: float) -> _Points:
        samples = evidence.samples
        return _NONE if samples is None else _known(evidence.seconds(samples.t_ns), getattr(samples, column))

    return points


def _health(evidence: Evidence, start_s: float) -> _Points:
    health = evidence.captures.health
    return _known(evidence.seconds(health.sent_ns), health.latency_ms)


def _ttft(evidence: Evidence, start_s: float) -> _Points:
    if evidence.requests is None:
        return _NONE
    order = np.argsort(evidence.requests.first_s, kind="stable")
    return evidence.requests.first_s[order], evidence.requests.ttft_ms[order]


def _known(times: FloatArray, values: FloatArray) -> _Points:
    seen = ~np.isnan(values)
    return times[seen], values[seen]


_RULES: Final = (
    _Rule("gen2_pause_ms", "gen-2 pause", "ms", _pauses, least=LEAST_PASSES, ratio=1.25, rise=0.5),
    _Rule("gen2_share", "gen-2 share", "fraction", _share, pool="mean", rise=0.005),
    _Rule("metrics_ms", "/metrics", "ms", _scraped("latency_ms"), ratio=1.25, rise=2.0),
    _Rule("metrics_series", "series", "series", _scraped("series"), rise=5.0, per_thousand=10.0),
    _Rule("metrics_body_bytes", "/metrics body", "bytes", _scraped("body_bytes"), ratio=1.1),
    _Rule("rss_mb", "API RSS", "MB", _sampled("rss_mb"), ratio=1.01, per_thousand=50 / 1024),
    _Rule("threads", "threads", "threads", _sampled("threads"), rise=4.0),
    _Rule("health_ms", "/health", "ms", _health, pool="mean", ratio=1.5, rise=5.0),
    _Rule("ttft_ms", "TTFT", "ms", _ttft, pool="mean", ratio=1.5, rise=20.0),
)
"""What matters: a scrape or a pause that takes a quarter longer at the end; half a percent more of the wall clock; a
series per hundred requests; 1% of memory and 50 KB per 1,000 requests; four threads; a probe or a
first token that waits half as long again."""
