"""From what was asked for to a plan: where servers run, what is refused instead of being ignored, what is declared."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom.cli import ab_options, ab_plan
from atom.cli.ab_options import request_of
from atom.cli.ab_plan import plan_of
from atom.cli.ab_plan_tables import plan_tables
from atom.diag.compare.placement import Machine
from atom.diag.compare.plan import Plan
from atom.recipes.errors import UsageError

GROUPS = (
    ab_options.arm_options,
    ab_options.load_options,
    ab_options.schedule_options,
    ab_options.evidence_options,
    ab_options.further_options,
    ab_options.output_options,
)
DEFAULTS = {
    name: parameter.default for group in GROUPS for name, parameter in inspect.signature(group).parameters.items()
}
URLS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
LOAD = "random --input-len 64 --output-len 8 --max-concurrency 4 --num-prompts 8"


def plan(base: str, head: str, **given: Any) -> Plan:
    assert set(given) <= set(DEFAULTS)
    return plan_of(request_of(base, head, {**DEFAULTS, **given}, frozenset(given)))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs and 16 CPUs, for those who ask for GPUs."""

    def this(*, gpus: bool = True) -> Machine:
        return Machine(devices=(0, 1, 2, 3) if gpus else (), cpus=tuple(range(16)))

    monkeypatch.setattr(ab_plan, "this_machine", this)
    for name in ("VLLM", "SGLANG"):
        monkeypatch.setenv(f"ATOM_{name}_PYTHON", sys.executable)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """One commit of a project that is laid out like this one."""
    (tmp_path / "repo/.src").mkdir(parents=True)
    (tmp_path / "repo/.src/x").write_text("x")
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    for command in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(tmp_path / "repo"), *identity, *command], check=True)
    return tmp_path / "repo"


def recipe(folder: Path, name: str, devices: str = "") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(f'name: {name}\ncommand: [serve, "{{src}}", --port, "{{port}}"]\n{devices}')
    return str(path)


# ---- where servers run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_servers_that_are_told_their_gpus_by_a_variable_get_halves_of_them(name: str) -> None:
    found = plan(name, f"other={name}", arm_args=["other:--eager"])
    assert [half.devices for half in found.placement.halves] == ["0,1", "2,3"]
    assert found.suite == "gpu"


def test_so_do_those_that_a_suite_names(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"name: mine\nloads: [{{name: one, bench: random, recipe: {recipe(tmp_path, 'gpu', 'devices: {env: [A]}')}}}]\n"
    )
    found = plan("main", "head=main", repo=repo, suite=str(tmp_path / "mine.yaml"))
    assert [half.devices for half in found.placement.halves] == ["0,1", "2,3"]


def test_what_computes_on_cpus_gets_none(repo: Path) -> None:
    for found in (
        plan("embedded", "simulated"),
        plan("main", "head=main", repo=repo),
        plan("main", "head=main", repo=repo, load=[f"{LOAD} --recipe embedded"]),
        plan("vllm-cpu", "head=vllm-cpu"),
    ):
        assert [half.devices for half in found.placement.halves] == [None, None]
        assert found.suite != "gpu"


def test_a_server_that_is_not_told_its_gpus_is_named(tmp_path: Path) -> None:
    other = recipe(tmp_path, "other")
    assert plan("vllm", other).extras["notes"] == [
        f"recipe {other} has no `devices.env`: its server is not told which GPUs are its half's"
    ]


def test_gpus_that_were_named_and_cannot_be_given_are_refused(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--devices: recipe simulated of head says in no field how to choose devices"):
        plan("embedded", "head=simulated", devices="0/1")
    with pytest.raises(UsageError, match=r"--devices: recipe simulated of main"):
        plan("main", "head=main", repo=repo, devices="0/1", load=[f"{LOAD} --recipe simulated"])
    with pytest.raises(UsageError, match=r"--devices: 127.0.0.1-8001 is a server that runs already"):
        plan("vllm", URLS[1], devices="0/1")
    assert [half.devices for half in plan("embedded", "head=embedded", devices="0/1").placement.halves] == ["0", "1"]


def test_servers_that_run_already_stay_where_they_are() -> None:
    found = plan(*URLS)
    assert found.placement.concurrent
    assert all(half.devices is None and not half.server_cpus for half in found.placement.halves)
    assert not found.swap
    assert {len(pair.runs) for pair in found.schedule} == {1}
    assert found.half_of(found.schedule[0].runs[0].runs[0]).name == "as it runs"
    assert plan(*URLS, placement="serial").swap  # their order is turned around
    mixed = plan("vllm", URLS[1])
    assert {len(pair.runs) for pair in mixed.schedule} == {1}
    halves = [mixed.half_of(run) for run in mixed.schedule[0].runs[0].runs]
    assert [half.devices for half in halves] == ["0,1", None]


def test_what_a_recipe_needs_may_be_given_for_the_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOM_VLLM_PYTHON")
    with pytest.raises(UsageError, match="recipe vllm needs a value for `python`"):
        plan("vllm", "head=vllm", arm_set=["vllm:python=/a"])
    found = plan("vllm", "head=vllm", arm_set=["vllm:python=/a"], arm_python=["head:/b"])
    assert [(arm.variables.get("python"), arm.python) for arm in found.arms] == [("/a", None), (None, "/b")]


# ---- what would be ignored -----------------------------------------------------------------------------------------


def test_a_recipe_needs_a_ref() -> None:
    for arms in (URLS, ("embedded", "simulated")):
        with pytest.raises(UsageError, match="--recipe says how a git ref is built"):
            plan(*arms, recipe="embedded")


@pytest.fixture
def records(tmp_path: Path) -> Callable[..., str]:
    def of(label: str, runs: int = 2, **load: Any) -> str:
        for number in range(runs):
            folder = tmp_path / f"{label}-{number}"
            folder.mkdir()
            (folder / "run.json").write_text(json.dumps({"schema_version": "1.0", "load": load}))
        return f"{label}=run:" + ",".join(str(tmp_path / f"{label}-{number}") for number in range(runs))

    return of


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"load": [LOAD]}, "--load"),
        ({"suite": "gpu"}, "--suite"),
        ({"devices": "0/1"}, "--devices"),
        ({"cpus": "0/1"}, "--cpus"),
        ({"placement": "serial"}, "--placement"),
        ({"recipe": "vllm"}, "--recipe"),
        ({"pairs": 3}, "--pairs"),
        ({"swap": False}, "--no-swap"),
        ({"until_decided": True}, "--until-decided"),
        ({"deadline": "5m"}, "--deadline"),
        ({"cooldown": "5s"}, "--cooldown"),
        ({"seed": 1}, "--seed"),
        ({"gc": True}, "--gc"),
        ({"accuracy": 5}, "--accuracy"),
        ({"probe_outputs": 4}, "--probe-outputs"),
        ({"cross": True}, "--cross"),
    ],
)
def test_records_are_not_run(records: Callable[..., str], given: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: leave it out") as caught:
        plan(records("a"), records("b"), **given)
    assert "\n" not in str(caught.value)


def test_the_load_of_records_is_what_they_say(records: Callable[..., str]) -> None:
    load = {"num_prompts": 30, "max_concurrency": 8, "source": {"random_input_len": 64, "random_output_len": 16}}
    (found,) = plan(records("a", **load), records("b", **{**load, "num_prompts": 40})).loads
    assert found.options == {"max-concurrency": 8, "random-input-len": 64, "random-output-len": 16}
    assert (found.name, found.recipe) == ("recorded", None)


def test_the_plan_of_records_says_nothing_of_running_them(records: Callable[..., str]) -> None:
    found = plan(records("a", 2), records("b", 2))
    assert (found.pairs, len(found.schedule), found.swap) == (2, 2, False)
    facts = {row[0]: row[1] for row in plan_tables(found)[0].rows}
    assert facts["pairs"] == "2 per load, not swapped"
    assert "halves" not in facts


def test_a_record_beside_what_is_run_has_its_own_number_of_pairs(records: Callable[..., str]) -> None:
    record = records("old")
    with pytest.raises(UsageError, match="--pairs: leave it out"):
        plan(record, "simulated", pairs=5)
    found = plan("base=simulated", "head=simulated", arm=[f"recorded:{record}"], arm_args=["head:--x"], pairs=5)
    numbers = {key: sum(pair.comparison == key for pair in found.schedule) for key in ("base..head", "base..old")}
    assert numbers == {"base..head": 5 * len(found.loads), "base..old": 2 * len(found.loads)}


# ---- what is declared ----------------------------------------------------------------------------------------------


def test_what_loads_declare_is_not_overridden_without_a_word() -> None:
    given = {"load": [f"one={LOAD} --primary ttft_p50 --margin 3", f"two={LOAD}"]}
    found = plan("simulated", "head=embedded", **given, primary="e2el_p50", margin="2%")
    assert {load.primary for load in found.loads} == {"e2el_p50"}
    assert found.extras["notes"] == [
        "--primary e2el_p50 decides one, instead of ttft_p50",
        "--margin 2% holds for one, instead of 3%",
    ]
    assert ["note", "--margin 2% holds for one, instead of 3%"] in plan_tables(found)[0].rows
    assert plan("simulated", "head=embedded", **given).extras["notes"] == []
    suite = plan("simulated", "head=embedded", suite="cpu", primary="e2el_p50")
    assert len(suite.extras["notes"]) == 2


def test_markers_of_agentic_prompts_are_the_same_in_all_runs() -> None:
    load = "agents=aiperf-agentic --generate --scenario inferencex-agentx-mvp"
    first, second, other = (
        plan("simulated", "head=embedded", load=[load], seed=seed).loads[0].options["cache-bust-nonce"]
        for seed in (1, 1, 2)
    )
    assert first == second != other
    own = plan("simulated", "head=embedded", load=[f"{load} --cache-bust-nonce mine"])
    assert own.loads[0].options["cache-bust-nonce"] == "mine"


SMALL = "random --input-len 64 --output-len 8 --max-concurrency 4 --num-prompts 8"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "not asked for: the simulated executor computes no text"),
        ({"load": [f"small={SMALL} --recipe embedded"]}, "4 prompts after small"),
        ({"probe_outputs": 0}, "not asked for (--probe-outputs 0)"),
    ],
)
def test_whether_greedy_outputs_are_compared_is_in_the_plan(repo: Path, given: dict[str, Any], told: str) -> None:
    found = plan("main", "other=main", **{"repo": repo, "load": [SMALL], **given})
    assert ["greedy outputs", told] in plan_tables(found)[0].rows


@pytest.mark.parametrize(
    ("load", "told"),
    [
        ({}, "; time per pair not known: the first one of a load may exceed 5 s"),
        ({"seconds": 1.0}, ""),
        ({"seconds": 60.0}, ", and a pair takes about 4 min"),
    ],
)
def test_a_deadline_says_what_it_cannot_promise(repo: Path, load: dict[str, Any], told: str) -> None:
    found = plan("main", "other=main", repo=repo, load=[SMALL], deadline="5s", placement="serial")
    found = replace(found, loads=tuple(replace(one, **load) for one in found.loads))
    (row,) = (row for row in plan_tables(found)[0].rows if row[0] == "deadline")
    assert row[1] == f"5 s: no pair begins that would not end by then{told}"
