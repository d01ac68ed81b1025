"""The table of a load's metrics: which interval its head names, what pairs without a swap are called, rows of fewer."""

from __future__ import annotations

import re
from pathlib import Path

from atom.cli.ab_tables import comparison_tables
from atom.cli.render import markdown
from atom.diag.compare.document import document
from atom.diag.compare.page import comparison_page
from tests.unit.diag.compare.test_page import Made


def test_the_head_names_the_interval_that_the_sentence_names(tmp_path: Path) -> None:
    steps = {"main": 10.0, "branch": 12.0}
    until = document(Made(tmp_path / "a", steps, pairs=2, aa_pairs=0, until_decided=True, max_pairs=3).write())
    fixed = document(Made(tmp_path / "b", steps, pairs=2, aa_pairs=0).write())
    for told, says in ((until, True), (fixed, False)):
        text = markdown(comparison_tables(told))
        assert ("95% repeated CI" in told["loads"][0]["sentence"]) is says
        assert bool(re.search(r"95% repeated\s*(<br>)?\s*CI \(%\)", text)) is says
        assert ("95% CI (%)" in text) is not says


def test_runs_without_a_swap_are_no_pairs_in_the_title_and_not_called_swapped(tmp_path: Path) -> None:
    out = Made(tmp_path, {"main": 10.0, "branch": 12.0}, pairs=3, aa_pairs=0, swap=False).write()
    told = document(out)
    tables = comparison_tables(told)
    assert "main → branch, 3 matched runs" in markdown(tables)
    page = comparison_page(out, told, tables)
    assert "halves swapped" not in page
    assert "order swapped" not in page


def test_what_failed_in_each_of_several_runs_is_no_total(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "branch": 10.0}, pairs=2, aa_pairs=0)
    made.failed = {"branch": 3}
    (load,) = document(made.write())["loads"]
    assert re.fullmatch(r"branch, run-1, run-2 and 2 more each: 3 of 120 requests failed", load["censored"][0])


def test_a_row_of_fewer_pairs_says_so_below_the_table(tmp_path: Path) -> None:
    told = document(Made(tmp_path, {"main": 10.0, "branch": 12.0}, pairs=3, aa_pairs=0).write())
    one = next(metric for metric in told["loads"][0]["metrics"].values() if not metric["primary"])
    one["pairs"] = 2
    assert f"{one['title']}: 2 of 3 pairs" in markdown(comparison_tables(told))
