"""Crossover of source and runtime: the two added arms, effects with intervals, a cell that did not start."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from atom.cli.ab_causal_tables import causal_tables
from atom.cli.render import markdown
from atom.diag.compare.contrasts import Network
from atom.diag.compare.crossover import cells_of, crossed_arms, crossed_comparisons, crossover_section
from atom.diag.compare.model import Arm, ArmKind
from atom.diag.compare.outcomes import ArmOutcome
from atom.diag.compare.statistics import Effects, Estimate, estimate
from atom.diag.compare.student_t import t_two_sided_p
from atom.recipes.errors import UsageError

BASE = Arm(
    label="main",
    role="base",
    kind=ArmKind.REF,
    spec="main",
    src="/c/a/src",
    checkout="/c/a",
    image="image:1",
    cache="/k/main",
    provenance={"sha": "a" * 40, "packages": {"torch": "2.6"}},
)
HEAD = Arm(
    label="branch",
    role="head",
    kind=ArmKind.REF,
    spec="branch",
    src="/c/b/src",
    checkout="/c/b",
    image="image:2",
    cache="/k/branch",
    provenance={"sha": "b" * 40, "packages": {"torch": "2.7"}},
)
CROSSED = crossed_arms(BASE, HEAD)
EFFECTS: dict[str, tuple[float, ...]] = {
    "source": (-0.5, 0.5, -0.5, 0.5),
    "runtime": (-0.5, -0.5, 0.5, 0.5),
    "interaction": (1.0, -1.0, -1.0, 1.0),
}
ARMS = [BASE, HEAD, *CROSSED]


def outcome(label: str, value: float | None = 100.0, **fields: Any) -> ArmOutcome:
    given: dict[str, Any] = {
        "runs": 2,
        "started": 2,
        "completed": 8,
        "requests": 8,
        "censored": (),
        "failure": None,
        "problem": None,
        **fields,
    }
    return ArmOutcome(arm=label, values=() if value is None else (value,), **given)


def section(estimates: dict[tuple[str, str], Estimate], *bad: ArmOutcome) -> Any:
    outcomes = {arm.label: outcome(arm.label) for arm in ARMS} | {one.arm: one for one in bad}
    words = {"load": "random", "metric": "output_throughput", "title": "output", "unit": "tok/s"}
    made = crossover_section(ARMS, outcomes, estimates, **words)
    assert made is not None
    return json.loads(json.dumps(made, allow_nan=False))


def measured(source: float, runtime: float, both: float = 0.0, sd: float = 0.002, pairs: int = 4, seed: int = 1) -> Any:
    """Estimates of the three comparisons with the base, of these true effects."""
    rng = np.random.default_rng(seed)
    true = {"branch": source + runtime + both, CROSSED[0].label: source, CROSSED[1].label: runtime}
    return {
        ("main", label): estimate(Effects(rng.normal(mean, sd, (pairs, 2)), np.full(pairs, np.nan)))
        for label, mean in true.items()
    }


def test_crossed_arms_take_source_from_one_and_runtime_from_the_other() -> None:
    one, other = CROSSED
    assert (one.checkout, one.src, one.image) == ("/c/b", "/c/b/src", "image:1")
    assert (other.checkout, other.src, other.image) == ("/c/a", "/c/a/src", "image:2")
    assert one.provenance == {"sha": "b" * 40, "packages": {"torch": "2.6"}}
    assert len({arm.cache for arm in ARMS}) == 4  # compile caches are kept per arm
    assert len({arm.label for arm in ARMS}) == 4


def test_comparisons_connect_all_cells_with_the_base() -> None:
    assert [(one.base, one.head) for one in crossed_comparisons(BASE, HEAD)] == [
        *(("main", "branch"), ("main", CROSSED[0].label), ("main", CROSSED[1].label))
    ]
    cells = cells_of(ARMS)
    assert cells is not None
    assert {cell: arm.label for cell, arm in cells.items()}["head", "base"] == CROSSED[0].label
    assert cells_of([BASE, HEAD]) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image": "image:1"}, "same runtime"),
        ({"src": "/c/a/src", "checkout": "/c/a", "spec": "main"}, "same source"),
        ({"provenance": BASE.provenance}, "same source"),  # one commit by two names
        ({"kind": ArmKind.URL, "url": "http://127.0.0.1:1"}, "two git refs"),
    ],
)
def test_what_cannot_be_crossed(change: dict[str, Any], says: str) -> None:
    import dataclasses

    with pytest.raises(UsageError, match=says):
        crossed_arms(BASE, dataclasses.replace(HEAD, **change))


@pytest.mark.parametrize(
    ("source", "runtime", "both", "verdict"),
    [
        (-0.10, 0.0, 0.0, "the difference comes from the source"),
        (0.0, -0.10, 0.0, "the difference comes from the runtime"),
        (-0.10, 0.05, 0.0, "both source and runtime make a difference, each by itself"),
        (0.0, 0.0, -0.10, "source and runtime act together: neither effect holds by itself"),
        (0.0, 0.0, 0.0, "no effect is told from zero"),
    ],
)
def test_verdicts(source: float, runtime: float, both: float, verdict: str) -> None:
    made = section(measured(source, runtime, both))
    assert made["verdict"] == verdict
    effects = made["effects"]
    assert effects["source"]["pct"] == pytest.approx(100 * math.expm1(source + both / 2), abs=0.5)
    assert effects["runtime"]["pct"] == pytest.approx(100 * math.expm1(runtime + both / 2), abs=0.5)
    assert effects["interaction"]["pct"] == pytest.approx(100 * math.expm1(both), abs=0.8)


def test_a_null_crossover_errs_rarely() -> None:
    """Each of the three effects is called at most in 5% of comparisons without any. An interval excludes zero exactly
    where p < 5%, which is faster to find out."""
    a, b, c, d = "main", CROSSED[0].label, CROSSED[1].label, "branch"
    called = dict.fromkeys(EFFECTS, 0)
    draws = 2000
    for seed in range(draws):
        net = Network(measured(0.0, 0.0, pairs=3, seed=seed))
        for name, (of_a, of_b, of_c, of_d) in EFFECTS.items():
            one = net.contrast({a: of_a, b: of_b, c: of_c, d: of_d})
            assert one is not None
            called[name] += t_two_sided_p(one.value / one.se, one.df) < 0.05
    assert all(count / draws <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws) for count in called.values()), called


def test_a_cell_that_did_not_start() -> None:
    bad = outcome(
        CROSSED[1].label, None, started=0, completed=None, requests=None, problem="undefined symbol: nvshmem_x"
    )
    estimates = measured(-0.1, 0.0)
    del estimates["main", CROSSED[1].label]
    made = section(estimates, bad)
    assert made["verdict"] == "inconclusive: cell (base's source, head's runtime) did not start"
    assert made["effects"] == {"source": None, "runtime": None, "interaction": None}
    assert made["simple"]["source on the base's runtime"]["pct"] == pytest.approx(-9.5, abs=0.5)
    assert made["simple"]["source on the head's runtime"] is None
    text = markdown(causal_tables({"cross": made}))
    assert "did not start" in text
    assert "undefined symbol: nvshmem" in text
    assert "source on the base's runtime" in text


def test_a_censored_cell_is_no_evidence() -> None:
    bad = outcome(CROSSED[0].label, 90.0, censored=("2 requests failed",))
    made = section(measured(-0.1, 0.0), bad)
    assert made["verdict"] == "inconclusive: cell (head's source, base's runtime) is censored"
    assert made["effects"]["source"] is None
    assert "90.00 raw, is censored" in markdown(causal_tables({"cross": [made]}))


def test_cells_are_what_the_effects_say() -> None:
    """Runs at different speeds of the machine: means over runs would tell another story than the pairs."""
    slow = outcome(CROSSED[0].label, 140.0)
    made = section(measured(-0.1, 0.03, both=0.02), slow)
    cells = {(one["source"], one["runtime"]): one["value"] for one in made["cells"]}
    logs = {cell: math.log(value) for cell, value in cells.items()}
    a, b, c, d = (logs[cell] for cell in (("base", "base"), ("head", "base"), ("base", "head"), ("head", "head")))
    seen = {"source": (b - a + d - c) / 2, "runtime": (c - a + d - b) / 2, "interaction": d - c - b + a}
    assert {name: 100 * math.expm1(one) for name, one in seen.items()} == pytest.approx(
        {name: one["pct"] for name, one in made["effects"].items()}
    )
    assert [one["raw"] for one in made["cells"]] == pytest.approx([100.0, 140.0, 100.0, 100.0])


def test_what_is_concluded_from_evidence_that_is_not_valid_says_so() -> None:
    bad = outcome(CROSSED[1].label, invalid=("client saturated",))
    made = section(measured(-0.1, 0.0), bad)
    assert made["verdict"] == "not valid (client saturated): the difference comes from the source"
    assert made["verdict"] in markdown(causal_tables({"cross": [made]}))


def test_tables_of_a_whole_crossover() -> None:
    text = markdown(causal_tables({"cross": section(measured(-0.1, 0.0))}))
    assert "main effect of source" in text
    assert "| interaction" in text
    assert "the difference comes from the source" in text


def test_a_comparison_of_two_has_no_such_tables() -> None:
    assert causal_tables({}) == []
