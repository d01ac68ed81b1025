"""`--fail-if`: what is understood, what is refused and with which hint, and what cannot be answered."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.diag.gc_profile import growth as growth_rules
from atom.diag.gc_profile.gates import (
    GROWTH_QUANTITIES,
    GateOutcome,
    check_gates,
    gate_status,
    parse_gates,
    quantities,
)
from atom.diag.gc_profile.model import Attribution, Growth, GrowthVerdict, Profile, Totals, Window
from atom.recipes.errors import ExitStatus, UsageError

PASSED, FAILED, UNANSWERED = GateOutcome.PASSED, GateOutcome.FAILED, GateOutcome.UNANSWERED


def growth(verdict: GrowthVerdict, **more: float) -> Growth:
    return Growth(quantity="rss_mb", label="API RSS", verdict=verdict, unit="MB", per="1,000 requests", **more)


def profile(label: str = "main", **more: object) -> Profile:
    given_: dict[str, object] = {
        "label": label,
        "directory": "run",
        "simulated": False,
        "old_object_passes": "gen-2 passes",
        "window_s": 300.0,
        "windows": (
            Window(start_s=0, end_s=300, gen2_share=0.02, metrics_p50_ms=94.0, rss_mb=1977.0, health_max_ms=9.0),
            Window(start_s=300, end_s=600, gen2_share=0.34, metrics_p50_ms=1205.0, rss_mb=3022.0),
        ),
        "totals": Totals(duration_s=600.0, gen2_share=0.18, gen2_passes=2569, ttft_p99_ms=1757.0, gen2_seconds=312.6),
        "growth": {"rss_mb": growth(GrowthVerdict.GROWS, slope=52.0)},
        "attribution": Attribution(first_tokens=None, chunk_gaps=None, shifts=0, note="no request was recorded"),
        "causes": (),
        "verdict": "yes",
        "is_problem": True,
        "processes": (),
        "validity": "valid",
    }
    return Profile(**{**given_, **more})  # type: ignore[arg-type]


def outcome(expression: str, *profiles: Profile) -> GateOutcome:
    (result,) = check_gates(profiles or [profile()], parse_gates([expression]))
    return result.outcome


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("gen2_share>1%", FAILED),
        ("gen2_share>0.01", FAILED),
        ("gen2_share > 18 %", PASSED),
        ("gen2_share>=18%", FAILED),
        ("ttft_p99_ms>1.7s", FAILED),
        ("ttft_p99_ms>1,800 ms", PASSED),
        ("gen2_seconds>5min", FAILED),
        ("gen2_passes!=2569", PASSED),
        ("windows.last.rss_mb>2.9GB", FAILED),
        ("windows.first.rss_mb>2.9GB", PASSED),
        ("windows.max.gen2_share>5%", FAILED),
        ("windows.min.gen2_share>5%", PASSED),
        ("windows.ratio.metrics_p50_ms>1.25", FAILED),
        ("windows.max.health_max_ms>10", PASSED),
        ("windows.last.health_max_ms>10", UNANSWERED),
        ("windows.ratio.health_max_ms>10", UNANSWERED),
        ("windows.max.threads>1", UNANSWERED),
        ("growth.rss_mb=grows", FAILED),
        ("growth.rss_mb!=flat", FAILED),
        ("growth.rss_mb == flat", PASSED),
        ("growth.rss_mb.slope>50KB", FAILED),
        ("growth.rss_mb.first>50", UNANSWERED),
        ("growth.threads=grows", UNANSWERED),
        ("attribution.first_tokens.lift_pass>1.5", UNANSWERED),
        ("metrics_p50_ms>100", UNANSWERED),
        ("is_problem=yes", FAILED),
        ("is_problem=false", PASSED),
        ("causes>0", PASSED),
        ("main:gen2_share>1%", FAILED),
    ],
)
def test_outcomes(expression: str, expected: GateOutcome) -> None:
    assert outcome(expression) == expected


def test_not_enough_data_answers_only_its_own_question() -> None:
    unsure = profile(growth={"rss_mb": growth(GrowthVerdict.NOT_ENOUGH_DATA)})
    assert outcome("growth.rss_mb=grows", unsure) == UNANSWERED
    assert outcome("growth.rss_mb!=flat", unsure) == UNANSWERED
    assert outcome("growth.rss_mb=not-enough-data", unsure) == FAILED


def test_each_arm_is_checked_or_the_named_one() -> None:
    arms = [profile("a"), profile("b: x", totals=Totals(duration_s=1.0, gen2_share=0.0))]
    assert [r.outcome for r in check_gates(arms, parse_gates(["gen2_share>1%"]))] == [FAILED, PASSED]
    (named,) = check_gates(arms, parse_gates(["b: x:gen2_share>1%"]))
    assert (named.arm, named.outcome, named.shown_value) == ("b: x", PASSED, "0.0%")
    with pytest.raises(UsageError, match="no arm is called 'c'; there is 'a', 'b: x'"):
        check_gates(arms, parse_gates(["c:gen2_share>1%"]))
    with pytest.raises(UsageError, match="no arm is called 'c'"):
        parse_gates(["c:gen2_share>1%"], labels=["a"])


def test_status_four_wins_over_three() -> None:
    gates = ["gen2_share>1%", "gen2_share>50%", "metrics_p50_ms>1"]
    results = check_gates([profile()], parse_gates(gates))
    assert gate_status(results[1:2]) == ExitStatus.OK
    assert gate_status(results[:2]) == ExitStatus.GATE
    assert gate_status(results) == ExitStatus.INVALID
    assert gate_status([]) == ExitStatus.OK


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("gen2share>1%", "did you mean gen2_share"),
        ("windows.last.rss>1", "did you mean windows.last.rss_mb"),
        ("growth.rss=grows", "did you mean growth.rss_mb"),
        ("nonsense>1", "is no quantity of a profile"),
        ("gen2_share", "expected QUANTITY, a comparison and a value"),
        ("gen2_share>", "expected QUANTITY"),
        ("gen2_share>1ms", "gen2_share has no unit 'ms'; it takes: %"),
        ("gen2_passes>1%", "gen2_passes has no unit '%'; it takes: none"),
        ("gen2_share>lots", "'lots' is no number"),
        ("gen2_share>1e999", "beyond any number"),
        ("growth.rss_mb>grows", "takes = or !="),
        ("growth.rss_mb=up", "one of flat, grows, not enough data"),
        ("is_problem=maybe", "one of yes, no"),
    ],
)
def test_what_is_refused_says_why(expression: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace(".", r"\.")) as caught:
        parse_gates([expression])
    assert "\n" not in str(caught.value)
    assert "--fail-if" in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused_in_one_line(text: str) -> None:
    said = ""
    try:
        parse_gates([text])
    except UsageError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1


@given(
    quantity=st.sampled_from(sorted(name for name, unit in quantities().items() if unit != "word")),
    comparison=st.sampled_from([">", ">=", "<", "<=", "=", "==", "!="]),
    value=st.floats(min_value=-1e12, max_value=1e12),
    arm=st.none() | st.text(min_size=1, max_size=12).map(str.strip).filter(bool),
    gap=st.sampled_from(["", " "]),
)
def test_what_is_written_is_what_is_parsed(
    quantity: str, comparison: str, value: float, arm: str | None, gap: str
) -> None:
    prefix = "" if arm is None else f"{arm}:"
    (gate,) = parse_gates([f"{prefix}{quantity}{gap}{comparison}{gap}{value!r}"])
    assert (gate.arm, gate.quantity, gate.operator) == (arm, quantity, comparison)
    assert isinstance(gate.limit, float)
    assert math.isclose(gate.limit, value)


@given(st.floats(allow_nan=True, allow_infinity=True) | st.none(), st.floats(min_value=0, max_value=1))
def test_a_gate_fails_exactly_where_its_expression_holds(value: float | None, limit: float) -> None:
    one = profile(totals=Totals(duration_s=1.0, gen2_share=value))
    got = outcome(f"gen2_share>{limit!r}", one)
    if value is None or not math.isfinite(value):
        assert got == UNANSWERED
    else:
        assert got == (FAILED if value > limit else PASSED)


def test_every_total_and_window_figure_can_be_asked_for() -> None:
    known = quantities()
    assert {field.name for field in fields(Totals)} <= set(known)
    assert {f"windows.last.{field.name}" for field in fields(Window)} - set(known) == {
        "windows.last.start_s",
        "windows.last.end_s",
    }
    for name, unit in known.items():
        wanted = {"is_problem": "=yes"}.get(name, "=flat" if unit == "word" else ">1")
        (result,) = check_gates([profile()], parse_gates([name + wanted]))
        assert result.gate == name + wanted


def test_the_documented_gates_are_understood() -> None:
    docs = Path(__file__).parents[4] / "docs" / "gc_profile.md"
    documented = re.findall(r"--fail-if '([^']+)'", docs.read_text(encoding="utf-8"))
    assert len(documented) >= 10
    assert len(parse_gates(documented)) == len(documented)


def test_every_quantity_that_is_judged_can_be_asked_for() -> None:
    assert {rule.quantity for rule in growth_rules._RULES} == set(GROWTH_QUANTITIES)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("rss_mb>1KB", "rss_mb is 21.5 MB, the limit 1KB"),
        ("ttft_p99_ms>=0.5s", "ttft_p99_ms is 236 ms, the limit 0.5s"),
        ("gen2_share > 1 %", "gen2_share is 1.004%, the limit 1 %"),
        ("gen2_share>0.1", "gen2_share is 1.0%, the limit 0.1"),
        ("metrics_series>4", "metrics_series is 5, the limit 4"),
    ],
)
def test_the_limit_is_shown_as_it_was_given(expression: str, reason: str) -> None:
    totals = Totals(duration_s=1.0, rss_mb=21.5, ttft_p99_ms=236.0, gen2_share=0.01004, metrics_series=5)
    (result,) = check_gates([profile(totals=totals)], parse_gates([expression]))
    assert result.reason == reason


@given(st.floats(min_value=0, max_value=1), st.integers(0, 1000))
def test_a_share_is_shown_on_its_side_of_the_limit(value: float, tenths: int) -> None:
    (result,) = check_gates(
        [profile(totals=Totals(duration_s=1.0, gen2_share=value))], parse_gates([f"gen2_share>={tenths / 10}%"])
    )
    assert abs(float(result.shown_value.rstrip("%")) - 100 * value) <= 0.051
