"""Both refs' unit tests: run in each checkout, read from JUnit XML, and compared test by test.

One arm leaves `tests/<label>.xml` (what the tests wrote), `<label>.log` and `<label>.json` (how the command ended) in
the comparison's directory; `unit_tests_section` reads those, so a comparison that was killed still has them. The XML
comes from code under test: it is read as a stream, without document types, and bounded in bytes and in tests.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from xml.parsers import expat

from atom.bench.regular_file import read_regular
from atom.bench.rundir import write_json
from atom.diag.compare.model import Arm, ArmKind
from atom.diag.compare.supervised import run_supervised
from atom.recipes.errors import UsageError

__all__ = [
    "DEFAULT_COMMAND",
    "DEFAULT_TIMEOUT_S",
    "CaseResult",
    "JunitError",
    "Status",
    "SuiteRun",
    "check_command",
    "compare_suites",
    "parse_junit",
    "read_suite",
    "run_unit_tests",
    "suite_command",
    "unit_tests_section",
]

DEFAULT_COMMAND: Final = "{python} -m pytest tests/unit -q -p no:cacheprovider --junitxml={junit}"
DEFAULT_TIMEOUT_S: Final = 1800.0
MOST_BYTES: Final = 256 << 20
MOST_TESTS: Final = 500_000
MOST_NAME: Final = 500
"""Characters of a test's name that are kept."""
MOST_MESSAGE: Final = 300
_MOST_FACTS: Final = 1 << 20
_LOG_BYTES: Final = 8 << 20
_CHUNK: Final = 1 << 16


class Status(StrEnum):
    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"
    ERROR = "error"
    """Its setup or teardown failed, or its file could not be collected."""

    @property
    def bad(self) -> bool:
        return self in (Status.FAILED, Status.ERROR)


_WORST_LAST: Final = (Status.PASSED, Status.SKIPPED, Status.ERROR, Status.FAILED)


class JunitError(ValueError):
    """The file is no JUnit XML that can be read."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One test. A name that the file has several times has the worst of their results."""

    status: Status
    message: str = ""
    """First line of why, for a test that did not pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRun:
    """What became of one arm's unit tests."""

    label: str
    command: str
    exit_status: int | None
    """None: it was killed, or never started."""
    seconds: float
    problem: str | None = None
    """Why the results are missing or not all there, in one line."""
    results: Mapping[str, CaseResult] = field(default_factory=dict)

    def count(self, *statuses: Status) -> int:
        return sum(result.status in statuses for result in self.results.values())


# ---- running -----------------------------------------------------------------------------------------------------


def run_unit_tests(
    arm: Arm, out: Path, *, command: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> SuiteRun:
    """Run the unit tests of an arm that has a checkout, and write `out/tests/<label>.{xml,log,json}`.

    `command` is split as a shell does (no shell runs) and may have `{python} {junit} {src} {checkout}`. Without
    `{junit}` pytest is told by PYTEST_ADDOPTS where to write, so a script around it needs no change. The command and
    everything it started end with this process. UsageError for an arm without a checkout, or a command that is none.
    """
    if arm.checkout is None:
        raise UsageError(f"--tests: arm {arm.label} is no git ref, so it has no unit tests to run")
    folder = out / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    junit = (folder / f"{arm.label}.xml").absolute()
    junit.unlink(missing_ok=True)
    argv = suite_command(arm, command or DEFAULT_COMMAND, junit)
    started = time.monotonic()
    status, problem = _run(argv, arm, junit, folder / f"{arm.label}.log", timeout_s)
    seconds = time.monotonic() - started
    facts = {"label": arm.label, "command": shlex.join(argv), "exit_status": status, "seconds": seconds}
    write_json(folder / f"{arm.label}.json", {**facts, "problem": problem})
    return read_suite(out, arm.label)


def check_command(command: str) -> None:
    """UsageError for a command that could not be made for any arm; before there is one."""
    suite_command(Arm(label="x", kind=ArmKind.REF, spec="x", checkout="x", src="x"), command, Path("x"))


def suite_command(arm: Arm, command: str, junit: Path) -> list[str]:
    """The command's words with its placeholders filled; UsageError names one that is unknown."""
    values = {
        "python": arm.python or sys.executable,
        "junit": str(junit),
        "src": arm.src or arm.checkout or "",
        "checkout": arm.checkout or "",
    }
    try:
        words = [word.format_map(values) for word in shlex.split(command)]
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise UsageError(
            f"--tests: cannot make a command of {command!r} ({error}); known: {{{'} {'.join(values)}}}"
        ) from None
    if not words:
        raise UsageError("--tests: the command is empty")
    return words


def _environment(arm: Arm, argv: Sequence[str], junit: Path) -> dict[str, str]:
    env = {**os.environ, **arm.env, "PYTHONUNBUFFERED": "1"}
    for name in ("GITHUB_STEP_SUMMARY", "PYTEST_ADDOPTS"):  # of whoever runs the comparison, not of what is compared
        env.pop(name, None)
    if arm.src is not None:  # processes that the tests start import the arm's code too
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [arm.src, env.get("PYTHONPATH")]))
    if not any(str(junit) in word for word in argv):
        env["PYTEST_ADDOPTS"] = shlex.join([f"--junitxml={junit}"])
    return env


def _run(argv: list[str], arm: Arm, junit: Path, log: Path, timeout_s: float) -> tuple[int | None, str | None]:
    """Exit status and problem."""
    assert arm.checkout is not None
    ended = run_supervised(
        argv,
        cwd=Path(arm.checkout),
        env=_environment(arm, argv, junit),
        log=log,
        timeout_s=timeout_s,
        log_max_bytes=_LOG_BYTES,
    )
    if ended.late:
        return None, f"ended after {timeout_s:.4g} s: what they had not finished by then is missing"
    return ended.status, ended.problem


# ---- reading -----------------------------------------------------------------------------------------------------


def read_suite(out: Path, label: str) -> SuiteRun:
    """What `run_unit_tests` left of an arm; with a `problem` where that is nothing, or damaged."""
    folder = out / "tests"
    facts: dict[str, Any] = {}
    try:
        read = json.loads(read_regular(folder / f"{label}.json", _MOST_FACTS))
        facts = read if isinstance(read, dict) else {}
    except (OSError, ValueError, RecursionError):
        facts = {"problem": "they did not come to their end"}
    status, seconds = facts.get("exit_status"), facts.get("seconds")
    problem = facts.get("problem")
    results: Mapping[str, CaseResult] = {}
    try:
        results = parse_junit(folder / f"{label}.xml")
    except JunitError as error:
        problem = problem or f"{error}{_exit_words(status)}"
    return SuiteRun(
        label=label,
        command=str(facts.get("command", "")),
        exit_status=status if isinstance(status, int) else None,
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        problem=None if problem is None else str(problem),
        results=results,
    )


def _exit_words(status: object) -> str:
    return f" (the command ended with status {status})" if isinstance(status, int) else ""


def parse_junit(path: Path) -> dict[str, CaseResult]:
    """Test → result. JunitError for what is no regular file, no XML, has a document type, or is beyond the bounds."""
    parser = expat.ParserCreate()
    reader = _Reader()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = _refuse
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise JunitError(f"no results: {path.name}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise JunitError(f"no results: {path.name} is no file")
        if info.st_size > MOST_BYTES:
            raise JunitError(f"{path.name} is larger than {MOST_BYTES >> 20} MB")
        try:
            while chunk := file.read(_CHUNK):
                parser.Parse(chunk, False)
            parser.Parse(b"", True)
        except expat.ExpatError as error:
            if not reader.results:
                raise JunitError(f"{path.name} is no XML: {error}") from None
            raise JunitError(f"{path.name} is cut off or damaged: {error}") from None
    if not reader.results and not reader.suites:
        raise JunitError(f"{path.name} is no JUnit file: it has no testsuite")
    return reader.results


def _refuse(*_: object) -> None:
    raise JunitError("the file has a document type, which no JUnit file needs")


class _Reader:
    """Fed by expat. Only what is inside a `testcase` counts, and of that only its status and the first line why."""

    def __init__(self) -> None:
        self.results: dict[str, CaseResult] = {}
        self.suites = 0
        self._case: str | None = None
        self._found = CaseResult(Status.PASSED)

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "testsuite":
            self.suites += 1
        elif tag == "testcase":
            name = "::".join(filter(None, (attributes.get("classname"), attributes.get("name"))))
            self._case, self._found = name[:MOST_NAME] or "?", CaseResult(Status.PASSED)
        elif self._case is not None and tag in _ELEMENTS:
            message = " ".join(attributes.get("message", "").split())[:MOST_MESSAGE]
            self._found = _worse(self._found, CaseResult(_ELEMENTS[tag], message))

    def end(self, tag: str) -> None:
        if tag != "testcase" or self._case is None:
            return
        earlier = self.results.get(self._case)
        if earlier is None and len(self.results) >= MOST_TESTS:
            raise JunitError(f"it has more than {MOST_TESTS:,} tests")
        self.results[self._case] = self._found if earlier is None else _worse(earlier, self._found)
        self._case = None


_ELEMENTS: Final = {"skipped": Status.SKIPPED, "failure": Status.FAILED, "error": Status.ERROR}


def _worse(a: CaseResult, b: CaseResult) -> CaseResult:
    return b if _WORST_LAST.index(b.status) > _WORST_LAST.index(a.status) else a


# ---- comparing ---------------------------------------------------------------------------------------------------


def unit_tests_section(out: Path, base: str, head: str) -> dict[str, Any] | None:
    """What `compare_suites` says of two arms' labels; None if no tests were asked for."""
    if not any((out / "tests" / f"{label}.{kind}").exists() for label in (base, head) for kind in ("json", "log")):
        return None
    return compare_suites(read_suite(out, base), read_suite(out, head))


def compare_suites(base: SuiteRun, head: SuiteRun) -> dict[str, Any]:
    """For the document and `cli/ab_section_tables.py`.

    `arms[] {label, passed, skipped, failed, errors, exit_status, seconds, command, problem}`; `changed[] {test, base,
    head, message}` of tests that both have; `only_base`, `only_head`: `{test, status}` of the others; `fail_on_both`;
    `new_failures`: tests that fail on the head, and on the base pass, are skipped or do not exist; `ok`: there are
    none, and both sides are complete. None where a side is incomplete and none was seen.
    """
    common = base.results.keys() & head.results.keys()
    changed = [
        {
            "test": test,
            "base": str(base.results[test].status),
            "head": str(head.results[test].status),
            "message": head.results[test].message or base.results[test].message,
        }
        for test in sorted(common)
        if _kind(base.results[test]) != _kind(head.results[test])
    ]
    new = [
        test
        for test, result in sorted(head.results.items())
        if result.status.bad and not (test in base.results and base.results[test].status.bad)
    ]
    complete = _complete(base) and _complete(head)
    return {
        "base": base.label,
        "head": head.label,
        "arms": [_arm(suite) for suite in (base, head)],
        "changed": changed,
        "only_base": _only(base, common),
        "only_head": _only(head, common),
        "fail_on_both": sorted(t for t in common if base.results[t].status.bad and head.results[t].status.bad),
        "new_failures": new,
        "complete": complete,
        "ok": False if new else True if complete else None,
    }


def _kind(result: CaseResult) -> str:
    """A failure and an error are the same to whoever asks which tests change status."""
    return "bad" if result.status.bad else str(result.status)


def _complete(suite: SuiteRun) -> bool:
    return suite.problem is None and bool(suite.results)


def _arm(suite: SuiteRun) -> dict[str, Any]:
    facts = asdict(suite)
    counts = Counter(result.status for result in suite.results.values())
    del facts["results"]
    return {
        **facts,
        "passed": counts[Status.PASSED],
        "skipped": counts[Status.SKIPPED],
        "failed": counts[Status.FAILED],
        "errors": counts[Status.ERROR],
    }


def _only(suite: SuiteRun, common: set[str]) -> list[dict[str, str]]:
    return [
        {"test": test, "status": str(result.status)}
        for test, result in sorted(suite.results.items())
        if test not in common
    ]
