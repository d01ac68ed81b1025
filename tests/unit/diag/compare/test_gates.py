"""Gates: pass, fail, and the undecided that must not look like either."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from atom.diag.compare.gates import (
    Gate,
    GateOutcome,
    GateResult,
    check_gate_loads,
    gate_status,
    judge_gate,
    judge_gates,
    parse_gate,
)
from atom.diag.compare.model import Load
from atom.diag.compare.statistics import Effects
from atom.diag.compare.verdict import MetricEvidence, evidence_of
from atom.recipes.errors import UsageError

TWO = Gate(slower_pct=2.0)


def evidence(*means_pct: float, within_pct: float = math.nan, **options: Any) -> MetricEvidence:
    logs = np.log1p(np.array(means_pct) / 100)
    effects = Effects(np.stack([logs, logs], axis=1), np.full(len(logs), within_pct / 100))
    return evidence_of(effects, **{"better": "lower", **options})


@pytest.mark.parametrize(
    ("means", "better", "outcome"),
    [
        ((3.0, 3.1, 3.2), "lower", "fail"),
        ((3.0, 3.1, 3.2), "higher", "pass"),
        ((-3.0, -3.1, -3.2), "higher", "fail"),
        ((-3.0, -3.1, -3.2), "lower", "pass"),
        ((0.5, 0.6, 0.7), "lower", "pass"),  # slower, and allowed to
        ((1.8, 1.9, 2.0), "lower", "undecided"),  # below the limit, but it might not be
        ((0.0, 3.0, 5.0), "lower", "undecided"),  # above the limit, but it might be nothing
        ((-3.0, 3.0, 0.1), "lower", "undecided"),
        ((), "lower", "undecided"),
        ((9.0,), "lower", "undecided"),
    ],
)
def test_outcomes(means: Any, better: Any, outcome: str) -> None:
    result = judge_gate(TWO, evidence(*means, within_pct=0.01, better=better))
    assert result.outcome == outcome
    assert result.text.startswith(f"{outcome}: ")
    assert "limit 2% slower" in result.text


def test_what_is_printed() -> None:
    fail = judge_gate(TWO, evidence(3.0, 3.1, 3.2))
    assert fail.text == "fail: slower by 3.10% (95% CI 2.85% to 3.35%, 3 pairs), limit 2% slower"
    passed = judge_gate(TWO, evidence(0.5, 0.6, 0.7))
    assert passed.text == "pass: 0.60% slower (95% CI +0.35% to +0.85%, 3 pairs), limit 2% slower"
    open_one = judge_gate(TWO, evidence(1.8, 1.9, 2.0))
    assert open_one.n_more is not None
    assert open_one.text.endswith(f"limit 2% slower; about {open_one.n_more} more pairs needed")
    faster = judge_gate(TWO, evidence(-3.0, -3.1, -3.2))
    assert faster.text.startswith("pass: 3.10% faster (95% CI −3.3")


def test_a_limit_of_zero_lets_nothing_be_slower() -> None:
    gate = Gate(slower_pct=0.0)
    assert judge_gate(gate, evidence(0.5, 0.6, 0.7)).outcome is GateOutcome.FAIL
    assert judge_gate(gate, evidence(-0.5, -0.6, -0.7)).outcome is GateOutcome.PASS
    assert judge_gate(gate, evidence(-0.1, 0.1, 0.0)).outcome is GateOutcome.UNDECIDED


def test_censored_evidence_decides_nothing_however_clear() -> None:
    for means in ((3.0, 3.1, 3.2), (-3.0, -3.1, -3.2)):
        result = judge_gate(TWO, evidence(*means, censored=["head: 6% of requests failed"]))
        assert result.text == "undecided: censored: head: 6% of requests failed; limit 2% slower"


def test_confounded_evidence_gates_and_says_so() -> None:
    result = judge_gate(TWO, evidence(3.0, 3.1, 3.2, confounded=["env FOO"]))
    assert result.outcome is GateOutcome.FAIL
    assert result.text.startswith("fail (confounded): slower by 3.10%")


def test_what_an_arm_shows_against_itself_fails_no_gate() -> None:
    logs = np.array([[0.05, 0.05], [-0.06, -0.06]])
    noisy = Effects(logs, np.full(2, math.nan))
    assert judge_gate(TWO, evidence(3.0, 3.1, 3.2, control=noisy)).outcome is GateOutcome.UNDECIDED


def test_several_gates_are_corrected_where_they_fail_and_not_where_they_pass() -> None:
    barely = evidence(1.5, 2.5, 3.5)
    assert judge_gate(TWO, barely).outcome is GateOutcome.FAIL
    results = judge_gates([(TWO, barely), (TWO, evidence(-3.0, 3.0, 0.1)), (TWO, evidence(0.1, 0.0, -0.1))])
    assert [one.outcome for one in results] == ["undecided", "undecided", "pass"]
    assert judge_gates([]) == []


def test_no_more_than_one_null_in_twenty_fails_and_none_passes_at_twice_the_limit() -> None:
    generator = np.random.default_rng(6)
    outcomes = {}
    for effect in (0.0, 0.04):
        draws = generator.normal(effect, 0.02, (2_000, 4, 2))
        outcomes[effect] = [
            judge_gate(TWO, evidence_of(Effects(one, np.full(4, math.nan)), better="lower")).outcome for one in draws
        ]
    assert outcomes[0.0].count(GateOutcome.FAIL) <= 50  # one side of 5%
    assert outcomes[0.04].count(GateOutcome.PASS) <= 50


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2%", Gate(slower_pct=2.0)),
        (" 0.5 ", Gate(slower_pct=0.5)),
        ("ttft_p99:5%", Gate(slower_pct=5.0, metric="ttft_p99")),
        ("itl_p50=1", Gate(slower_pct=1.0, metric="itl_p50")),
        ("8k-1k.c64/ttft_p99: 5 %", Gate(slower_pct=5.0, metric="ttft_p99", load="8k-1k.c64")),
    ],
)
def test_gates_as_they_are_typed(text: str, expected: Gate) -> None:
    assert parse_gate(text) == expected


@pytest.mark.parametrize("text", ["", "two", "-1%", "1.2.3%", "100%", "ttft:", "load/2%", "nan%", "2%%"])
def test_gates_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="gate"):
        parse_gate(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lnog/itl_p50:2%", "no load 'lnog' to gate; there are long, short"),
        ("soak/itl_p50:2%", "no load 'soak' to gate"),
        ("long/itl_p50:2%", None),
        ("2%", None),
    ],
)
def test_a_gate_needs_a_load_that_answers_it(text: str, message: str | None) -> None:
    sections = {"long": "load", "short": "load", "soak": "gc"}
    loads = [Load(name=name, bench="random", section=section) for name, section in sections.items()]
    if message is None:
        check_gate_loads([parse_gate(text)], loads)
    else:
        with pytest.raises(UsageError, match=message):
            check_gate_loads([parse_gate(text)], loads)
    with pytest.raises(UsageError, match="load"):
        check_gate_loads([parse_gate(text)], loads[2:])


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [([], 0), (["pass", "pass"], 0), (["pass", "fail"], 3), (["fail", "undecided"], 4), (["undecided"], 4)],
)
def test_an_unanswered_gate_wins_over_a_failed_one(outcomes: list[str], status: int) -> None:
    results = [GateResult(gate=TWO, outcome=GateOutcome(one), text="") for one in outcomes]
    assert gate_status(results) == status
