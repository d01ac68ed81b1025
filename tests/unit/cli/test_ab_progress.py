"""What a comparison says while it runs."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import pytest

from atom.bench.rundir import RunDirectory
from atom.cli import ab_progress
from atom.cli.ab_plan_tables import duration_text
from atom.cli.ab_progress import ComparisonProgress
from atom.cli.progress import StatusLine
from atom.diag.compare.arm_process import ArmProgress
from atom.diag.compare.conductor import LATE, Event, Progress
from atom.diag.compare.model import ArmRun, MatchedRun, Purpose, RunResult
from atom.diag.compare.plan import Pair
from atom.recipes.errors import ExitStatus


def matched(index: int) -> MatchedRun:
    runs = (ArmRun(arm="main", half=index, order=index), ArmRun(arm="branch", half=1 - index, order=1 - index))
    return MatchedRun(comparison="main..branch", purpose=Purpose.COMPARE, load="short", pair=0, index=index, runs=runs)


PAIR = Pair(comparison="main..branch", purpose=Purpose.COMPARE, load="short", pair=0, runs=(matched(0), matched(1)))


def event(kind: Event, index: int, done: int, **more: object) -> Progress:
    facts: dict[str, object] = {"run": PAIR.runs[index], "remaining_s": 200.0, "total": 3, **more}
    return Progress(event=kind, pair=PAIR, done=done, **facts)  # type: ignore[arg-type]


def result(arm: str, side: int, **more: object) -> RunResult:
    facts: dict[str, object] = {"status": 0, "stage": "done", "problem": None, **more}
    return RunResult(
        matched="k",
        arm=arm,
        side=side,
        directory=f"arms/{arm}/run-1",
        started_ns=0,
        ended_ns=12_000_000_000,
        **facts,  # type: ignore[arg-type]
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError


def test_plain_lines_say_what_became_of_each_run() -> None:
    stream = io.StringIO()
    progress = ComparisonProgress(quiet=False, line=StatusLine(stream))
    good = (result("main", 0), result("branch", 1))
    progress.on_event(event(Event.RUN_ENDED, 0, 0, results=good))
    progress.on_event(event(Event.RUN_ENDED, 1, 1, results=good))
    lost = (
        result("main", 0, status=ExitStatus.INTERRUPTED, stage="start", problem="the other arm did not start"),
        result("branch", 1, status=1, stage="start", problem="the server died"),
    )
    progress.on_event(event(Event.RUN_ENDED, 1, 2, results=lost, remaining_s=None))
    assert stream.getvalue().splitlines() == [
        "pair 1/3 short 1/2: main 12 s, branch 12 s; about 3 min left",
        "pair 1/3 short 2/2: main 12 s, branch 12 s; about 3 min left",
        "pair 2/3 short 2/2: main not run, branch did not start (the server died)",
    ]


def test_a_terminal_has_both_loads_in_one_line() -> None:
    stream = Terminal()
    progress = ComparisonProgress(quiet=False, line=StatusLine(stream))
    progress.on_event(event(Event.RUN_STARTED, 0, 0))
    progress.on_arm(ArmProgress(matched="k", arm="main", side=0, stage="load", figures={"done": 5, "total": 9}))
    progress.on_arm(ArmProgress(matched="k", arm="branch", side=1, stage="starting"))
    last = stream.getvalue().rpartition("\r")[2]
    assert "pair 1/3 short 1/2  main: 5/9   branch: server starts   3 min left" in last
    assert "\n" not in stream.getvalue()


def test_the_deadline_is_said_once_at_the_moment_of_giving_up() -> None:
    stream = io.StringIO()
    progress = ComparisonProgress(quiet=False, line=StatusLine(stream))
    for index in (0, 1):
        progress.on_event(event(Event.SKIPPED, index, 1, text=LATE))
    progress.on_event(event(Event.SKIPPED, 0, 1, text="branch did not start"))
    assert stream.getvalue().splitlines() == [
        "deadline: pair 2/3 short is left out, and whatever else would not end before it"
    ]


def test_pairs_that_are_added_until_it_is_decided_have_numbers_of_their_own() -> None:
    stream = io.StringIO()
    progress = ComparisonProgress(quiet=False, line=StatusLine(stream))
    good = (result("main", 0), result("branch", 1))
    for pair in range(3):
        for index in (0, 1):
            done = pair + index
            more = {"results": good, "remaining_s": None, "total": max(1, done), "at_most": 3}
            progress.on_event(event(Event.RUN_ENDED, index, done, **more))
    heads = [line.partition(":")[0] for line in stream.getvalue().splitlines()]
    assert heads == [f"pair {pair} (at most 3) short {index}/2" for pair in (1, 2, 3) for index in (1, 2)]


def test_quiet_says_nothing() -> None:
    stream = io.StringIO()
    progress = ComparisonProgress(quiet=True, line=StatusLine(stream))
    progress.on_event(event(Event.RUN_ENDED, 0, 0, results=(result("main", 0), result("branch", 1))))
    progress.say("a note")
    assert stream.getvalue() == ""


def test_durations() -> None:
    assert [duration_text(one) for one in (0.2, 45, 89, 120, 5000, 5500)] == [
        *("1 s", "45 s", "89 s", "2 min", "83 min", "1 h 32 min"),
    ]


def test_a_run_with_another_status_says_why(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = ComparisonProgress(quiet=False, line=StatusLine(stream))
    saturated = ["client saturated: its event loop used 99% of a CPU", "client saturated: its event loop was late"]
    RunDirectory(tmp_path / "arms/main/run-1").seal("not valid", [*saturated, "lines are damaged"])
    progress.out = tmp_path
    ended = (result("main", 0, status=4), result("branch", 1, status=4))
    progress.on_event(event(Event.RUN_ENDED, 1, 1, results=ended, remaining_s=None))
    why = "client saturated; lines are damaged"
    assert stream.getvalue() == f"pair 1/3 short 2/2: main 12 s ({why}), branch 12 s (status 4)\n"


def test_what_keeps_an_arm_from_being_run_is_said_once() -> None:
    stream = io.StringIO()
    progress = ComparisonProgress(quiet=False, line=StatusLine(stream))
    progress.problem("branch", "prepare failed\nits log")
    lost = (
        result("main", 0, status=ExitStatus.INTERRUPTED, stage="prepare", problem="nothing to compare it with"),
        result("branch", 1, status=1, stage="prepare", problem="prepare failed"),
    )
    for number in range(2):
        progress.on_event(event(Event.RUN_ENDED, number, 1, results=lost, remaining_s=None))
    progress.on_event(event(Event.GIVEN_UP, 1, 1, text="branch: did not start twice: prepare failed"))
    assert stream.getvalue().count("prepare failed") == 1
    assert stream.getvalue().endswith("given up: branch: did not start twice: as above\n")


def test_what_has_no_progress_of_its_own_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_progress, "PLAIN_PERIOD_S", 0.01)
    stream, counted = io.StringIO(), threading.Event()

    class Line(StatusLine):
        def show(self, text: str) -> None:
            super().show(text)
            if "at most" in text:
                counted.set()

    progress = ComparisonProgress(quiet=False, line=Line(stream))
    with progress.counting("main: unit tests", 120.0):
        assert counted.wait(30)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "main: unit tests …"
    assert re.fullmatch(r"main: unit tests … \d+ s, at most 2 min", lines[1])
    progress.say("main: unit tests: exit status 0")
    assert stream.getvalue().splitlines() == [*lines, "main: unit tests: exit status 0"]
