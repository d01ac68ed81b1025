"""Finding recordings in what a user names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atom.bench.rundir import RunDirectory
from atom.diag.consensus.sources import find_recordings
from atom.recipes.errors import UsageError
from tests.unit.diag.consensus.traces import Pipeline, Writer


def test_a_run_directory_with_arms(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for label in ("control", "async"):
        for number in (0, 1, 10):
            Pipeline([1, 1], "async", label, requests=2).write(run.arms / label / f"run-{number}" / "trace")
    (run.arms / "async" / "run-2").mkdir()
    found = find_recordings([run.path])
    assert [(one.label, one.repeat) for one in found] == [
        *(("async", number) for number in (0, 1, 10)),
        *(("control", number) for number in (0, 1, 10)),
    ]
    assert [len(one.ranks) for one in found] == [2] * 6


@pytest.mark.parametrize("inside", ["", "trace"])
def test_a_directory_of_one_run(tmp_path: Path, inside: str) -> None:
    Pipeline([1] * 11, "async", requests=2).write(tmp_path / inside)
    (tmp_path / "server.log").write_text("{}")
    found = find_recordings([tmp_path])[0]
    assert [one.rank for one in found.ranks] == list(range(11))
    assert not found.problems


def test_files_of_one_run(tmp_path: Path) -> None:
    Pipeline([1, 1, 1], "async", requests=2).write(tmp_path)
    found = find_recordings([tmp_path / "rank-0.jsonl", tmp_path / "rank-2.jsonl"])
    assert len(found) == 1
    assert found[0].problems == ("no trace of rank 1",)


def test_arms_of_one_name_in_two_runs(tmp_path: Path) -> None:
    for name in ("monday", "friday"):
        Pipeline([1, 1], "async", requests=2).write(tmp_path / name / "arms/async/run-0/trace")
    labels = [one.label for one in find_recordings([tmp_path / "monday", tmp_path / "friday"])]
    assert labels == ["monday/async", "friday/async"]


def test_a_trace_without_an_arms_name_has_its_directorys(tmp_path: Path) -> None:
    Writer(0, 1, arm="").write(tmp_path / "nightly", {})
    assert find_recordings([tmp_path / "nightly"])[0].label == "nightly"


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    Writer(0, 2).write(tmp_path / "a", {})
    (tmp_path / "a/rank-1.jsonl").write_bytes((tmp_path / "a/rank-0.jsonl").read_bytes())
    with pytest.raises(UsageError, match="both of rank 0"):
        find_recordings([tmp_path / "a"])


def test_ranks_of_two_modes(tmp_path: Path) -> None:
    Writer(0, 2, "async").write(tmp_path, {})
    Writer(1, 2, "blocking").write(tmp_path, {})
    with pytest.raises(UsageError, match="several runs or modes"):
        find_recordings([tmp_path])


@pytest.mark.parametrize("name", ["missing", "empty", "run"])
def test_where_there_is_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    RunDirectory(tmp_path / "run")
    with pytest.raises(UsageError, match=name):
        find_recordings([tmp_path / name])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["rank-1.jsonl", "rank-0.exit.json", "other.json"])
def test_a_pipe_in_a_directory_of_traces_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = Pipeline([1, 1], "async", requests=2).write(tmp_path) / "rank-0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    if name == "rank-1.jsonl":
        with pytest.raises(UsageError, match=r"rank-1\.jsonl is no regular file"):
            find_recordings([tmp_path])
    else:
        assert [one.rank for one in find_recordings([tmp_path])[0].ranks] == [0, 1]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("path", ["/dev/zero", "pipe"])
def test_a_pipe_or_device_is_said_to_be_no_regular_file(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is no regular file"):
        find_recordings([tmp_path / path])


def test_the_directory_of_one_arm(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        Pipeline([1, 1], requests=2).write(tmp_path / "run/arms/blocking" / f"run-{number}" / "trace")
    found = find_recordings([tmp_path / "run/arms/blocking"])
    assert [(one.label, one.repeat, len(one.ranks)) for one in found] == [("blocking", n, 2) for n in (1, 2, 10)]
