"""Runs lm-evaluation-harness on the job that standard input describes. Started by path, by an interpreter that has it
and maybe nothing of ours: standard library and `lm_eval` alone. `bench/gsm8k/harness.py` writes the job."""

import json
import sys
from importlib import import_module


def main() -> None:
    job = json.load(sys.stdin)
    harness, tasks = import_module("lm_eval"), import_module("lm_eval.tasks")
    results = harness.simple_evaluate(
        task_manager=tasks.TaskManager(include_path=job["include_path"], include_defaults=False),
        tasks=[job["task"]],
        log_samples=True,
        bootstrap_iters=2,  # only to have a standard error at all: that of a mean needs no bootstrap
        **job["evaluate"],
    )
    content = {"results": results["results"][job["task"]], "samples": results["samples"][job["task"]]}
    with open(job["output"], "w", encoding="utf-8") as file:
        json.dump(content, file, default=str)


if __name__ == "__main__":
    main()
