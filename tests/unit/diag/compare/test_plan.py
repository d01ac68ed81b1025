"""The plan of a comparison: a balanced, randomised schedule that goes through its file unchanged."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.diag.compare.model import Arm, ArmKind, Comparison, Half, Load, Placement, Purpose
from atom.diag.compare.plan import PLAN_FILE, Plan, make_plan
from atom.recipes.errors import UsageError

SERIAL = Placement(halves=(Half(name="all"),), reason="one device")
HALVES = Placement(halves=(Half(name="0", devices="0"), Half(name="1", devices="1")), reason="two devices")


def arm(label: str, kind: ArmKind = ArmKind.REF, **fields: Any) -> Arm:
    return Arm(label=label, kind=kind, spec=label, **fields)


def two(placement: Placement = SERIAL, loads: int = 1, **options: Any) -> Plan:
    return make_plan(
        [arm("base"), arm("head")],
        [Comparison(base="base", head="head")],
        [Load(name=f"load-{number}", bench="random", seconds=10) for number in range(loads)],
        placement,
        **options,
    )


def places(plan: Plan) -> list[list[list[tuple[str, int]]]]:
    """Per pair and matched run, who runs in the order of starting: (arm, half)."""
    return [
        [[(one.arm, one.half) for one in sorted(run.runs, key=lambda one: one.order)] for run in pair.runs]
        for pair in plan.schedule
    ]


def test_one_device_is_abba_and_then_baab() -> None:
    orders = {seed: places(two(pairs=2, seed=seed)) for seed in range(8)}
    abba = [[("base", 0), ("head", 0)], [("head", 0), ("base", 0)]]
    assert all(sorted(order) == sorted([abba, abba[::-1]]) for order in orders.values())
    assert len({json.dumps(order) for order in orders.values()}) == 2  # which of them comes first is drawn


def test_two_halves_are_swapped_within_a_pair() -> None:
    plan = two(HALVES, pairs=4, seed=3)
    for pair in plan.schedule:
        assert {run.index for run in pair.runs} == {0, 1}
        for run in pair.runs:
            assert [one.half for one in run.runs] == [run.index, 1 - run.index]  # index 0: the base on half 0
    assert Counter(pair.runs[0].index for pair in plan.schedule) == {0: 2, 1: 2}


@pytest.mark.parametrize("placement", [SERIAL, HALVES])
def test_without_the_swap_a_pair_is_one_matched_run(placement: Placement) -> None:
    plan = two(placement, pairs=3, swap=False)
    assert [[run.index for run in pair.runs] for pair in plan.schedule] == [[0]] * 3
    assert [one.arm for one in plan.schedule[0].runs[0].runs] == ["base", "head"]


def test_controls_come_first_and_are_of_the_base_alone() -> None:
    plan = two(HALVES, loads=2, pairs=2, aa_pairs=1)
    purposes = [pair.purpose for pair in plan.schedule]
    assert purposes == [Purpose.CONTROL] * 2 + [Purpose.COMPARE] * 4
    for pair in plan.schedule[:2]:
        assert pair.arms == {"base"}
        assert pair.comparison == "base..base"
        assert [[one.half for one in run.runs] for run in pair.runs] in ([[0, 1], [1, 0]], [[1, 0], [0, 1]])
    assert plan.comparisons == (Comparison(base="base", head="head"),)


def test_causal_arms_are_interleaved_each_with_the_control() -> None:
    arms = [arm("control"), arm("treatment"), arm("bypass"), arm("repair")]
    comparisons = [Comparison(base="control", head=one.label) for one in arms[1:]]
    plan = make_plan(arms, comparisons, [Load(name="a", bench="random")], SERIAL, pairs=3, aa_pairs=2, seed=5)
    rounds = [[pair.comparison for pair in plan.schedule if pair.pair == number] for number in range(3)]
    keys = {one.key for one in comparisons}
    assert [set(one) - {"control..control"} for one in rounds] == [keys] * 3
    compared = [pair for pair in plan.schedule if pair.purpose is Purpose.COMPARE]
    assert [pair.pair for pair in compared] == [0] * 3 + [1] * 3 + [2] * 3
    assert [pair.comparison for pair in compared[3:6]] == [pair.comparison for pair in compared[2::-1]]


def test_long_sections_take_one_pair_and_no_control() -> None:
    loads = [Load(name="a", bench="random"), Load(name="long", bench="random", section="gc")]
    base = [arm("base"), arm("head")], [Comparison(base="base", head="head")], loads, SERIAL
    plan = make_plan(*base, pairs=3, aa_pairs=1, until_decided=True, max_pairs=5)
    counts = Counter((pair.purpose.value, pair.load) for pair in plan.schedule)
    assert counts == {("aa", "a"): 1, ("compare", "a"): 5, ("compare", "long"): 1}
    assert [pair.pair for pair in plan.schedule if plan.is_extra(pair)] == [3, 4]


def test_records_are_a_pair_each_and_are_not_swapped() -> None:
    arms = [arm(label, ArmKind.RECORDED, recorded=("x", "y")) for label in ("base", "head")]
    loads, comparisons = [Load(name="a", bench="random", seconds=9)], [Comparison(base="base", head="head")]
    plan = make_plan(arms, comparisons, loads, HALVES, pairs=7, cool_down_s=0)
    assert [(pair.pair, len(pair.runs)) for pair in plan.schedule] == [(0, 1), (1, 1)]
    assert plan.expected_seconds() == 0
    with pytest.raises(UsageError, match="'base' has 2 recorded runs and 'head' has 1: give as many"):
        make_plan([arms[0], arm("head", ArmKind.RECORDED, recorded=("x",))], comparisons, loads, HALVES)


def test_expected_time() -> None:
    assert two(SERIAL, loads=2, pairs=3, cool_down_s=5).expected_seconds() == 2 * 3 * 2 * (20 + 5) + 11 * 5
    assert two(HALVES, loads=2, pairs=3).expected_seconds() == 2 * 3 * 2 * 10
    assert two(HALVES, pairs=3, until_decided=True).expected_seconds() == 3 * 2 * 10  # what is sure to be made
    unknown = make_plan(
        [arm("a"), arm("b")], [Comparison(base="a", head="b")], [Load(name="l", bench="random")], SERIAL
    )
    assert unknown.expected_seconds() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": 0}, "--pairs must be from 1"),
        ({"aa_pairs": -1}, "--aa-pairs must be from 0"),
        ({"max_pairs": 4}, "--max-pairs says where --until-decided ends"),
        ({"max_pairs": 2, "until_decided": True}, r"--max-pairs must be from --pairs \(3\)"),
        ({"pairs": 1, "max_pairs": 1, "until_decided": True}, "at least 2"),
        ({"deadline_s": -1.0}, "deadline_s must be a number of seconds"),
        ({"cool_down_s": float("nan")}, "cool_down_s must be a number of seconds"),
    ],
)
def test_what_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        two(**change)


def test_what_arms_and_loads_cannot_be() -> None:
    loads, pair = [Load(name="l", bench="random")], [Comparison(base="a", head="b")]
    url = arm("a", ArmKind.URL, url="http://127.0.0.1:1")
    for arms, comparisons, some, message in (
        ([arm("a"), arm("a")], pair, loads, "there are two arms named 'a'"),
        ([arm("../a"), arm("b")], pair, loads, "a name has letters"),
        ([arm("a"), arm("b")], pair, loads * 2, "there are two loads named 'l'"),
        ([arm("a"), arm("c")], pair, loads, "there is no arm 'b'"),
        ([arm("a"), arm("b")], [Comparison(base="a", head="a")], loads, "would be compared with itself"),
        ([arm("a"), arm("b")], pair, [], "needs two arms and a load"),
        ([url, arm("b")], pair, loads, "would load it twice at the same time"),
        ([arm("a", ArmKind.RECORDED, recorded=("x",)), arm("b")], pair, loads, "a control has to be run"),
    ):
        with pytest.raises(UsageError, match=message):
            make_plan(arms, comparisons, some, HALVES, aa_pairs=1)
    assert make_plan([url, arm("b")], pair, loads, SERIAL, aa_pairs=1).schedule


@settings(max_examples=25, deadline=None)
@given(
    arms=st.integers(2, 4),
    loads=st.integers(1, 3),
    pairs=st.integers(1, 5),
    aa_pairs=st.integers(0, 2),
    swap=st.booleans(),
    halves=st.booleans(),
    extra=st.none() | st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_every_schedule_is_balanced_and_recorded(
    arms: int, loads: int, pairs: int, aa_pairs: int, swap: bool, halves: bool, extra: int | None, seed: int
) -> None:
    labels = [f"arm-{number}" for number in range(arms)]
    comparisons = [Comparison(base=labels[0], head=label) for label in labels[1:]]
    arguments: dict[str, Any] = {
        "arms": [arm(label) for label in labels],
        "comparisons": comparisons,
        "loads": [Load(name=f"l{number}", bench="random", options={"x": [1, 2]}) for number in range(loads)],
        "placement": HALVES if halves else SERIAL,
        "pairs": pairs,
        "aa_pairs": aa_pairs,
        "swap": swap,
        "seed": seed,
        "until_decided": extra is not None,
        "max_pairs": None if extra is None else max(pairs + extra, 2),
        "gates": [{"metric": "itl_p50", "slower_pct": 2.0}],
    }
    plan = make_plan(**arguments)
    assert plan == make_plan(**arguments)
    text = json.dumps(plan.as_dict())
    assert json.dumps(Plan.from_dict(json.loads(text)).as_dict()) == text
    most = pairs if extra is None else max(pairs + extra, 2)
    for comparison in comparisons:
        for load in plan.loads:
            made = plan.pairs_of((comparison.key, load.name))
            assert [one.pair for one in made] == list(range(most))
            first = Counter(one.runs[0].index for one in made)
            assert abs(first[0] - first[1]) <= 1 or not swap
            for one in made:
                assert len(one.runs) == (2 if swap else 1)
                for run in one.runs:
                    assert [part.order for part in run.runs] == [run.index, 1 - run.index]
    # A prefix leaves all streams about equally far, so a deadline does too.
    done: Counter[tuple[str, str]] = Counter({(one.key, load.name): 0 for one in comparisons for load in plan.loads})
    for pair in plan.schedule:
        if pair.purpose is Purpose.COMPARE:
            done[pair.stream] += 1
            assert max(done.values()) - min(done.values()) <= 1


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = two(HALVES, loads=2, aa_pairs=1, deadline_s=3000.0, suite="cpu", extras={"tests": "pytest"})
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan
    assert plan.arm("head").label == "head"
    assert plan.load("load-1").name == "load-1"


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: "[]",
        lambda plan: "{}",
        lambda plan: "nonsense",
        lambda plan: json.dumps(plan | {"placement": 3}),
        lambda plan: json.dumps(plan | {"arms": "x"}),
        lambda plan: json.dumps(plan | {"arms": [plan["arms"][0] | {"label": "../../x"}, plan["arms"][1]]}),
        lambda plan: json.dumps(plan | {"arms": [plan["arms"][0] | {"kind": "moon"}, plan["arms"][1]]}),
        lambda plan: json.dumps(plan | {"loads": []}),
        lambda plan: json.dumps(plan | {"schedule": plan["schedule"] * 2}),
        lambda plan: json.dumps(plan | {"schedule": [plan["schedule"][0] | {"load": "other"}]}),
        lambda plan: json.dumps(plan | {"placement": plan["placement"] | {"halves": []}}),
        lambda plan: json.dumps(plan | {"deadline_s": "soon"}),
        lambda plan: json.dumps(plan | {"loads": [plan["loads"][0] | {"primary": "speed"}]}),
        lambda plan: json.dumps(plan | {"loads": [plan["loads"][0] | {"primary": ["itl_p50"]}]}),
        lambda plan: json.dumps(plan | {"loads": [plan["loads"][0] | {"margin_pct": 0}]}),
        lambda plan: json.dumps(plan | {"loads": [plan["loads"][0] | {"margin_pct": "wide"}]}),
        lambda plan: json.dumps(plan | {"loads": [plan["loads"][0] | {"seconds": -1}]}),
        lambda plan: "[" * 100_000,
    ],
)
def test_a_damaged_plan_is_one_clear_error(tmp_path: Path, change: Any) -> None:
    text = change(json.loads(json.dumps(two(HALVES).as_dict())))
    (tmp_path / PLAN_FILE).write_text(text)
    with pytest.raises(UsageError) as error:
        Plan.read(tmp_path)
    assert str(error.value).count("\n") == 0


def test_no_plan(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plan\.json: cannot read the plan of a comparison"):
        Plan.read(tmp_path)
