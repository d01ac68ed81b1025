"""The branches of tests/benchmarks/ab_proof.py still fit the source they change; what it expects of a comparison."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.ab_proof import CASES, ROOT, Done, apply_edit, cpu_list, placement, shares


@pytest.mark.parametrize("name", CASES)
def test_each_branch_changes_one_place_and_is_python(name: str, tmp_path: Path) -> None:
    for edit in CASES[name].edits:
        target = tmp_path / edit.file
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / edit.file, target)
        before = target.read_text(encoding="utf-8")
        apply_edit(tmp_path, edit)
        after = target.read_text(encoding="utf-8")
        assert after.replace(edit.text, "", 1) == before
    for path in tmp_path.rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"))


def done(word: str, *, status: int = 0, finding: str | None = None, **document: Any) -> Done:
    metric = {"title": "ITL p50", "verdict": word, "word": word, "finding": finding}
    load = {"section": "load", "primary": "itl_p50", "metrics": {"itl_p50": metric}}
    return Done(status, "", "", {"loads": [load], "reasons": [], **document}, 1.0)


def test_what_holds_and_what_does_not() -> None:
    slower = done("slower", finding="slower")
    equal, censored = done("equivalent"), done("censored", status=4, reasons=["censored: 9 of 160 requests failed"])
    busy = done("slower", finding="slower", status=4, reasons=["main: client saturated: …"])
    assert [CASES["slower"].check([one]) is None for one in (slower, busy, equal, censored)] == [
        True,
        True,
        False,
        False,
    ]
    assert [CASES["comment"].check([one]) is None for one in (slower, equal, censored)] == [True, True, False]
    assert CASES["comment"].check([slower, slower, equal]) == "2 of 3 claim a difference"
    assert [CASES["failing"].check([one]) is None for one in (slower, equal, censored)] == [False, False, True]
    nothing = Done(1, "the server died: RuntimeError: this branch\n does not start", "", {}, 1.0)
    assert [CASES["absent"].check([one]) is None for one in (nothing, slower)] == [True, False]
    grown = {"head": "gc", "exposed": ["gc"], "quantities": [{"quantity": "rss_mb", "finding": "head"}]}
    assert CASES["gc"].check([done("equivalent", gc=grown)]) is None
    assert CASES["gc"].check([done("equivalent", gc={**grown, "exposed": [], "verdict": ""})]) is not None
    assert CASES["gc"].check([done("equivalent")]) is not None


def test_each_job_has_cpus_of_its_own() -> None:
    assert cpu_list("0-3,8") == [0, 1, 2, 3, 8]
    assert shares(cpu_list("0-15"), 3) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert placement([4, 5, 6, 7]) == ["--placement", "halves", "--cpus", "4-5/6-7"]
    assert placement([0, 1]) == ["--placement", "serial"]
