"""What is behind it, by rule. Each cause that holds is named with the numbers that it rests on; none excludes another.

heap grows        memory rises with requests by more than the new metric series can hold, or passes take longer and
                  longer while no series are added
series            a metric family gains a series every 100 requests or more often
renders           `/health` probes sent during a scrape wait, or tokens do while no pass explains them, over and over
allocation        passes cost, and nothing grows that would make them
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from atom.diag.gc_profile.attribution import Overlaps, Surplus
from atom.diag.gc_profile.evidence import Evidence
from atom.diag.gc_profile.growth import warm_up_s
from atom.diag.gc_profile.model import Cause, CauseKind, Growth, GrowthVerdict, Totals, Window
from atom.diag.gc_profile.words import PassWords, counted, duration, ends, figure, joined, pass_words
from atom.diag.server_captures import FloatArray

__all__ = ["Findings", "costs", "family_growth", "few_passes", "find_causes"]

COSTLY_SHARE: Final = 0.01
"""Of the wall clock in passes, over the span or in the last whole window."""
LEAST_LATE: Final = 3
"""Passes that began in that window: one or two are no state that the server has come to."""
ATTRIBUTED: Final = 0.1
"""Of the slow events, that passes (renders) explain beyond chance."""
LEAST_FOUND: Final = 10
SERIES_KB: Final = 3.0
"""Most that a metric series takes in the API process, with what a render makes of it; a labelled gauge of
prometheus_client was measured at 1.4 KB."""
LEAST_LEAK_KB: Final = 50.0
"""Per 1,000 requests, beyond what series explain."""
SERIES_PER_REQUEST: Final = 0.01
MOST_NAMED: Final = 3
"""Families."""
LEAST_SHORT_GAIN: Final = 20
SHORT_GAIN: Final = 0.5
"""Where a run is too short for a trend: series that a family gained, and how many per request completed, in the first
half of the requests as in the second. A family whose labels are all new at the first request stands still after it."""
NOTED_RISE: Final = 1.05
"""Of memory from the first window to the last, where no trend could be judged."""
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
MOST_FEW: Final = 8
"""Passes that are told one by one."""
LEAST_LONGER: Final = 3
"""Passes, each longer than the one before, that are cited: of three it happens by chance in one of six, so that they
support a heap that grows by its memory, and never say it alone."""


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

    def not_judged(self, quantity: str) -> Growth | None:
        growth = self.growth.get(quantity)
        return growth if growth is not None and growth.verdict is GrowthVerdict.NOT_ENOUGH_DATA else None

    @property
    def late_share(self) -> float | None:
        """The share of the last whole window (a shorter rest says little); None where that had next to no pass."""
        whole = [one for one in self.windows if one.end_s - one.start_s >= 0.999 * self._window_s]
        last = whole[-1] if len(whole) > 1 else None
        return last.gen2_share if last is not None and (last.gen2_passes or 0) >= LEAST_LATE else None

    @property
    def _window_s(self) -> float:
        return self.windows[0].end_s - self.windows[0].start_s if self.windows else 0.0


def find_causes(findings: Findings) -> tuple[Cause, ...]:
    found = [_heap(findings), _series(findings), _renders(findings)]
    causes = [cause for cause in found if cause is not None]
    pattern = _allocation(findings, causes)
    return (*causes, pattern) if pattern is not None else tuple(causes)


def costs(findings: Findings) -> list[str]:
    """What garbage collection costs in the API process, where that is much; empty if it is not."""
    found = []
    if max(findings.totals.gen2_share or 0.0, findings.late_share or 0.0) >= COSTLY_SHARE:
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
        grows = f"API RSS grows by {_size(rss.slope)} per {rss.per} ({ends(rss)})"
        if series is not None:
            most = (series.slope or 0.0) * SERIES_KB
            grows += f", of which new metric series hold {_size(most / 1024)} at most"
        statements.append(grows)
        evidence |= {"rss_mb_slope": rss.slope, "unexplained_kb": unexplained, "per": rss.per}
    if pause is not None and (statements or series is None):
        added = ", while no metric series are added" if findings.is_flat("metrics_series") else ""
        statements.append(f"{_passes(findings).many} take longer and longer ({ends(pause)}){added}")
        evidence |= {"gen2_pause_ms_first": pause.first, "gen2_pause_ms_last": pause.last}
    elif statements and (pauses := _ever_longer(findings.evidence)):
        listed = joined([figure(one) for one in pauses])
        statements.append(
            f"each of {len(pauses)} {_passes(findings).many} took longer than the one before: {listed} ms"
        )
        evidence["pauses_ms"] = list(pauses)
    if not statements:
        return None
    return Cause(
        kind=CauseKind.HEAP_GROWS,
        statement="; ".join(statements),
        evidence=evidence,
        advice="find what keeps a request's objects after it ends: a queue that nobody reads, a dict, a cache, a log",
    )


def few_passes(evidence: Evidence) -> tuple[tuple[float, float], ...]:
    """When each pass of the span began in seconds, and its pause in ms; empty where there are more than MOST_FEW."""
    start, pause = evidence.begun_passes()
    return tuple(zip(start.tolist(), pause.tolist(), strict=True)) if len(start) <= MOST_FEW else ()


def _ever_longer(evidence: Evidence) -> tuple[float, ...]:
    """The pauses of few passes, in ms, if each is longer than the one before; else empty."""
    pauses = tuple(pause for _, pause in few_passes(evidence))
    longer = all(before < after for before, after in itertools.pairwise(pauses))
    return pauses if longer and len(pauses) >= LEAST_LONGER else ()


def _unexplained_kb(rss: Growth, series: Growth | None) -> float | None:
    """How much memory grows at least, in KB per 1,000 requests (or per minute), beyond what series can hold; None if
    that is nothing. The least of the one is compared with the most of the other."""
    assert rss.slope_low is not None
    explained = 0.0 if series is None else (series.slope_high or 0.0) * SERIES_KB
    unexplained = rss.slope_low * 1024 - explained
    return unexplained if unexplained >= LEAST_LEAK_KB else None


# ---- metric series -----------------------------------------------------------------------------------------------

_SERIES_ADVICE: Final = "drop the label that names a request, or switch the metric off; a series is never freed"


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


def _short_culprits(evidence: Evidence) -> dict[str, tuple[int, float]]:
    """Family → series gained, and gained per request completed, of those that gained about one with each request in
    the first half of the requests and in the second; most first."""
    scraped = [
        (at, families)
        for at, families in evidence.captures.scrapes.families
        if evidence.start_ns <= at <= evidence.end_ns
    ]
    finished = evidence.finished(evidence.seconds([at for at, _ in scraped])) if len(scraped) > 2 else None
    if finished is None:
        return {}
    middle = int(np.searchsorted(finished, (finished[0] + finished[-1]) / 2))
    marks = sorted({0, min(max(middle, 1), len(scraped) - 2), len(scraped) - 1})
    now: dict[str, int] = {}
    seen: list[dict[str, int]] = []
    for i, (_, families) in enumerate(scraped):
        now |= families
        if i in marks:
            seen.append(dict(now))
    requests = np.diff(finished[marks])
    if not np.all(requests > 0):
        return {}
    culprits = {}
    for name, last in now.items():
        counts = np.array([one.get(name, 0) for one in seen])
        gained = int(last - counts[0])
        if gained >= LEAST_SHORT_GAIN and np.all(np.diff(counts) >= SHORT_GAIN * requests):
            culprits[name] = (gained, gained / float(requests.sum()))
    return dict(sorted(culprits.items(), key=lambda item: -item[1][0]))


def _series_in_short(findings: Findings) -> Cause | None:
    """The same where the run is too short for a trend: only families that gain about one series with each request."""
    culprits = _short_culprits(findings.evidence)
    if not culprits:
        return None
    named = joined(
        [f"{name} (+{gained:,}, {each:.2g} per request)" for name, (gained, each) in culprits.items()][:MOST_NAMED]
    )
    statement = f"metric series are added with each request, by {named}, in a run too short for a trend"
    if findings.totals.metrics_series is not None:
        statement += f"; {findings.totals.metrics_series:,} series at the end"
    return Cause(
        kind=CauseKind.SERIES_PER_REQUEST,
        statement=statement,
        evidence={"families": {name: each for name, (_, each) in culprits.items()}},
        advice=_SERIES_ADVICE,
    )


def _series(findings: Findings) -> Cause | None:
    growth = findings.grows("metrics_series")
    if growth is None or growth.slope is None:
        return _series_in_short(findings) if findings.not_judged("metrics_series") else None
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
        each = growth.slope / 1000
        named = joined([f"{name} (+{gained:.2g})" for name, gained in list(culprits.items())[:MOST_NAMED]])
        statement = f"{each:.2g} metric series {'is' if f'{each:.2g}' == '1' else 'are'} added per request, by {named}"
    else:
        named = joined(list(families)[:MOST_NAMED]) or "families that the record does not name"
        statement = f"{figure(growth.slope)} metric series are added per {growth.per}, in {named}"
    scrape = findings.grows("metrics_ms")
    if scrape is not None:
        statement += f"; scrapes take longer and longer ({ends(scrape)})"
    if findings.totals.metrics_series is not None:
        statement += f"; {findings.totals.metrics_series:,} series at the end"
    return Cause(
        kind=CauseKind.SERIES_PER_REQUEST,
        statement=statement,
        evidence={"series_per": growth.per, "series_slope": growth.slope, "families": culprits or families},
        advice=_SERIES_ADVICE,
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
            f"{held:,} of {counted(scraped, 'scrape')} held up a /health probe sent just after they began: "
            f"{figure(inside)} ms (median), otherwise {figure(outside)} ms"
        )
        evidence |= {"scrapes_holding_up": held, "scrapes_probed": scraped, "inside_ms": inside, "outside_ms": outside}
    for kind, overlaps in findings.overlaps.items():
        alone, hit = overlaps.render_only, overlaps.renders_that_hold_up
        if alone is None or hit is None or hit < HELD_UP_TOKENS or not _explain(alone, overlaps.events.slow):
            continue
        where = "a scrape" if findings.evidence.passes is None else "a scrape and in no pass"
        lift = f", {figure(alone.lift)} times what chance gives" if alone.lift is not None else ""
        statements.append(
            f"{alone.found:,} of {counted(overlaps.events.slow, f'slow {kind}')} were in {where}{lift}; "
            f"{hit:.0%} of the scrapes held one up"
        )
        evidence[f"{kind.replace(' ', '_')}_in_render_only"] = alone.found
    if not statements:
        return None
    return Cause(
        kind=CauseKind.RENDER_ON_LOOP,
        statement=f"a scrape takes {figure(float(np.median(latency)))} ms (median); {'; '.join(statements)}",
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
    """Passes cost although nothing grows, as far as that could be judged."""
    passes, totals = findings.evidence.passes, findings.totals
    if passes is None or not costs(findings) or not totals.gen2_passes:
        return None
    makers = {CauseKind.HEAP_GROWS, CauseKind.SERIES_PER_REQUEST}
    if any(cause.kind in makers for cause in others) or findings.grows("gen2_pause_ms"):
        return None
    growing, judged = _what_grows(findings)
    process = passes.process
    collected = sum(one.collected for one in process.passes) / max(len(process.passes), 1)
    thresholds = ", ".join(map(str, process.last_thresholds))
    mean, freed = f"of {figure(totals.gen2_mean_pause_ms or 0.0)} ms", counted(round(collected), "object")
    if totals.gen2_passes == 1:
        ran = f"there was 1 {_passes(findings).one} {mean}, and it freed {freed}"
    else:
        ran = f"there were {totals.gen2_passes:,} {_passes(findings).many} {mean} on average, and each freed {freed}"
    frozen = "no object frozen" if not process.frozen else f"{counted(process.frozen, 'object')} frozen"
    limits = f"thresholds {thresholds}, {frozen}" if thresholds else frozen
    return Cause(
        kind=CauseKind.ALLOCATION_PATTERN,
        statement=f"{growing} in {duration(totals.duration_s)} {ran}; {limits}",
        evidence={
            "passes_per_s": totals.gen2_passes / totals.duration_s,
            "collected_per_pass": collected,
            "thresholds": list(process.last_thresholds),
            "frozen": process.frozen,
        },
        advice=f"{'' if judged else 'measure for longer, to see what grows; '}look for explicit gc.collect(); "
        "gc.freeze() after start, or higher thresholds, which --what-if tries",
    )


def _what_grows(findings: Findings) -> tuple[str, bool]:
    """The beginning of the sentence, and whether everything was judged. What was not is not said to stand still."""
    names = {"rss_mb": "memory", "metrics_series": "metric series"}
    unknown = {names[key]: growth for key in names if (growth := findings.not_judged(key)) is not None}
    grown = [names[key] for key in names if findings.grows(key)]
    flat = [name for name in names.values() if name not in (*unknown, *grown)]
    said = []
    if flat:
        said.append(f"{joined(flat)} {'do' if flat[-1] == names['metrics_series'] else 'does'} not grow")
    if grown:
        said.append(f"{joined(grown)} grow, which does not explain it")
    if unknown:
        reasons = "; ".join(dict.fromkeys(growth.reason for growth in unknown.values()))
        said.append(
            f"whether {joined([*unknown])} {'grow' if 'metric series' in unknown else 'grows'} is not known ({reasons})"
        )
    seen = [window.rss_mb for window in findings.windows if window.rss_mb is not None]
    if "memory" in unknown and len(seen) > 1 and seen[-1] >= NOTED_RISE * seen[0]:
        said.append(f"API RSS was {figure(seen[0])} MB in the first window and {figure(seen[-1])} MB in the last")
    return f"{', '.join(said)}{';' if unknown else ', yet'}", not unknown


# ---- words -------------------------------------------------------------------------------------------------------


def _passes(findings: Findings) -> PassWords:
    passes = findings.evidence.passes
    return pass_words(None if passes is None else passes.process.collector)


def _size(megabytes: float | None) -> str:
    assert megabytes is not None
    return f"{megabytes:,.1f} MB" if megabytes >= 1 else f"{megabytes * 1024:,.0f} KB"
