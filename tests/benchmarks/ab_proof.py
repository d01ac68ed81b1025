"""`atom ab-compare` against branches whose difference is known: does it say what is so, and nothing else?

    python tests/benchmarks/ab_proof.py [--only slower comment gc failing absent] [--jobs N] [--cpus 0-15]
                                        [--comparisons 20] [--markdown FILE|-] [--keep DIR]

A real clone of this repository gets a branch per case, each with one small commit:

    slower    the simulated step takes 2% longer        → slower, at the default number of pairs
    comment   a comment                                 → in 20 comparisons at most one faster or slower
    gc        finished sequences stay referenced        → exposed by --gc
    failing   6% of the requests fail; its step is 5%
              shorter, so that it would win             → censored, never a winner
    absent    the server raises when it starts          → a readable table, and no success

Needs the base and the engine extra, and git; no network. Prints for each case its commands and what they said, and ends
with 1 if an expectation does not hold. On two cores everything takes about an hour, nearly all of it `comment`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
BASE: Final = "main"
LOAD: Final = (
    "random --recipe simulated --random-input-len 64 --random-output-len 32 --max-concurrency 8 --num-prompts 160 "
    "--ignore-eos -- --sim-base-ms 8"
)
LEAST_FOR_HALVES: Final = 4
"""CPUs of a job, with which both arms run at the same time."""

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Edit:
    """In `file`, `text` is inserted before the one line that is `before`; or appended."""

    file: str
    text: str
    before: str | None = None


@dataclass(frozen=True)
class Done:
    """One comparison."""

    status: int
    output: str
    errors: str
    document: Document
    seconds: float

    @property
    def primary(self) -> list[Mapping[str, Any]]:
        """The metric that decides, of each load that is compared."""
        loads = self.document.get("loads", [])
        return [load["metrics"][load["primary"]] for load in loads if load["section"] == "load"]

    @property
    def verdicts(self) -> list[str]:
        return [f"{metric['title']}: {metric['verdict']}" for metric in self.primary]

    @property
    def claims(self) -> bool:
        """Whether a difference is claimed, within the margin or beyond it."""
        return any(metric["finding"] in ("faster", "slower") for metric in self.primary)

    @property
    def measured(self) -> bool:
        """A machine that was too busy for the client makes status 4: what was said is then still judged, and the report
        has the reason."""
        busy = all("client saturated" in reason for reason in self.document.get("reasons", [""]))
        return bool(self.primary) and (self.status == 0 or (self.status == 4 and busy))


@dataclass(frozen=True)
class Case:
    title: str
    edits: tuple[Edit, ...]
    options: tuple[str, ...]
    expectation: str
    check: Callable[[Sequence[Done]], str | None]
    """What is wrong; None if nothing."""
    repeated: bool = False


# ---- what is expected


def is_slower(runs: Sequence[Done]) -> str | None:
    (done,) = runs
    if not done.measured:
        return f"exit status {done.status}"
    wrong = [verdict for verdict, metric in zip(done.verdicts, done.primary, strict=True) if metric["word"] != "slower"]
    return "; ".join(wrong) or None


def is_quiet(runs: Sequence[Done]) -> str | None:
    failed = sum(not done.measured for done in runs)
    if failed:
        return f"{failed} of {len(runs)} comparisons did not come to a verdict"
    false = sum(done.claims for done in runs)
    return f"{false} of {len(runs)} claim a difference" if false > 1 else None


def is_exposed(runs: Sequence[Done]) -> str | None:
    (done,) = runs
    section = done.document.get("gc") or {}
    head = section.get("head")
    if not head or section["exposed"] != [head]:
        return f"exposed: {section.get('exposed')}; {section.get('verdict')}"
    grown = {q["quantity"] for q in section["quantities"] if q["finding"] == "head"}
    return None if grown & {"rss_mb", "gen2_share", "gen2_pause_ms"} else f"grows in the head alone: {sorted(grown)}"


def is_censored(runs: Sequence[Done]) -> str | None:
    (done,) = runs
    if done.claims or not done.primary:
        return f"a winner is named, or nothing is: {done.verdicts}"
    wrong = [v for v, metric in zip(done.verdicts, done.primary, strict=True) if metric["word"] != "censored"]
    return "; ".join(wrong) or (f"exit status {done.status}, not 4" if done.status != 4 else None)


def is_readable(runs: Sequence[Done]) -> str | None:
    (done,) = runs
    if done.status != 1:
        return f"exit status {done.status}, not 1"
    if "Traceback" in done.errors:
        return "a traceback"
    if "this branch does not start" not in " ".join(done.output.split()):
        return "the table does not say why the arm did not start"
    return "a difference is claimed" if done.claims else None


STEP: Final = "engine/executors/simulated.py"
JITTER: Final = "        if model.jitter:"
MANAGER: Final = "engine/core_manager.py"
ANSWERS: Final = "engine/server/completions.py"

CASES: Final[Mapping[str, Case]] = {
    "slower": Case(
        "a simulated step that takes 2% longer",
        (Edit(STEP, "        seconds *= 1.02\n", JITTER),),
        (),
        "slower, at the default number of pairs",
        is_slower,
    ),
    "comment": Case(
        "a comment",
        (Edit(STEP, "        # The jitter multiplies: a step never gets negative.\n", JITTER),),
        (),
        "at most one of the comparisons says faster or slower",
        is_quiet,
        repeated=True,
    ),
    "gc": Case(
        "finished sequences that stay referenced",
        (
            Edit(
                MANAGER, "        self._kept: list[_SequenceBatch] = []\n", "        self.consumes_outputs_queue = True"
            ),
            Edit(MANAGER, "        self._kept.append(batch)\n", "        if self.consumes_outputs_queue:"),
        ),
        ("--gc", "--pairs", "1", "--no-swap"),
        "the head is exposed: its API process grows with the requests served, the base's does not",
        is_exposed,
    ),
    "failing": Case(
        "6% of the requests fail, and a step is 5% shorter",
        (
            Edit(STEP, "        seconds *= 0.95\n", JITTER),
            Edit(ANSWERS, "_asked = iter(range(1 << 62))\n\n\n", "async def _answer("),
            Edit(
                ANSWERS,
                '    if next(_asked) % 50 in (13, 27, 41):\n        raise ApiError(500, "out of cache blocks")\n',
                '    answer_id = f"{format_type.id_prefix}{uuid.uuid4().hex}"',
            ),
            Edit(
                ANSWERS,
                "from atom.engine.server.api_errors import ApiError\n",
                "from atom.engine.server.collected import CollectedAnswer",
            ),
        ),
        (),
        "censored, whatever it measures",
        is_censored,
    ),
    "absent": Case(
        "a server that raises when it starts",
        (
            Edit(
                "engine/server/__main__.py",
                '    raise RuntimeError("this branch does not start")\n',
                "    engine_config, server_config = parse_args(argv)",
            ),
        ),
        (),
        "a table that says why there is no head, and no success",
        is_readable,
    ),
}


# ---- the clone


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=proof", "-c", "user.email=proof@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def make_clone(folder: Path) -> Path:
    """Of this checkout's commit, as `main`; a copy without history becomes a repository of one commit."""
    clone = folder / "clone"
    if (ROOT / ".git").exists():
        git(folder, "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone))
        git(clone, "checkout", "--quiet", "-B", BASE, git(ROOT, "rev-parse", "HEAD"))
    else:
        left_out = shutil.ignore_patterns(".venv", "__pycache__", "*_cache", ".hypothesis", "atom-runs", "out")
        shutil.copytree(ROOT, clone, symlinks=True, ignore=left_out)
        git(clone, "init", "--quiet", "--initial-branch", BASE)
        git(clone, "add", "--all")
        git(clone, "commit", "--quiet", "--message", "As copied")
    return clone


def make_branch(clone: Path, name: str, case: Case) -> None:
    git(clone, "checkout", "--quiet", "-B", name, BASE)
    for edit in case.edits:
        apply_edit(clone, edit)
    git(clone, "commit", "--quiet", "--all", "--message", case.title.capitalize())
    git(clone, "checkout", "--quiet", BASE)


def apply_edit(clone: Path, edit: Edit) -> None:
    """The line that it goes before has to be there once: otherwise the source has moved on, and so must this."""
    path = clone / edit.file
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    at = [number for number, line in enumerate(lines) if line.rstrip("\n") == edit.before]
    if len(at) != 1:
        sys.exit(f"{edit.file} has the line {edit.before!r} {len(at)} times, not once")
    lines.insert(at[0], edit.text)
    path.write_text("".join(lines), encoding="utf-8")


# ---- comparisons


def cpu_list(text: str) -> list[int]:
    """`0-3,8` → 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def shown_cpus(cpus: Sequence[int]) -> str:
    whole = list(range(cpus[0], cpus[-1] + 1))
    return f"{cpus[0]}-{cpus[-1]}" if list(cpus) == whole and len(cpus) > 1 else ",".join(map(str, cpus))


def shares(cpus: Sequence[int], jobs: int) -> list[list[int]]:
    """One disjoint set per job."""
    each = len(cpus) // jobs
    if not each:
        sys.exit(f"--jobs {jobs} is more than the {len(cpus)} CPUs of --cpus")
    return [list(cpus[job * each : (job + 1) * each]) for job in range(jobs)]


def placement(cpus: Sequence[int]) -> list[str]:
    if len(cpus) < LEAST_FOR_HALVES:
        return ["--placement", "serial"]
    half = len(cpus) // 2
    return ["--placement", "halves", "--cpus", f"{shown_cpus(cpus[:half])}/{shown_cpus(cpus[half : 2 * half])}"]


def command(name: str, case: Case, clone: Path, out: Path, seed: int, cpus: Sequence[int]) -> list[str]:
    return [
        *("ab-compare", BASE, name, "--repo", str(clone), "--load", LOAD, *case.options, *placement(cpus)),
        *("--seed", str(seed), "--output-dir", str(out), "--json", str(out) + ".json"),
    ]


class Comparisons:
    """Runs them, and ends those that run when this process is told to end."""

    def __init__(self, folder: Path) -> None:
        self._env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "120"}
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / ".src"), os.environ.get("PYTHONPATH")]))
        self._env.pop("GITHUB_STEP_SUMMARY", None)
        self._running: set[subprocess.Popen[str]] = set()

    def end(self, number: int, _: FrameType | None) -> None:
        running = tuple(self._running)
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:  # their servers end before their folder goes
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        raise SystemExit(128 + number)

    def run(self, arguments: Sequence[str], cpus: Sequence[int], out: Path) -> Done:
        pin = f"import os, runpy, sys; os.sched_setaffinity(0, {list(cpus)!r}); sys.argv[0] = 'atom'; "
        program = [sys.executable, "-c", pin + "runpy.run_module('atom.cli.main', run_name='__main__', alter_sys=True)"]
        started = time.monotonic()
        process = subprocess.Popen(
            [*program, *arguments], env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._running.add(process)
        output, errors = process.communicate()
        self._running.discard(process)
        document: Document = {}
        path = Path(str(out) + ".json")
        if path.is_file():
            document = json.loads(path.read_text(encoding="utf-8"))
        return Done(process.returncode, output, errors, document, time.monotonic() - started)


def run_case(
    name: str, case: Case, clone: Path, folder: Path, comparisons: Comparisons, sets: Sequence[list[int]], times: int
) -> tuple[list[Done], list[list[str]]]:
    """In as many processes as there are sets of CPUs."""
    free = [list(cpus) for cpus in sets]
    jobs = range(times if case.repeated else 1)
    written: list[list[str]] = []

    def one(number: int) -> Done:
        cpus = free.pop()
        out = folder / f"{name}-{number}"
        arguments = command(name, case, clone, out, number, cpus)
        written.append(arguments)
        try:
            return comparisons.run(arguments, cpus, out)
        finally:
            free.append(cpus)

    if len(jobs) == 1 or len(sets) == 1:
        return [one(number) for number in jobs], written
    first = one(0)  # makes the checkouts that the others share
    with ThreadPoolExecutor(len(sets)) as pool:
        return [first, *pool.map(one, jobs[1:])], written


# ---- what is printed


def report(name: str, case: Case, runs: Sequence[Done], written: Sequence[list[str]], problem: str | None) -> str:
    lines = [f"### {name}: {case.title}", ""]
    shown = sorted(written, key=lambda words: int(words[words.index("--seed") + 1]))
    lines += ["```", f"$ {shlex.join(['atom', *shown[0]])}"]
    if len(runs) > 1:
        lines.append(f"… and {len(runs) - 1} more, with --seed 1 to {len(runs) - 1}")
        lines += [f"{number}: {'; '.join(done.verdicts) or 'no verdict'}" for number, done in enumerate(runs)]
    else:
        lines += [runs[0].output.strip(), *([runs[0].errors.strip()] if problem else [])]
    seconds = sum(done.seconds for done in runs)
    lines += ["```", "", f"exit status {', '.join(sorted({str(done.status) for done in runs}))}; {seconds:,.0f} s"]
    lines += [f"expected: {case.expectation}", f"**{'holds' if problem is None else 'DOES NOT HOLD: ' + problem}**", ""]
    return "\n".join(lines)


def seen(case: Case, runs: Sequence[Done]) -> str:
    if case.repeated:
        return f"{sum(done.claims for done in runs)} of {len(runs)} claim a difference"
    section = runs[0].document.get("gc")
    if case.check is is_exposed and section:
        return f"exposed: {', '.join(section['exposed']) or 'none'}"
    return "; ".join(runs[0].verdicts) or f"exit status {runs[0].status}"


def table(rows: Sequence[tuple[str, str, str, bool]]) -> str:
    lines = ["| branch | expected | said | |", "|---|---|---|---|"]
    lines += [f"| {name} | {wanted} | {said} | {'ok' if ok else '**no**'} |" for name, wanted, said, ok in rows]
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--jobs", type=int, default=1, help="comparisons at the same time, each on CPUs of its own")
    parser.add_argument("--cpus", type=cpu_list, default=sorted(os.sched_getaffinity(0)), help="such as 0-15")
    parser.add_argument("--comparisons", type=int, default=20, help="of the branch with the comment")
    parser.add_argument("--markdown", help="where the report goes; -: standard output", default="-")
    parser.add_argument("--keep", type=Path, help="folder for the clone and the comparisons; default: a temporary one")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="ab-proof-"))
    folder.mkdir(parents=True, exist_ok=True)
    comparisons = Comparisons(folder)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, comparisons.end)
    texts, rows = [], list[tuple[str, str, str, bool]]()
    try:
        clone = make_clone(folder)
        for name in options.only:
            make_branch(clone, name, CASES[name])
        sets = shares(options.cpus, options.jobs)
        for name in options.only:
            case = CASES[name]
            print(f"{name}: {case.title} …", file=sys.stderr, flush=True)
            runs, written = run_case(name, case, clone, folder, comparisons, sets, options.comparisons)
            problem = case.check(runs)
            rows.append((name, case.expectation, seen(case, runs), problem is None))
            texts.append(report(name, case, runs, written, problem).replace(str(folder), "TMP"))
            print(f"{name}: {problem or 'holds'}", file=sys.stderr, flush=True)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    text = "\n".join([*texts, table(rows), ""])
    if options.markdown == "-":
        print(text)
    else:
        Path(options.markdown).write_text(text, encoding="utf-8")
    return 0 if all(ok for *_, ok in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
