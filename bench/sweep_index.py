"""sweep.json: the options and the points of a sweep, replaced after each point. A sweep that was broken off goes on
from it, and its tables are made from it. Read as untrusted input."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atom.bench.records import is_count
from atom.bench.rundir import SCHEMA_VERSION, RunDirectory, Validity, check_schema_version, write_json
from atom.bench.slo import Objective, ObjectiveResult, parse_objectives
from atom.bench.sweep import Conclusion, Plan, Point, State, Swept
from atom.recipes.errors import UsageError

__all__ = ["SweepIndex", "index_path", "is_sweep"]

FILE: Final = "sweep.json"
_DIRECTORY: Final = re.compile(r"arms/[A-Za-z0-9_.+-]{1,80}/run-[0-9]{1,6}")
_FIGURE: Final = re.compile(r"[A-Za-z0-9_.]{1,60}")


def index_path(run_dir: RunDirectory) -> Path:
    return run_dir.path / FILE


def is_sweep(run_dir: RunDirectory) -> bool:
    return index_path(run_dir).is_file()


@dataclass(kw_only=True, slots=True)
class SweepIndex:
    """The content of sweep.json."""

    plan: Plan
    objectives: Sequence[Objective]
    fail_below: float | None
    options: Mapping[str, Any]
    """What was asked for, by flag: what has to be the same when the sweep goes on. No secrets."""
    points: list[Point] = field(default_factory=list)
    sessions: int = 0
    """How often a server was taken or started for it."""
    ended: str | None = None
    """`done`, or why it ended before; None while it runs, and after a kill."""

    def write(self, run_dir: RunDirectory, conclusion: Conclusion | None = None) -> None:
        """Replace sweep.json, atomically."""
        plan = self.plan
        content: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "plan": {
                "swept": str(plan.swept),
                "values": list(plan.values),
                "start": plan.start,
                "most": plan.most,
                "most_why": plan.most_why,
                "resolution": plan.resolution,
                "max_points": plan.max_points,
                "go_on": plan.go_on,
                "judged": plan.judged,
            },
            "slo": [one.expression for one in self.objectives],
            "fail_below": self.fail_below,
            "options": dict(self.options),
            "sessions": self.sessions,
            "ended": self.ended,
            "points": [_as_dict(point) for point in self.points],
        }
        if conclusion is not None:
            knee = conclusion.knee
            content |= {
                "knee": None if knee is None else {"value": knee.value, "how": knee.how, "detail": knee.detail},
                "validity": str(conclusion.validity),
                "reasons": conclusion.reasons,
                "notes": conclusion.notes,
            }
        write_json(index_path(run_dir), content)

    @classmethod
    def read(cls, run_dir: RunDirectory) -> SweepIndex:
        """UsageError, with the file's name, if it is not what it must be."""
        path = index_path(run_dir)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; no sweep was begun in {run_dir.path}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise UsageError(f"{path} must hold a JSON object")
        check_schema_version(content.get("schema_version"), path)
        try:
            return cls(
                plan=_plan(content["plan"]),
                objectives=parse_objectives([_text(one) for one in content["slo"]]),
                fail_below=None if content["fail_below"] is None else _number(content["fail_below"]),
                options=_object(content["options"]),
                points=[_point(_object(one)) for one in content["points"]],
                sessions=_count(content["sessions"]),
                ended=None if content["ended"] is None else _text(content["ended"]),
            )
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path} is not what a sweep writes: {what}") from None

    def difference(self, options: Mapping[str, Any]) -> str | None:
        """The first option that is not as it was, in words."""
        for flag in {**self.options, **options}:
            was, now = self.options.get(flag), options.get(flag)
            if was != now:
                return f"{flag} was {_shown(was)}, now it is {_shown(now)}"
        return None


def _shown(value: object) -> str:
    return "not given" if value is None else json.dumps(value)[:200]


def _as_dict(point: Point) -> dict[str, Any]:
    return {
        "value": point.value,
        "attempt": point.attempt,
        "directory": point.directory,
        "seed": point.seed,
        "validity": str(point.validity),
        "reasons": point.reasons,
        "state": str(point.state),
        "why": point.why,
        "slo": [one.as_dict() for one in point.objectives],
        "keeps_up": point.keeps_up,
        "backlog": point.backlog,
        "figures": {name: dict(figure) for name, figure in point.figures.items()},
    }


def _point(entry: dict[str, Any]) -> Point:
    directory = _text(entry["directory"])
    if not _DIRECTORY.fullmatch(directory):
        raise ValueError(f"{directory[:80]!r} is no directory of a point")
    keeps_up, why_not = entry["keeps_up"], entry["backlog"]
    return Point(
        value=_number(entry["value"]),
        attempt=_count(entry["attempt"]),
        directory=directory,
        seed=_count(entry["seed"]),
        validity=Validity(entry["validity"]),
        reasons=[_text(one) for one in entry["reasons"]],
        figures={name: _figure(name, one) for name, one in _object(entry["figures"]).items()},
        objectives=[
            ObjectiveResult(
                _text(one["objective"]), None if one["value"] is None else _number(one["value"]), _flag(one["met"])
            )
            for one in entry["slo"]
        ],
        keeps_up=_flag(keeps_up),
        backlog=None if why_not is None else _text(why_not),
        state=State(entry["state"]),
        why=_text(entry["why"]),
    )


def _figure(name: str, figure: object) -> dict[str, Any]:
    entry = _object(figure)
    if not _FIGURE.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no name of a figure")
    return {
        "value": None if entry["value"] is None else _number(entry["value"]),
        "unit": _text(entry["unit"]),
        "n": _count(entry["n"]),
        "definition": _text(entry["definition"]),
        "supported": entry["supported"] is True,
    }


def _plan(entry: object) -> Plan:
    plan = _object(entry)
    return Plan(
        swept=Swept(plan["swept"]),
        values=tuple(_number(value) for value in plan["values"]),
        start=_number(plan["start"]),
        most=_number(plan["most"]),
        most_why=_text(plan.get("most_why", "")),
        resolution=_number(plan["resolution"]),
        max_points=_count(plan["max_points"]),
        go_on=plan["go_on"] is True,
        judged=plan["judged"] is True,
    )


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -1e15 < value < 1e15:
        raise ValueError(f"{str(value)[:80]!r} is no number")
    return float(value)


def _count(value: object) -> int:
    if not is_count(value):
        raise ValueError(f"{str(value)[:80]!r} is no whole number from 0")
    assert isinstance(value, int)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:80]!r} is no string")
    return value


def _flag(value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{str(value)[:80]!r} is neither true, false nor null")
    return value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:80]!r} is no object")
    return value
