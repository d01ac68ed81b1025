"""Accuracy question by question: from run directories, pooled over runs so that a question counts once."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.bench.gsm8k.compare import mcnemar_p
from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import RunDirectory
from atom.cli.ab_section_tables import accuracy_section_tables
from atom.cli.render import markdown
from atom.diag.compare.accuracy import accuracy_section

Answers = Mapping[str, bool | None]
"""Question → right, wrong, or failed."""


def run(path: Path, answers: Answers, *, validity: str = "valid", max_tokens: int = 256) -> Path:
    """As `atom bench gsm8k` leaves it."""
    run_dir = RunDirectory(path)
    source = {"kind": "word-problems", "figure": "gsm8k", "problems": "test.jsonl", "max_tokens": max_tokens}
    run_dir.write_run_json({"load": {"source": source, "model": "m"}, "validity": validity})
    with run_dir.requests_writer() as writer:
        for index, (question, right) in enumerate(answers.items()):
            writer.append_line(record(index, question, right))
    return path


def record(index: int, question: str, right: bool | None) -> str:
    answered = right is not None
    return RequestRecord(
        index=index,
        outcome=Outcome.COMPLETED if answered else Outcome.FAILED,
        error_class=None if answered else "http-500",
        error_message=None if answered else "no",
        sent_ns=1,
        first_ns=2 if answered else None,
        last_ns=2 if answered else None,
        end_ns=2,
        chunk_ns=[2] if answered else [],
        tags={"question": question, "gold": "7"},
        text=f"#### {7 if right else 8}" if answered else None,
    ).to_line()


def section(base: Sequence[Path], head: Sequence[Path]) -> dict[str, Any]:
    told = accuracy_section(base, head, base_label="main", head_label="branch")
    json.dumps(told, allow_nan=False)
    return told


def test_one_run_each_is_mcnemars_test(tmp_path: Path) -> None:
    questions = [f"q{i}" for i in range(40)]
    base = run(tmp_path / "a", {q: i < 30 for i, q in enumerate(questions)})
    head = run(tmp_path / "b", {q: i < 20 or i > 38 for i, q in enumerate(questions)})
    told = section([base], [head])
    assert told["n"] == 40
    for row in told["filters"]:
        assert (row["better"], row["worse"]) == (1, 10)
        assert row["p"] == mcnemar_p(10, 1)
        assert row["base"]["value"] == 30 / 40
        assert row["head"]["value"] == pytest.approx(21 / 40)
        assert row["difference"] == pytest.approx(-9 / 40)
        assert row["ci"][0] < row["difference"] < row["ci"][1] < 0
        assert row["verdict"] == "branch is less accurate"
    assert told["within"] == {"base": None, "head": None}


def test_several_runs_are_no_more_questions(tmp_path: Path) -> None:
    """Ten runs of one answer are one answer: the error does not shrink with runs that say the same."""
    base, head = {"a": True, "b": False, "c": True}, {"a": True, "b": True, "c": False}
    one = section([run(tmp_path / "a", base)], [run(tmp_path / "b", head)])
    many = section(
        [run(tmp_path / f"a{i}", base) for i in range(10)], [run(tmp_path / f"b{i}", head) for i in range(10)]
    )
    assert many["filters"] == one["filters"]
    assert many["n"] == one["n"] == 3
    assert many["within"] == {"base": 0.0, "head": 0.0}


@settings(max_examples=25)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()), min_size=2, max_size=12))
def test_a_question_has_the_share_of_its_runs(tmp_path_factory: pytest.TempPathFactory, hits: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("runs")
    runs = [run(folder / str(i), {f"q{q}": row[i] for q, row in enumerate(hits)}) for i in range(4)]
    row = section(runs[:2], runs[2:])["filters"][0]
    steps = [(c + d - a - b) / 2 for a, b, c, d in hits]
    assert row["difference"] == pytest.approx(statistics.fmean(steps))
    assert row["difference_stderr"] == pytest.approx(statistics.stdev(steps) / len(steps) ** 0.5)
    assert (row["better"], row["worse"]) == (sum(s > 0 for s in steps), sum(s < 0 for s in steps))


@pytest.mark.parametrize(("lost", "n"), [(0, 5), (5, 5), (1, 200), (0, 200)])
def test_a_few_questions_that_agree_are_no_certainty(tmp_path: Path, lost: int, n: int) -> None:
    """The interval covers a true loss that would show so little at least one time in twenty, or nearly."""
    base = run(tmp_path / "a", {f"q{i}": True for i in range(n)})
    head = run(tmp_path / "b", {f"q{i}": i >= lost for i in range(n)})
    for row in section([base], [head])["filters"]:
        low, high = row["ci"]
        assert -1 <= low <= row["difference"] <= high <= 1
        assert low < high
    if n == 5:
        assert low < -0.25


def test_filters_are_corrected_for_one_another(tmp_path: Path) -> None:
    base = run(tmp_path / "a", {f"q{i}": True for i in range(20)})
    head = run(tmp_path / "b", {f"q{i}": i >= 6 for i in range(20)})
    for row in section([base], [head])["filters"]:
        assert row["p"] == pytest.approx(2 / 64)  # less than 0.05, by itself
        assert row["adjusted_p"] == pytest.approx(4 / 64)
        assert row["verdict"].startswith("no difference found")


def test_runs_of_one_arm_that_disagree_are_shown_beside(tmp_path: Path) -> None:
    runs = [run(tmp_path / str(i), {"a": True, "b": i == 0, "c": False, "d": True}) for i in range(2)]
    told = section(runs, runs[:1])
    assert told["within"] == {"base": 0.25, "head": None}
    (table,) = accuracy_section_tables(told)
    assert "questions on which two runs of the same arm disagree: main 25.0%" in table.notes


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    base = run(tmp_path / "a", {"a": True, "b": None, "only": True}, validity="not valid")
    head = run(tmp_path / "b", {"a": False, "b": True}, max_tokens=64)
    told = section([base, tmp_path / "nowhere"], [head])
    notes = "\n".join(told["notes"])
    for words in (
        "is no run directory",
        "not valid",
        "1 questions were answered by one arm alone",
        "main: 1 failed requests count as wrong",
        "not asked the same way (A: main, B: branch): --max-gen-toks 256 in A, 64 in B",
    ):
        assert words in notes
    assert told["n"] == 2
    assert "no difference found" in markdown(accuracy_section_tables(told))


@pytest.mark.parametrize("runs", ["none", "other questions"])
def test_nothing_in_common_is_no_difference(tmp_path: Path, runs: str) -> None:
    base = [run(tmp_path / "a", {"a": True})]
    head = [] if runs == "none" else [run(tmp_path / "b", {"z": True})]
    told = section(base, head)
    assert told["n"] == 0
    assert [row["verdict"] for row in told["filters"]] == ["not compared"] * 2
    assert "nothing to compare" in markdown(accuracy_section_tables(told))
    assert accuracy_section_tables(None) == []
