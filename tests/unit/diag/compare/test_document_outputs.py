"""Greedy outputs in the document of a comparison: load by load, with the runs of the control."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from atom.bench.rundir import RunDirectory
from atom.cli.ab_tables import comparison_tables
from atom.cli.render import markdown
from atom.diag.compare import document as document_module
from atom.diag.compare.document import document
from atom.diag.compare.evidence import ScoredPair
from atom.diag.compare.model import Arm, ArmKind, Comparison, Half, Load, Placement, RunResult
from atom.diag.compare.outputs import OUTPUTS_FILE
from atom.diag.compare.plan import Plan, make_plan

ONE = Placement(halves=(Half(name="all"),), reason="one device")
Answer = Callable[[str, str, int], str]
"""Of an arm under a load, the how-manieth run → text."""


def made(out: Path, loads: Sequence[str], answer: Answer, **options: Any) -> Plan:
    """A comparison whose runs left nothing but their answers."""
    plan = make_plan(
        [Arm(label=label, kind=ArmKind.REF, spec=label) for label in ("main", "branch")],
        [Comparison(base="main", head="branch")],
        [Load(name=name, bench="random", seconds=1) for name in loads],
        ONE,
        **options,
    )
    RunDirectory(out).write_run_json({"name": "ab-compare", "ended": "complete"})
    plan.write(out)
    number, lines = 0, []
    for run in (run for pair in plan.schedule for run in pair.runs):
        for side, one in enumerate(run.runs):
            number += 1
            path = out / "arms" / one.arm / f"run-{number}"
            path.mkdir(parents=True)
            line = {"index": 0, "text": answer(one.arm, run.load, number), "tokens": None}
            (path / OUTPUTS_FILE).write_text(json.dumps(line) + "\n", encoding="utf-8")
            directory = path.relative_to(out).as_posix()
            result = RunResult(
                matched=run.key, arm=one.arm, side=side, directory=directory, status=0, started_ns=0, ended_ns=1
            )
            lines.append(json.dumps(result.as_dict()) + "\n")
    (out / "runs.jsonl").write_text("".join(lines), encoding="utf-8")
    return plan


def test_each_load_is_judged_by_itself(tmp_path: Path) -> None:
    """Answers that differ between loads are no difference of an arm from itself."""
    made(tmp_path, ["long", "short"], lambda arm, load, _: f"{load}{arm if load == 'short' else ''}", pairs=2)
    told = document(tmp_path)
    found = {one["load"]: (one["base"], one["head"], one["word"], one["within"]) for one in told["outputs"]}
    assert found == {
        "long": ("main", "branch", "identical", 0.0),
        "short": ("main", "branch", "differs consistently", 0.0),
    }
    text = markdown(comparison_tables(told))
    assert "long: greedy outputs are identical on 1 prompt" in text
    assert "short: greedy outputs differ between arms on 1 of 1 prompt" in text


@pytest.mark.parametrize("sound", [True, False])
def test_runs_of_the_control_are_runs_of_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: bool) -> None:
    """With four of them even one pair tells; those of a control that is no evidence are left out."""
    made(tmp_path, ["long"], lambda arm, _, number: arm if arm == "main" else f"{arm} {number}", pairs=1, aa_pairs=1)

    def split(pairs: Sequence[ScoredPair]) -> tuple[list[ScoredPair], list[str]]:
        return (list(pairs), []) if sound else ([], [])

    monkeypatch.setattr(document_module, "sound_control", split)
    (found,) = document(tmp_path)["outputs"]
    assert found["word"] == ("differs consistently" if sound else "not decided")


def test_nothing_asked_is_nothing(tmp_path: Path) -> None:
    made(tmp_path, ["long"], lambda *_: "x", pairs=1)
    for path in (tmp_path / "arms").glob(f"*/*/{OUTPUTS_FILE}"):
        path.unlink()
    assert document(tmp_path)["outputs"] is None


def test_a_control_that_is_no_evidence_is_a_remark_and_no_reason(tmp_path: Path) -> None:
    """Its runs have no records of requests."""
    made(tmp_path, ["long"], lambda *_: "x", pairs=1, aa_pairs=1)
    told = document(tmp_path)
    (load,) = told["loads"]
    assert any(line.startswith("A/A pair 1 is in no noise floor: run-") for line in load["remarks"])
    assert not any("A/A pair" in line for line in told["reasons"])
    assert (told["outputs"][0]["word"], load["control"]["left_out"][0][:10]) == ("identical", "A/A pair 1")
