"""A sweep: one load at growing concurrency, or a growing request rate, until it is too much. Which point comes next,
which one is the knee, and what the sweep is worth. No I/O: `bench/sweep_index.py` keeps the points."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from atom.bench.backlog import Backlog
from atom.bench.load import DEFAULT_FAILED_REQUEST_THRESHOLD
from atom.bench.rundir import Validity
from atom.bench.slo import Objective, ObjectiveResult, check_objectives, error_rate
from atom.recipes.errors import ExitStatus, UsageError

__all__ = [
    "Conclusion",
    "Knee",
    "Plan",
    "Point",
    "State",
    "Swept",
    "arrival_seconds",
    "calm_seconds",
    "conclude",
    "judge_point",
    "latest",
    "parse_plan",
    "point_label",
    "point_seed",
]

PLATEAU: Final = 0.05
"""Without an objective, concurrency is doubled until that gains less than this share of throughput."""
SECONDS_OF_ARRIVALS: Final = 30.0
TIMES_A_REQUEST: Final = 8.0
"""So many times what a request takes: a schedule that tells whether the server keeps up takes four times as long at
least (`bench/backlog.py`)."""
MOST_SECONDS_OF_ARRIVALS: Final = 600.0
DEFAULT_MOST: Final[Mapping[str, float]] = {"max_concurrency": 4096, "request_rate": 100_000}


class Swept(StrEnum):
    """The parameter that grows."""

    CONCURRENCY = "max_concurrency"
    RATE = "request_rate"

    @property
    def flag(self) -> str:
        return f"--{self.value.replace('_', '-')}"

    @property
    def unit(self) -> str:
        return "requests at once" if self is Swept.CONCURRENCY else "req/s"

    def show(self, value: float) -> str:
        return f"C{value:g}" if self is Swept.CONCURRENCY else f"{value:g} req/s"


class State(StrEnum):
    """What a point says about the server."""

    MET = "met"
    """Valid, and every objective is met; where there is none, valid and not overloaded."""
    BROKEN = "broken"
    """An objective is not met, the server does not keep up with the rate, or too many requests failed."""
    UNKNOWN = "not known"
    """No valid evidence: a saturated client, an objective on what was not measured, a schedule too short to tell
    whether the server keeps up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One load of the sweep, as far as the sweep has to know it; everything is in its run directory."""

    value: float
    attempt: int
    """1, and more if an earlier one was broken off."""
    directory: str
    """Relative to the sweep's."""
    seed: int
    validity: Validity
    reasons: list[str]
    figures: Mapping[str, Mapping[str, Any]]
    """As in summary.json, the ones that tables and curves show."""
    objectives: list[ObjectiveResult]
    keeps_up: bool | None
    backlog: str | None
    state: State
    why: str
    """Why not `met`, in a few words; empty if it is."""

    @property
    def verdict(self) -> str:
        """The state in a table's words."""
        valid = self.validity is Validity.VALID
        if self.state is State.UNKNOWN:
            return "unknown" if valid else str(self.validity).upper()
        word = "yes" if self.state is State.MET else "no"
        return word if valid else f"{word} ({str(self.validity).upper()})"

    def figure(self, name: str) -> float | None:
        value = self.figures.get(name, {}).get("value")
        return None if value is None else float(value)


def judge_point(
    summary: Mapping[str, Any], objectives: Sequence[Objective], pressure: Backlog | None
) -> tuple[State, str, list[ObjectiveResult]]:
    """State, why, and what became of each objective.

    Failures beyond the threshold are an answer of the server's, although such a run is no valid evidence of latencies.
    """
    values = {name: figure["value"] for name, figure in summary["figures"].items()}
    completed, failed = values["completed"] or 0, values["failed"] or 0
    failing = error_rate(completed, failed)
    results = check_objectives(objectives, {**values, "error_rate": failing})
    threshold = summary["load"].get("failed_request_threshold")
    all_failed = summary["validity"] == Validity.FAILED
    if failing is not None and (
        all_failed or failing > (DEFAULT_FAILED_REQUEST_THRESHOLD if threshold is None else threshold)
    ):
        return State.BROKEN, f"{failed:,.0f} of {completed + failed:,.0f} requests failed", results
    if summary["validity"] != Validity.VALID:
        return State.UNKNOWN, "; ".join(summary["reasons"]) or str(summary["validity"]), results
    if pressure is not None and pressure.keeps_up is False:
        return State.BROKEN, f"does not keep up: {pressure.detail}", results
    broken = [one.objective for one in results if one.met is False]
    if broken:
        return State.BROKEN, f"breaks {', '.join(broken)}", results
    missing = [one.objective for one in results if one.met is None]
    if missing:
        return State.UNKNOWN, f"not measured: {', '.join(missing)}", results
    if pressure is not None and pressure.keeps_up is None:
        return State.UNKNOWN, f"whether the server keeps up is not known: {pressure.detail}", results
    return State.MET, "", results


def calm_seconds(points: Sequence[Point]) -> float | None:
    """What a request takes at the lowest point that the server kept up with, in seconds."""
    calm = min((point for point in points if point.keeps_up), key=lambda point: point.value, default=None)
    took_ms = None if calm is None else calm.figure("median_e2el_ms")
    return None if took_ms is None else took_ms / 1000


def arrival_seconds(points: Sequence[Point]) -> float:
    """How long the next point of a rate has to last so that it can tell whether the server keeps up: by what requests
    took at the point before."""
    took_ms = points[-1].figure("median_e2el_ms") if points and points[-1].state is not State.BROKEN else None
    wanted = TIMES_A_REQUEST * (took_ms or 0.0) / 1000
    return min(max(SECONDS_OF_ARRIVALS, wanted), MOST_SECONDS_OF_ARRIVALS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which values are measured. Pure: the next one follows from the points so far, so that a sweep that was broken
    off goes on where it was."""

    swept: Swept
    values: tuple[float, ...] = ()
    """In this order; empty: a search."""
    start: float = 1.0
    most: float = DEFAULT_MOST["max_concurrency"]
    most_why: str = ""
    """Why an open search ends there, if what lies above cannot be measured."""
    resolution: float = 0.1
    """The search ends when limit and broken value are this share apart, or neighbours."""
    max_points: int = 20
    go_on: bool = False
    """Measure all `values`, also those after one that is too much."""
    judged: bool = True
    """Whether anything but a plateau can end a search: an objective, or a rate to keep up with."""

    def next(self, points: Sequence[Point]) -> float | None:
        """None: done. What was no valid evidence is measured once more, at once: a moment of a busy machine must not
        end a sweep."""
        if points and points[-1].state is State.UNKNOWN and _times(points, points[-1].value) == 1:
            return points[-1].value
        if self.values:
            done = {point.value for point in points}
            if not self.go_on and any(point.state is State.BROKEN for point in points):
                return None
            return next((value for value in self.values if value not in done), None)
        if not points:
            return self.start
        if len(points) >= self.max_points:
            return None
        return self._search(latest(points))

    def _search(self, points: Sequence[Point]) -> float | None:
        above = min((p for p in points if p.state is not State.MET), key=lambda p: p.value, default=None)
        met = [p.value for p in points if p.state is State.MET and (above is None or p.value < above.value)]
        if above is None:
            low = max(met)
            if low >= self.most or (not self.judged and _on_plateau(points)):
                return None
            return min(low * 2, self.most)
        if not met or above.state is State.UNKNOWN:
            return None  # nothing to search between; or no evidence, of which there is no more in between
        low, high = max(met), above.value
        if high / low - 1 <= self.resolution:
            return None
        return self._between(low, high)

    def _between(self, low: float, high: float) -> float | None:
        if self.swept is Swept.CONCURRENCY:
            return float((int(low) + int(high)) // 2) if high - low > 1 else None
        middle = (low + high) / 2
        rounded = float(f"{middle:.4g}")
        return rounded if low < rounded < high else middle


def latest(points: Sequence[Point]) -> list[Point]:
    """The last attempt of each value, in the order in which the values came."""
    return list({point.value: point for point in points}.values())


def _times(points: Sequence[Point], value: float) -> int:
    return sum(point.value == value for point in points)


def _on_plateau(points: Sequence[Point]) -> bool:
    """Whether the last doubling gained next to nothing."""
    if len(points) < 2:
        return False
    before, last = (point.figure("output_throughput") for point in points[-2:])
    return before is not None and last is not None and last < (1 + PLATEAU) * before


_AUTO: Final = re.compile(r"auto(?::(?P<start>[0-9.]+)(?:-(?P<most>[0-9.]+))?)?")


def parse_plan(swept: Swept, text: str, *, resolution: float, max_points: int, go_on: bool, judged: bool) -> Plan:
    """`1,2,4`, `auto`, `auto:START`, `auto:START-MOST`. UsageError names the flag."""
    flag = swept.flag
    search = _AUTO.fullmatch(text.strip())
    if search is None:
        values = tuple(_value(swept, item, text) for item in text.split(","))
        if len(set(values)) != len(values):
            raise UsageError(f"{flag} {text}: a value stands there twice")
        return Plan(swept=swept, values=values, go_on=go_on)
    if go_on:
        raise UsageError(f"--continue is for a list of values; {flag} {text} searches")
    start = _value(swept, search["start"] or "1", text)
    most = _value(swept, search["most"], text) if search["most"] else DEFAULT_MOST[swept]
    if most < start:
        raise UsageError(f"{flag} {text}: it must end above where it starts")
    return Plan(swept=swept, start=start, most=most, resolution=resolution, max_points=max_points, judged=judged)


def _value(swept: Swept, item: str, text: str) -> float:
    wanted = "whole numbers from 1" if swept is Swept.CONCURRENCY else "positive rates"
    try:
        value = float(item)
    except ValueError:
        value = math.nan
    whole = swept is not Swept.CONCURRENCY or value.is_integer()
    least = 1 if swept is Swept.CONCURRENCY else 1e-6
    if not (least <= value <= 1e7) or not whole:
        raise UsageError(f"{swept.flag} must be {wanted} such as 1,2,4,8, or auto; got {text!r}")
    return value


def point_label(swept: Swept, value: float) -> str:
    """The point's folder in `arms/`."""
    return f"{'concurrency' if swept is Swept.CONCURRENCY else 'rate'}-{value:g}"


def point_seed(seed: int, swept: Swept, value: float, attempt: int) -> int:
    """Every point has prompts of its own, or the server would find them in its prefix cache; the same seed gives the
    same points. An attempt that was broken off has left its prompts there, so the next one has others."""
    text = f"{seed}:{swept}:{value:.12g}:{attempt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])


@dataclass(frozen=True, slots=True)
class Knee:
    """The point to run at."""

    value: float
    how: str
    """`objective` or `curvature`."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """What the sweep says. `status` is of a sweep that came to its end."""

    knee: Knee | None
    status: ExitStatus
    validity: Validity
    reasons: list[str]
    """Why it is no valid evidence, or what failed."""
    notes: list[str]


def conclude(
    plan: Plan, points: Sequence[Point], objectives: Sequence[Objective], fail_below: float | None = None
) -> Conclusion:
    """`fail_below`: the knee must not lie below it."""
    ordered = sorted(latest(points), key=lambda point: point.value)
    by_objective = bool(objectives) or plan.swept is Swept.RATE
    notes = _notes(plan, ordered)
    if not any(point.figure("completed") for point in points):
        nothing = f"no request was completed: {ordered[0].why}" if ordered else "no point was measured"
        return _concluded(None, ExitStatus.FAILED, Validity.FAILED, [nothing], notes)
    limit = next((point for point in ordered if point.state is State.BROKEN), None)
    if by_objective:
        knee = _highest_met(plan, ordered, limit)
    else:
        knee, none = _by_curvature(plan, ordered)
        notes += [f"no knee found: {none}"] if knee is None else []
    status, reasons = _doubts(plan, ordered, limit, knee, by_objective)
    if fail_below is not None:
        status = _gate(plan, knee, fail_below, status, reasons)
    validity = Validity.NOT_VALID if status is ExitStatus.INVALID else Validity.VALID
    return _concluded(knee, status, validity, reasons, notes)


def _doubts(
    plan: Plan, ordered: Sequence[Point], limit: Point | None, knee: Knee | None, by_objective: bool
) -> tuple[ExitStatus, list[str]]:
    """A point without evidence matters where the knee might be: between the one found and the first too much."""
    show = plan.swept.show
    for point in ordered:
        below, above = knee is not None and point.value < knee.value, limit is not None and point.value > limit.value
        if point.state is State.UNKNOWN and not below and not above:
            beyond = f", so the knee is at least {show(knee.value)}" if knee is not None and by_objective else ""
            return ExitStatus.INVALID, [f"{show(point.value)} is no valid evidence{beyond}: {point.why}"]
    if limit is not None and limit is ordered[0]:
        status = ExitStatus.GATE if by_objective and limit.validity is Validity.VALID else ExitStatus.INVALID
        return status, [f"{show(limit.value)}, the lowest point: {limit.why}"]
    return ExitStatus.OK, []


def _concluded(
    knee: Knee | None, status: ExitStatus, validity: Validity, reasons: list[str], notes: list[str]
) -> Conclusion:
    return Conclusion(knee=knee, status=status, validity=validity, reasons=reasons, notes=notes)


def _gate(plan: Plan, knee: Knee | None, fail_below: float, status: ExitStatus, reasons: list[str]) -> ExitStatus:
    """A knee that is known to lie high enough passes, whatever lies above it."""
    if knee is not None and knee.value >= fail_below:
        return ExitStatus.OK
    if status is ExitStatus.INVALID or (knee is None and status is ExitStatus.OK):
        reasons.append(f"--fail-below {fail_below:g} cannot be answered")
        return ExitStatus.INVALID
    if knee is not None:
        reasons.append(f"the knee is {plan.swept.show(knee.value)}, below --fail-below {fail_below:g}")
    return ExitStatus.GATE


def _notes(plan: Plan, ordered: Sequence[Point]) -> list[str]:
    notes = []
    if plan.most_why:
        notes.append(f"the search ends at {plan.swept.show(plan.most)}: {plan.most_why}")
    if ordered and plan.judged and all(point.state is State.MET for point in ordered):
        notes.append(f"nothing is too much up to {plan.swept.show(ordered[-1].value)}: the limit lies above")
    first = next((i for i, point in enumerate(ordered) if point.state is State.BROKEN), len(ordered))
    for point in ordered[first:]:
        if point.state is State.MET:
            again = f"{plan.swept.show(point.value)} meets everything, above a point that does not"
            notes.append(f"{again}: close to the limit, or noise")
    return notes


def _highest_met(plan: Plan, ordered: Sequence[Point], limit: Point | None) -> Knee | None:
    below = [p for p in ordered if p.state is State.MET and (limit is None or p.value < limit.value)]
    if not below:
        return None
    value = below[-1].value
    if limit is None:
        return Knee(value, "objective", "the highest point that meets everything; none is too much")
    ends = f"{plan.swept.show(limit.value)} {limit.why}"
    return Knee(value, "objective", f"the highest point that meets everything below the first that does not: {ends}")


MIN_FOR_CURVATURE: Final = 3
LEAST_BULGE: Final = 0.2
"""How far above the diagonal of the unit square the knee must lie: of a straight line with noise, too, some point lies
above."""
FLATTENED: Final = 0.5
"""Beyond the knee throughput must grow by less than this power of what grew. (1: in proportion; 0: not at all.)"""


def _by_curvature(plan: Plan, ordered: Sequence[Point]) -> tuple[Knee | None, str]:
    """The knee, or why there is none.

    Kneedle (Satopää, Albrecht, Irwin and Raghavan, "Finding a 'Kneedle' in a Haystack", 2011): with latency and
    throughput both scaled to 0 … 1, the point of a concave curve that lies farthest above the diagonal has the greatest
    curvature. Without the paper's smoothing: the points are few, and each is a measurement of its own. Some point is
    the farthest of any curve, so it counts only if it lies clearly above, and throughput flattens beyond it.
    """
    curve = [
        (point.value, latency, throughput)
        for point in ordered
        if point.validity is Validity.VALID
        and point.state is not State.UNKNOWN
        and (latency := point.figure("median_e2el_ms")) is not None
        and (throughput := point.figure("output_throughput")) is not None
    ]
    if len(curve) < MIN_FOR_CURVATURE:
        return None, f"fewer than {MIN_FOR_CURVATURE} valid points"
    latencies, throughputs = [c[1] for c in curve], [c[2] for c in curve]
    span_x, span_y = max(latencies) - min(latencies), max(throughputs) - min(throughputs)
    if span_x <= 0 or span_y <= 0:
        return None, "latency or throughput is the same at all points"

    def above(c: tuple[float, float, float]) -> float:
        return (c[2] - min(throughputs)) / span_y - (c[1] - min(latencies)) / span_x

    best = max(curve[1:-1], key=above)
    if _power(curve[0], best) <= _power(best, curve[-1]) or best[2] < (1 + PLATEAU) * curve[0][2]:
        return None, "throughput does not flatten between the first point and the last"
    if _power(best, curve[-1]) >= FLATTENED:
        return None, f"throughput still grows at {plan.swept.show(curve[-1][0])}: it lies above"
    if above(best) < LEAST_BULGE:
        return None, "the curve of throughput over latency has no clear bend"
    value, latency, throughput = best
    detail = (
        f"greatest curvature of output tok/s over E2EL p50 (Kneedle), at {throughput:,.1f} tok/s and {latency:,.1f} ms"
    )
    return Knee(value, "curvature", detail), ""


def _power(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """p where throughput grew from one point to the other as the p-th power of the value."""
    if one[2] <= 0 or other[2] <= 0:
        return 0.0 if other[2] <= 0 else math.inf
    return math.log(other[2] / one[2]) / math.log(other[0] / one[0])
