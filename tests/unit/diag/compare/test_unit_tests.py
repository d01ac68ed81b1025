"""Unit tests of two refs: what is read from JUnit XML that code under test wrote, and what is said of both."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.diag.compare import unit_tests
from atom.diag.compare.model import Arm, ArmKind
from atom.diag.compare.unit_tests import (
    CaseResult,
    JunitError,
    Status,
    SuiteRun,
    compare_suites,
    parse_junit,
    read_suite,
    run_unit_tests,
    suite_command,
    unit_tests_section,
)
from atom.recipes.errors import UsageError
from tests.waiting import until

ELEMENT = {Status.PASSED: "", Status.SKIPPED: "<skipped/>", Status.FAILED: "<failure/>", Status.ERROR: "<error/>"}
ROOT = Path(__file__).resolve().parents[4]


def xml(*cases: tuple[str, str, Status]) -> str:
    lines = [
        f"<testcase classname={quoteattr(a)} name={quoteattr(b)}>{ELEMENT[status]}</testcase>" for a, b, status in cases
    ]
    return f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>"


def suite(label: str = "main", problem: str | None = None, **statuses: str) -> SuiteRun:
    results = {name: CaseResult(Status(status)) for name, status in statuses.items()}
    return SuiteRun(label=label, command="pytest", exit_status=0, seconds=1.0, problem=problem, results=results)


def arm(checkout: Path, **fields: Any) -> Arm:
    given = {"label": "main", "kind": ArmKind.REF, "spec": "main", "checkout": str(checkout), "python": sys.executable}
    return Arm(**{**given, **fields})


# ---- reading


@given(
    st.dictionaries(
        st.tuples(st.text("ab.é\"<&'", min_size=1, max_size=8), st.text("xy [1]-<", min_size=1, max_size=8)),
        st.sampled_from(Status),
        min_size=1,
        max_size=30,
    )
)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, cases: dict[Any, Status]) -> None:
    path = tmp_path_factory.mktemp("junit") / "a.xml"
    path.write_text(xml(*((a, b, status) for (a, b), status in cases.items())), encoding="utf-8")
    read = parse_junit(path)
    assert {name: result.status for name, result in read.items()} == {f"{a}::{b}": s for (a, b), s in cases.items()}


def test_a_test_named_twice_has_the_worst_result(tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    path.write_text(xml(("m", "t", Status.PASSED), ("m", "t", Status.FAILED), ("m", "t", Status.ERROR)))
    assert parse_junit(path) == {"m::t": CaseResult(Status.FAILED)}


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><testsuite><testcase name="&b;"/></testsuite>'
OUTSIDE = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><testsuite><testcase name="&a;"/></testsuite>'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "document type"),
        (OUTSIDE, "document type"),
        ("", "no XML"),
        ("{}", "no XML"),
        ("<html/>", "no testsuite"),
        ('<testsuite><testcase name="a"/><testcase na', "cut off"),
        ("<a>" * 10_000, "no XML"),
    ],
)
def test_what_is_no_junit_file_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "a.xml"
    path.write_text(text)
    with pytest.raises(JunitError, match=why):
        parse_junit(path)


def test_sizes_and_kinds_of_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo.xml")
    with pytest.raises(JunitError, match="no file"):
        parse_junit(tmp_path / "fifo.xml")
    with pytest.raises(JunitError, match="No such file"):
        parse_junit(tmp_path / "none.xml")
    path = tmp_path / "a.xml"
    path.write_text(xml(*(("m", f"t{i}", Status.PASSED) for i in range(20))))
    monkeypatch.setattr(unit_tests, "MOST_TESTS", 10)
    with pytest.raises(JunitError, match="more than 10 tests"):
        parse_junit(path)
    monkeypatch.setattr(unit_tests, "MOST_BYTES", 100)
    with pytest.raises(JunitError, match="larger"):
        parse_junit(path)


# ---- comparing


def test_which_tests_change_status() -> None:
    base = suite(a="passed", b="failed", c="skipped", d="passed", e="failed", f="error", old="passed", gone="failed")
    head = suite(
        "head", a="passed", b="passed", c="passed", d="failed", e="failed", f="failed", new="failed", n="passed"
    )
    told = compare_suites(base, head)
    assert [(one["test"], one["base"], one["head"]) for one in told["changed"]] == [
        ("b", "failed", "passed"),
        ("c", "skipped", "passed"),
        ("d", "passed", "failed"),
    ]
    assert told["fail_on_both"] == ["e", "f"]  # a failure and an error are the same question
    assert told["new_failures"] == ["d", "new"]
    assert [one["test"] for one in told["only_base"]] == ["gone", "old"]
    assert [one["test"] for one in told["only_head"]] == ["n", "new"]
    assert told["ok"] is False
    assert [(arm["passed"], arm["failed"], arm["errors"], arm["skipped"]) for arm in told["arms"]] == [
        (3, 3, 1, 1),
        (4, 4, 0, 0),
    ]


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(Status)))
def test_a_suite_against_itself_changes_nothing(results: dict[str, Status]) -> None:
    one = suite(**{name: str(status) for name, status in results.items()})
    told = compare_suites(one, one)
    assert told["changed"] == told["only_base"] == told["only_head"] == told["new_failures"] == []
    assert told["ok"] is (True if results else None)


def test_an_incomplete_suite_is_never_ok() -> None:
    assert compare_suites(suite(a="passed"), suite("head", problem="ended after 5 s", a="passed"))["ok"] is None
    assert compare_suites(suite(problem="no results"), suite("head", a="failed"))["ok"] is False


# ---- running


TESTS = """
import os, subprocess, sys
import pytest

def test_ok(): import thing; assert thing.__file__.startswith(os.environ["HERE"])

def test_child(): assert subprocess.run([sys.executable, "-c", "import thing"]).returncode == 0

def test_bad(): assert False, "not <this>"

@pytest.mark.skip
def test_later(): pass
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "checkout"
    (folder / "tests" / "unit").mkdir(parents=True)
    (folder / "src").mkdir()
    (folder / "src" / "thing.py").write_text("")
    (folder / "tests" / "unit" / "test_thing.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("HERE", str(folder))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they need none, and start faster
    return folder


@pytest.mark.parametrize("command", [None, "{python} -m pytest -p no:cacheprovider -q"])
def test_the_tests_of_a_checkout_are_run_with_its_source(checkout: Path, tmp_path: Path, command: str | None) -> None:
    out = tmp_path / "out dir"
    ran = run_unit_tests(arm(checkout, src=str(checkout / "src")), out, command=command)
    assert ran.problem is None
    assert ran.exit_status == 1
    name = "tests.unit.test_thing::test_"
    assert {test.removeprefix(name): str(result.status) for test, result in ran.results.items()} == {
        "ok": "passed",
        "child": "passed",
        "bad": "failed",
        "later": "skipped",
    }
    assert "not <this>" in ran.results[f"{name}bad"].message
    assert read_suite(out, "main") == ran
    assert "not <this>" in (out / "tests" / "main.log").read_text()
    section = unit_tests_section(out, "main", "other")
    assert section is not None
    assert section["arms"][1]["problem"] == "they did not come to their end"
    assert unit_tests_section(tmp_path / "elsewhere", "main", "other") is None


@pytest.mark.parametrize(
    ("command", "timeout_s", "why"),
    [
        ("no-such-command", 60.0, "cannot run no-such-command: No such file or directory"),
        ("false", 60.0, r"no results: main.xml: .*status 1"),
        ("sleep 600", 0.2, "ended after 0.2 s"),
    ],
)
def test_why_there_are_no_results(checkout: Path, tmp_path: Path, command: str, timeout_s: float, why: str) -> None:
    ran = run_unit_tests(arm(checkout), tmp_path / "out", command=command, timeout_s=timeout_s)
    assert not ran.results
    assert ran.problem is not None
    assert re.search(why, ran.problem), ran.problem


def test_results_of_an_earlier_run_are_not_believed(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "tests").mkdir(parents=True)
    (out / "tests" / "main.xml").write_text(xml(("m", "t", Status.PASSED)))
    assert not run_unit_tests(arm(checkout), out, command="true").results


def test_a_command_that_cannot_be_is_refused(checkout: Path) -> None:
    for command in ("", "pytest {unknown}", "pytest 'open", "{0}"):
        with pytest.raises(UsageError, match="--tests: "):
            suite_command(arm(checkout), command, Path("j.xml"))
    with pytest.raises(UsageError, match="no git ref"):
        run_unit_tests(Arm(label="u", kind=ArmKind.URL, spec="http://x"), checkout)


def test_what_the_tests_started_does_not_outlive_a_killed_comparison(checkout: Path, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = checkout / "long.py"
    script.write_text(f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    code = (
        "from pathlib import Path; from atom.diag.compare.model import Arm; "
        "from atom.diag.compare.unit_tests import run_unit_tests; "
        f"run_unit_tests(Arm(label='a', kind='ref', spec='a', checkout={str(checkout)!r}), "
        f"Path({str(tmp_path / 'out')!r}), command='{{python}} long.py')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / ".src")})
    until(lambda: note.exists() and note.read_text() != "")
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    until(lambda: not Path(f"/proc/{note.read_text()}").exists())
