"""What the options of `atom ab-compare` mean together, and what is refused with the option's name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from atom.cli import ab_options
from atom.cli.ab_options import arm_changes, parse_percent, request_of
from atom.cli.options import split_tests
from atom.recipes.errors import UsageError

GROUPS = (
    ab_options.arm_options,
    ab_options.load_options,
    ab_options.schedule_options,
    ab_options.evidence_options,
    ab_options.further_options,
    ab_options.output_options,
)


def given(**changes: Any) -> dict[str, Any]:
    defaults = {
        name: parameter.default for group in GROUPS for name, parameter in inspect.signature(group).parameters.items()
    }
    assert set(changes) <= set(defaults)
    return {**defaults, **changes}


def test_two_arms() -> None:
    request = request_of("main", "branch", given())
    assert [(arm.spec, arm.role) for arm in request.arms] == [("main", "base"), ("branch", "head")]
    assert (request.pairs, request.swap, request.aa_pairs, request.tests) == (3, True, 0, None)


def test_further_arms_follow_the_head() -> None:
    request = request_of("main", "branch", given(arm=["bypass:local=ref:x", "repair:fix"]))
    assert [arm.role for arm in request.arms] == ["base", "head", "bypass", "repair"]
    assert request.arms[2].spec == "local=ref:x"


def test_a_control_takes_the_place_of_the_base() -> None:
    request = request_of(None, None, given(arm=["treatment:b", "control:a"]))
    assert [(arm.spec, arm.role) for arm in request.arms] == [("a", "control"), ("b", "treatment")]


@pytest.mark.parametrize(
    ("base", "head", "changes", "named"),
    [
        (None, None, {}, "BASE and HEAD"),
        ("main", None, {}, "HEAD"),
        ("main", "b", {"arm": ["control:x"]}, "--arm control"),
        ("main", "b", {"arm": ["friend:x"]}, "--arm"),
        ("main", "b", {"pairs": 0}, "--pairs"),
        ("main", "b", {"max_pairs": 5}, "--max-pairs"),
        ("main", "b", {"until_decided": True, "max_pairs": 2}, "--max-pairs"),
        ("main", "b", {"until_decided": True, "pairs": 1, "max_pairs": 1}, "--max-pairs"),
        ("main", "b", {"accuracy": 50, "gate": ["accuracy:some"]}, "--gate accuracy:some"),
        ("main", "b", {"accuracy": 50, "gate": ["accuracy:101"]}, "--gate accuracy:101"),
        ("main", "b", {"gate": ["accuracy:2%"]}, "--accuracy"),
        ("main", "b", {"placement": "somewhere"}, "--placement"),
        ("main", "b", {"primary": "speed"}, "--primary"),
        ("main", "b", {"fail_if_slower": "fast"}, "--fail-if-slower"),
        ("main", "b", {"gate": ["speed:2%"]}, "--gate"),
        ("main", "b", {"gate": ["ttft_p99:2%", "ttft_p99:3%"]}, "--gate"),
        ("main", "b", {"gate": ["tests"]}, "--tests"),
        ("main", "b", {"gate": ["gc"]}, "--gc"),
        ("main", "b", {"gate": ["accuracy"]}, "--accuracy"),
        ("main", "b", {"accuracy_dataset": "x"}, "--accuracy-dataset"),
        ("main", "b", {"load": ["random"], "suite": "cpu"}, "--suite"),
        ("main", "b", {"cross": True, "arm": ["repair:x"]}, "--cross"),
        ("main", "b", {"deadline": "soon"}, "--deadline"),
        ("main", "b", {"margin": "0"}, "--margin"),
    ],
)
def test_what_cannot_be_is_refused(base: str | None, head: str | None, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        request_of(base, head, given(**changes))
    assert "\n" not in str(caught.value)


def test_gates_of_metrics_and_sections() -> None:
    request = request_of("main", "b", given(fail_if_slower="2%", gate=["2k/ttft_p99:5", "tests"], tests=True))
    assert [(one.load, one.metric, one.slower_pct) for one in request.gates] == [
        (None, None, 2.0),
        ("2k", "ttft_p99", 5.0),
    ]
    assert request.section_gates == ("tests",)
    request = request_of("main", "b", given(gate=["accuracy:2%", "gc"], accuracy=50, gc=True))
    assert (request.section_gates, request.accuracy_margin_pct) == (("accuracy", "gc"), 2.0)


def test_changes_of_one_arm() -> None:
    found = arm_changes(
        ["main", "branch"],
        given(
            base_args="--level 1",
            arm_args=["main:--more 'a b'"],
            head_env=["A=1"],
            arm_env=["branch:B=2=3"],
            arm_set=["branch:model=/m"],
            base_image="image:1",
            arm_python=["branch:/venv/bin/python"],
        ),
    )
    assert found[0].server_args == ("--level", "1", "--more", "a b")
    assert found[0].image == "image:1"
    assert found[1].env == {"A": "1", "B": "2=3"}
    assert found[1].variables == {"model": "/m"}
    assert found[1].python == "/venv/bin/python"


@pytest.mark.parametrize(
    ("option", "value"),
    [("arm_env", ["nobody:A=1"]), ("arm_env", ["main:A"]), ("arm_args", ["main"]), ("base_args", "'open")],
)
def test_changes_that_cannot_be(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')}"):
        arm_changes(["main", "branch"], given(**{option: value}))


def test_a_command_of_tests_needs_an_equals_sign() -> None:
    assert split_tests(["ab-compare", "--tests", "main", "b"]) == ["ab-compare", "--tests", "main", "b"]
    assert split_tests(["--tests=make test"]) == ["--tests-command=make test"]


@pytest.mark.parametrize(("text", "value"), [("2%", 2.0), ("0.5", 0.5), (" 10 % ", 10.0)])
def test_percentages(text: str, value: float) -> None:
    assert parse_percent("--margin", text) == value
