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


def compare(
    folder: Path,
    result: dict[str, Any] | None,
    outcomes: tuple[Outcome, Outcome] = (Outcome.COMPLETED, Outcome.COMPLETED),
    more_urls: tuple[str, ...] = (),
) -> dict[str, Any]:
    records = [
        RequestRecord(index=i, outcome=outcome, text=TEXTS[i] if outcome is Outcome.COMPLETED else None)
        for i, outcome in enumerate(outcomes)
    ]
    endpoint = Endpoint(base_url="http://127.0.0.1:1", model="m", api_key="secret-key", more_urls=more_urls)
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


def test_agreement_over_no_question_or_over_some_is_none(tmp_path: Path) -> None:
    nothing = compare(tmp_path, {**samples(TEXTS, prompts(), [1, 0], [1, 0]), "samples": []})
    assert (nothing["n"], nothing["agrees"]) == (0, False)
    assert nothing["notes"][0] == "NOT VALID: lm_eval scored 0 of 2 questions"
    result = samples(TEXTS, prompts(), [1, 0], [1, 0])
    result["samples"] = [sample for sample in result["samples"] if sample["doc_id"] == 0]
    some = compare(tmp_path, result)
    assert (some["n"], some["same_prompt"], some["agrees"]) == (1, 1, False)
    assert some["notes"] == ["NOT VALID: lm_eval scored 1 of 2 questions"]


def test_a_request_that_failed_is_named_and_no_difference_of_texts(tmp_path: Path) -> None:
    result = samples(TEXTS, prompts(), [1, 0], [1, 0])
    found = compare(tmp_path, result, (Outcome.COMPLETED, Outcome.FAILED))
    assert (found["n"], found["same_text"], found["agrees"]) == (1, 1, True)
    assert found["notes"] == ["1 questions have no answer in this run (failed or cancelled) and are not compared"]
    found = compare(tmp_path, result, (Outcome.FAILED, Outcome.FAILED))
    assert not found["agrees"]
    assert found["notes"][0] == "NOT VALID: no question was answered in this run and scored by lm_eval"


def test_of_several_servers_one_is_asked_and_that_is_said(tmp_path: Path) -> None:
    found = compare(tmp_path, samples(TEXTS, prompts(), [1, 0], [1, 0]), more_urls=("http://127.0.0.1:2",))
    assert found["agrees"]
    assert found["notes"] == ["lm_eval asked the first --base-url alone"]


def test_a_harness_that_hangs_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    script.chmod(0o755)
    endpoint = Endpoint(base_url="http://127.0.0.1:1", model="m")
    with pytest.raises(RunError, match=r"did not end within 0 s and was killed"):
        run_harness(Harness(str(script), "0"), tmp_path / "h", SOURCE, endpoint, [], max_concurrency=1, timeout_s=0.2)


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
