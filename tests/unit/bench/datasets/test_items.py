"""Items of large files: found in any piece size, bounded, and what is wrong is said with its line."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.bench.datasets import items
from atom.bench.datasets.items import index_items
from atom.recipes.errors import UsageError

leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
value = st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))
objects = st.lists(st.dictionaries(st.text(max_size=5), value, max_size=4), min_size=1, max_size=12)
same_folder = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@same_folder
@given(objects, st.booleans(), st.sampled_from([None, 0, 3]), st.integers(1, 40), st.booleans())
def test_an_array_gives_back_its_objects(
    tmp_path: Path, values: list[dict[str, Any]], ascii_only: bool, indent: int | None, piece: int, bom: bool
) -> None:
    file = tmp_path / "array.json"
    text = json.dumps(values, ensure_ascii=ascii_only, indent=indent)
    file.write_bytes((b"\xef\xbb\xbf" if bom else b"") + text.encode("utf-8", "surrogatepass") + b"\n ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "_PIECE", piece)
        found = index_items(file)
        assert [found.object(number) for number in range(len(found))] == values


@same_folder
@given(objects, st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"]), min_size=12, max_size=12))
def test_lines_give_back_their_objects_and_know_their_numbers(
    tmp_path: Path, values: list[dict[str, Any]], ends: list[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    text = "".join(json.dumps(v) + end for v, end in zip(values, ends, strict=False))
    file.write_bytes(text.encode())
    found = pickle.loads(pickle.dumps(index_items(file)))  # noqa: S301 (as workers get it)
    assert [found.object(number) for number in range(len(found))] == values
    line = 1
    for number, end in enumerate(ends[: len(values)]):
        assert found.line(number) == line
        line += end.count("\n")


def write(folder: Path, content: bytes) -> Path:
    file = folder / "data.json"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no items"),
        (b" \n\n", "no items"),
        (b"[]", "no items"),
        (b'[\n{"a": 1},\n{"b": }\n]', r"data.json:3: no JSON"),
        (b'[{"a": 1}\n{"b": 2}]', r"data.json:2: ',' or ']' must follow"),
        (b'[{"a": 1}, {"b": 2}', r"data.json:1: .*the array does not end"),
        (b'[{"a": 1},', r"data.json:1: no JSON"),
        (b'[{"a": 1}]\n[{"b": 2}]', r"data.json:2: something follows the array"),
        (b"[" * 100_000, r"data.json:1: no JSON .*\(nested too deeply\)"),
        (b'["' + b"x" * 3000, r"data.json:1: no JSON"),
        (b"[12", r"data.json:1: no JSON \(the array does not end\)"),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.setattr(items, "MAX_ITEM_BYTES", 1000)
    monkeypatch.setattr(items, "_PIECE", 16)
    with pytest.raises(UsageError, match=message):
        index_items(write(tmp_path, content))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "no JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b"3", "must be a JSON object, got int"),
        (b'{"a": "\xff"}', "no JSON"),
        (b'{"a":' * 50_000, "no JSON"),
    ],
)
def test_damaged_lines_are_named_when_they_are_read(tmp_path: Path, line: bytes, message: str) -> None:
    found = index_items(write(tmp_path, b'{"fine": 1}\n\n' + line + b"\n"))
    assert found.object(0) == {"fine": 1}
    with pytest.raises(UsageError, match=rf"data.json:3: .*{message}"):
        found.object(1)


def test_too_long_lines_and_too_many_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, b'{"a": 1}\n{"b": "' + b"x" * 100 + b'"}\n')
    monkeypatch.setattr(items, "MAX_ITEM_BYTES", 50)
    with pytest.raises(UsageError, match=r"data.json:2: the line is longer than"):
        index_items(file)
    monkeypatch.setattr(items, "MAX_ITEM_BYTES", 500)
    monkeypatch.setattr(items, "MAX_ITEMS", 1)
    with pytest.raises(UsageError, match="more than 1 items"):
        index_items(file)


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, b'{"a": 1}\n')
    found = index_items(file)
    file.write_bytes(b'{"a": 1}\n{"b": 2}\n')
    with pytest.raises(UsageError, match="changed while it was being used"):
        found.object(0)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--dataset-path .*No such file"):
        index_items(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UsageError, match=r"--dataset-path .*regular file"):
            index_items(wrong)
