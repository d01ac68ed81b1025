"""The words of a comparison: arms, loads, halves, matched runs, and what became of them. No behaviour lives here.

An **arm** is one thing under test. A **half** is the share of the machine that one arm's server has at a time. A
**matched run** is two arms under the same load: at the same time on two halves, or one after the other where there is
one. A **pair** is two matched runs, the second with the halves (or the order) swapped: the unit of evidence.

Everything here goes through JSON (`plan.json`, `runs.jsonl`), see `as_dict` and `from_dict`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

from atom.recipes.errors import UsageError

__all__ = [
    "START_GATE",
    "Arm",
    "ArmKind",
    "ArmRun",
    "Comparison",
    "Half",
    "Load",
    "MatchedRun",
    "Placement",
    "Purpose",
    "RunResult",
]


START_GATE: Final = "ATOM_START_GATE"
"""The environment variable by which a load finds the line to whoever started it (`cli/start_gate.py`)."""

_MOST_SHOWN: Final = 80


class ArmKind(StrEnum):
    REF = "ref"
    """A commit of a git repository, started from a checkout of its own."""
    RECIPE = "recipe"
    URL = "url"
    """A server that runs already."""
    RECORDED = "recorded"
    """Run directories, or result files of another tool: nothing is started."""


class Purpose(StrEnum):
    """Why a matched run is made."""

    COMPARE = "compare"
    CONTROL = "aa"
    """The same arm on both halves: what no difference looks like."""


class _Json:
    """A frozen dataclass of JSON values, nested ones of this kind, enums and tuples."""

    def as_dict(self) -> dict[str, Any]:
        value: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return value

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], where: str | None = None) -> Self:
        """UsageError if a field is missing, or is of another type; it says in which place, which is called `where`.
        Unknown fields are left out: a later version may have more."""
        place = cls.__name__.lower() if where is None else where
        if not isinstance(value, Mapping):
            raise UsageError(f"{place or 'it'} must be an object, got {_json(value)}")
        hints = _hints(cls)  # type: ignore[arg-type]
        inside = f"{place}." if place else ""
        for one in dataclasses.fields(cls):  # type: ignore[arg-type]
            if one.name not in value and one.default is one.default_factory is dataclasses.MISSING:
                raise UsageError(f"{inside}{one.name} is missing")
        fields = {name: _read(one, hints[name], f"{inside}{name}") for name, one in value.items() if name in hints}
        try:
            return cls(**fields)
        except ValueError as error:
            raise UsageError(f"{place}: {error}" if place else str(error)) from None


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls)
    return {one.name: hints[one.name] for one in dataclasses.fields(cls)}


def _read(value: Any, hint: Any, where: str) -> Any:
    """A JSON value as what a field of this type takes: lists are frozen, objects of this kind are made."""
    if isinstance(hint, type) and issubclass(hint, _Json):
        return hint.from_dict(value, where)
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        parts = typing.get_args(hint)
        wanted = [parts[0]] * len(value) if parts[-1] is ... else list(parts)
        if len(value) != len(wanted):
            raise UsageError(f"{where} must be a list of {len(wanted)}, got {_json(value)}")
        return tuple(_read(one, part, f"{where}[{i}]") for i, (one, part) in enumerate(zip(value, wanted, strict=True)))
    if typing.get_origin(hint) is tuple or not _fits(value := _frozen(value), hint):
        raise UsageError(f"{where} must be {_named(hint)}, got {_json(value)}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value, lists frozen, is what a field of this type takes."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in parts)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(name, parts[0]) and _fits(one, parts[1]) for name, one in value.items()
        )
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if issubclass(hint, StrEnum):
        return isinstance(value, str) and value in set(hint)
    return isinstance(value, hint)


def _named(hint: Any) -> str:
    """A type in the words of JSON."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_named, parts))
    if origin is tuple:
        return "a list"
    if origin is Mapping:
        return "an object" + ("" if parts[1] is Any else f" with {_named(parts[1]).partition(' ')[2]}s")
    if issubclass(hint, StrEnum):
        return f"one of {', '.join(hint)}"
    names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(hint, "null")


def _json(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def _frozen(value: Any) -> Any:
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm(_Json):
    """One thing under test, ready to be started or read. Made by `compare/arms.py`."""

    label: str
    """As it stands in tables; names its directory `arms/<label>`, so it has only letters, digits, and ._-"""
    kind: ArmKind
    spec: str
    """As it was given."""
    role: str = "arm"
    """`base`, `head`, or of a causal comparison `control`, `treatment`, `bypass`, `repair`."""
    recipe: str | None = None
    """Built-in name or path; None: the load's own."""
    src: str | None = None
    """Import root of the checkout (`{src}` of the recipe)."""
    checkout: str | None = None
    """Top directory of the checkout."""
    python: str | None = None
    """`{python}` of the recipe; None: the recipe's."""
    image: str | None = None
    """Container image that the server runs in, with the checkout mounted."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """`--set` of the recipe."""
    env: Mapping[str, str] = field(default_factory=dict)
    server_args: tuple[str, ...] = ()
    """Appended to the server's command."""
    url: str | None = None
    recorded: tuple[str, ...] = ()
    """Run directories or files, in order: one per pair, which is not swapped."""
    cache: str | None = None
    """Directory of this arm's compile caches (Triton, inductor, vLLM)."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """`sha`, `ref`, `subject`, `dirty`, `commit_time` of a ref; `packages`; small JSON."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", ArmKind(self.kind))


@dataclass(frozen=True, kw_only=True, slots=True)
class Load(_Json):
    """One load of the suite. Every arm gets the same one, with the same seed."""

    name: str
    bench: str
    """Subcommand of `atom bench`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its long flags without the dashes: a number, a text, a list (given repeatedly), or true for a bare flag."""
    recipe: str | None = None
    """For arms that have none."""
    server_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    primary: str = "itl_p50"
    """Name of the metric that decides (`compare/metrics.py`). Declared before anything runs."""
    margin_pct: float = 1.0
    """Differences within ± this are called equivalent."""
    section: str = "load"
    """`load`, `gc` (the long run of the API process), or `accuracy`: which table it goes to."""
    seconds: float | None = None
    """About how long one run of it takes, server start included; for the plan's expected time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Half(_Json):
    """A share of the machine."""

    name: str
    devices: str | None = None
    """GPU numbers as `--devices` takes them."""
    server_cpus: tuple[int, ...] = ()
    client_cpus: tuple[int, ...] = ()
    """Empty: not pinned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement(_Json):
    """Where arms run. One half: one after the other, in ABBA order."""

    halves: tuple[Half, ...]
    reason: str
    """Why so, in words."""

    def __post_init__(self) -> None:
        halves = tuple(one if isinstance(one, Half) else Half.from_dict(one) for one in self.halves)
        object.__setattr__(self, "halves", halves)

    @property
    def concurrent(self) -> bool:
        return len(self.halves) == 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(_Json):
    """Two arms that are compared, by label."""

    base: str
    head: str
    purpose: Purpose = Purpose.COMPARE

    def __post_init__(self) -> None:
        object.__setattr__(self, "purpose", Purpose(self.purpose))

    @property
    def key(self) -> str:
        return f"{self.base}..{self.head}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRun(_Json):
    """One arm's part of a matched run."""

    arm: str
    half: int
    """Index into `Placement.halves`; 0 where there is one."""
    order: int
    """0 or 1: which is started first where they do not run at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchedRun(_Json):
    """Two arms, one load. `runs[0]` is the base's, `runs[1]` the head's; in a control both are the same arm."""

    comparison: str
    """`Comparison.key`."""
    purpose: Purpose
    load: str
    pair: int
    """From 0, within (comparison, load)."""
    index: int
    """0 or 1 within the pair; 1 has the halves or the order swapped."""
    runs: tuple[ArmRun, ArmRun]

    def __post_init__(self) -> None:
        object.__setattr__(self, "purpose", Purpose(self.purpose))
        runs = tuple(one if isinstance(one, ArmRun) else ArmRun.from_dict(one) for one in self.runs)
        object.__setattr__(self, "runs", runs)

    @property
    def key(self) -> str:
        return f"{self.comparison}/{self.load}/pair-{self.pair}/{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult(_Json):
    """What became of one arm's part of a matched run: one line of `runs.jsonl`."""

    matched: str
    """`MatchedRun.key`."""
    arm: str
    side: int
    """0: as the base, 1: as the head."""
    directory: str
    """Run directory, relative to that of the comparison; `arms/<label>/run-N`."""
    status: int
    """Exit status of the load (DESIGN: 0 ok, 1 failed, 4 not valid evidence, 130 interrupted)."""
    started_ns: int
    ended_ns: int
    """time.monotonic_ns."""
    problem: str | None = None
    """Why there is nothing to compare: the server did not start, the client was killed. In one line."""
    stage: str = "done"
    """How far it came: `prepare`, `start`, `load`, `done`."""

    @property
    def has_records(self) -> bool:
        return self.stage in ("load", "done")


def labels(arms: Sequence[Arm]) -> dict[str, Arm]:
    """Arms by label; they are unique."""
    assert len({arm.label for arm in arms}) == len(arms)
    return {arm.label: arm for arm in arms}
