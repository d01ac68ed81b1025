"""Tables of unit tests of both refs; those of accuracy and of the API process are tested beside their sections."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from atom.cli.ab_section_tables import MOST_NAMED, unit_test_section_tables
from atom.cli.render import markdown, print_tables
from atom.diag.compare.unit_tests import CaseResult, Status, SuiteRun, compare_suites


def suite(label: str, problem: str | None = None, **statuses: str) -> SuiteRun:
    results = {name: CaseResult(Status(status), f"{name} broke") for name, status in statuses.items()}
    return SuiteRun(label=label, command="pytest", exit_status=0, seconds=12.3, problem=problem, results=results)


def shown(base: SuiteRun, head: SuiteRun) -> str:
    tables = unit_test_section_tables(compare_suites(base, head))
    console = Console(file=StringIO(), width=80)
    print_tables(tables, console)
    return markdown(tables)


def test_counts_of_both_and_what_changes() -> None:
    told = shown(
        suite("main", a="passed", b="failed", same="skipped"),
        suite("branch", a="failed", b="failed", same="skipped", new="passed"),
    )
    assert "| main | 1 | 1 | 1 | 0 | 12 |" in told
    assert "| branch | 1 | 1 | 2 | 0 | 12 |" in told
    assert "| a | passed | failed | a broke |" in told
    assert "fail on both: 1 (b)" in told
    assert "only in branch: 1 test" in told


def test_no_change_is_said_only_where_both_are_complete() -> None:
    same = "no test that both have changes status"
    assert same in shown(suite("main", a="passed"), suite("branch", a="passed"))
    told = shown(suite("main", a="passed"), suite("branch", problem="ended after 5 s", a="passed"))
    assert same not in told
    assert "branch: ended after 5 s" in told


def test_an_arm_without_results_has_no_counts() -> None:
    told = shown(suite("main", problem="no results"), suite("branch", problem="no results"))
    assert "| main | – | – | – | – | 12 |" in told
    assert unit_test_section_tables(None) == []


def test_names_of_tests_are_shortened_and_harmless() -> None:
    names = {f"t{i:03}\x1b[31m\u202e|" + "x" * 400: "failed" for i in range(MOST_NAMED + 5)}
    told = shown(suite("main", **dict.fromkeys(names, "passed")), suite("branch", **names))
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert "5 more change status" in told
    assert max(map(len, told.splitlines())) < 400
