"""What the document of a comparison says of its arms: one that does not start, secrets, where the code came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from atom.bench.rundir import RunDirectory
from atom.cli.ab_publish import comparison_junit
from atom.cli.dispatch import main
from atom.diag.compare.crossover import CROSSED
from atom.diag.compare.document import document
from atom.diag.compare.journal import Journal, read_records
from atom.diag.compare.model import MatchedRun, Purpose, RunResult
from tests.unit.diag.compare.test_page import Made

S = 1_000_000_000


def write_with_lost(made: Made) -> Path:
    """As the conductor leaves it: whoever is matched with an arm that does not start is not run either."""
    RunDirectory(made.out).write_run_json({"name": "ab-compare", "ended": "done"})
    made.plan.write(made.out)
    with Journal(made.out) as journal:
        for run in (run for pair in made.plan.schedule for run in pair.runs):
            labels = [one.arm for one in run.runs]
            if not made.lost & set(labels):
                journal.append([made._run(journal, run, side) for side in (0, 1)])
                continue
            journal.append(
                [
                    RunResult(
                        matched=run.key,
                        arm=label,
                        side=side,
                        directory=str(journal.new_directory(label).relative_to(made.out)),
                        status=1 if label in made.lost else 130,
                        started_ns=S,
                        ended_ns=S,
                        problem="ValueError: x" if label in made.lost else "not run: the other arm did not start",
                        stage="start",
                    )
                    for side, label in enumerate(labels)
                ]
            )
    return made.out


def test_an_arm_that_does_not_start_takes_nothing_from_the_control_of_the_others(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "branch": 12.0, "bypass": 10.0, "bad": 10.0}, pairs=2, aa_pairs=0)
    made.lost = {"bad"}
    (causal,) = document(write_with_lost(made))["causal"]
    rows = {one["arm"]: one for one in causal["arms"]}
    assert rows["bad"]["problem"] == "ValueError: x"
    assert rows["bad"]["pct_of_control"] is None
    for label, runs in (("main", 8), ("branch", 4), ("bypass", 4)):
        assert (rows[label]["problem"], rows[label]["failure"], rows[label]["runs"]) == (None, None, runs)
        assert rows[label]["completed"] == rows[label]["requests"] == 120 * runs
    assert rows["branch"]["pct_of_control"]["value"] < 90
    assert rows["bypass"]["pct_of_control"]["value"] > 95


def test_a_cell_that_does_not_start_takes_nothing_from_the_other_cells(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "branch": 12.0, "head-base": 12.0, "base-head": 10.0}, pairs=2, aa_pairs=0)
    made.lost = {"base-head"}
    roles = dict(zip(made.steps_ms, ("base", "head", *CROSSED), strict=True))
    made.plan = replace(made.plan, arms=tuple(replace(one, role=roles[one.label]) for one in made.plan.arms))
    (cross,) = document(write_with_lost(made))["cross"]
    assert {one["arm"]: one["problem"] for one in cross["cells"]} == {
        "main": None,
        "branch": None,
        "head-base": None,
        "base-head": "did not start",
    }
    assert cross["simple"]["source on the base's runtime"]["pct"] < -10


class OneControlFails(Made):
    def _run(self, journal: Journal, run: MatchedRun, side: int) -> RunResult:
        self.failed = {"main": 30} if run.purpose is Purpose.CONTROL and run.pair == 0 else {}
        return super()._run(journal, run, side)


def test_a_control_that_is_no_evidence_takes_nothing_from_the_comparison(tmp_path: Path) -> None:
    told = document(OneControlFails(tmp_path, {"main": 10.0, "branch": 12.0}, pairs=3, aa_pairs=2).write())
    assert (told["valid"], told["reasons"], told["status"]) == (True, [], 0)
    (load,) = told["loads"]
    assert load["word"] == "slower"
    (line,) = [one for one in load["remarks"] if "A/A pair 1 is in no noise floor" in one]
    assert "requests failed" in line
    assert line in load["control"]["left_out"]


def test_a_gate_on_arms_that_differ_as_was_asked_for_answers_and_is_marked(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "branch": 10.0}, pairs=3, aa_pairs=0)
    base, head = made.plan.arms
    changed = replace(head, env={"A": "1"}, server_args=("--flag",))
    made.plan = replace(made.plan, arms=(base, changed), gates=({"slower_pct": 5.0},))
    told = document(made.write())
    (gate,) = told["gates"]
    assert (gate["outcome"], told["status"]) == ("pass", 0)
    assert (
        gate["confounded"] == told["confounded"] == ["env A: unset / 1", "server argument --flag: not given / --flag"]
    )
    assert gate["unasked"] == []
    assert "(confounded)" in comparison_junit(told)
    assert "<error" not in comparison_junit(told)


SECRET = "hunter2"


def test_secrets_stand_in_nothing_that_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(tmp_path / "out", {"main": 10.0, "branch": 10.0}, pairs=1, aa_pairs=0)
    hidden = {
        "env": {"MY_SECRET_TOKEN": SECRET, "PROXY": f"http://user:{SECRET}@host", "SEEN": "yes"},
        "server_args": ("--api-key", SECRET, "--seen", "yes"),
        "variables": {"password": SECRET},
    }
    made.plan = replace(
        made.plan,
        arms=tuple(replace(one, **hidden) for one in made.plan.arms),
        loads=tuple(
            replace(one, env=hidden["env"], options={**one.options, "header": [f"X-Key: {SECRET}"]})
            for one in made.plan.loads
        ),
        extras={"tests_command": f"pytest --api-key={SECRET}", "tests_text": f"tests: API_KEY={SECRET} pytest"},
    )
    out = made.write()
    assert SECRET in (out / "plan.json").read_text()  # --resume starts servers with it
    assert (out / "plan.json").stat().st_mode & 0o777 == 0o600
    told = document(out)
    assert SECRET not in json.dumps(told)
    assert told["arms"][0]["env"]["SEEN"] == "yes"
    assert told["arms"][0]["server_args"][-1] == "yes"
    assert told["comparisons"][0]["key"] == "main..branch"
    main(["report", str(out), "--json", str(tmp_path / "told.json"), "--markdown", str(tmp_path / "told.md")])
    assert SECRET not in "".join(capsys.readouterr())
    for path in (out / "summary.json", out / "report.html", tmp_path / "told.json", tmp_path / "told.md"):
        assert SECRET not in path.read_text()


# ---- whose code it was


def of_a_checkout(made: Made, checkout: Path, recipe: str, sections: Sequence[str] = ()) -> None:
    """Arms have a checkout and a recipe; there is a load more for each section."""
    for section in sections:
        load = replace(made.plan.loads[0], name=section, section=section)
        pair = next(one for one in made.plan.schedule if one.purpose is Purpose.COMPARE)
        runs = tuple(replace(run, load=section) for run in pair.runs)
        schedule = (*made.plan.schedule, replace(pair, load=section, runs=runs))
        made.plan = replace(made.plan, loads=(*made.plan.loads, load), schedule=schedule)
    arms = tuple(replace(one, checkout=str(checkout), recipe=recipe) for one in made.plan.arms)
    made.plan = replace(made.plan, arms=arms)


def write_origins(out: Path, file: str, *, but: Sequence[Path] = ()) -> None:
    for run in out.glob("arms/*/run-*"):
        where = "/elsewhere/__init__.py" if run in but else file
        record = {"role": "engine", "pid": 7, "executable": "python", "python": "3.11", "modules": {"pkg": where}}
        (run / "server").mkdir(exist_ok=True)
        (run / "server" / "origins-engine-7.json").write_text(json.dumps(record))


@pytest.fixture
def made_of_a_checkout(tmp_path: Path) -> Made:
    recipe = tmp_path / "engine.yaml"
    recipe.write_text('name: engine\ncommand: [serve, --port, "{port}", "{src}"]\nsource: {path: ., packages: [pkg]}\n')
    made = Made(tmp_path / "out", {"main": 10.0, "branch": 10.0}, pairs=2, aa_pairs=0)
    of_a_checkout(made, tmp_path / "checkout", str(recipe), ("gc", "accuracy"))
    gates = ({"slower_pct": 50.0, "load": "random"}, {"section": "gc"}, {"section": "accuracy"})
    made.plan = replace(made.plan, gates=gates)
    return made


@pytest.mark.parametrize("load", ["random", "gc", "accuracy"])
def test_foreign_code_in_any_section_makes_it_invalid_and_decides_no_gate(made_of_a_checkout: Made, load: str) -> None:
    made = made_of_a_checkout
    out = made.write()
    at = next(line for line in read_records(out).lines if f"/{load}/" in line.matched and line.side == 1)
    write_origins(out, str(out.parent / "checkout" / "pkg" / "__init__.py"), but=[out / at.directory])
    told = document(out)
    (reason,) = [line for line in told["reasons"] if "foreign modules" in line]
    assert reason.startswith(f"{load}: foreign modules in 1 of ")
    assert "/elsewhere/__init__.py" in reason
    assert not told["valid"]
    gates = {one["load"] or one["gate"]: one["outcome"] for one in told["gates"]}
    assert gates[load] == "undecided"
    assert (gates["random"] == "pass") == (load != "random")
    assert not any("foreign" in line for line in told["notes"])


def test_a_report_outlives_the_recipes_file(made_of_a_checkout: Made, tmp_path: Path) -> None:
    made = made_of_a_checkout
    recipe = str(tmp_path / "engine.yaml")
    gone = str(tmp_path / "gone.yaml")
    made.plan = replace(
        made.plan,
        arms=tuple(replace(one, recipe=gone) for one in made.plan.arms),
        extras={"source_packages": {gone: ["pkg"], recipe: []}},
    )
    out = made.write()
    write_origins(out, str(tmp_path / "checkout" / "pkg" / "__init__.py"))
    assert not any("source" in line for line in document(out)["reasons"])
    made.plan = replace(made.plan, extras={})
    made.plan.write(out)
    assert any("gone.yaml cannot be read any more" in line for line in document(out)["reasons"])
