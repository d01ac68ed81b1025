"""`--fail-if`: expressions that a CI job checks against profiles, parsed before anything runs.

    [ARM:]QUANTITY OPERATOR VALUE        gen2_share>1%   ttft_p99_ms>=0.5s   branch:rss_mb>3GB   growth.rss_mb=grows

The expression says what is *wrong*: a gate fails where it holds. One whose quantity was not seen cannot be answered,
which is neither. `gate_status` makes the exit status of both; docs/gc_profile.md lists the quantities.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

from atom.diag.gc_profile.model import GrowthVerdict, Profile, SlowEvents, Totals, Window
from atom.recipes.errors import ExitStatus, UsageError

__all__ = ["Gate", "GateOutcome", "GateResult", "check_gates", "gate_status", "parse_gates", "quantities"]

GROWTH_QUANTITIES: Final = (
    *("gen2_pause_ms", "gen2_share", "metrics_ms", "metrics_series", "metrics_body_bytes"),
    *("rss_mb", "threads", "health_ms", "ttft_ms"),
)
_GROWTH_NUMBERS: Final = ("slope", "slope_low", "slope_high", "first", "last")
_OVER_WINDOWS: Final = ("last", "first", "max", "min", "ratio")
"""`ratio`: last ÷ first window."""

_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_GATE: Final = re.compile(
    r"\s*(?:(?P<arm>.*\S)\s*:\s*)?(?P<quantity>[A-Za-z0-9_./]+)\s*(?P<operator>>=|<=|==|!=|>|<|=)\s*(?P<value>\S.*?)\s*",
    re.DOTALL,
)
_NUMBER: Final = re.compile(r"(?P<number>[+-]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>[A-Za-zµ%/]*)")

_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "fraction": {"": 1.0, "%": 0.01},
    "ms": {"": 1.0, "ms": 1.0, "s": 1e3, "us": 1e-3, "µs": 1e-3, "min": 6e4, "m": 6e4},
    "s": {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "m": 60.0, "h": 3600.0},
    "MB": {"": 1.0, "mb": 1.0, "mib": 1.0, "kb": 2**-10, "kib": 2**-10, "gb": 1024.0, "gib": 1024.0},
    "bytes": {"": 1.0, "b": 1.0, "kb": 2.0**10, "kib": 2.0**10, "mb": 2.0**20, "mib": 2.0**20, "gb": 2.0**30},
    "cores": {"": 1.0, "%": 0.01},
    "": {"": 1.0},
}
"""Unit of a quantity → what may stand after a number, and its factor. Bytes in powers of two, as everywhere here."""


class GateOutcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNANSWERED = "unanswered"


@dataclass(frozen=True, slots=True)
class Gate:
    """One parsed expression."""

    expression: str
    arm: str | None
    """Label of the arm; None: each of them."""
    quantity: str
    operator: str
    limit: float | str
    """In the quantity's own unit; a verdict or yes/no is a word."""
    given_limit: str
    """As it was written, with its unit."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate on one arm."""

    gate: str
    arm: str
    outcome: GateOutcome
    value: float | str | None
    """In the quantity's own unit, fractions 0..1."""
    shown_value: str
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_gates(expressions: Sequence[str], labels: Sequence[str] | None = None) -> list[Gate]:
    """Check and parse `--fail-if` expressions. UsageError says what is wrong and what was perhaps meant.
    `labels`: of the arms there will be, where they are known; a gate on another one is refused."""
    gates = [_parse(expression) for expression in expressions]
    if labels is not None:
        for gate in gates:
            _check_arm(gate, labels)
    return gates


def check_gates(profiles: Sequence[Profile], gates: Sequence[Gate]) -> list[GateResult]:
    """Each gate on its arm, or on every one. UsageError for an arm that there is not."""
    labels = [profile.label for profile in profiles]
    for gate in gates:
        _check_arm(gate, labels)
    return [
        _check(profile, gate) for gate in gates for profile in profiles if gate.arm is None or gate.arm == profile.label
    ]


def gate_status(results: Sequence[GateResult]) -> ExitStatus:
    """4 if a gate could not be answered, else 3 if one failed, else 0."""
    outcomes = {result.outcome for result in results}
    if GateOutcome.UNANSWERED in outcomes:
        return ExitStatus.INVALID
    return ExitStatus.GATE if GateOutcome.FAILED in outcomes else ExitStatus.OK


def quantities() -> Mapping[str, str]:
    """Everything a gate may ask for, with its unit: `fraction`, `ms`, `s`, `MB`, `bytes`, `cores`, `word`, nothing."""
    found = {name: unit_of(name) for name in _numbers(Totals)}
    for name in _numbers(Window, leave=("start_s", "end_s")):
        for over in _OVER_WINDOWS:
            found[f"windows.{over}.{name}"] = "" if over == "ratio" else unit_of(name)
    for name in GROWTH_QUANTITIES:
        found[f"growth.{name}"] = "word"
        found |= {f"growth.{name}.{part}": unit_of(name) for part in _GROWTH_NUMBERS}
    for name in _numbers(SlowEvents, leave=("kind",)):
        for kind in ("first_tokens", "chunk_gaps"):
            found[f"attribution.{kind}.{name}"] = unit_of(name)
    return found | {"is_problem": "word", "causes": "", "growing_families": ""}


def unit_of(name: str) -> str:
    """The unit that a field's name tells."""
    for ending, unit in (("_share", "fraction"), ("_ms", "ms"), ("_mb", "MB"), ("_bytes", "bytes")):
        if name.endswith(ending):
            return unit
    if name.endswith("_cpu"):
        return "cores"
    return "s" if name.endswith(("_seconds", "_s")) and not name.endswith("_per_s") else ""


def _numbers(record: type[Any], leave: Sequence[str] = ()) -> Iterator[str]:
    return (field.name for field in fields(record) if field.name not in leave)


# ---- parsing -----------------------------------------------------------------------------------------------------


def _parse(expression: str) -> Gate:
    match = _GATE.fullmatch(expression)
    if match is None:
        raise UsageError(
            f"--fail-if {_quoted(expression)}: expected QUANTITY, a comparison and a value, as in 'gen2_share>1%' or "
            "'growth.rss_mb=grows'"
        )
    quantity = match["quantity"]
    known = quantities()
    if quantity not in known:
        near = _near(quantity.lower(), list(known))
        hint = f"; did you mean {', '.join(near)}?" if near else f"; for instance {', '.join(list(known)[:6])}"
        raise UsageError(f"--fail-if {_quoted(expression)}: {_quoted(quantity)} is no quantity of a profile{hint}")
    comparison, text = match["operator"], match["value"]
    limit: float | str
    if known[quantity] == "word":
        limit = _word(expression, quantity, comparison, text)
    else:
        limit = _number(expression, quantity, known[quantity], text)
    return Gate(expression.strip(), match["arm"], quantity, comparison, limit, " ".join(text.split()))


def _word(expression: str, quantity: str, comparison: str, text: str) -> str:
    wanted = ["yes", "no"] if quantity == "is_problem" else [str(verdict) for verdict in GrowthVerdict]
    word = re.sub(r"[\s_-]+", " ", text.lower())
    word = {"true": "yes", "false": "no"}.get(word, word) if quantity == "is_problem" else word
    if comparison not in ("=", "==", "!=") or word not in wanted:
        raise UsageError(f"--fail-if {_quoted(expression)}: {quantity} takes = or != and one of {', '.join(wanted)}")
    return word


def _number(expression: str, quantity: str, unit: str, text: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UsageError(f"--fail-if {_quoted(expression)}: {_quoted(text)} is no number")
    factors, suffix = _UNITS[unit], match["unit"]
    factor = factors.get(suffix, factors.get(suffix.lower()))
    if factor is None:
        units = ", ".join(name for name in factors if name) or "none"
        raise UsageError(
            f"--fail-if {_quoted(expression)}: {quantity} has no unit {_quoted(suffix)}; it takes: {units}"
        )
    value = float(match["number"].replace(",", "").replace("_", "")) * factor
    if not math.isfinite(value):
        raise UsageError(f"--fail-if {_quoted(expression)}: {_quoted(text)} is beyond any number")
    return value


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Names that hold all its words, else similar ones; short ones first."""
    words = [word for word in re.split(r"[^a-z0-9]+", name) if word]
    holding = [one for one in known if words and all(word in re.split(r"[._]", one) for word in words)]
    return sorted(holding, key=len)[:4] or difflib.get_close_matches(name, known, n=4, cutoff=0.5)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:119] + "…")


def _check_arm(gate: Gate, labels: Sequence[str]) -> None:
    if gate.arm is not None and gate.arm not in labels:
        raise UsageError(
            f"--fail-if {_quoted(gate.expression)}: no arm is called {_quoted(gate.arm)}; there is "
            + ", ".join(map(_quoted, labels))
        )


# ---- checking ----------------------------------------------------------------------------------------------------


def _check(profile: Profile, gate: Gate) -> GateResult:
    value, why_not = _value(profile, gate)
    if value is None:
        return GateResult(gate.expression, profile.label, GateOutcome.UNANSWERED, None, "–", why_not)
    shown = _shown(value, gate)
    holds = _OPERATORS[gate.operator](value, gate.limit)
    outcome = GateOutcome.FAILED if holds else GateOutcome.PASSED
    reason = f"{gate.quantity} is {shown}" + ("" if isinstance(value, str) else f", the limit {gate.given_limit}")
    return GateResult(gate.expression, profile.label, outcome, value, shown, reason)


def _value(profile: Profile, gate: Gate) -> tuple[float | str | None, str]:
    """The quantity's value, or None and why there is none."""
    head, _, rest = gate.quantity.partition(".")
    value: Any
    unseen = f"{gate.quantity} was not seen in this run"
    if head == "windows":
        value, unseen = _over_windows(profile.windows, *rest.split("."))
    elif head == "growth":
        value, unseen = _growth(profile, rest, gate)
    elif head == "attribution":
        kind, _, name = rest.partition(".")
        events = getattr(profile.attribution, kind)
        value = None if events is None else getattr(events, name)
        unseen = profile.attribution.note or unseen
    elif head == "is_problem":
        value = None if profile.is_problem is None else "yes" if profile.is_problem else "no"
    elif head in ("causes", "growing_families"):
        value = len(getattr(profile, head))
    else:
        value = getattr(profile.totals, head)
    if isinstance(value, float) and not math.isfinite(value):
        value = None
    return value, unseen


def _over_windows(windows: Sequence[Window], over: str, name: str) -> tuple[float | None, str]:
    values = [getattr(window, name) for window in windows]
    seen = [value for value in values if value is not None]
    if (
        not seen
        or (over in ("first", "ratio") and values[0] is None)
        or (over in ("last", "ratio") and values[-1] is None)
    ):
        which = {"first": "first", "last": "last", "ratio": "first or last"}.get(over, "any")
        return None, f"{name} was not seen in the {which} window" if seen else f"{name} was not seen in any window"
    if over == "ratio":
        return (values[-1] / values[0], "") if values[0] else (None, f"{name} is 0 in the first window: no ratio")
    return {"first": values[0], "last": values[-1], "max": max(seen), "min": min(seen)}[over], ""


def _growth(profile: Profile, rest: str, gate: Gate) -> tuple[float | str | None, str]:
    name, _, part = rest.partition(".")
    growth = profile.growth.get(name)
    if growth is None:
        return None, f"{name} was not seen in this run"
    if part:
        return getattr(growth, part), growth.reason or f"{gate.quantity} is not known"
    verdict = str(growth.verdict)
    if growth.verdict == GrowthVerdict.NOT_ENOUGH_DATA and gate.limit != verdict:
        return None, f"not enough data{': ' + growth.reason if growth.reason else ''}"
    return verdict, ""


def _shown(value: float | str, gate: Gate) -> str:
    if isinstance(value, str):
        return value
    unit = quantities()[gate.quantity]
    if unit == "fraction":
        return _percent(value, gate)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{number} {unit}" if unit else number


def _percent(value: float, gate: Gate) -> str:
    """As the tables have it, unless that would be on the other side of the limit: 1.004% is more than 1%."""
    digits = 2 if 0 < abs(value) < 0.01 else 1
    holds = _OPERATORS[gate.operator]
    same = holds(float(f"{100 * value:.{digits}f}") / 100, gate.limit) == holds(value, gate.limit)
    return f"{value:.{digits}%}" if same else f"{100 * value:.6g}%"
