"""What run.json says, checked: it may come from anywhere, and everything that sums up or shows a run relies on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from atom.bench.records import is_count
from atom.bench.rundir import RunDirectory, Validity
from atom.recipes.errors import UsageError

__all__ = ["checked_run"]


_MOST: Final = 1e15
"""A number beyond this is none that a run has."""


def _real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _object(value: object) -> bool:
    return isinstance(value, dict)


def _objects(value: object) -> bool:
    return isinstance(value, list) and all(map(_object, value))


def _text(value: object) -> bool:
    return isinstance(value, str)


def _facts(value: object) -> bool:
    """An object of strings and numbers."""
    return isinstance(value, dict) and all(isinstance(v, str | int | float | None) for v in value.values())


_Kind = tuple[Callable[[object], bool], str]
_OBJECT: Final[_Kind] = (_object, "an object")
_TEXT: Final[_Kind] = (_text, "a string")
_TEXTS: Final[_Kind] = (_texts, "a list of strings")
_COUNT: Final[_Kind] = (is_count, "a whole number from 0")
_NUMBER: Final[_Kind] = (_real, "a number")
_FACTS: Final[_Kind] = (_facts, "an object of strings and numbers")

_FIELDS: Final[Mapping[str, _Kind]] = {
    "name": _TEXT,
    "backend": _TEXT,
    "validity": (lambda value: value in tuple(Validity), "one of " + ", ".join(Validity)),
    "reasons": _TEXTS,
    "command": _TEXTS,
    "start_time": _TEXT,
    "end_time": _TEXT,
    "start_ns": _COUNT,
    "start_unix_ns": _COUNT,
    "measured_start_ns": _COUNT,
    "host": _OBJECT,
    "host.name": _TEXT,
    "host.cpu": _TEXT,
    "host.cpus": _COUNT,
    "host.python": _TEXT,
    "git": _FACTS,
    "git.sha": _TEXT,
    "packages": _FACTS,
    "devices": _TEXTS,
    "ranks": (_objects, "a list of objects"),
    "recipe": _OBJECT,
    "recipe.name": _TEXT,
    "target": _FACTS,
    "load": _OBJECT,
    "load.name": _TEXT,
    "load.model": _TEXT,
    "load.num_prompts": _COUNT,
    "load.max_concurrency": _COUNT,
    "load.concurrency": _COUNT,
    "load.scenario": _TEXT,
    "load.scenario_conflicts": _TEXTS,
    "load.client": _TEXT,
    "load.input_file": _TEXT,
    "load.request_rate": (lambda value: value == "inf" or _real(value), 'a number or "inf"'),
    "load.burstiness": _NUMBER,
    "load.arrival_pattern": _TEXT,
    "load.workers": _COUNT,
    "load.duration_s": _NUMBER,
    "load.grace_period_s": _NUMBER,
    "load.cancellation_rate": _NUMBER,
    "load.failed_request_threshold": _NUMBER,
    "load.slice_duration_s": _NUMBER,
    "load.goodput_ms": (lambda value: isinstance(value, dict) and all(map(_real, value.values())), "numbers by name"),
    "load.source": _OBJECT,
    "load.ramp": _FACTS,
    "load.ramp.start_rps": _NUMBER,
    "load.ramp.end_rps": _NUMBER,
    "load.source.shape": _TEXT,
    "load.source.notes": _TEXTS,
    "load.source.random_input_len": _COUNT,
    "load.source.random_output_len": _COUNT,
    "load.source.random_prefix_len": _COUNT,
    "load.source.random_range_ratio": _NUMBER,
}
"""Field → what it must be, where it is there and not null; an object comes before its fields."""


def checked_run(run_dir: RunDirectory) -> dict[str, Any]:
    """run.json; UsageError that names the field if one of those that are read is not what it must be."""
    run = run_dir.read_run_json()
    for path, (fits, wanted) in _FIELDS.items():
        value: Any = run
        for name in path.split("."):
            value = None if value is None else value.get(name)
        if value is not None and not fits(value):
            raise UsageError(f"{run_dir.run_json}: {path} must be {wanted}, got {str(value)[:80]!r}")
    try:
        json.dumps(run, allow_nan=False)
    except ValueError:
        raise UsageError(f"{run_dir.run_json} has NaN or Infinity in it, which JSON has not") from None
    return run
