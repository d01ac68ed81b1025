"""lm_eval beside a run: which interpreter has it, and what is made of its results. A real one is in the integration
tests, where it is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atom.bench.gsm8k.fewshot import BUILT_IN, FewShots
from atom.bench.gsm8k.harness import Harness, find_harness, run_harness
from atom.bench.gsm8k.load import WordProblems
from atom.bench.gsm8k.problems import Problem, ProblemSet
from atom.bench.gsm8k.prompts import completion_prompt
from atom.bench.load import Endpoint
from atom.bench.records import Outcome, RequestRecord
from atom.recipes.errors import RunError, UsageError

PROBLEMS = ProblemSet(name="two", problems=(Problem("One?", "#### 1"), Problem("Two?", "#### 2")))
SOURCE = WordProblems(problems=PROBLEMS, fewshots=FewShots(pool=BUILT_IN, count=1, questions=2))
TEXTS = ["It is #### 1", "It is 3"]


def samples(texts: list[str], prompts: list[str], strict: list[int], flexible: list[int]) -> dict[str, Any]:
    lines = [
        {
            "doc_id": index,
            "filter": label,
            "resps": [[texts[index]]],
            "exact_match": float(hits[index]),
            "arguments": [[prompts[index], {}]],
        }
        for label, hits in (("strict-match", strict), ("flexible-extract", flexible))
        for index in range(2)
    ]
    results = {
        f"{key},{label}": value
        for label in ("strict-match", "flexible-extract")
        for key, value in (("exact_match", 0.5), ("exact_match_stderr", 0.5))
    }
    return {"samples": lines, "results": results}


def fake_python(folder: Path, result: dict[str, Any] | None) -> Harness:
    """An interpreter that writes `result` where the job says, or fails as one does whose server is gone."""
    script = folder / "python"
    if result is None:
        body = "sys.exit('ConnectionError: refused')"
    else:
        body = f"open(job['output'], 'w').write({json.dumps(result)!r})"
    script.write_text(f"#!{sys.executable}\nimport json, os, sys\njob = json.load(sys.stdin)\n{body}\n")
    script.chmod(0o755)
    return Harness(str(script), "0.0")


def compare(folder: Path, result: dict[str, Any] | None) -> dict[str, Any]:
    records = [RequestRecord(index=index, outcome=Outcome.COMPLETED, text=text) for index, text in enumerate(TEXTS)]
    endpoint = Endpoint(base_url="http://127.0.0.1:1", model="m", api_key="secret-key")
    return run_harness(fake_python(folder, result), folder / "lm_eval", SOURCE, endpoint, records, max_concurrency=4)


def prompts() -> list[str]:
    return [completion_prompt(SOURCE.fewshots.of(i), PROBLEMS.problems[i].question) for i in range(2)]


def test_two_that_agree(tmp_path: Path) -> None:
    found = compare(tmp_path, samples(TEXTS, prompts(), [1, 0], [1, 0]))
    assert (found["n"], found["same_prompt"], found["same_text"], found["agrees"]) == (2, 2, 2, True)
    assert found["filters"]["strict_match"] == {"value": 0.5, "stderr": 0.5, "same_hit": 2, "rescored_same": 2}
    assert found["notes"] == []


def test_other_texts_are_the_servers_doing_and_other_verdicts_are_not(tmp_path: Path) -> None:
    texts = ["It is #### 1", "It is 2"]
    found = compare(tmp_path, samples(texts, prompts(), [1, 0], [1, 1]))
    assert found["agrees"]
    assert found["filters"]["flexible_extract"]["same_hit"] == 1
    assert "1 texts differ" in found["notes"][0]
    found = compare(tmp_path, samples(TEXTS, prompts(), [0, 0], [1, 0]))
    assert not found["agrees"]
    assert found["notes"][0].startswith("NOT VALID")


def test_another_prompt_is_no_agreement(tmp_path: Path) -> None:
    found = compare(tmp_path, samples(TEXTS, ["other", prompts()[1]], [1, 0], [1, 0]))
    assert (found["same_prompt"], found["agrees"]) == (1, False)


def test_a_harness_that_fails_is_quoted_and_no_key_is_kept(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"lm_eval ended with status 1: ConnectionError: refused \(see .*log.txt\)"):
        compare(tmp_path, None)
    kept = [path.read_bytes() for path in (tmp_path / "lm_eval").iterdir()]
    assert kept
    assert not any(b"secret-key" in content for content in kept)


def test_results_of_an_unknown_form(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="results of an unknown form"):
        compare(tmp_path, {"samples": [{"filter": "strict-match"}], "results": {}})


def test_an_interpreter_without_it(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(UsageError, match="has no lm_eval"):
        find_harness(str(script))
    with pytest.raises(UsageError, match="--harness-python /nowhere cannot be run"):
        find_harness("/nowhere")
