"""Run directories that are damaged, empty or wrong: null and notes, never a crash, and never NaN."""

from __future__ import annotations

import json
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
