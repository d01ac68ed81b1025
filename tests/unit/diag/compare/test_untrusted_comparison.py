"""A comparison's directory may be anybody's: what stands in it hangs nothing, and ends nothing but in one line."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.bench.regular_file import read_regular, read_tail
from atom.diag.compare.document import document
from atom.diag.compare.plan import Plan
from atom.recipes.errors import UsageError
from tests.unit.diag.compare.test_page import Made

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = Made(tmp_path_factory.mktemp("whole"), {"main": 10.0, "branch": 10.0}, pairs=1, aa_pairs=0)
    value: dict[str, Any] = json.loads(json.dumps(made.plan.as_dict()))
    return value


def run_of(plan: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = plan["schedule"][0]["runs"][0]
    return found


CHANGES: list[tuple[Change, str]] = [
    (lambda plan: plan.update(gates=[{"slower_pct": 2, "metric": "foo"}]), "a gate that is none"),
    (lambda plan: plan.update(gates=[{"slower_pct": "x"}]), "a gate that is none"),
    (lambda plan: plan.update(gates=[{"slower_pct": 2, "load": "foo"}]), "a gate that is none"),
    (lambda plan: plan.update(gates=[{"section": "foo"}]), "a gate that is none"),
    (lambda plan: plan.update(gates=[{"slower_pct": float("nan")}]), "a gate's limit is a percentage"),
    (lambda plan: plan.update(gates=["x"]), r"gates\[0\] must be an object|gates must be"),
    (lambda plan: plan["loads"][0].update(primary="foo"), "primary must be one of"),
    (
        lambda plan: plan["loads"][0].update(options=[1]),
        r"is damaged: loads\[0\]\.options must be an object, got \[1\]",
    ),
    (lambda plan: plan["loads"][0].update(env={"A": 1}), r"loads\[0\]\.env must be an object with strings, got"),
    (lambda plan: plan["arms"][0].update(label=7), r"arms\[0\]\.label must be a string, got 7"),
    (
        lambda plan: plan["arms"][0].update(kind="foo"),
        r'arms\[0\]\.kind must be one of ref, recipe, url, recorded, got "foo"',
    ),
    (lambda plan: plan["arms"][0].update(provenance="x"), r"arms\[0\]\.provenance must be an object, got"),
    (lambda plan: plan["arms"][0].update(recorded="/etc/passwd"), r"arms\[0\]\.recorded must be a list, got"),
    (lambda plan: plan.update(comparisons=[]), "or there is none"),
    (lambda plan: plan["comparisons"][0].update(base="foo"), "an arm that the plan does not"),
    (lambda plan: plan.update(pairs="3"), r'is damaged: pairs must be a whole number, got "3"'),
    (lambda plan: plan.update(extras=[]), "extras must be an object, got "),
    (lambda plan: plan.update(placement=None), "placement must be an object, got null"),
    (lambda plan: plan["placement"].update(halves=[]), "0 halves"),
    (
        lambda plan: plan["placement"]["halves"][0].update(server_cpus=["a"]),
        r"placement\.halves\[0\]\.server_cpus\[0\] must be a whole number, got",
    ),
    (lambda plan: plan["schedule"][0].update(pair=-1), "has another number|does not belong"),
    (lambda plan: run_of(plan).update(index=2), "other matched runs, than a pair has"),
    (lambda plan: run_of(plan).update(index=True), r"schedule\[0\]\.runs\[0\]\.index must be a whole number, got true"),
    (lambda plan: run_of(plan)["runs"][0].update(half=-1), "has a half that there is not"),
    (lambda plan: run_of(plan)["runs"][0].update(half=2), "has a half that there is not"),
    (lambda plan: run_of(plan)["runs"][0].update(order=7), "has a half that there is not"),
    (lambda plan: run_of(plan)["runs"][0].update(arm="foo"), "an arm or a load that the plan does not"),
    (lambda plan: run_of(plan)["runs"].pop(), r"schedule\[0\]\.runs\[0\]\.runs must be a list of 2, got"),
    (lambda plan: plan["schedule"].append(plan["schedule"][0]), "the same pair twice"),
]
CHANGES += [
    (lambda plan: plan["loads"][0].update(options=5), r"loads\[0\]\.options must be an object, got 5"),
    (lambda plan: plan.update(deadline_s="x"), r'deadline_s must be a number or null, got "x"'),
    (lambda plan: plan["arms"][1].pop("kind"), r"plan.json is damaged: arms\[1\]\.kind is missing"),
    (lambda plan: plan.clear(), r"plan.json is damaged: arms is missing"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_plan_that_cannot_be_is_refused_in_one_line(
    whole: dict[str, Any], tmp_path: Path, change: Change, message: str
) -> None:
    plan = copy.deepcopy(whole)
    change(plan)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UsageError, match=message) as caught:
        Plan.read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("[]", "must be an object, got \\[\\]"), ("{", "it is no JSON: ")])
def test_what_is_no_plan_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UsageError, match=f"plan.json is damaged: .*{message}"):
        Plan.read(tmp_path)


def test_lines_that_cannot_be_read_are_counted_and_told(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "branch": 10.0}, pairs=1, aa_pairs=0)
    out = made.write()
    with (out / "runs.jsonl").open("a") as file:
        file.write('[]\n{"matched": 1}\nnonsense\n')
    assert "runs.jsonl: 3 lines cannot be read" in document(out)["notes"]


def test_fields_of_a_later_version_are_left_out(whole: dict[str, Any], tmp_path: Path) -> None:
    plan = copy.deepcopy(whole)
    plan["arms"][0]["later"] = plan["later"] = {"x": 1}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert json.loads(json.dumps(Plan.read(tmp_path).as_dict())) == whole


@pytest.mark.timeout(120)
def test_pipes_in_place_of_files_hang_nothing(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "branch": 10.0}, pairs=1, aa_pairs=0)
    out = made.write()
    run = out / "arms" / "branch" / "run-1"
    (out / "tests").mkdir()
    (run / "server").mkdir(exist_ok=True)
    for path in (
        *(run / "run.json", run / "server" / "server.log", run / "server" / "origins-main-1.json"),
        *(run / "outputs.jsonl", run / "client" / "0.jsonl", run / "requests" / "0.jsonl"),
        *(out / "tests" / "main.json", out / "tests" / "main.xml", out / "tests" / "branch.xml"),
    ):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    told = document(out)
    assert told["loads"][0]["pairs"][0]["complete"] is False
    assert told["tests"]["arms"][0]["problem"]
    for name in ("runs.jsonl", "plan.json"):
        (out / name).unlink()
        os.mkfifo(out / name)
    with pytest.raises(UsageError, match="not a regular file"):
        document(out)


def test_only_regular_files_up_to_a_size_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_regular(file, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular(file, 4)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(tmp_path, 5)
    assert read_tail(tmp_path) == read_tail(tmp_path / "none") == []
    file.write_text("".join(f"line {n}\n" for n in range(100)))
    assert read_tail(file, 16) == ["line 98", "line 99"]
