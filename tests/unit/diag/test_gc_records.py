"""Reading GC records: torn, foreign, repeated; and the books that have to balance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.diag.gc_hook import collector_kind, old_generations
from atom.diag.gc_records import check_books, read_gc_file, read_gc_records
from atom.recipes.errors import UsageError

HOOK: dict[str, Any] = {
    "type": "hook",
    "schema_version": "1.0",
    "pid": 7,
    "ppid": 1,
    "role": "other",
    "command": "python",
    "installed_ns": 100,
    "collector": "generational",
    "old_generations": [2],
    "thresholds": [700, 10, 10],
}


def one_pass(start: int, pause: int) -> dict[str, Any]:
    return {
        "type": "pass",
        "start_ns": start,
        "stop_ns": start + pause,
        "generation": 2,
        "collected": 1,
        "uncollectable": 0,
    }


def totals(t: int, passes: int, ns: int, *, recorded: int | None = None, dropped: int = 0) -> dict[str, Any]:
    return {
        "type": "totals",
        "t_ns": t,
        "recorded": passes if recorded is None else recorded,
        "dropped": dropped,
        "old_passes": passes,
        "old_ns": ns,
    }


def write(path: Path, *lines: Any, tail: str = "") -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines) + tail)
    return path


def test_a_file_cut_off_in_a_line_keeps_the_rest(tmp_path: Path) -> None:
    path = write(
        tmp_path / "gc-api-7.jsonl",
        HOOK,
        one_pass(1000, 5),
        totals(2000, 1, 5),
        one_pass(3000, 7),
        tail='{"type":"pass","start_ns":4000,"st',
    )
    (process,) = read_gc_file(path)
    assert process.role == "api"  # from the name: the role may have become known after the first line
    assert [one.pause_ns for one in process.passes] == [5, 7]
    assert process.last_seen_ns == 3007
    assert check_books(process) == []


def test_foreign_lines_are_skipped(tmp_path: Path) -> None:
    path = write(
        tmp_path / "gc-api-7.jsonl", "garbage", [1], HOOK, {"type": "pass", "start_ns": "x"}, {}, one_pass(1, 1)
    )
    (process,) = read_gc_file(path)
    assert len(process.passes) == 1


def test_an_exec_starts_a_second_record_in_the_same_file(tmp_path: Path) -> None:
    write(tmp_path / "gc-api-7.jsonl", HOOK, one_pass(1, 1), {**HOOK, "installed_ns": 500}, one_pass(600, 2))
    first, second = read_gc_records(tmp_path)
    assert (len(first.passes), first.installed_ns) == (1, 100)
    assert (len(second.passes), second.installed_ns) == (1, 500)


def test_a_newer_record_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "gc-api-7.jsonl", {**HOOK, "schema_version": "2.0"})
    with pytest.raises(UsageError, match="newer"):
        list(read_gc_file(path))


def test_missing_and_dropped_passes_are_found(tmp_path: Path) -> None:
    def problems(*lines: dict[str, Any]) -> str:
        (process,) = read_gc_file(write(tmp_path / "gc-api-7.jsonl", HOOK, *lines))
        return "; ".join(check_books(process))

    assert problems(one_pass(1, 5), totals(9, 1, 5)) == ""
    assert "2 passes were written, 1 are readable" in problems(one_pass(1, 5), totals(9, 2, 10))
    assert "take 5 ns, its totals say 6 ns" in problems(one_pass(1, 5), totals(9, 1, 6))
    assert "3 passes were not recorded" in problems(one_pass(1, 5), totals(9, 4, 50, recorded=1, dropped=3))
    # A pass that happened after the buffer was drained and before the totals were written is in order.
    assert problems(one_pass(1, 5), totals(9, 2, 12, recorded=1), one_pass(8, 7)) == ""


def test_what_counts_as_a_pass_over_old_objects() -> None:
    assert old_generations("generational") == [2]
    assert old_generations("incremental") == [1, 2]
    assert old_generations("free-threaded") == [0, 1, 2]
    assert collector_kind() in ("generational", "incremental", "free-threaded")
