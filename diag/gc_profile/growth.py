"""Which quantities rise while the server serves: one verdict each.

"grows" needs three things: the slope's interval lies above zero (`trend.py`, at a level fit for judging all quantities
of a run together); the rise is spread over the whole span instead of one step; and what was seen at the end differs by
as much as matters from what was seen at first (`_RULES`). The first part of the span is warm-up and left out. The slope
is per 1,000 requests completed, because that is what a leak follows; per minute where nobody counted requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from atom.diag.gc_profile.evidence import Evidence
from atom.diag.gc_profile.model import Growth, GrowthVerdict
from atom.diag.gc_profile.trend import CONFIDENCE, Pool, Shape, Trend, fit_trend
from atom.diag.gc_profile.words import amount, counted, duration, ends
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
    unseen: Callable[[Evidence], str]
    """Why there may be no point at all."""
    point: tuple[str, str]
    """What a point is called: one, many."""
    least: int = LEAST_SAMPLES
    pool: Pool = "median"
    ratio: float = 1.0
    """`Growth.last` ÷ `Growth.first`."""
    rise: float = 0.0
    """`Growth.last` − `Growth.first`, in the unit."""
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
        return growth(GrowthVerdict.NOT_ENOUGH_DATA, _too_few(rule, evidence, len(values), start))
    if requests is not None and requests[-1] - requests[0] < LEAST_REQUESTS:
        done = counted(int(requests[-1] - requests[0]), "request")
        return growth(GrowthVerdict.NOT_ENOUGH_DATA, f"{done} completed meanwhile, {LEAST_REQUESTS} needed")
    trend = fit_trend(x, values, rng, pool=rule.pool)
    if trend is None:
        return growth(GrowthVerdict.NOT_ENOUGH_DATA, "everything was observed at one moment")
    verdict, reason = _verdict(rule, trend, per)
    judged = growth(verdict, reason, trend)
    if verdict is GrowthVerdict.FLAT and trend.low <= 0:
        judged = _flat(judged, excludes_rise=not _room(rule, trend, per, float(x[-1] - x[0])))
    return replace(judged, reason=f"{reason}, {ends(judged)}") if verdict is GrowthVerdict.GROWS else judged


def _too_few(rule: _Rule, evidence: Evidence, seen: int, start_s: float) -> str:
    if not seen and (why := rule.unseen(evidence)):
        return why
    found = counted(seen, *rule.point) if seen else f"no {rule.point[0]}"
    start = f"{start_s:.0f} s" if start_s >= 10 else duration(start_s)
    return f"{found} after the first {start} (warm-up), {rule.least} needed"


def _verdict(rule: _Rule, trend: Trend, per: str) -> tuple[GrowthVerdict, str]:
    if trend.low <= 0:
        return GrowthVerdict.FLAT, "no rise" if trend.slope <= 0 else "no rise that its scatter could not make"
    wanted = [f"{rule.ratio - 1:.0%}"] if trend.last < rule.ratio * trend.first else []
    wanted += [amount(rule.rise, rule.unit)] if trend.last - trend.first < rule.rise else []
    if per != "minute" and trend.slope < rule.per_thousand:
        wanted.append(f"{_in_its_unit(rule.per_thousand, rule.unit)} per {per}")
    if wanted:
        return GrowthVerdict.FLAT, f"rises, but by less than {' and '.join(wanted)}"
    if trend.shape is Shape.STEP:
        return GrowthVerdict.FLAT, "rises, but not steadily: one step describes it better than a line"
    if trend.shape is Shape.UNEVEN:
        return GrowthVerdict.FLAT, "rises, but not steadily: it stands still or falls in a part of the span"
    return GrowthVerdict.GROWS, "rises over the whole span"


def _room(rule: _Rule, trend: Trend, per: str, span: float) -> bool:
    """Whether the slope's interval holds a rise that would count."""
    rise = trend.high * span
    steep = per == "minute" or trend.high >= rule.per_thousand
    return steep and rise >= rule.rise and trend.first + rise >= rule.ratio * trend.first


def _flat(growth: Growth, *, excludes_rise: bool) -> Growth:
    reason = growth.reason if excludes_rise else "no rise is seen, but the interval has room for one that would count"
    return replace(growth, reason=reason, excludes_rise=excludes_rise)


def _in_its_unit(value: float, unit: str) -> str:
    return f"{value * 1024:.0f} KB" if unit == "MB" and value < 1 else amount(value, unit)


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


def _no_pass(evidence: Evidence) -> str:
    return evidence.why_no_pass()


def _no_piece(evidence: Evidence) -> str:
    if evidence.passes is None:
        return _no_pass(evidence)
    return "" if evidence.duration_s < 2 * LEAST_SAMPLES else "the GC hook did not see the whole span"


def _no_scrape(evidence: Evidence) -> str:
    scrapes = evidence.captures.scrapes.outcome(evidence.start_ns, evidence.end_ns)
    if not scrapes.sent:
        return "no scrape was recorded"
    return scrapes.failure if scrapes.failed == scrapes.sent else ""


def _no_sample(evidence: Evidence) -> str:
    return "" if evidence.samples is not None else "no API process was seen"


def _no_probe(evidence: Evidence) -> str:
    health = evidence.captures.health
    if not len(health.sent_ns):
        return "no probe was recorded"
    return "" if len(_health(evidence, 0.0)[0]) else "no probe was answered"


def _no_token(evidence: Evidence) -> str:
    return "" if evidence.requests is not None else "no request was recorded"


_PASS: Final = (_no_pass, ("pass", "passes"))
_SCRAPE: Final = (_no_scrape, ("scrape", "scrapes"))
_SAMPLE: Final = (_no_sample, ("sample", "samples"))
_PIECE: Final = (_no_piece, ("second", "seconds"))
_PROBE: Final = (_no_probe, ("probe", "probes"))
_TOKEN: Final = (_no_token, ("first token", "first tokens"))

_RULES: Final = (
    _Rule("gen2_pause_ms", "gen-2 pause", "ms", _pauses, *_PASS, least=LEAST_PASSES, ratio=1.25, rise=0.5),
    _Rule("gen2_share", "gen-2 share", "fraction", _share, *_PIECE, pool="mean", rise=0.005),
    _Rule("metrics_ms", "/metrics", "ms", _scraped("latency_ms"), *_SCRAPE, ratio=1.25, rise=2.0),
    _Rule("metrics_series", "series", "series", _scraped("series"), *_SCRAPE, rise=5.0, per_thousand=10.0),
    _Rule("metrics_body_bytes", "/metrics body", "bytes", _scraped("body_bytes"), *_SCRAPE, ratio=1.1),
    _Rule("rss_mb", "API RSS", "MB", _sampled("rss_mb"), *_SAMPLE, ratio=1.01, per_thousand=50 / 1024),
    _Rule("threads", "threads", "threads", _sampled("threads"), *_SAMPLE, rise=4.0),
    _Rule("health_ms", "/health", "ms", _health, *_PROBE, pool="mean", ratio=1.5, rise=2.0),
    _Rule("ttft_ms", "TTFT", "ms", _ttft, *_TOKEN, pool="mean", ratio=1.5, rise=20.0),
)
"""What matters: a scrape or a pause that takes a quarter longer at the end; half a percent more of the wall clock; a
series per hundred requests; 1% of memory and 50 KB per 1,000 requests; four threads; a probe, or a first token, that
waits half as long again and 2 ms, or 20 ms, longer. (Most probes wait for nothing; 2 ms more on average is what a stall
of 63 ms in every second makes.)"""
