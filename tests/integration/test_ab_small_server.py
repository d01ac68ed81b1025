"""`atom ab-compare` as a CI job would use it, between refs of a server that is not ours too: ab_compare_ci.sh by case.

The server (`small_server/`) becomes a git repository; each of its branches differs from main in one place. Gates are
tried on recorded results with times that are made up here: a busy machine changes nothing about them.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("small_server")
SCRIPT = Path(__file__).with_name("ab_compare_ci.sh")
BATCH = "src/smallserve/batch.py"
BRANCHES = {
    "comment": (BATCH, "STEP_MS = 4.0", "# Measured.\nSTEP_MS = 4.0"),
    "slower": (BATCH, "STEP_MS = 4.0", "STEP_MS = 8.0"),
    "absent": ("src/smallserve/__main__.py", "    stop = asyncio.Event()", '    raise RuntimeError("out of luck")'),
}


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository") / "small-server"
    shutil.copytree(SERVER, folder, ignore=shutil.ignore_patterns("__pycache__", "_built.py"))
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "A small server")
    for name, (file, before, after) in BRANCHES.items():
        git(folder, "checkout", "--quiet", "-b", name, "main")
        text = (folder / file).read_text()
        assert text.count(before) == 1
        (folder / file).write_text(text.replace(before, after))
        git(folder, "commit", "--quiet", "--all", "--message", name)
    git(folder, "checkout", "--quiet", "main")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, str]:
    """`atom` on PATH, what the script wants, and a cache of its own for the checkouts."""
    folder = tmp_path_factory.mktemp("ci")
    command = folder / "bin" / "atom"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m atom.cli.main "$@"\n')
    command.chmod(0o755)
    records = folder / "records"
    write_results(records, "main")
    write_results(records, "same")
    write_results(records, "slower", factor=1.1)
    write_results(records, "noisy", scatter=0.2)
    write_results(records, "failing", factor=0.9, fail_every=16)
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / ".src"),
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "REPO": str(repository),
        "RECORDS": str(records),
        "RECIPE": str(repository / "recipe.yaml"),
        "COLUMNS": "160",
    }


def write_results(folder: Path, name: str, *, factor: float = 1.0, scatter: float = 0.002, fail_every: int = 0) -> None:
    """Six results as `vllm bench serve --save-result --save-detailed` writes them: a closed loop of eight streams whose
    chunks are `factor` · 10 ms apart, more or less by `scatter` from run to run."""
    (folder / name).mkdir(parents=True)
    rng = random.Random(name)
    for number in range(1, 7):
        gap = 0.010 * factor * math.exp(rng.gauss(0.0, scatter))
        columns: dict[str, list[Any]] = {}
        for index in range(160):
            failed = fail_every and index % fail_every == fail_every - 1
            gaps = [] if failed else [gap * (1 + rng.uniform(-0.01, 0.01)) for _ in range(31)]
            row = {
                "input_lens": 64,
                "output_lens": 0 if failed else 32,
                "start_times": 1000.0 + index // 8 * gap * 33,
                "ttfts": 0.0 if failed else 1.5 * gap,
                "itls": gaps,
                "errors": "out of cache blocks" if failed else "",
            }
            for key, value in row.items():
                columns.setdefault(key, []).append(value)
        facts = {"num_prompts": 160, "max_concurrency": 8, "request_rate": "inf", "model_id": "m"}
        (folder / name / f"{number}.json").write_text(json.dumps({**facts, **columns}))


def run_case(case: str, environment: dict[str, str], folder: Path) -> Path:
    """The folder that the case worked in."""
    done = subprocess.run(
        ["bash", str(SCRIPT), case],
        env={**environment, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout == f"{case}: ok\n", done.stdout + done.stderr
    assert done.returncode == 0
    return next(folder.iterdir())


@pytest.mark.parametrize("case", ["pass", "regression", "undecided", "censored"])
def test_the_exit_status_of_gates(case: str, environment: dict[str, str], tmp_path: Path) -> None:
    run_case(case, environment, tmp_path)


@pytest.mark.parametrize("case", ["plan", "absent", "usage", "resume"])
def test_refs_as_ci_compares_them(case: str, environment: dict[str, str], tmp_path: Path) -> None:
    run_case(case, environment, tmp_path)


def test_a_step_of_twice_the_time_is_seen_and_traced_to_its_commit(environment: dict[str, str], tmp_path: Path) -> None:
    """Whatever else the machine does, no step of the head is as short as a step of the base."""
    told = json.loads((run_case("refs", environment, tmp_path) / "ab.json").read_text())
    (load,) = told["loads"]
    assert load["metrics"]["itl_p50"]["delta_pct"] > 30
    assert load["metrics"]["itl_p50"]["word"] == "indicative"
    assert told["confounded"] == []
    for arm, ref in zip(told["arms"], ("main", "slower"), strict=True):
        assert arm["sha"] == git(Path(environment["REPO"]), "rev-parse", ref)
        origins = list(tmp_path.glob(f"*/run/arms/{arm['label']}/run-1/server/origins-*.json"))
        assert origins, "what the server loaded is on record"
