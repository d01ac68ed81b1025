"""lm-evaluation-harness itself, asked the same problems by the same server, and what the two say beside each other.

It runs in an interpreter of its own, offline, on a task written for the occasion: the definition of its task `gsm8k`,
reading our problems from files. All of it stays in the run directory under `accuracy/lm_eval/`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atom.bench.gsm8k.extract import FILTERS, FLEXIBLE, STRICT, extracted, is_hit
from atom.bench.gsm8k.load import WordProblems
from atom.bench.gsm8k.problems import Problem
from atom.bench.gsm8k.prompts import STOP, chat_messages, completion_prompt
from atom.bench.load import Api, Endpoint
from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import write_json, write_text
from atom.recipes.errors import RunError, UsageError

__all__ = ["Harness", "find_harness", "run_harness"]

TASK: Final = "atom_word_problems"
CHILD: Final = Path(__file__).with_name("harness_child.py")
RETRIES: Final = 3
"""How often lm_eval sends a request (its `max_retries`)."""
LOOKUP_S: Final = 120.0
LOG_TAIL: Final = 400
OVERHEAD_S: Final = 900.0
"""What lm_eval may take beyond its requests: imports, its task, metrics."""
_METRIC_FILTER: Final[Mapping[str, str]] = {FLEXIBLE: "flexible-extract", STRICT: "strict-match"}


@dataclass(frozen=True, slots=True)
class Harness:
    """An interpreter that has lm_eval."""

    python: str
    version: str


def find_harness(python: str | None) -> Harness:
    """Of `python`, or of the interpreter that runs this. UsageError if it has no lm_eval."""
    interpreter = python or sys.executable
    code = "from importlib.metadata import version; print(version('lm_eval'))"
    try:
        found = subprocess.run(
            [interpreter, "-I", "-c", code], capture_output=True, text=True, timeout=LOOKUP_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--harness-python {interpreter} cannot be run: {error}") from None
    if found.returncode != 0:
        raise UsageError(
            f"--harness: {interpreter} has no lm_eval (pip install 'lm_eval[api]'); --harness-python names an "
            "interpreter that has it"
        )
    return Harness(interpreter, found.stdout.strip())


def run_harness(
    harness: Harness,
    folder: Path,
    source: WordProblems,
    endpoint: Endpoint,
    records: Sequence[RequestRecord],
    *,
    max_concurrency: int,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Ask again through lm_eval, keep what it said in `folder`, and compare it with `records` question by question. Of
    several base URLs it asks the first.

    `timeout_s`: what it may take; None: as long as its requests may take one by one in their lanes, and `OVERHEAD_S`.
    RunError with the end of its log if it fails, or takes longer.
    """
    if timeout_s is None:
        rounds = -(-len(source) // max_concurrency)
        timeout_s = OVERHEAD_S + RETRIES * rounds * endpoint.request_timeout
    _write_task(folder, source)
    output, log = folder / "results.json", folder / "log.txt"
    output.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="atom-lm-eval-") as scratch, log.open("wb") as out:
        job = _job(folder, output, source, endpoint, max_concurrency)
        process = subprocess.Popen(
            [harness.python, "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environment(scratch, endpoint),
            cwd=scratch,
        )
        try:
            process.communicate(json.dumps(job).encode(), timeout_s)
        except subprocess.TimeoutExpired:
            raise RunError(f"lm_eval did not end within {timeout_s:,.0f} s and was killed (see {log})") from None
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0 or not output.is_file():
        tail = log.read_text(encoding="utf-8", errors="replace").strip()[-LOG_TAIL:]
        last = tail.splitlines()[-1] if tail else "it said nothing"
        raise RunError(f"lm_eval ended with status {process.returncode}: {last} (see {log})")
    return _compared(harness, _results(output), source, endpoint, records)


def _environment(scratch: str, endpoint: Endpoint) -> dict[str, str]:
    """Offline, without our path and proxies, with caches of its own. The key travels here, not in a file."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")}
    env |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": scratch,
        "NO_PROXY": "*",
        "no_proxy": "*",
    }
    return env | ({"OPENAI_API_KEY": endpoint.api_key} if endpoint.api_key is not None else {})


def _job(folder: Path, output: Path, source: WordProblems, endpoint: Endpoint, concurrency: int) -> dict[str, Any]:
    chat = source.api is Api.CHAT
    model: dict[str, Any] = {
        "model": endpoint.model,
        "base_url": endpoint.base_url.rstrip("/") + endpoint.path,
        "num_concurrent": concurrency,
        "tokenizer_backend": None,
        "tokenized_requests": False,
        "max_gen_toks": source.max_tokens,
        "timeout": max(1, int(endpoint.request_timeout)),
        "verify_certificate": endpoint.verify_tls,
    }
    if endpoint.headers:
        key = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
        model["header"] = {**key, **endpoint.headers}
    evaluate: dict[str, Any] = {
        "model": "local-chat-completions" if chat else "local-completions",
        "model_args": model,
        "num_fewshot": source.fewshots.count,
        "fewshot_random_seed": source.fewshots.seed,
    }
    if chat:
        evaluate |= {"apply_chat_template": True, "fewshot_as_multiturn": True}
    return {"include_path": str(folder.resolve()), "task": TASK, "output": str(output.resolve()), "evaluate": evaluate}


def _write_task(folder: Path, source: WordProblems) -> None:
    """The task's files. JSON is YAML too."""
    folder.mkdir(parents=True, exist_ok=True)
    pool = source.fewshots.pool.problems
    files = {"test": folder / "test.jsonl", "train": folder / "train.jsonl"}
    _write_problems(files["test"], source.problems.problems)
    _write_problems(files["train"], pool)
    task: dict[str, Any] = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {split: str(file.resolve()) for split, file in files.items()}},
        "output_type": "generate_until",
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "num_fewshot": source.fewshots.count,
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"],
            }
        ],
        "generation_kwargs": {
            "until": list(STOP),
            "do_sample": False,
            "max_gen_toks": source.max_tokens,
            **source.sampling,
            **source.extra_body,
        },
        "repeats": 1,
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [
                    {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"},
                    {"function": "take_first"},
                ],
            },
            {
                "name": "flexible-extract",
                "filter": [
                    {"function": "regex", "group_select": -1, "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
                    {"function": "take_first"},
                ],
            },
        ],
        "metadata": {"version": 3.0},
    }
    if source.fewshots.sampler != "default":
        task["fewshot_config"] = {"sampler": source.fewshots.sampler}
    write_json(folder / f"{TASK}.yaml", task)


def _write_problems(path: Path, problems: Sequence[Problem]) -> None:
    lines = (json.dumps({"question": problem.question, "answer": problem.answer}) for problem in problems)
    write_text(path, "".join(f"{line}\n" for line in lines))


def _results(output: Path) -> dict[str, Any]:
    try:
        content = json.loads(output.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{output} is not JSON: {error}") from None
    assert isinstance(content, dict)
    return content


def _compared(
    harness: Harness,
    content: Mapping[str, Any],
    source: WordProblems,
    endpoint: Endpoint,
    records: Sequence[RequestRecord],
) -> dict[str, Any]:
    """Theirs beside ours, over the questions that both have an answer to. `same_*` count questions."""
    answered = {one.index: one.text for one in records if one.outcome == Outcome.COMPLETED and one.text is not None}
    filters: dict[str, dict[str, Any]] = {}
    same_prompt = same_text = 0
    try:
        samples = {
            label: [sample for sample in content["samples"] if sample["filter"] == label]
            for label in _METRIC_FILTER.values()
        }
        scored = set.intersection(*({int(sample["doc_id"]) for sample in found} for found in samples.values()))
        both = scored & answered.keys()
        for name, label in _METRIC_FILTER.items():
            same_prompt, same_text, same_hit, rescored = 0, 0, 0, 0
            for sample in samples[label]:
                if int(sample["doc_id"]) not in both:
                    continue
                index, text, hit = int(sample["doc_id"]), sample["resps"][0][0], sample["exact_match"] == 1
                gold = source.problems.problems[index].gold
                same_prompt += _same_prompt(source, index, sample["arguments"])
                same_text += text == answered[index]
                same_hit += hit == is_hit(extracted(answered[index], name), gold)
                rescored += hit == is_hit(extracted(text, name), gold)
            result = content["results"]
            filters[name] = {
                "value": float(result[f"exact_match,{label}"]),
                "stderr": _number(result.get(f"exact_match_stderr,{label}")),
                "same_hit": same_hit,
                "rescored_same": rescored,
            }
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(f"lm_eval {harness.version} wrote results of an unknown form: {error!r}") from None
    n, questions = len(both), set(range(len(source)))
    same = same_prompt == n and all(filters[name]["rescored_same"] == n for name in FILTERS)
    unscored = len(questions - scored)
    against = []
    if unscored:
        against.append(f"NOT VALID: lm_eval scored {len(questions) - unscored:,} of {len(questions):,} questions")
    if not n:
        against.append("NOT VALID: no question was answered in this run and scored by lm_eval")
    elif not same:
        against.append(
            "NOT VALID: prompts or verdicts on the same text differ: this run and lm_eval measure other things"
        )
    return {
        "version": harness.version,
        "n": n,
        "same_prompt": same_prompt,
        "same_text": same_text,
        "filters": filters,
        "agrees": not against,
        "notes": [*against, *_notes(n, same_text, len(questions - answered.keys()), endpoint)],
    }


def _notes(n: int, same_text: int, unanswered: int, endpoint: Endpoint) -> list[str]:
    notes = []
    if same_text < n:
        notes.append(
            f"{n - same_text:,} texts differ between the two runs: the server does not answer the same prompt the same "
            "way in every batch"
        )
    if unanswered:
        notes.append(f"{unanswered:,} questions have no answer in this run (failed or cancelled) and are not compared")
    if endpoint.more_urls:
        notes.append("lm_eval asked the first --base-url alone")
    return notes


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _same_prompt(source: WordProblems, index: int, arguments: Any) -> bool:
    """`arguments` as the samples log them: by name, or a list of calls."""
    first = arguments["gen_args_0"]["arg_0"] if isinstance(arguments, dict) else arguments[0][0]
    question, examples = source.problems.problems[index].question, source.fewshots.of(index)
    if source.api is not Api.CHAT:
        return bool(first == completion_prompt(examples, question))
    sent = first[0] if isinstance(first, list) else first
    messages = json.loads(sent) if isinstance(sent, str) else first
    # The harness's messages may carry a type beside role and content.
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    return plain == chat_messages(examples, question)
