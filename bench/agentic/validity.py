"""What a scenario asks of a run: which options it fixes, and what must hold of the records.

A scenario's verdict is not the run's: a run may be sound evidence and yet not count for the scenario (it was short, its
sessions were made up). `--unsafe-override` lets such a run begin. What spoils the measurement itself, too many requests
beyond the context for instance, makes the run not valid too. No result of this project is ever an official submission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from atom.bench.agentic.driver import is_context_overflow
from atom.bench.records import Outcome, RequestRecord
from atom.recipes.errors import UsageError

__all__ = ["SCENARIOS", "Scenario", "find_scenario", "scenario_reasons"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Options by parameter name; the defaults are the ones that its users run it with."""

    name: str
    min_duration_s: float
    fixed: Mapping[str, Any]
    """Parameter → the only value that counts."""
    max_overflow_share: float
    """Of all answers: requests that the server refused as longer than its context."""
    min_coverage: float
    """Share of completed requests whose tokens and TTFT are known."""

    def conflicts(self, given: Mapping[str, Any]) -> list[str]:
        """What of the options does not go with the scenario, as `--flag value: why`."""
        found = []
        if given["duration"] < self.min_duration_s:
            found.append(f"--benchmark-duration {given['duration']:g}: at least {self.min_duration_s:g} s count")
        for name, wanted in self.fixed.items():
            if given[name] != wanted:
                flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
                found.append(f"{flag} {_shown(given[name])}: {_shown(wanted)} is fixed")
        return found


_FLAGS: Final = {"system_idle_gap_cap": "--system-idle-gap-cap-seconds"}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "inferencex-agentx-mvp": Scenario(
        name="inferencex-agentx-mvp",
        min_duration_s=900.0,
        fixed={"cache_bust": "first_turn_prefix", "system_idle_gap_cap": 10.0, "ignore_eos": True},
        max_overflow_share=0.01,
        min_coverage=0.98,
    )
}


def find_scenario(name: str) -> Scenario | None:
    """None for `none`; UsageError for a name that is not known."""
    if name == "none":
        return None
    if name not in SCENARIOS:
        raise UsageError(f"--scenario must be one of {', '.join(SCENARIOS)}, none; got {name!r}")
    return SCENARIOS[name]


def scenario_reasons(
    load: Mapping[str, Any], records: Sequence[RequestRecord], *, interrupted: bool
) -> tuple[list[str], list[str]]:
    """(against the measurement, against the scenario): the first are among the second.

    `load`: of run.json. Each reason begins with the name that AIPerf has for it.
    """
    scenario = SCENARIOS.get(str(load.get("scenario")))
    if scenario is None:
        return [], []
    measured = _measured(scenario, records)
    others = [f"unsafe_override: {conflict}" for conflict in load.get("scenario_conflicts") or ()]
    if interrupted:
        others.append("run_cancelled: the run did not come to its end")
    return measured, [*others, *measured]


def _measured(scenario: Scenario, records: Sequence[RequestRecord]) -> list[str]:
    reasons: list[str] = []
    answers = [record for record in records if record.outcome != Outcome.CANCELLED]
    overflows = sum(map(is_context_overflow, answers))
    if answers and overflows / len(answers) > scenario.max_overflow_share:
        reasons.append(
            f"context_overflow_rate_exceeded: {overflows} of {len(answers)} requests "
            f"({overflows / len(answers):.1%}) were longer than the server's context; "
            f"{scenario.max_overflow_share:.0%} may be: --max-context-length leaves such recordings out"
        )
    completed = [record for record in answers if record.outcome == Outcome.COMPLETED]
    covered = sum(map(_is_covered, completed))
    if completed and covered / len(completed) < scenario.min_coverage:
        reasons.append(
            f"insufficient_profile_metric_coverage: tokens and TTFT are known of {covered} of {len(completed)} "
            f"completed requests ({covered / len(completed):.2%}); {scenario.min_coverage:.0%} are needed"
        )
    return reasons


def _is_covered(record: RequestRecord) -> bool:
    known = (record.prompt_tokens, record.output_tokens, record.first_ns, record.sent_ns)
    return None not in known and record.tokens_from != "chunks"
