"""What is behind it, by rule. Each cause that holds is named with the numbers that it rests on; none excludes another.

heap grows        memory rises with requests by more than the new metric series can hold, or passes take longer and
                  longer while no series are added
series            a metric family gains a series every 100 requests or more often
renders           `/health` probes sent during a scrape wait, or tokens do while no pass explains them, over and over
allocation        passes cost, and nothing grows that would make them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from atom.diag.gc_profile.attribution import Overlaps, Surplus
from atom.diag.gc_profile.evidence import Evidence
from atom.diag.gc_profile.growth import warm_up_s
from atom.diag.gc_profile.model import Cause, CauseKind, Growth, GrowthVerdict, Totals, Window
from atom.diag.server_captures import FloatArray

__all__ = ["Findings", "costs", "family_growth", "find_causes"]

COSTLY_SHARE: Final = 0.01
"""Of the wall clock in passes, over the span or in the last window."""
ATTRIBUTED: Final = 0.1
"""Of the slow events, that passes (renders) explain beyond chance."""
LEAST_FOUND: Final = 10
SERIES_KB: Final = 3.0
"""Most that a metric series takes in the API process, with what a render makes of it; a labelled gauge of
prometheus_client was measured at 1.4 KB."""
LEAST_LEAK_KB: Final = 50.0
"""Per 1,000 requests, beyond what series explain."""
SERIES_PER_REQUEST: Final = 0.01
SLOW_SCRAPE_MS: Final = 10.0
"""Scrapes that take less hold up nobody, whatever they run on."""
HELD_UP_TOKENS: Final = 0.2
"""Of the scrapes, that overlap a slow token: one stall of the whole machine overlaps one."""
HELD_UP_PROBES: Final = 0.5
"""Of the scrapes in whose first half a probe was sent, that made it wait."""
WAITED: Final = 0.4
"""Of the scrape's time, that such a probe waits for at least: one that shares the interpreter with a render on another
thread is answered before."""
WAITED_MS: Final = 10.0
LEAST_HELD_UP: Final = 5


@dataclass(frozen=True, slots=True)
class Findings:
    """What the rules look at."""

    evidence: Evidence
    totals: Totals
    windows: Sequence[Window]
    growth: Mapping[str, Growth]
    overlaps: Mapping[str, Overlaps]
    """By kind of event."""

    def grows(self, quantity: str) -> Growth | None:
        growth = self.growth.get(quantity)
        return growth if growth is not None and growth.verdict is GrowthVerdict.GROWS else None

    def is_flat(self, quantity: str) -> bool:
        return quantity in self.growth and self.growth[quantity].verdict is GrowthVerdict.FLAT


def find_causes(findings: Findings) -> tuple[Cause, ...]:
    found = [_heap(findings), _series(findings), _renders(findings)]
    causes = [cause for cause in found if cause is not None]
    pattern = _allocation(findings, causes)
    return (*causes, pattern) if pattern is not None else tuple(causes)


def costs(findings: Findings) -> list[str]:
    """What garbage collection costs in the API process, where that is much; empty if it is not."""
    totals, last = findings.totals, findings.windows[-1] if findings.windows else None
    found = []
    if max(totals.gen2_share or 0.0, (last.gen2_share if last else None) or 0.0) >= COSTLY_SHARE:
        found.append("share")
    for overlaps in findings.overlaps.values():
        passes = overlaps.passes
        if passes is not None and _explain(passes, overlaps.events.slow):
            found.append(overlaps.events.kind)
    return found


def _explain(surplus: Surplus, slow: int) -> bool:
    """Whether pauses explain a part of the slow events that matters, beyond chance."""
    return surplus.is_evidence and surplus.found - surplus.expected >= max(LEAST_FOUND, ATTRIBUTED * slow)


# ---- heap --------------------------------------------------------------------------------------------------------


def _heap(findings: Findings) -> Cause | None:
    rss, pause, series = (findings.grows(name) for name in ("rss_mb", "gen2_pause_ms", "metrics_series"))
    statements, evidence = [], dict[str, Any]()
    if rss is not None and (unexplained := _unexplained_kb(rss, series)) is not None:
        statements.append(f"API RSS grows by {_size(rss.slope)} per {rss.per} ({_ends(rss)})")
        if series is not None:
            most = (series.slope or 0.0) * SERIES_KB
            statements.append(f"of which new metric series hold {_size(most / 1024)} at most")
        evidence |= {"rss_mb_slope": rss.slope, "unexplained_kb": unexplained, "per": rss.per}
    if pause is not None and (statements or series is None):
        what = f"each pass takes longer than the ones before: {_ends(pause)}"
        statements.append(what if statements else f"{what}, while no metric series are added")
        evidence |= {"gen2_pause_ms_first": pause.first, "gen2_pause_ms_last": pause.last}
    if not statements:
        return None
    return Cause(
        kind=CauseKind.HEAP_GROWS,
        statement="; ".join(statements),
        evidence=evidence,
        advice="find what keeps a request's objects after it ends: a queue that nobody reads, a dict, a cache, a log",
    )


def _unexplained_kb(rss: Growth, series: Growth | None) -> float | None:
    """How much memory grows at least, in KB per 1,000 requests (or per minute), beyond what series can hold; None if
    that is nothing. The least of the one is compared with the most of the other."""
    assert rss.slope_low is not None
    explained = 0.0 if series is None else (series.slope_high or 0.0) * SERIES_KB
    unexplained = rss.slope_low * 1024 - explained
    return unexplained if unexplained >= LEAST_LEAK_KB else None


# ---- metric series -----------------------------------------------------------------------------------------------


def family_growth(evidence: Evidence, from_s: float) -> dict[str, tuple[int, int]]:
    """Metric family → series at `from_s` and at the end of the span, of those that grew; most growth first."""
    start_ns = evidence.start_ns + round(from_s * 1e9)
    first: dict[str, int] | None = None
    now: dict[str, int] = {}
    for moment, families in evidence.captures.scrapes.families:
        if moment > evidence.end_ns:
            break
        now |= families
        if first is None and moment >= start_ns:
            first = dict(now)
    grown = (
        {name: (first.get(name, 0), count) for name, count in now.items() if count > first.get(name, 0)}
        if first
        else {}
    )
    return dict(sorted(grown.items(), key=lambda item: item[1][0] - item[1][1]))


def _series(findings: Findings) -> Cause | None:
    growth = findings.grows("metrics_series")
    if growth is None or growth.slope is None:
        return None
    scrapes = findings.evidence.captures.scrapes
    start_s = warm_up_s(findings.evidence.duration_s)
    families = family_growth(findings.evidence, start_s)
    part = scrapes.window(findings.evidence.start_ns + round(start_s * 1e9), findings.evidence.end_ns)
    scraped = findings.evidence.seconds(scrapes.sent_ns[part])
    span = findings.evidence.finished(scraped[[0, -1]])  # there are some: series are known to grow
    requests = float(span[1] - span[0]) if span is not None else 0.0
    culprits = {
        name: (last - first) / requests
        for name, (first, last) in families.items()
        if requests and (last - first) / requests >= SERIES_PER_REQUEST
    }
    if culprits:
        named = " and ".join(f"{name} (+{each:.2g})" for name, each in list(culprits.items())[:3])
        statement = f"{growth.slope / 1000:.2g} metric series are added per request, by {named}"
    else:
        names = ", ".join(list(families)[:3]) or "families that the record does not name"
        statement = f"{growth.slope:.3g} metric series are added per {growth.per}, in {names}"
    scrape = findings.grows("metrics_ms")
    if scrape is not None:
        statement += f"; a scrape takes {_ends(scrape)}"
    return Cause(
        kind=CauseKind.SERIES_PER_REQUEST,
        statement=f"{statement}; {findings.totals.metrics_series or 0:,} series at the end",
        evidence={"series_per": growth.per, "series_slope": growth.slope, "families": culprits or families},
        advice="drop the label that names a request, or switch the metric off; a series is never freed",
    )


# ---- renders -----------------------------------------------------------------------------------------------------


def _renders(findings: Findings) -> Cause | None:
    scrapes = findings.evidence.captures.scrapes
    part = scrapes.window(findings.evidence.start_ns, findings.evidence.end_ns)
    latency = scrapes.latency_ms[part]
    latency = latency[~np.isnan(latency)]
    if not len(latency) or np.percentile(latency, 75) < SLOW_SCRAPE_MS:
        return None
    statements, evidence = [], dict[str, Any]()
    probes = _held_up_probes(findings.evidence)
    if probes is not None:
        held, scraped, inside, outside = probes
        statements.append(
            f"/health had to wait for {held} of the {scraped} scrapes that began just before it: {inside:.1f} ms "
            f"(median), {outside:.1f} ms when there was none"
        )
        evidence |= {"scrapes_holding_up": held, "scrapes_probed": scraped, "inside_ms": inside, "outside_ms": outside}
    for kind, overlaps in findings.overlaps.items():
        alone, hit = overlaps.render_only, overlaps.renders_that_hold_up
        if alone is None or hit is None or hit < HELD_UP_TOKENS or not _explain(alone, overlaps.events.slow):
            continue
        name = "first tokens" if kind == "first token" else "chunk gaps"
        lift = f", {alone.lift:.1f} times what chance gives" if alone.lift is not None else ""
        statements.append(
            f"{alone.found} of {overlaps.events.slow} slow {name} were in a scrape and in no pass{lift}, "
            f"in {hit:.0%} of the scrapes"
        )
        evidence[f"{kind.replace(' ', '_')}_in_render_only"] = alone.found
    if not statements:
        return None
    return Cause(
        kind=CauseKind.RENDER_ON_LOOP,
        statement=f"a scrape takes {np.median(latency):.0f} ms (median): {'; '.join(statements)}",
        evidence=evidence,
        advice="render /metrics outside the event loop, or give it fewer series",
    )


def _held_up_probes(evidence: Evidence) -> tuple[int, int, float, float] | None:
    """Scrapes that held up a `/health` probe, scrapes with a probe sent in their first half, and the median latency of
    those probes and of probes outside scrapes; None if scrapes do not hold up probes.

    Counted by scrape, because one stall of the whole machine stretches one scrape over many slow probes. Probes that
    overlap a pass are left out: what they waited for is known.
    """
    health, scrapes = evidence.captures.health, evidence.captures.scrapes
    sent = evidence.seconds(health.sent_ns)
    used = ~np.isnan(health.latency_ms) & (sent >= 0) & (sent < evidence.duration_s)
    sent, latency = sent[used], health.latency_ms[used]
    good = ~np.isnan(scrapes.latency_ms)
    begun = evidence.seconds(scrapes.sent_ns[good])
    if not len(sent) or not len(begun):
        return None
    free = ~_in_a_pass(evidence, sent, latency)
    sent, latency = sent[free], latency[free]
    which = np.searchsorted(begun, sent, side="right") - 1
    length_ms = scrapes.latency_ms[good][np.maximum(which, 0)]
    after_ms = (sent - begun[np.maximum(which, 0)]) * 1e3
    during = (which >= 0) & (after_ms < length_ms)
    early = during & (after_ms < length_ms / 2) & (length_ms >= SLOW_SCRAPE_MS)
    if not early.any() or during.all():
        return None
    otherwise = float(np.median(latency[~during]))
    waited = early & (latency >= WAITED * length_ms) & (latency >= otherwise + WAITED_MS)
    scraped, held = len(np.unique(which[early])), len(np.unique(which[waited]))
    if held < LEAST_HELD_UP or held < HELD_UP_PROBES * scraped:
        return None
    return held, scraped, float(np.median(latency[early])), otherwise


def _in_a_pass(evidence: Evidence, sent_s: FloatArray, latency_ms: FloatArray) -> Any:
    passes = evidence.passes
    if passes is None or not len(passes.start_ns):
        return np.zeros(len(sent_s), dtype=bool)
    start, stop = evidence.seconds(passes.start_ns), evidence.seconds(passes.stop_ns)
    return np.searchsorted(stop, sent_s) < np.searchsorted(start, sent_s + latency_ms / 1e3)


# ---- allocation --------------------------------------------------------------------------------------------------


def _allocation(findings: Findings, others: Sequence[Cause]) -> Cause | None:
    """Passes cost although nothing grows."""
    passes, totals = findings.evidence.passes, findings.totals
    if passes is None or not costs(findings) or not totals.gen2_passes:
        return None
    makers = {CauseKind.HEAP_GROWS, CauseKind.SERIES_PER_REQUEST}
    if any(cause.kind in makers for cause in others) or findings.grows("gen2_pause_ms"):
        return None
    flat = findings.is_flat("rss_mb") and findings.is_flat("metrics_series")
    collected = sum(one.collected for one in passes.process.passes) / max(len(passes.process.passes), 1)
    thresholds = ", ".join(map(str, passes.process.last_thresholds))
    growing = "nothing grows" if flat else "no growth is seen"
    return Cause(
        kind=CauseKind.ALLOCATION_PATTERN,
        statement=(
            f"{growing}, yet there are {totals.gen2_passes / totals.duration_s:.2g} passes a second of "
            f"{totals.gen2_mean_pause_ms or 0:.1f} ms (mean), which free {collected:,.0f} objects each; thresholds "
            f"{thresholds}, {passes.process.frozen or 0:,} objects frozen"
        ),
        evidence={
            "passes_per_s": totals.gen2_passes / totals.duration_s,
            "collected_per_pass": collected,
            "thresholds": list(passes.process.last_thresholds),
            "frozen": passes.process.frozen,
        },
        advice="look for explicit gc.collect(); gc.freeze() after start, or higher thresholds, which --what-if tries",
    )


# ---- words -------------------------------------------------------------------------------------------------------


def _ends(growth: Growth) -> str:
    return f"{growth.first:,.4g} to {growth.last:,.4g} {growth.unit}"


def _size(megabytes: float | None) -> str:
    assert megabytes is not None
    return f"{megabytes:,.1f} MB" if megabytes >= 1 else f"{megabytes * 1024:,.0f} KB"
