"""Files of problems: untrusted, named in every error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from atom.bench.gsm8k.problems import read_fewshot_problems, read_problems
from atom.recipes.errors import UsageError

ROWS = [
    {"question": "One and one?", "answer": "1+1=<<1+1=2>>2\n#### 2", "extra": 1},
    {"question": "Ten hundreds – and 5?", "answer": "#### 1,005"},
]


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "\n")
    return path


def write_parquet(path: Path, rows: Sequence[object]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_json_lines(tmp_path: Path) -> None:
    problems = read_problems(write_jsonl(tmp_path / "test.jsonl", [*ROWS]))
    assert [problem.gold for problem in problems.problems] == ["2", "1005"]
    assert problems.name == "test.jsonl"
    assert len({problem.key for problem in problems.problems}) == 2
    assert problems.origin["problems"] == 2
    assert len(read_problems(tmp_path / "test.jsonl", limit=1)) == 1


def test_parquet_says_the_same(tmp_path: Path) -> None:
    table = read_problems(write_parquet(tmp_path / "t.parquet", ROWS))
    lines = read_problems(write_jsonl(tmp_path / "t.jsonl", [*ROWS]))
    assert table.problems == lines.problems


def test_a_folder_has_its_splits(tmp_path: Path) -> None:
    write_parquet(tmp_path / "test-00000-of-00001.parquet", ROWS[:1])
    write_jsonl(tmp_path / "train.jsonl", ROWS[1:])
    assert read_problems(tmp_path).problems[0].gold == "2"
    assert read_fewshot_problems(tmp_path).problems[0].gold == "1005"
    write_jsonl(tmp_path / "test.jsonl", [*ROWS])
    with pytest.raises(UsageError, match=r"a folder needs one .* it has test-00000-of-00001.parquet, test.jsonl"):
        read_problems(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad.jsonl, line 2 is not JSON"),
        ("[" * 100_000, r"bad.jsonl, line 2 is not JSON"),
        ("[1]", r"bad.jsonl, line 2 must be an object"),
        ('{"answer": "#### 1"}', r'line 2: "question" must be a text, got None'),
        ('{"question": "q", "answer": 7}', r'line 2: "answer" must be a text, got 7'),
        ('{"question": "q", "answer": "seven"}', r'line 2: "answer" must end in "#### number", got \'seven\''),
        ('{"question": "\\ud800", "answer": "#### 1"}', r'line 2: "question" has half a surrogate pair'),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n{line}\n")
    with pytest.raises(UsageError, match=message) as caught:
        read_problems(path)
    assert str(caught.value).startswith("--dataset-path")
    assert "\n" not in str(caught.value)


def test_what_is_no_file_of_problems(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="has no problems"):
        read_problems(tmp_path / "empty.jsonl")
    with pytest.raises(UsageError, match="No such file"):
        read_problems(tmp_path / "none.jsonl")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="no regular file"):
        read_problems(tmp_path / "fifo")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1" + bytes(range(200)))
    pytest.importorskip("pyarrow")
    with pytest.raises(UsageError, match="cannot be read as parquet"):
        read_problems(tmp_path / "torn.parquet")
    with pytest.raises(UsageError, match="no column 'answer'"):
        read_problems(write_parquet(tmp_path / "half.parquet", [{"question": "q"}]))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "test.parquet"
    path.write_bytes(b"PAR1....PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="pip install pyarrow"):
        read_problems(path)
