"""`atom bench gsm8k`: accuracy on grade-school math word problems, beside lm_eval and another run if asked for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from atom.bench.gsm8k.asked import asked_differently, data_set
from atom.bench.gsm8k.compare import compared
from atom.bench.gsm8k.fewshot import BUILT_IN, DEFAULT_SEED, SAMPLERS, FewShots
from atom.bench.gsm8k.generate import GENERATORS, generate_problems
from atom.bench.gsm8k.harness import Harness, find_harness, run_harness
from atom.bench.gsm8k.load import WordProblems
from atom.bench.gsm8k.problems import ProblemSet, read_fewshot_problems, read_problems
from atom.bench.gsm8k.prompts import MAX_TOKENS
from atom.bench.gsm8k.questions import Questions, read_questions
from atom.bench.gsm8k.section import COMPARISON_FILE, HARNESS_FILE
from atom.bench.load import Endpoint
from atom.bench.records import read_records
from atom.bench.rundir import RunDirectory, Validity, write_json
from atom.bench.static_load import StaticLoad
from atom.bench.target import Target
from atom.cli.bench_checks import parse_extra_body
from atom.cli.bench_command import SERVER_ARGUMENTS, bench
from atom.cli.load_choices import BACKENDS, limits, sampling
from atom.cli.load_options import LOAD
from atom.cli.load_run import LoadFactory
from atom.cli.option_groups import (
    evidence_options,
    limit_options,
    output_options,
    sampling_options,
    server_options,
    with_options,
)
from atom.recipes.errors import ExitStatus, RunError, UsageError

__all__ = ["CONTEXT_SETTINGS", "EXAMPLES", "gsm8k"]

PROBLEMS: Final = "Problems"
GENERATED: Final = 200
"""Questions, where nothing says how many."""
CONCURRENCY: Final = 64

CONTEXT_SETTINGS: Final = SERVER_ARGUMENTS
EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom bench gsm8k --port 8000 --dataset-path gsm8k/ --num-fewshot 5\n\n"
    "  atom bench gsm8k --recipe embedded --limit 50 --compare atom-runs/base\n\n"
    "  atom bench gsm8k --port 8000 --dataset-path test.jsonl --fewshot-path train.jsonl --harness"
)


@with_options(server_options, limit_options, sampling_options, evidence_options, output_options)
def gsm8k(
    ctx: typer.Context,
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            help="GSM8K's test split: .jsonl or .parquet with question and answer, or a folder that has it. "
            "Default: generated problems.",
            rich_help_panel=PROBLEMS,
        ),
    ] = None,
    generator: Annotated[
        str | None,
        typer.Option(
            help=f"Where generated problems come from: {' or '.join(GENERATORS)} (if installed). They are not GSM8K.",
            rich_help_panel=PROBLEMS,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-L",
            "--num-prompts",
            help=f"The first so many questions; default: all of a file, {GENERATED} generated ones.",
            rich_help_panel=PROBLEMS,
        ),
    ] = None,
    num_fewshot: Annotated[
        int, typer.Option("--num-fewshot", "-f", help="Worked examples before each question.", rich_help_panel=PROBLEMS)
    ] = 5,
    fewshot_path: Annotated[
        Path | None,
        typer.Option(
            help="Where examples come from: GSM8K's train split. Default: that of --dataset-path if it is a folder, "
            "else built-in ones.",
            rich_help_panel=PROBLEMS,
        ),
    ] = None,
    fewshot_sampler: Annotated[
        str,
        typer.Option(
            help=f"{SAMPLERS[0]}: drawn for each question, as lm_eval does; {SAMPLERS[1]}: the first ones for all.",
            rich_help_panel=PROBLEMS,
        ),
    ] = SAMPLERS[0],
    fewshot_seed: Annotated[int, typer.Option(help="For the drawing.", rich_help_panel=PROBLEMS)] = DEFAULT_SEED,
    max_gen_toks: Annotated[
        int,
        typer.Option(
            "--max-gen-toks", "--output-len", help="Most tokens of an answer (max_tokens).", rich_help_panel=LOAD
        ),
    ] = MAX_TOKENS,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Another run: compare with it question by question.", rich_help_panel=PROBLEMS
        ),
    ] = None,
    harness: Annotated[
        bool,
        typer.Option("--harness", help="Ask lm_eval too, on the same server, and compare.", rich_help_panel=PROBLEMS),
    ] = False,
    harness_python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="An interpreter that has lm_eval.", rich_help_panel=PROBLEMS),
    ] = None,
    **given: Any,
) -> int:
    """Accuracy on math word problems: value ± standard error, as lm_eval's task gsm8k has it (prompts, stops, filters).

    Greedy, 64 requests at once unless --max-concurrency says otherwise. Without --dataset-path problems are generated:
    those are not GSM8K, and whatever is printed says so. Exit status 3 if --harness finds that the two do not measure
    the same.
    """
    given |= {"ctx": ctx}
    if given["max_concurrency"] is None:
        given["max_concurrency"] = CONCURRENCY
    if harness_python is not None and not harness:
        raise UsageError("--harness-python is for --harness, which is not given")
    problems = _problems(dataset_path, generator, limit, given["seed"])
    plan = WordProblems(
        problems=problems,
        fewshots=FewShots(
            pool=_examples(dataset_path, fewshot_path),
            count=num_fewshot,
            questions=len(problems),
            sampler=fewshot_sampler,
            seed=fewshot_seed,
        ),
        api=BACKENDS.get(given["backend"], WordProblems.api),
        max_tokens=max_gen_toks,
        sampling=sampling(given),
        extra_body=_extra_body(given),
        stream_options={"continuous_usage_stats": True} if given["continuous_usage_stats"] else {},
    )
    after = _Afterwards(
        plan,
        base=None if compare is None else (compare, read_questions(RunDirectory.open(compare))),
        harness=find_harness(harness_python) if harness else None,
        max_concurrency=given["max_concurrency"],
        quiet=given["quiet"],
    )

    def load(given: dict[str, Any]) -> LoadFactory:
        def make(endpoint: Endpoint, target: Target | None) -> StaticLoad:
            return StaticLoad(source=plan if target is None else replace(plan, model=endpoint.model))

        return LoadFactory(make=make, options={**limits(given), "keep_text": True}, workers=given["workers"])

    status = bench(problems.figure.replace("_", "-"), given, load, afterwards=after)
    return after.status(status)


def _problems(path: Path | None, generator: str | None, limit: int | None, seed: int) -> ProblemSet:
    if limit is not None and limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}")
    if path is None:
        return generate_problems(GENERATED if limit is None else limit, seed, generator or GENERATORS[0])
    if generator is not None:
        raise UsageError("--dataset-path has the problems, --generator would make others: give one of them")
    return read_problems(path, limit=limit)


def _examples(dataset: Path | None, fewshot: Path | None) -> ProblemSet:
    if fewshot is not None:
        return read_fewshot_problems(fewshot)
    if dataset is not None and dataset.is_dir():
        return read_fewshot_problems(dataset, "--dataset-path")
    return BUILT_IN


def _extra_body(given: dict[str, Any]) -> dict[str, Any]:
    body = parse_extra_body(given["extra_body"])
    if "stop" in body:
        raise UsageError("--extra-body must not have 'stop': where an answer ends is part of what is measured")
    if given["ignore_eos"]:
        body["ignore_eos"] = True
    return body


class _Afterwards:
    """What happens between the load and the end of its server: the comparison, and the harness."""

    def __init__(
        self,
        plan: WordProblems,
        *,
        base: tuple[Path, Questions] | None,
        harness: Harness | None,
        max_concurrency: int,
        quiet: bool,
    ) -> None:
        self._plan, self._base, self._harness = plan, base, harness
        self._max_concurrency = max_concurrency
        self._quiet = quiet
        self._error: str | None = None
        self._agrees = True

    def __call__(self, endpoint: Endpoint, run_dir: RunDirectory) -> None:
        if self._base is not None:
            write_json(run_dir.path / COMPARISON_FILE, _comparison(*self._base, run_dir))
        if self._harness is not None:
            if not self._quiet:
                print(f"lm_eval {self._harness.version} asks the same questions …", file=sys.stderr, flush=True)
            try:
                found = run_harness(
                    self._harness,
                    run_dir.path / "accuracy" / "lm_eval",
                    self._plan,
                    endpoint,
                    list(read_records(run_dir)),
                    max_concurrency=self._max_concurrency,
                )
                self._agrees = found["agrees"]
            except RunError as error:
                self._error = str(error)
                found = {"error": self._error}
            write_json(run_dir.path / HARNESS_FILE, found)

    def status(self, of_run: int) -> int:
        """The run's own status, unless that is 0 and the harness has something against it."""
        if of_run != ExitStatus.OK:
            return of_run
        if self._error is not None:
            print(f"error: {self._error}", file=sys.stderr)
            return ExitStatus.FAILED
        return ExitStatus.OK if self._agrees else ExitStatus.GATE


def _comparison(path: Path, base: Questions, run_dir: RunDirectory) -> dict[str, Any]:
    mine = read_questions(run_dir)
    rows = compared(base.results, mine.results)
    left, right = RunDirectory.open(path).read_run_json(), run_dir.read_run_json()
    notes = []
    if left.get("validity") != Validity.VALID:
        notes.append(f"A is no valid evidence: {left.get('validity') or 'it did not come to its end'}")
    if not rows[0].n:
        notes.append(f"nothing to compare: {_why_nothing(base, mine, left, right)}")
    else:
        if differing := asked_differently(left["load"], right["load"]):
            notes.append(f"the two were not asked the same way: {'; '.join(differing)}")
        if unpaired := len(base.results) + len(mine.results) - 2 * rows[0].n:
            notes.append(f"{unpaired:,} questions are in one of the runs alone, and not compared")
    return {"a": str(path), "n": rows[0].n, "filters": [row.as_dict() for row in rows], "notes": notes}


def _why_nothing(a: Questions, b: Questions, left: dict[str, Any], right: dict[str, Any]) -> str:
    without = [name for name, questions in (("A", a), ("B", b)) if not questions.results]
    if without:
        return f"no question of {' and of '.join(without)} can be scored"
    sources = (run["load"]["source"] for run in (left, right))
    return "other problems: " + ", ".join(f"{data_set(one)} in {name}" for one, name in zip(sources, "AB", strict=True))
