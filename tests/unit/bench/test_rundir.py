"""The run directory's mechanics: writers, readers, versions, atomic replacement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atom.bench.rundir import SCHEMA_VERSION, JsonlFile, JsonlWriter, RunDirectory, Validity, read_jsonl, write_json
from atom.recipes.errors import UsageError


def test_layout_and_run_json(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert {p.name for p in run.path.iterdir()} == {"run.json", "requests", "server", "client"}
    assert run.read_run_json()["validity"] is None
    assert not run.sealed
    run.write_run_json({"seed": 1})
    run.write_run_json({"host": "h"})
    run.seal(Validity.NOT_VALID, ["client saturated"])
    content = RunDirectory.open(run.path).read_run_json()
    assert content["schema_version"] == SCHEMA_VERSION
    assert (content["seed"], content["host"], content["validity"]) == (1, "h", "not valid")
    assert content["reasons"] == ["client saturated"]
    assert [p.name for p in run.path.iterdir() if p.name.startswith(".")] == []


def test_open_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run directory"):
        RunDirectory.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_validity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fine"):
        RunDirectory(tmp_path).seal("fine")


@pytest.mark.parametrize("version", ["2.0", "17", None, 1, "x.1"])
def test_newer_or_senseless_schema_is_refused(tmp_path: Path, version: object) -> None:
    write_json(tmp_path / "run.json", {"schema_version": version})
    with pytest.raises(UsageError, match="schema_version"):
        RunDirectory.open(tmp_path)


def test_newer_minor_schema_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"schema_version": "1.99", "validity": None})
    assert RunDirectory.open(tmp_path).read_run_json()["schema_version"] == "1.99"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": "1.0"'])
def test_damaged_run_json_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UsageError, match=r"run\.json"):
        RunDirectory.open(tmp_path)


def test_reader_skips_torn_and_foreign_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n\n[1]\n{"a":2}\nnot json\n{"a":3}\n{"a":')
    file = JsonlFile(path)
    assert [record["a"] for record in file] == [1, 2, 3]
    assert file.malformed == 3
    assert file.torn
    assert list(read_jsonl(tmp_path / "missing.jsonl")) == []


def test_writer_continues_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":')
    with JsonlWriter(path) as writer:
        writer.append({"a": 2})
    assert [record["a"] for record in read_jsonl(path)] == [1, 2]


def test_one_writer_per_file(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "x.jsonl"), pytest.raises(UsageError, match="another process"):
        JsonlWriter(tmp_path / "x.jsonl")
    JsonlWriter(tmp_path / "x.jsonl").close()


def test_not_a_number_never_reaches_a_file(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "x.jsonl") as writer, pytest.raises(ValueError, match="JSON"):
        writer.append({"a": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "y.json", {"a": float("inf")})


def test_failed_replacement_keeps_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "y.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "y.json", {"a": object()})
    assert json.loads((tmp_path / "y.json").read_text()) == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_everything_appended_survives_kill_9(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom atom.bench.rundir import RunDirectory\n"
        "writer = RunDirectory(Path(sys.argv[1])).requests_writer()\ni = 0\n"
        "while True:\n    writer.append({'i': i, 'pad': 'x' * 300})\n    print(i, flush=True)\n    i += 1\n"
    )
    src = str(Path(__file__).resolve().parents[3] / ".src")
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": src},
    ) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(200)]
        process.send_signal(signal.SIGKILL)
    recorded = [record["i"] for record in read_jsonl(tmp_path / "run" / "requests" / "0.jsonl")]
    assert recorded[: len(acknowledged)] == acknowledged
    assert not RunDirectory.open(tmp_path / "run").sealed


def test_reader_reads_regular_files_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "real").write_text('{"a":1}\n')
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real")
    for name in ("pipe", "folder"):
        file = JsonlFile(tmp_path / f"{name}.jsonl")
        assert list(file) == []
        assert (file.malformed, file.damaged, file.torn) == (1, 1, False)
    assert list(JsonlFile(tmp_path / "link.jsonl")) == [{"a": 1}]


def test_bytes_at_the_end_that_begin_no_object_are_not_torn(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a":1}\n\x00\x00')
    file = JsonlFile(path)
    assert list(file) == [{"a": 1}]
    assert (file.malformed, file.damaged) == (1, 1)
    path.write_bytes(b'{"a":1}\n{"a"')
    assert list(file) == [{"a": 1}]
    assert (file.malformed, file.damaged) == (1, 0)
