"""Profiles for machines: the JSON of `--json`, and gates and validity as JUnit XML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from atom.bench.junit import JunitCase, junit_xml
from atom.bench.rundir import SCHEMA_VERSION, Validity
from atom.diag.gc_profile.gates import GateOutcome, GateResult
from atom.diag.gc_profile.model import Profile

__all__ = ["profile_json", "profile_junit"]


def profile_json(profiles: Sequence[Profile], gates: Sequence[GateResult] = ()) -> dict[str, Any]:
    """Everything that the profiles say. At the top level stand the keys of the first arm (`windows`, `gen2_share`,
    `growth`, …), so that a script reads one arm and the first of several alike; `arms` has each arm in the same form.
    Fractions are 0..1; what was not seen is null, and so is what is no number."""
    assert profiles
    arms = [_finite(profile.as_dict()) for profile in profiles]
    return {
        "schema_version": SCHEMA_VERSION,
        **arms[0],
        "gates": [_finite(result.as_dict()) for result in gates],
        "arms": arms,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def profile_junit(profiles: Sequence[Profile], gates: Sequence[GateResult] = ()) -> str:
    """One test case per gate and arm, and one per arm for the evidence. A gate that failed is a failure, one that could
    not be answered an error."""
    several = len(profiles) > 1
    cases = [JunitCase(f"evidence{_of(p.label, several)}", _validity(p)) for p in profiles]
    for result in gates:
        cases.append(
            JunitCase(
                f"fail if {result.gate}{_of(result.arm, several)}",
                failure=result.reason if result.outcome == GateOutcome.FAILED else None,
                error=result.reason if result.outcome == GateOutcome.UNANSWERED else None,
            )
        )
    verdicts = {f"verdict{_of(p.label, several)}": p.verdict for p in profiles}
    return junit_xml("atom gc-profile", cases, verdicts)


def _of(label: str, several: bool) -> str:
    return f" ({label})" if several else ""


def _validity(profile: Profile) -> str | None:
    if profile.validity == Validity.VALID:
        return None
    state = profile.validity or "the run was not sealed: it did not come to its end"
    return "\n".join([state, *profile.notes])
