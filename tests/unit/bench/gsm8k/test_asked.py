"""What is said of two runs that were asked otherwise: values of both, and nothing of what makes no difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atom.bench.gsm8k.asked import asked_differently, data_set
from atom.bench.gsm8k.fewshot import BUILT_IN, FewShots
from atom.bench.gsm8k.load import WordProblems
from atom.bench.gsm8k.problems import read_problems

ROWS = "".join(f'{{"question": "Q{i}?", "answer": "#### {i}"}}\n' for i in range(4))


def load(
    path: Path | None, *, rows: str = ROWS, shots: int = 2, max_tokens: int = 256, seed: int = 1
) -> dict[str, Any]:
    """`load` of run.json for examples of this file; None: the built-in ones."""
    if path is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(rows)
    pool = BUILT_IN if path is None else read_problems(path)
    fewshots = FewShots(pool=pool, count=shots, questions=len(pool), seed=seed)
    source = WordProblems(problems=pool, fewshots=fewshots, model="m", max_tokens=max_tokens)
    return {"model": "m", "source": source.describe()}


def test_the_same_examples_in_another_file_are_the_same(tmp_path: Path) -> None:
    assert asked_differently(load(tmp_path / "train.jsonl"), load(tmp_path / "b" / "copy.jsonl")) == []


def test_other_examples_of_the_same_name_are_others(tmp_path: Path) -> None:
    (told,) = asked_differently(load(tmp_path / "t.jsonl"), load(tmp_path / "b" / "t.jsonl", rows=ROWS + ROWS))
    assert told.startswith("examples sha256 ")
    assert " in A, sha256 " in told
    (told,) = asked_differently(load(None), load(tmp_path / "t.jsonl"))
    assert told.startswith("examples built-in examples (not GSM8K's) in A, sha256 ")


def test_values_of_both(tmp_path: Path) -> None:
    a, b = load(None), {**load(None, max_tokens=64, seed=7), "model": "other"}
    assert asked_differently(a, b) == [
        "model m in A, other in B",
        "--max-gen-toks 256 in A, 64 in B",
        "--fewshot-seed 1 in A, 7 in B",
    ]


def test_of_no_examples_it_does_not_matter_where_they_would_come_from(tmp_path: Path) -> None:
    assert asked_differently(load(None, shots=0), load(tmp_path / "t.jsonl", shots=0, seed=7)) == []


def test_a_load_of_another_version_is_no_fault() -> None:
    assert asked_differently({"model": "m", "source": None}, {"model": "m", "source": {"stop": ["x" * 500]}})
    assert (
        data_set({"problems": "a.jsonl", "origin": {"sha256": "0123456789abcdef"}}) == "a.jsonl (sha256 0123456789ab)"
    )
    assert data_set({}) == "not told"
