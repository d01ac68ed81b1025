"""Tables of a comparison as a person sees them on a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from atom.cli.ab_publish import comparison_junit
from atom.cli.ab_tables import comparison_tables
from atom.cli.render import print_tables
from atom.diag.compare.document import document
from tests.unit.diag.compare.test_page import Made


def shown_at(told: Mapping[str, Any], width: int = 80) -> str:
    console = Console(file=StringIO(), width=width)
    print_tables(comparison_tables(told, width=width), console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_server_that_died_under_load_is_told_everywhere(tmp_path: Path) -> None:
    problem = "the server died with exit status 3 under load"
    made = Made(tmp_path, {"main": 10.0, "branch": 10.0}, pairs=1, aa_pairs=0)
    out = made.write()
    lines = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    for line in lines:
        if line["arm"] == "branch":
            line |= {"status": 1, "problem": problem}
    (out / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = document(out)
    main_arm, branch = told["arms"]
    assert (main_arm["problem"], main_arm["runs_text"]) == (None, "2 made")
    assert (branch["problem"], branch["runs_text"]) == (problem, "2 failed under load")
    assert branch["runs"] == {"made": 2, "recorded": 2, "failed": 2, "superseded": 0}
    (load,) = told["loads"]
    assert load["word"] == told["verdict"] == "censored"
    assert problem in load["sentence"]
    assert load["pairs"][0]["runs"][0]["head"]["problem"] == problem
    assert not told["valid"]
    assert problem in told["reasons"][0]
    assert told["status"] == 4
    assert problem in comparison_junit(told)
    shown = shown_at(told)
    assert f"FAILED: branch: {problem}" in shown
    assert "2 failed under load" in shown
