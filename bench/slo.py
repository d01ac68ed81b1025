"""Service-level objectives on the figures of a run: `--slo 'p99_ttft_ms<=500'`, parsed before anything runs."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from atom.bench.metrics import DISTRIBUTIONS, RATES
from atom.recipes.errors import UsageError

__all__ = ["Objective", "ObjectiveResult", "check_objectives", "error_rate", "parse_objectives", "percentiles_of"]

ERROR_RATE: Final = "error_rate"

_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_OBJECTIVE: Final = re.compile(
    r"\s*(?P<figure>[A-Za-z0-9_.]+)\s*(?P<operator><=|>=|<|>)\s*(?P<limit>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>%|ms|s|)\s*",
    re.ASCII,
)
_LATENCY: Final = re.compile(
    rf"(?:(?P<statistic>mean|median|std|p(?P<q>\d{{1,2}}(?:\.\d{{1,6}})?))_(?P<name>{'|'.join(DISTRIBUTIONS)})(?:_ms)?"
    rf"|(?P<name_first>{'|'.join(DISTRIBUTIONS)})_(?P<statistic_last>mean|median|std|p\d{{1,2}}(?:\.\d{{1,6}})?)(?:_ms)?)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a figure must be: the name as in summary.json, the limit in its unit there."""

    figure: str
    operator: str
    limit: float

    @property
    def expression(self) -> str:
        return f"{self.figure}{self.operator}{self.limit:g}"

    def holds(self, value: float) -> bool:
        return _OPERATORS[self.operator](value, self.limit)


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    objective: str
    value: float | None
    met: bool | None
    """None: the figure was not measured."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_objectives(expressions: Sequence[str]) -> list[Objective]:
    """UsageError that names what is wrong, and what was perhaps meant."""
    return [_parse(text) for text in expressions]


def check_objectives(objectives: Sequence[Objective], figures: Mapping[str, float | None]) -> list[ObjectiveResult]:
    """`figures`: values by name, with `error_rate` among them."""
    results = []
    for one in objectives:
        value = figures.get(one.figure)
        results.append(ObjectiveResult(one.expression, value, None if value is None else one.holds(value)))
    return results


def percentiles_of(objectives: Sequence[Objective]) -> list[float]:
    """The percentiles that have to be computed."""
    matches = (_LATENCY.fullmatch(one.figure) for one in objectives)
    return sorted({float(match["q"]) for match in matches if match is not None and match["q"]})


def error_rate(completed: float, failed: float) -> float | None:
    """Failed requests ÷ those that were not cancelled on purpose."""
    return failed / (completed + failed) if completed + failed else None


def _parse(text: str) -> Objective:
    match = _OBJECTIVE.fullmatch(text)
    if match is None:
        raise UsageError(f"--slo must look like 'p99_ttft_ms<=500' (operators {' '.join(_OPERATORS)}), got {text!r}")
    name, unit, limit = match["figure"], match["unit"], float(match["limit"])
    latency = _LATENCY.fullmatch(name)
    if latency is not None:
        if unit == "%":
            raise UsageError(f"--slo {text!r}: a time has no %")
        statistic = latency["statistic"] or latency["statistic_last"]
        if statistic.startswith("p"):
            q = float(statistic[1:])
            if q == 0:
                raise UsageError(f"--slo {text!r}: a percentile lies between 0 and 100")
            statistic = f"p{q:g}"
        factor = 1e3 if unit == "s" else 1.0
        return Objective(
            f"{statistic}_{latency['name'] or latency['name_first']}_ms", match["operator"], limit * factor
        )
    if name not in RATES and name != ERROR_RATE:
        known = [ERROR_RATE, *RATES, *(f"{s}_{n}_ms" for n in DISTRIBUTIONS for s in ("mean", "median", "p99"))]
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise UsageError(f"--slo {text!r}: {name!r} is no figure of a run{hint}")
    own_unit = "fraction" if name == ERROR_RATE else RATES[name][0]
    if unit and not (unit == "%" and own_unit == "fraction") and unit != own_unit:
        raise UsageError(f"--slo {text!r}: {name} is in {own_unit}, not {unit}")
    return Objective(name, match["operator"], limit * (0.01 if unit == "%" else 1.0))
