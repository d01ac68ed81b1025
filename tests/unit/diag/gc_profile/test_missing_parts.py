"""Run directories of which a part is gone: said by name, never taken for a quiet server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.cli.gc_tables import profile_tables
from atom.diag.gc_profile.model import Profile
from atom.diag.gc_profile.profile import profile_run

Builder = Callable[..., Any]
RECORD = "server/gc-api-10.jsonl"


def profiled(directory: Path, **more: Any) -> Profile:
    return profile_run(directory, shifts=5, **more)


def noted(directory: Path, **facts: Any) -> None:
    run = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps({**run, **facts}))


def left_at(run: Any, seconds: float, *, end: bool) -> Path:
    """The record as a hook leaves it that saw nothing after `seconds`."""
    directory: Path = run.write()
    lines = [json.loads(line) for line in (directory / RECORD).read_text().splitlines()]
    lines[-1]["t_ns"] = run.ns(seconds)
    run.lines(RECORD, [*lines, *([{"type": "end", "reason": "stopped"}] if end else [])])
    return directory


def test_a_share_is_of_the_time_that_the_hook_watched(synthetic: Builder) -> None:
    run = synthetic(seconds=12, passes=[(1.0, 0.5), (7.0, 0.33)])
    profile = profiled(left_at(run, 8.3, end=True), window_s=3)
    assert profile.totals.gen2_share == pytest.approx(0.83 / 8.3)
    shares = [window.gen2_share for window in profile.windows]
    assert shares == [pytest.approx(0.5 / 3), 0.0, pytest.approx(0.33 / 2.3), None]
    assert "the collector was seen for 8.3 s of 12 s" in profile.notes
    assert "8.3 s that were watched" in profile.verdict
    assert profile.validity == "valid"  # that a hook was taken out is no damage


def test_a_hook_that_saw_less_than_half_gives_no_share(synthetic: Builder) -> None:
    profile = profiled(left_at(synthetic(seconds=60), 20, end=True), window_s=30)
    assert profile.totals.gen2_share is None
    assert [window.gen2_share for window in profile.windows] == [None, None]
    assert "the collector was seen for 20 s of 60 s" in profile.notes


def test_a_record_that_stops_before_its_process_is_cut(synthetic: Builder) -> None:
    profile = profiled(left_at(synthetic(seconds=60, passes=[(5, 0.5)]), 40, end=False))
    assert profile.validity == "not valid"
    assert any(f"{RECORD} is cut: it ends 19.1 s before" in note for note in profile.notes)
    assert profile.totals.gen2_share == pytest.approx(0.5 / 40)


def test_a_record_within_the_hooks_period_is_whole(synthetic: Builder) -> None:
    profile = profiled(left_at(synthetic(seconds=60), 58, end=False))
    assert (profile.validity, profile.notes) == ("valid", ())


@pytest.mark.parametrize(("lost", "validity"), [(0, "valid"), (1, "not valid"), (40, "not valid")])
def test_lost_request_records_are_said(synthetic: Builder, lost: int, validity: str) -> None:
    run = synthetic(seconds=20, requests_per_s=4)
    directory = run.write()
    path = directory / "requests/0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) - lost]))
    end = {"kind": "measured_end", "t_ns": run.ns(20), "started": len(lines), "sent": len(lines)}
    run.lines("client/0.jsonl", [{"kind": "measured_start", "t_ns": run.ns(0)}, end])
    profile = profiled(directory)
    assert profile.validity == validity
    told = f"{len(lines) - lost} completed + 0 failed + 0 cancelled = {len(lines) - lost}, started {len(lines)}"
    assert any(told in note for note in profile.notes) == bool(lost)
    path.unlink()
    profile = profiled(directory)
    assert profile.validity == "not valid"
    assert f"requests/*.jsonl is missing: {len(lines)} requests were started" in profile.notes


@pytest.mark.parametrize("name", ["metrics-api.jsonl", "health.jsonl", "process.jsonl"])
def test_a_capture_that_was_written_and_is_gone(synthetic: Builder, name: str) -> None:
    directory = synthetic(seconds=20, requests_per_s=4).write()
    path = directory / "server" / name
    lines = path.read_text().splitlines(keepends=True)
    noted(directory, capture={name: {"lines": len(lines), "lost": 0, "error": None}, "../x.jsonl": {"lines": 9}})
    assert (profiled(directory).validity, profiled(directory).notes) == ("valid", ())
    path.write_text("".join(lines[:5]))
    profile = profiled(directory)
    assert profile.validity == "not valid"
    assert f"server/{name} has 5 of the {len(lines)} lines that were written" in profile.notes
    path.unlink()
    assert f"server/{name} is missing: {len(lines)} lines were written" in profiled(directory).notes


@pytest.mark.parametrize("emptied", [False, True])
def test_a_hook_whose_record_is_gone(synthetic: Builder, emptied: bool) -> None:
    directory = synthetic(seconds=20, requests_per_s=4).write()
    noted(directory, gc_hook={"processes": [{"pid": 10, "role": "api", "hooked": True, "reason": None}]})
    assert (profiled(directory).validity, profiled(directory).notes) == ("valid", ())
    if emptied:
        (directory / RECORD).write_text("")
    else:
        (directory / RECORD).unlink()
    profile = profiled(directory)
    assert profile.validity == "not valid"
    assert f"{RECORD} is missing: the process was hooked" in profile.notes
    assert f"the hook's record of passes is missing ({RECORD})" in profile.verdict
    assert "no GC hook was" not in profile.verdict
    assert profile.is_problem is None
    (row,) = profile.processes
    assert (row.role, row.hooked, row.reason) == ("api", True, "the hook's record of it is missing")


def test_a_record_that_cannot_be_read_is_no_missing_hook(synthetic: Builder) -> None:
    directory = synthetic(seconds=20, requests_per_s=4).write()
    (directory / RECORD).write_text("garbage\n")
    (row,) = profiled(directory).processes
    assert (row.role, row.hooked, row.reason) == ("api", True, "the hook's record of it cannot be read")


@pytest.mark.parametrize(("content", "said"), [("garbage\n", False), (None, True)])
def test_the_table_says_no_hook_only_where_there_was_none(synthetic: Builder, content: str | None, said: bool) -> None:
    directory = synthetic(seconds=20, requests_per_s=4, with_hook=False).write()
    if content is not None:
        (directory / RECORD).write_text(content)
    notes = [note for table in profile_tables([profiled(directory)]) for note in table.notes]
    assert any("no hook in the API process" in note for note in notes) == said
