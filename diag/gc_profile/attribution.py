"""Slow first tokens and slow chunk gaps: was the API process in a pass, in a `/metrics` render, or in neither?

An event is an interval: request sent → first token, or chunk → next chunk of its stream. It is slow above the highest
of: the 95th percentile, half as long again as the median, the median + 5 ms. It is *in a pass* if passes cover at least
half of its excess over the median, whatever else happened in it: in a long queue only what overlaps can explain.

How much chance would cover is found by shifting all pauses together around the end of the span by random offsets: they
keep their lengths and their bursts, and lose their place. Each is moved besides by up to half of the usual distance
between two: a scrape a second, shifted by whole seconds, would be where it was. Lift is found ÷ the mean of the shifts;
what 95% of the shifts give is what pauses that have nothing to do with latency would give. Renders are taken from
outside, first byte sent to last byte read, so a scrape that waits behind a pass covers it too: such events count in
both, and `Overlaps.render_only` says how many renders explain alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from atom.diag.gc_profile.evidence import Evidence
from atom.diag.gc_profile.model import Attribution, SlowEvents
from atom.diag.gc_profile.words import counted
from atom.diag.server_captures import FloatArray

__all__ = ["Overlaps", "Pauses", "Surplus", "attribute", "compare"]

BoolArray = npt.NDArray[np.bool_]

SLOW_PERCENTILE: Final = 95.0
SLOW_RATIO: Final = 1.5
SLOW_MS: Final = 5.0
COVERED: Final = 0.5
"""Of an event's excess."""
LEAST_EVENTS: Final = 50
MOST_SHIFTED: Final = 20_000
"""Slow events that the shifts look at; of more, so many spread evenly over the span."""
NEAREST_SHIFT: Final = 0.02
"""Share of the span that a shift moves at least: less would leave the pauses where they were."""


class Pauses:
    """Intervals within [0, period_s), joined where they overlap, and how much of any interval they cover."""

    def __init__(self, start_s: FloatArray, stop_s: FloatArray, period_s: float) -> None:
        start, stop = np.clip(start_s, 0, period_s), np.clip(stop_s, 0, period_s)
        order = np.argsort(start, kind="stable")
        start, stop = start[order], np.maximum.accumulate(stop[order]) if len(order) else stop
        kept = stop > start
        start, stop = start[kept], stop[kept]
        first = np.ones(len(start), dtype=bool)
        first[1:] = start[1:] > stop[:-1]
        last = np.roll(first, -1)
        self.start_s, self.stop_s = start[first], stop[last]
        self.period_s = period_s
        self.total_s = float((self.stop_s - self.start_s).sum())
        # Time spent in pauses up to each border: piecewise linear, so that np.interp gives it for any moment.
        self._at = np.concatenate([[0.0], np.column_stack([self.start_s, self.stop_s]).ravel(), [period_s]])
        lengths = self.stop_s - self.start_s
        spent = np.column_stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)]).ravel()
        self._spent = np.concatenate([[0.0], spent, [self.total_s]])

        self._spacing_s = float(np.median(np.diff(self.start_s))) if len(self.start_s) > 1 else 0.0

    def covered(self, from_s: FloatArray, to_s: FloatArray) -> FloatArray:
        """Seconds of each [from, to] within pauses."""
        spent: FloatArray = np.interp(to_s, self._at, self._spent) - np.interp(from_s, self._at, self._spent)
        return spent

    def moved(self, offset_s: float, rng: np.random.Generator | None = None) -> Pauses:
        """The same pauses shifted around the end of the period; with `rng`, each by up to half the usual distance
        between two more or less."""
        length, period = self.stop_s - self.start_s, self.period_s
        jitter = 0.0 if rng is None else self._spacing_s * rng.uniform(-0.5, 0.5, len(length))
        start = (self.start_s + offset_s + jitter) % period
        over = start + length > period  # the rest of these begins anew
        return Pauses(
            np.concatenate([start, np.zeros(np.count_nonzero(over))]),
            np.concatenate([start + length, (start + length - period)[over]]),
            period,
        )


@dataclass(frozen=True, slots=True)
class Surplus:
    """Events counted, beside what chance gives."""

    found: int
    expected: float
    low: float
    high: float
    """Mean and 95% interval of the shifts."""
    p: float

    @property
    def lift(self) -> float | None:
        return self.found / self.expected if self.expected > 0 else None

    @property
    def is_evidence(self) -> bool:
        return self.found > self.high and self.p <= 0.01


@dataclass(frozen=True, slots=True)
class Overlaps:
    """`SlowEvents`, and what a rule needs beside it."""

    events: SlowEvents
    passes: Surplus | None
    renders: Surplus | None
    render_only: Surplus | None
    """In a render and in no pass."""
    renders_that_hold_up: float | None
    """Share of the renders that overlap an event that they explain alone."""


def attribute(evidence: Evidence, *, shifts: int, seed: int) -> tuple[Attribution, dict[str, Overlaps]]:
    """The attribution, and by kind of event the numbers behind it."""
    requests = evidence.requests
    passes, renders = _passes(evidence), _renders(evidence)
    scrapes = evidence.captures.scrapes.outcome(evidence.start_ns, evidence.end_ns)
    missing = [
        *(["no request was recorded, so there is no token to explain"] if requests is None else []),
        *(["passes were not recorded"] if passes is None else []),
        *([scrapes.failure or "no scrape was recorded"] if renders is None else []),
    ]
    found: dict[str, Overlaps] = {}
    if requests is not None and (passes is not None or renders is not None):
        kinds = {
            "first token": (requests.sent_s, requests.first_s),
            "chunk gap": (requests.gap_from_s, requests.gap_to_s),
        }
        for number, (kind, (start, stop)) in enumerate(kinds.items()):
            rng = np.random.default_rng([seed, number])
            overlaps = compare(kind, start, stop, passes, renders, shifts=shifts, rng=rng)
            if overlaps is None:
                found_events = counted(len(start), kind) if len(start) else f"no {kind}"
                missing.append(f"{found_events} seen, {LEAST_EVENTS} needed")
            else:
                found[kind] = overlaps
    return (
        Attribution(
            first_tokens=found["first token"].events if "first token" in found else None,
            chunk_gaps=found["chunk gap"].events if "chunk gap" in found else None,
            shifts=shifts,
            note="; ".join(missing),
        ),
        found,
    )


def _passes(evidence: Evidence) -> Pauses | None:
    """Passes of the API processes together: which of them served a request is not recorded."""
    watched = [
        one
        for one in evidence.captures.passes
        if one.process.role == "api" and one.watched_ns(evidence.start_ns, evidence.end_ns)
    ]
    if not watched or evidence.duration_s <= 0:
        return None
    start = np.concatenate([evidence.seconds(one.start_ns) for one in watched])
    stop = np.concatenate([evidence.seconds(one.stop_ns) for one in watched])
    return Pauses(start, stop, evidence.duration_s)


def _renders(evidence: Evidence) -> Pauses | None:
    scrapes = evidence.captures.scrapes
    good = ~np.isnan(scrapes.latency_ms)
    if not good.any() or evidence.duration_s <= 0:
        return None
    start = evidence.seconds(scrapes.sent_ns[good])
    return Pauses(start, start + scrapes.latency_ms[good] / 1e3, evidence.duration_s)


def compare(
    kind: str,
    start_s: FloatArray,
    stop_s: FloatArray,
    passes: Pauses | None,
    renders: Pauses | None,
    *,
    shifts: int,
    rng: np.random.Generator,
) -> Overlaps | None:
    """Attribute the slow ones among the events [start, stop); None if there are too few events."""
    if len(start_s) < LEAST_EVENTS:
        return None
    lengths = stop_s - start_s
    typical = float(np.median(lengths))
    threshold = max(float(np.percentile(lengths, SLOW_PERCENTILE)), SLOW_RATIO * typical, typical + SLOW_MS / 1e3)
    chosen = lengths > threshold
    slow = _Slow(start_s[chosen], stop_s[chosen], lengths[chosen] - typical)
    in_pass, in_render = slow.inside(passes), slow.inside(renders)
    shifted = slow.shifted(passes, renders, shifts, rng)
    pass_surplus = _surplus(in_pass, shifted[0])
    render_surplus = _surplus(in_render, shifted[1])
    alone = _only(in_render, in_pass)
    either = np.zeros(len(slow.start_s), dtype=bool)
    for inside in (in_pass, in_render):
        either |= inside if inside is not None else False
    events = SlowEvents(
        kind=kind,
        threshold_ms=threshold * 1e3,
        typical_ms=typical * 1e3,
        events=len(lengths),
        slow=len(slow.start_s),
        in_pass=None if in_pass is None else int(in_pass.sum()),
        in_render=None if in_render is None else int(in_render.sum()),
        in_both=None if in_pass is None or in_render is None else int((in_pass & in_render).sum()),
        neither=int(np.count_nonzero(~either)),
        expected_in_pass=pass_surplus.expected if pass_surplus else None,
        expected_in_render=render_surplus.expected if render_surplus else None,
        **_lift("pass", pass_surplus),
        **_lift("render", render_surplus),
        excess_s=float(slow.excess_s.sum()),
        excess_in_pass_s=slow.excess_inside(passes),
        excess_in_render_s=slow.excess_inside(renders),
    )
    return Overlaps(
        events,
        pass_surplus,
        render_surplus,
        _surplus(alone, shifted[2]),
        None if alone is None else slow.pauses_hit(renders, alone),
    )


def _only(inside: BoolArray | None, other: BoolArray | None) -> BoolArray | None:
    return inside if inside is None or other is None else inside & ~other


def _lift(what: str, surplus: Surplus | None) -> dict[str, float | None]:
    known = surplus is not None and surplus.expected > 0
    return {
        f"lift_{what}": surplus.lift if surplus else None,
        f"lift_{what}_low": surplus.low / surplus.expected if surplus and known else None,
        f"lift_{what}_high": surplus.high / surplus.expected if surplus and known else None,
        f"p_{what}": surplus.p if surplus and (known or surplus.found) else None,
    }


def _surplus(inside: BoolArray | None, shifted: FloatArray | None) -> Surplus | None:
    if inside is None or shifted is None or not len(shifted):
        return None
    found = int(inside.sum())
    low, high = np.quantile(shifted, [0.025, 0.975])
    p = (np.count_nonzero(shifted >= found) + 1) / (len(shifted) + 1)
    return Surplus(found, float(shifted.mean()), float(low), float(high), float(p))


@dataclass(frozen=True, slots=True)
class _Slow:
    """The slow events."""

    start_s: FloatArray
    stop_s: FloatArray
    excess_s: FloatArray

    def inside(self, pauses: Pauses | None) -> BoolArray | None:
        if pauses is None:
            return None
        covered = pauses.covered(self.start_s, self.stop_s)
        explained: BoolArray = covered >= COVERED * self.excess_s
        return explained

    def excess_inside(self, pauses: Pauses | None) -> float | None:
        if pauses is None:
            return None
        return float(np.minimum(pauses.covered(self.start_s, self.stop_s), self.excess_s).sum())

    def shifted(
        self, passes: Pauses | None, renders: Pauses | None, shifts: int, rng: np.random.Generator
    ) -> tuple[FloatArray | None, FloatArray | None, FloatArray | None]:
        """How many are in a pass, in a render, and in a render alone after each shift. Passes and renders are shifted
        by the same offset, as what one does to the other stays with them."""
        part = self._sample()
        scale = len(self.start_s) / max(len(part.start_s), 1)
        period_s = next((one.period_s for one in (passes, renders) if one is not None), 0.0)
        counts = np.full((shifts, 3), np.nan)
        for i, offset in enumerate(rng.uniform(NEAREST_SHIFT, 1 - NEAREST_SHIFT, shifts) * period_s):
            in_pass = part.inside(None if passes is None else passes.moved(offset, rng))
            in_render = part.inside(None if renders is None else renders.moved(offset, rng))
            if in_pass is not None:
                counts[i, 0] = in_pass.sum()
            if in_render is not None:
                counts[i, 1] = in_render.sum()
            if (alone := _only(in_render, in_pass)) is not None:
                counts[i, 2] = alone.sum()
        counts *= scale
        return (
            None if passes is None else counts[:, 0],
            None if renders is None else counts[:, 1],
            None if renders is None else counts[:, 2],
        )

    def _sample(self) -> _Slow:
        if len(self.start_s) <= MOST_SHIFTED:
            return self
        order = np.argsort(self.start_s, kind="stable")
        chosen = order[np.linspace(0, len(order) - 1, MOST_SHIFTED).astype(np.int64)]
        return _Slow(self.start_s[chosen], self.stop_s[chosen], self.excess_s[chosen])

    def pauses_hit(self, pauses: Pauses | None, which: BoolArray) -> float | None:
        """Share of the pauses that overlap at least one of these events."""
        if pauses is None or not len(pauses.start_s):
            return None
        changes = np.zeros(len(pauses.start_s) + 1)
        first = np.searchsorted(pauses.stop_s, self.start_s[which], side="right")
        last = np.searchsorted(pauses.start_s, self.stop_s[which], side="left")
        hits = last > first
        np.add.at(changes, first[hits], 1)
        np.add.at(changes, last[hits], -1)
        return float(np.mean(np.cumsum(changes[:-1]) > 0))
