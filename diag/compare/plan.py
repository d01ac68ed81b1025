"""What a comparison will do, decided before anything runs: the arms, the loads, what each metric's verdict will be held
against, and the schedule of pairs. Written to `plan.json`; `compare/conductor.py` carries it out.

The schedule is a randomised block design with a recorded seed. Round r has pair r of every stream (a comparison under
a load), so that a deadline leaves all streams about equally far. Rounds go through the streams in a random order and
each second one in the reverse of the one before; which of a pair's two matched runs comes first is drawn for one pair
and turned around for the next. Drift of the machine is thereby shared out, and nobody chose the order.

Pairs of the A/A control come first: they say what no difference looks like.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from atom.bench.regular_file import read_regular
from atom.bench.rundir import write_json
from atom.diag.compare.metrics import METRICS, PRIMARY_CHOICES
from atom.diag.compare.model import (
    Arm,
    ArmKind,
    ArmRun,
    Comparison,
    Half,
    Load,
    MatchedRun,
    Placement,
    Purpose,
    _Json,
    labels,
)
from atom.recipes.errors import UsageError

__all__ = ["DEFAULT_MAX_PAIRS", "DEFAULT_PAIRS", "MAX_PAIRS", "PLAN_FILE", "Pair", "Plan", "Stream", "make_plan"]

PLAN_FILE: Final = "plan.json"
DEFAULT_PAIRS: Final = 3
DEFAULT_MAX_PAIRS: Final = 12
"""Where `--until-decided` gives up."""
MAX_PAIRS: Final = 1000
_MAX_PLAN_BYTES: Final = 16 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_GATED: Final = ("tests", "accuracy", "gc")
"""Sections that have a gate of their own."""
_ONE_PAIR: Final = MappingProxyType({"gc": 1, "accuracy": 1})

Stream = tuple[str, str]
"""(`Comparison.key`, `Load.name`): what a sequence of pairs gives evidence about. A control has the key of an arm
against itself, and is a stream of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair(_Json):
    """The unit of evidence: a matched run, and the same with the halves (or the order) swapped. Without the swap it is
    one matched run."""

    comparison: str
    purpose: Purpose
    load: str
    pair: int
    """From 0, within (comparison, load)."""
    runs: tuple[MatchedRun, ...]
    """In the order in which they are made. `MatchedRun.index` is 0 where the base is on half 0 (or goes first), and 1
    where the head is; which of the two is made first is drawn."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "purpose", Purpose(self.purpose))
        runs = tuple(one if isinstance(one, MatchedRun) else MatchedRun.from_dict(one) for one in self.runs)
        object.__setattr__(self, "runs", runs)

    @property
    def stream(self) -> Stream:
        return (self.comparison, self.load)

    @property
    def key(self) -> str:
        return f"{self.comparison}/{self.load}/pair-{self.pair}"

    @property
    def arms(self) -> frozenset[str]:
        return frozenset(one.arm for run in self.runs for one in run.runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(_Json):
    """Everything that is declared in advance. Made by `make_plan`, which checks it, or read from `plan.json`."""

    arms: tuple[Arm, ...]
    comparisons: tuple[Comparison, ...]
    """Without the controls."""
    loads: tuple[Load, ...]
    """With the primary metric and the equivalence margin of each."""
    placement: Placement
    pairs: int
    """Per comparison and load."""
    swap: bool
    aa_pairs: int
    seed: int
    schedule: tuple[Pair, ...]
    """In the order in which they are made; with `until_decided` also those that may be needed, up to `max_pairs`."""
    until_decided: bool = False
    max_pairs: int = DEFAULT_PAIRS
    deadline_s: float | None = None
    cool_down_s: float = 0.0
    """Pause between two matched runs."""
    gates: tuple[Mapping[str, Any], ...] = ()
    """As JSON: `compare/gates.py` knows what they mean."""
    suite: str | None = None
    """Where the loads are from."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What else was declared: the command of `--tests`, the number of probed outputs. Small JSON."""

    def __post_init__(self) -> None:
        for name, kind in (("arms", Arm), ("comparisons", Comparison), ("loads", Load), ("schedule", Pair)):
            values = tuple(one if isinstance(one, kind) else kind.from_dict(one) for one in getattr(self, name))
            object.__setattr__(self, name, values)
        placement: Any = self.placement
        if not isinstance(placement, Placement):
            object.__setattr__(self, "placement", Placement.from_dict(placement))
        _check_names(self.arms, self.loads)
        _check_loads(self.loads)
        if self.until_decided and not (isinstance(self.max_pairs, int) and max(self.pairs, 2) <= self.max_pairs):
            raise UsageError(f"max_pairs must be from pairs ({self.pairs}), at least 2; got {self.max_pairs!r}")
        _check_schedule(self)
        _check_gates(self)

    def arm(self, label: str) -> Arm:
        return labels(self.arms)[label]

    def load(self, name: str) -> Load:
        return next(load for load in self.loads if load.name == name)

    def half_of(self, run: ArmRun) -> Half:
        """The half as far as the arm was put there: a server that runs already stays where it is."""
        kind = self.arm(run.arm).kind
        if kind is ArmKind.URL:
            return Half(name="as it runs")
        return Half(name="recorded") if kind is ArmKind.RECORDED else self.placement.halves[run.half]

    def pairs_of(self, stream: Stream) -> list[Pair]:
        """By their number."""
        return sorted((pair for pair in self.schedule if pair.stream == stream), key=lambda pair: pair.pair)

    @property
    def streams(self) -> list[Stream]:
        return list(dict.fromkeys(pair.stream for pair in self.schedule))

    def is_extra(self, pair: Pair) -> bool:
        """Made only if the pairs before did not decide."""
        return self.until_decided and pair.purpose is Purpose.COMPARE and pair.pair >= self.pairs

    def seconds_of(self, run: MatchedRun) -> float | None:
        """About how long it takes, by what the load declares; None where that is not known. Arms that take turns cool
        down between them."""
        seconds = self.load(run.load).seconds
        made = sum(self.arm(one.arm).kind is not ArmKind.RECORDED for one in run.runs)
        if seconds is None or not made:
            return None if made else 0.0
        turns = 1 if self.placement.concurrent else made
        return seconds * turns + self.cool_down_s * (turns - 1)

    def expected_seconds(self) -> float | None:
        """Of the whole schedule without what `until_decided` may add; None where a load does not say."""
        runs = [run for pair in self.schedule if not self.is_extra(pair) for run in pair.runs]
        seconds = [self.seconds_of(run) for run in runs]
        known = [one for one in seconds if one is not None]
        if len(known) < len(seconds):
            return None
        return sum(known) + self.cool_down_s * max(0, len(runs) - 1)

    def write(self, directory: Path) -> None:
        """For this user alone: it has what arms are given in their environments and arguments."""
        write_json(directory / PLAN_FILE, self.as_dict(), mode=0o600)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """UsageError if there is none, or one that cannot be."""
        path = directory / PLAN_FILE
        try:
            return cls.from_dict(json.loads(read_regular(path, _MAX_PLAN_BYTES)), "")
        except OSError as error:
            raise UsageError(f"{path}: cannot read the plan of a comparison: {error.strerror}") from None
        except UsageError as error:
            raise UsageError(f"{path} is damaged: {error}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is damaged: it is no JSON: {error}") from None


def make_plan(
    arms: Sequence[Arm],
    comparisons: Sequence[Comparison],
    loads: Sequence[Load],
    placement: Placement,
    *,
    pairs: int = DEFAULT_PAIRS,
    swap: bool = True,
    aa_pairs: int = 0,
    seed: int = 0,
    until_decided: bool = False,
    max_pairs: int | None = None,
    deadline_s: float | None = None,
    cool_down_s: float = 0.0,
    gates: Sequence[Mapping[str, Any]] = (),
    suite: str | None = None,
    extras: Mapping[str, Any] = MappingProxyType({}),
    section_pairs: Mapping[str, int] = _ONE_PAIR,
) -> Plan:
    """The plan of these comparisons; UsageError names what cannot be.

    `max_pairs` is for `until_decided` (default: 12). `section_pairs`: at most so many pairs of a load of that section
    (the long run of the API process and the accuracy take one). The control is the first comparison's base against
    itself, and so on for other bases. A recorded arm has as many pairs as there are records, and nothing is
    swapped; nor are the halves of a server that runs already, which stays where it is.
    """
    _check_numbers(pairs, aa_pairs, max_pairs, until_decided=until_decided)
    if max_pairs is None:
        max_pairs = max(pairs, DEFAULT_MAX_PAIRS) if until_decided else pairs
    if not loads or not comparisons:
        raise UsageError("a comparison needs two arms and a load")
    _check_names(arms, loads)
    by_label = labels(arms)
    for comparison in comparisons:
        for label in (comparison.base, comparison.head):
            if label not in by_label:
                raise UsageError(f"there is no arm {label!r}; there are {', '.join(by_label)}")
        if comparison.base == comparison.head:
            raise UsageError(f"arm {comparison.base!r} would be compared with itself: --aa-pairs does that")
    draw = random.Random(seed)
    maker = _Maker(by_label, placement, draw, swap=swap)
    control: dict[Stream, int] = {}
    if aa_pairs:
        for base in dict.fromkeys(one.base for one in comparisons):
            _check_control(by_label[base], placement)
            control |= {(f"{base}..{base}", load.name): aa_pairs for load in loads if load.section == "load"}
    compare: dict[Stream, int] = {}
    for comparison in comparisons:
        recorded = maker.records(comparison)
        for load in loads:
            most = max_pairs if until_decided and load.section == "load" else pairs
            most = min(most, section_pairs.get(load.section, most))
            compare[comparison.key, load.name] = most if recorded is None else min(recorded, MAX_PAIRS)
    known = {
        one.key: one for one in (*(Comparison(base=b, head=b, purpose=Purpose.CONTROL) for b in by_label), *comparisons)
    }
    schedule = [
        maker.pair(known[key], load, number)
        for streams in (control, compare)
        for number, (key, load) in _rounds(streams, draw)
    ]
    return Plan(
        arms=tuple(arms),
        comparisons=tuple(comparisons),
        loads=tuple(loads),
        placement=placement,
        pairs=pairs,
        swap=swap and any(maker.swaps(one) for one in comparisons),
        aa_pairs=aa_pairs,
        seed=seed,
        schedule=tuple(schedule),
        until_decided=until_decided,
        max_pairs=max_pairs,
        deadline_s=deadline_s,
        cool_down_s=cool_down_s,
        gates=tuple(gates),
        suite=suite,
        extras=dict(extras),
    )


def _rounds(streams: Mapping[Stream, int], draw: random.Random) -> Iterator[tuple[int, Stream]]:
    """(pair, stream), round by round; `streams` says how many pairs each has."""
    order: list[Stream] = []
    for number in range(max(streams.values(), default=0)):
        if number % 2 == 0:
            order = draw.sample(list(streams), len(streams))
        else:
            order = order[::-1]
        yield from ((number, stream) for stream in order if number < streams[stream])


class _Maker:
    """Makes pairs. Remembers per stream which matched run came first."""

    def __init__(self, arms: Mapping[str, Arm], placement: Placement, draw: random.Random, *, swap: bool) -> None:
        self._arms = arms
        self._concurrent = placement.concurrent
        self._draw = draw
        self._swap = swap
        self._first: dict[Stream, int] = {}

    def records(self, comparison: Comparison) -> int | None:
        """How many matched runs there are records of; None where both arms are run."""
        arms = [self._arms[label] for label in (comparison.base, comparison.head)]
        counts = {len(arm.recorded) for arm in arms if arm.kind is ArmKind.RECORDED}
        if not counts:
            return None
        if len(counts) > 1:
            base, head = arms
            raise UsageError(
                f"arm {base.label!r} has {len(base.recorded)} recorded runs and {head.label!r} has "
                f"{len(head.recorded)}: give as many of both, in the order in which they belong together"
            )
        return counts.pop()

    def swaps(self, comparison: Comparison) -> bool:
        """Whether there is anything to swap."""
        arms = [self._arms[label] for label in (comparison.base, comparison.head)]
        stays = self._concurrent and any(arm.kind is ArmKind.URL for arm in arms)
        return not stays and self.records(comparison) is None

    def pair(self, comparison: Comparison, load: str, number: int) -> Pair:
        stream = (comparison.key, load)
        indices = [0]
        if self._swap and self.swaps(comparison):
            first = self._draw.randrange(2) if number % 2 == 0 else 1 - self._first[stream]
            self._first[stream] = first
            indices = [first, 1 - first]
        return Pair(
            comparison=comparison.key,
            purpose=comparison.purpose,
            load=load,
            pair=number,
            runs=tuple(self._matched(comparison, load, number, index) for index in indices),
        )

    def _matched(self, comparison: Comparison, load: str, number: int, index: int) -> MatchedRun:
        def side(arm: str, place: int) -> ArmRun:
            return ArmRun(arm=arm, half=place if self._concurrent else 0, order=place)

        return MatchedRun(
            comparison=comparison.key,
            purpose=comparison.purpose,
            load=load,
            pair=number,
            index=index,
            runs=(side(comparison.base, index), side(comparison.head, 1 - index)),
        )


def _check_numbers(pairs: int, aa_pairs: int, max_pairs: int | None, *, until_decided: bool) -> None:
    if not 1 <= pairs <= MAX_PAIRS:
        raise UsageError(f"--pairs must be from 1 to {MAX_PAIRS}, got {pairs}")
    if not 0 <= aa_pairs <= MAX_PAIRS:
        raise UsageError(f"--aa-pairs must be from 0 to {MAX_PAIRS}, got {aa_pairs}")
    if max_pairs is None:
        return
    if not until_decided:
        raise UsageError("--max-pairs says where --until-decided ends: add it, or use --pairs")
    if not max(pairs, 2) <= max_pairs <= MAX_PAIRS:
        raise UsageError(f"--max-pairs must be from --pairs ({pairs}), at least 2, to {MAX_PAIRS}, got {max_pairs}")


def _check_control(arm: Arm, placement: Placement) -> None:
    if arm.kind is ArmKind.RECORDED:
        raise UsageError(f"--aa-pairs: arm {arm.label!r} is recorded, and a control has to be run")
    if arm.kind is ArmKind.URL and placement.concurrent:
        raise UsageError(
            f"--aa-pairs: arm {arm.label!r} is one running server, and a control would load it twice at the same time; "
            "use --placement serial"
        )


def _check_names(arms: Sequence[Arm], loads: Sequence[Load]) -> None:
    """They name directories and are parts of keys."""
    for kind, names in (("arm", [arm.label for arm in arms]), ("load", [load.name for load in loads])):
        for name in names:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise UsageError(f"{kind} {name!r}: a name has letters, digits, '.', '_', '+' and '-', at most 64")
        again = next((name for name in names if names.count(name) > 1), None)
        if again is not None:
            raise UsageError(f"there are two {kind}s named {again!r}: give one another name (NAME=…)")


def _check_loads(loads: Sequence[Load]) -> None:
    """What a verdict would be held against."""
    for load in loads:
        if load.primary not in PRIMARY_CHOICES:
            raise UsageError(
                f"load {load.name}: primary must be one of {', '.join(PRIMARY_CHOICES)}; got {load.primary!r}"
            )
        numbers = {"margin_pct": load.margin_pct} | ({} if load.seconds is None else {"seconds": load.seconds})
        for name, value in numbers.items():
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise UsageError(f"load {load.name}: {name} must be a number above 0, got {value!r}")


def _check_schedule(plan: Plan) -> None:
    """A plan that was read may be anything."""
    arms, loads = {arm.label for arm in plan.arms}, {load.name for load in plan.loads}
    if not plan.comparisons or any(not {one.base, one.head} <= arms for one in plan.comparisons):
        raise UsageError("a comparison has an arm that the plan does not, or there is none")
    if len(plan.placement.halves) not in (1, 2):
        raise UsageError(f"the machine has {len(plan.placement.halves)} halves")
    for pair in plan.schedule:
        if not pair.arms <= arms or pair.load not in loads:
            raise UsageError(f"{pair.key}: has an arm or a load that the plan does not")
        if pair.pair < 0 or sorted(run.index for run in pair.runs) not in ([0], [0, 1], [1]):
            raise UsageError(f"{pair.key}: has another number, or other matched runs, than a pair has")
        for run in pair.runs:
            same = (run.comparison, run.load, run.pair, run.purpose) == (*pair.stream, pair.pair, pair.purpose)
            placed = all(0 <= one.half < len(plan.placement.halves) and one.order in (0, 1) for one in run.runs)
            if not same or not placed:
                raise UsageError(f"{run.key}: does not belong to {pair.key}, or has a half that there is not")
    if len({pair.key for pair in plan.schedule}) != len(plan.schedule):
        raise UsageError("the plan has the same pair twice")
    for name in ("deadline_s", "cool_down_s"):
        value = getattr(plan, name)
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise UsageError(f"{name} must be a number of seconds, got {value!r}")


def _check_gates(plan: Plan) -> None:
    from atom.diag.compare.gates import Gate

    for one in plan.gates:
        if one.get("section") in _GATED:
            continue
        limit, metric, load = (one.get(name) for name in ("slower_pct", "metric", "load"))
        if not isinstance(limit, int | float) or metric not in (None, *METRICS) or load not in (None, *_names(plan)):
            raise UsageError(f"the plan has a gate that is none: {json.dumps(one)[:200]}")
        Gate(slower_pct=float(limit), metric=metric, load=load)


def _names(plan: Plan) -> list[str]:
    return [load.name for load in plan.loads]
