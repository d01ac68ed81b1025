"""Run directories that are damaged, empty or wrong: null and notes, never a crash, and never NaN."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.diag.gc_profile.profile import profile_run
from atom.recipes.errors import UsageError

Builder = Callable[..., Any]

FILES = (
    "client/0.jsonl",
    "requests/0.jsonl",
    "server/gc-api-10.jsonl",
    "server/metrics-api.jsonl",
    "server/process.jsonl",
    "server/health.jsonl",
)
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**30, -(10**30), 2**62, "x", [], {}, [1], {"a": 1}, [[]], ""),
    *(float("nan"), float("inf"), float("-inf")),
)


def check(directory: Path) -> None:
    """Everything can be said as JSON, which has no NaN."""
    profile = profile_run(directory, shifts=5)
    json.dumps(profile.as_dict(), allow_nan=False)
    assert profile.verdict


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", ["", "\n\n", "garbage\n{}\n[]\n1\n{", '{"a":1}\n' * 50, "\x00\xff\n"])
def test_a_file_of_garbage(synthetic: Builder, name: str, content: str) -> None:
    directory = synthetic(seconds=20, requests_per_s=4).write()
    (directory / name).write_text(content, encoding="latin-1")
    check(directory)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(synthetic: Builder, name: str) -> None:
    directory = synthetic(seconds=20, requests_per_s=4).write()
    (directory / name).unlink()
    check(directory)


def test_nothing_but_run_json(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema_version": "1.0"}')
    profile = profile_run(tmp_path)
    assert profile.windows == ()
    assert profile.totals.gen2_share is None
    assert profile.is_problem is None
    assert "nothing was recorded" in profile.notes
    check(tmp_path)


def test_a_directory_where_a_file_should_be(synthetic: Builder) -> None:
    directory = synthetic(seconds=20, requests_per_s=4).write()
    for name in ("server/metrics-api.jsonl", "server/health.jsonl"):
        (directory / name).unlink()
        (directory / name).mkdir()
    check(directory)


@pytest.mark.parametrize("seed", range(12))
def test_lines_with_wrong_values(synthetic: Builder, seed: int) -> None:
    """Values of fields are replaced at random by what no capture writes."""
    rng = random.Random(seed)
    directory = synthetic(seconds=25, requests_per_s=4, passes=[(i, 0.01) for i in range(1, 24)]).write()
    for name in FILES:
        lines = [json.loads(line) for line in (directory / name).read_text().splitlines()]
        for line in rng.sample(lines, max(1, len(lines) // 3)):
            line[rng.choice(list(line))] = rng.choice(WRONG)
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    check(directory)


@pytest.mark.parametrize("field", ["sent_ns", "t_ns", "start_ns", "stop_ns", "latency_ns", "end_ns", "chunk_ns"])
@pytest.mark.parametrize("value", [0, 2**61])
def test_clocks_that_jump(synthetic: Builder, field: str, value: int) -> None:
    directory = synthetic(seconds=20, requests_per_s=4, passes=[(5, 0.1), (9, 0.1)]).write()
    for name in FILES:
        lines = [json.loads(line) for line in (directory / name).read_text().splitlines()]
        for line in lines[-3:-1]:
            if field in line:
                line[field] = [value] if field == "chunk_ns" else value
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    check(directory)


@pytest.mark.parametrize(
    "fields", [{"gc_hook": 5}, {"gc_hook": {"processes": [1, {"pid": []}]}}, {"server": []}, {"target": {}}]
)
def test_run_json_of_another_form(synthetic: Builder, fields: dict[str, Any]) -> None:
    directory = synthetic(seconds=5).write()
    facts = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps({**facts, **fields}))
    check(directory)


def test_a_newer_schema_is_refused(synthetic: Builder) -> None:
    directory = synthetic(seconds=5).write()
    (directory / "run.json").write_text('{"schema_version": "2.0"}')
    with pytest.raises(UsageError, match="newer"):
        profile_run(directory)


def test_every_request_at_one_moment(synthetic: Builder) -> None:
    run = synthetic(seconds=60)
    directory = run.write()
    record = json.loads((directory / "requests/0.jsonl").read_text().splitlines()[0])
    run.lines("requests/0.jsonl", [{**record, "index": index} for index in range(200)])
    check(directory)


@pytest.mark.parametrize("name", [*FILES[3:], "client/0.jsonl", "client/1.jsonl"])
def test_a_folder_where_a_file_should_be(synthetic: Builder, name: str) -> None:
    directory = synthetic(seconds=20, requests_per_s=4).write()
    (directory / name).unlink(missing_ok=True)
    (directory / name).mkdir()
    check(directory)


RECORD = "server/gc-api-10.jsonl"


def edited(directory: Path, name: str, change: Callable[[list[str]], list[str]]) -> Path:
    path = directory / name
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    return directory


@pytest.mark.parametrize(
    "change",
    [
        lambda line: "",
        lambda line: "garbage\x00\n",
        lambda line: line.replace('"start_ns": ', '"start_ns": -9'),
        lambda line: line.replace('"stop_ns": ', '"stop_ns": 1e999, "x": '),
    ],
    ids=["deleted", "garbage", "negative", "infinite"],
)
def test_passes_that_cannot_be_read_are_not_said_to_be_none(synthetic: Builder, change: Callable[[str], str]) -> None:
    directory = synthetic(seconds=60, requests_per_s=4, passes=[(i, 0.05) for i in range(1, 59)]).write()
    edited(directory, RECORD, lambda lines: [change(one) if '"pass"' in one else one for one in lines])
    profile = profile_run(directory, shifts=5)
    assert profile.totals.gen2_passes is None
    assert profile.totals.gen2_share is None
    assert profile.is_problem is None
    assert "no gen-2 pass" not in profile.verdict
    assert "record of passes is damaged" in profile.verdict
    assert profile.validity == "not valid"
    assert any("58 passes were written, 0 are readable" in note for note in profile.notes)


def test_a_record_without_its_first_line_is_named(synthetic: Builder) -> None:
    directory = edited(synthetic(seconds=30, passes=[(9, 0.1)]).write(), RECORD, lambda lines: ["\x01\n", *lines[1:]])
    profile = profile_run(directory, shifts=5)
    assert profile.is_problem is None
    assert RECORD in profile.verdict
    assert profile.validity == "not valid"


@pytest.mark.parametrize("name", FILES[2:])
@pytest.mark.parametrize("line", ["\x00\x00\n", "\x00\x00", '{"sent_ns": NaN, "t_ns": 1e999}\n', "{}\n"])
def test_lines_that_cannot_be_right_are_counted_by_file(synthetic: Builder, name: str, line: str) -> None:
    directory = edited(synthetic(seconds=30, passes=[(9, 0.1)]).write(), name, lambda lines: [*lines, line])
    profile = profile_run(directory, shifts=5)
    assert f"1 unreadable line in {name}" in profile.notes
    assert profile.validity == "not valid"


@pytest.mark.parametrize("value", ["1e18", "-1", "NaN", "1e999", '"x"', "true"])
def test_an_absurd_memory_is_no_sample(synthetic: Builder, value: str) -> None:
    def change(lines: list[str]) -> list[str]:
        return [*lines[:-1], lines[-1].replace('"rss_bytes": ', f'"rss_bytes": {value}, "x": ')]

    profile = profile_run(edited(synthetic(seconds=30).write(), "server/process.jsonl", change), shifts=5)
    assert profile.totals.rss_mb == pytest.approx(100)
    assert "1 unreadable line in server/process.jsonl" in profile.notes


@pytest.mark.parametrize("name", FILES[2:])
def test_a_line_that_a_kill_tore_is_no_damage(synthetic: Builder, name: str) -> None:
    directory = edited(synthetic(seconds=30).write(), name, lambda lines: [*lines, '{"type":"pass","sta'])
    profile = profile_run(directory, shifts=5)
    assert profile.validity == "valid"
    assert profile.notes == ()


@pytest.mark.parametrize("name", FILES[1:])
def test_a_pipe_where_a_file_should_be_is_not_waited_for(synthetic: Builder, name: str) -> None:
    directory = synthetic(seconds=20, requests_per_s=4).write()
    (directory / name).unlink()
    os.mkfifo(directory / name)
    check(directory)
    assert any(name in note for note in profile_run(directory, shifts=5).notes)
