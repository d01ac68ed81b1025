"""What a comparison says while it runs."""

from __future__ import annotations

import io

from atom.cli.ab_plan_tables import duration_text
from atom.cli.ab_progress import ComparisonProgress
from atom.cli.progress import StatusLine
from atom.diag.compare.arm_process import ArmProgress
from atom.diag.compare.conductor import Event, Progress
from atom.diag.compare.model import ArmRun, MatchedRun, Purpose, RunResult
from atom.diag.compare.plan import Pair
from atom.recipes.errors import ExitStatus


def matched(index: int) -> MatchedRun:
    runs = (ArmRun(arm="main", half=index, order=index), ArmRun(arm="branch", half=1 - index, order=1 - index))
    return MatchedRun(comparison="main..branch", purpose=Purpose.COMPARE, load="short", pair=0, index=index, runs=runs)


PAIR = Pair(comparison="main..branch", purpose=Purpose.COMPARE, load="short", pair=0, runs=(matched(0), matched(1)))


def event(kind: Event, index: int, done: int, **more: object) -> Progress:
    facts: dict[str, object] = {"run": PAIR.runs[index], "remaining_s": 200.0, **more}
    return Progress(event=kind, pair=PAIR, done=done, total=3, **facts)  # type: ignore[arg-type]


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
