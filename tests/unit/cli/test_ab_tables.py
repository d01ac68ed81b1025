"""Tables of a comparison as a person sees them on a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from atom.bench.rundir import RunDirectory
from atom.cli.ab_plan_tables import plan_tables
from atom.cli.ab_publish import comparison_junit
from atom.cli.ab_tables import comparison_tables, verdict_lines
from atom.cli.render import markdown, print_tables
from atom.diag.compare.crossover import CROSSED
from atom.diag.compare.document import document
from atom.diag.compare.model import Half, Placement
from tests.unit.diag.compare.test_page import Made


def shown_at(told: Mapping[str, Any], width: int = 80) -> str:
    console = Console(file=StringIO(), width=width)
    print_tables(comparison_tables(told, width=width), console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_one_pair_is_called_indicative_and_nothing_else(tmp_path: Path) -> None:
    told = document(Made(tmp_path, {"main": 10.0, "branch": 12.0}, pairs=1, aa_pairs=0).write())
    for width in (80, 200):
        shown = shown_at(told, width)
        table = shown[shown.index("random: main → branch, 1 pair") :]
        table = table.partition("this result holds")[0]
        rows = [line for line in table.splitlines() if line.rstrip().endswith("indicative")]
        assert len(rows) == sum(one["pairs"] == 1 for one in told["loads"][0]["metrics"].values())
        assert "slower" not in table
        assert "two families" not in table  # their rate of error is of more than one pair
        assert table.count("indicative: of one pair") == 1
        assert "noise" not in table.partition("ITL p50 (ms)")[0]  # no A/A pairs, no column of dashes
        assert max(map(len, shown.splitlines())) <= width


def test_what_holds_of_several_metrics_is_one_sentence(tmp_path: Path) -> None:
    told = document(Made(tmp_path, {"main": 10.0, "branch": 10.0}, pairs=3, aa_pairs=0).write())
    lines = shown_at(told).splitlines()
    assert sum(line.rstrip().endswith(" equivalent") for line in lines) > 1
    assert lines.count("equivalent: within 1%") == 1


def test_two_names_of_one_commit_are_said_to_be_one(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "branch": 10.0}, pairs=2, aa_pairs=0)
    same = [replace(one, provenance={**one.provenance, "sha": "a" * 40}) for one in made.plan.arms]
    made.plan = replace(made.plan, arms=tuple(same))
    said = "main and branch are one commit (aaaaaaaaaaaa), run in one way: what differs is noise"
    assert verdict_lines(document(made.write()))[0] == said
    made.plan = replace(made.plan, arms=(same[0], replace(same[1], env={"A": "1"})))
    made.plan.write(made.out)
    assert said not in verdict_lines(document(made.out))


def test_one_whole_machine_is_no_half(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "branch": 10.0}, pairs=1, aa_pairs=1)
    placement = Placement(halves=(Half(name="whole"),), reason="of the test")
    shown = markdown(plan_tables(replace(made.plan, placement=placement, schedule=())))
    assert "| halves" not in shown
    assert "1 pair of the base" in shown


def test_the_noise_floor_has_a_column_where_it_was_measured(tmp_path: Path) -> None:
    told = document(Made(tmp_path, {"main": 10.0, "branch": 12.0}, pairs=2, aa_pairs=2).write())
    assert "floor (%)" in shown_at(told, 200)


def test_cells_of_a_crossover_are_not_called_by_the_name_of_another_arm(tmp_path: Path) -> None:
    labels = ("main", "branch", *CROSSED)
    made = Made(tmp_path, dict.fromkeys(labels, 10.0), pairs=1, aa_pairs=0)
    roles = dict(zip(labels, ("base", "head", *CROSSED), strict=True))
    made.plan = replace(made.plan, arms=tuple(replace(one, role=roles[one.label]) for one in made.plan.arms))
    told = document(made.write())
    wide, narrow = shown_at(told, 200), shown_at(told)
    assert "main → head-on-base…" in wide
    assert "main → base-on-head…" in wide
    assert "head-on…" in narrow
    assert not any("main → head " in f"{line} " for line in (wide + narrow).splitlines())


def test_a_deadline_is_said_with_the_verdict_and_once(tmp_path: Path) -> None:
    out = Made(tmp_path, {"main": 10.0, "branch": 10.0}, pairs=1, aa_pairs=0).write()
    text = "deadline 5 s: 1 of 3 pairs made, took 49 s"
    RunDirectory(out).write_run_json({"ended": "deadline", "ended_text": text})
    told = document(out)
    assert verdict_lines(told)[-1] == text
    assert shown_at(told).count(text) == 1


def test_a_working_tree_is_shown_by_a_commit_that_others_know(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "worktree": 10.0}, pairs=1, aa_pairs=0)
    facts = ({"sha": "a" * 40, "dirty": False, "head": None}, {"sha": "b" * 40, "dirty": True, "head": "c" * 40})
    arms = tuple(replace(arm, provenance=one) for arm, one in zip(made.plan.arms, facts, strict=True))
    made.plan = replace(made.plan, arms=arms)
    for shown in (shown_at(document(made.write())), markdown(plan_tables(made.plan))):
        assert "a" * 12 in shown
        assert f"{'c' * 12} + changes" in shown
        assert "b" * 12 not in shown


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
