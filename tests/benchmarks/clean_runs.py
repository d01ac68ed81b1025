"""How often a clean server is said to grow: `python tests/benchmarks/clean_runs.py --runs 20 --num-prompts 4000`.

Runs the clean arm of `atom gc-profile replay` that many times and counts the verdicts of growth over all quantities.
None of them is true, so each is a false alarm; the target is at most one in 20 runs. Prints a line per run, the
counts, and as its last line everything as one JSON object. With `--parallel K` runs share the machine: about three
cores each. Exit status 1 when the target is missed or a run failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TARGET_SHARE = 1 / 20
"""Verdicts of growth per run."""


@dataclass(frozen=True)
class Run:
    seed: int
    validity: str | None
    requests: int | None
    verdicts: dict[str, str]
    grows: dict[str, dict[str, Any]]
    """What was said to grow, with its slope and interval."""
    gen2_ms_per_1000: float | None
    metrics_p50_ratio: float | None
    """Last window over the first."""
    series_change: int | None
    """Last window minus the second: the first scrapes come before the first requests."""
    rss_slope_kb_per_1000: float | None
    is_problem: bool | None


def one_run(seed: int, args: argparse.Namespace, folder: Path) -> Run:
    run = folder / f"run-{seed}"
    command = [
        *(sys.executable, "-m", "atom.cli.main", "gc-profile", "replay", "--arms", "clean", "--quiet"),
        *("--num-prompts", str(args.num_prompts), "--scale", str(args.scale), "--seed", str(seed)),
        *("--output-dir", str(run), "--json", str(folder / f"{seed}.json")),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 4):
        raise SystemExit(f"run {seed} ended with status {done.returncode}: {done.stderr.strip()}")
    result = json.loads((folder / f"{seed}.json").read_text())
    if not args.keep:
        shutil.rmtree(run, ignore_errors=True)
    return summarize(seed, result)


def summarize(seed: int, result: dict[str, Any]) -> Run:
    growth: dict[str, dict[str, Any]] = result["growth"]
    requests, seconds = result["requests"], result["gen2_seconds"]
    rss = growth.get("rss_mb", {}).get("slope")
    return Run(
        seed=seed,
        validity=result["validity"],
        requests=requests,
        verdicts={name: one["verdict"] for name, one in growth.items()},
        grows={name: one for name, one in growth.items() if one["verdict"] == "grows"},
        gen2_ms_per_1000=None if not requests or seconds is None else seconds * 1e6 / requests,
        metrics_p50_ratio=over_windows(result["windows"], "metrics_p50_ms", lambda first, last: last / first),
        series_change=over_windows(result["windows"][1:], "metrics_series", lambda first, last: last - first),
        rss_slope_kb_per_1000=None if rss is None else rss * 1024,
        is_problem=result["is_problem"],
    )


def over_windows(windows: list[dict[str, Any]], name: str, combine: Any) -> Any:
    seen = [window[name] for window in windows if window[name] is not None]
    return combine(seen[0], seen[-1]) if len(seen) > 1 else None


def spread(values: list[float | None]) -> dict[str, float | int | None]:
    seen = [value for value in values if value is not None]
    if not seen:
        return {"n": 0, "median": None, "max": None}
    return {"n": len(seen), "median": statistics.median(seen), "max": max(seen)}


def report(runs: list[Run], args: argparse.Namespace) -> dict[str, Any]:
    alarms = sum(len(run.grows) for run in runs)
    counts: dict[str, Counter[str]] = {}
    for run in runs:
        for name, verdict in run.verdicts.items():
            counts.setdefault(name, Counter())[verdict] += 1
    for name, counter in counts.items():
        print(f"{name:20} " + ", ".join(f"{verdict} {number}" for verdict, number in counter.most_common()))
    print(f"verdicts of growth: {alarms} in {len(runs)} clean runs")
    return {
        "runs": len(runs),
        "num_prompts": args.num_prompts,
        "scale": args.scale,
        "parallel": args.parallel,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "verdicts_of_growth": alarms,
        "allowed": max(1, int(len(runs) * TARGET_SHARE)),
        "verdicts": {name: dict(counter) for name, counter in counts.items()},
        "false_alarms": [
            {"seed": run.seed, "quantity": name, **one} for run in runs for name, one in run.grows.items()
        ],
        "called_a_problem": sum(run.is_problem is True for run in runs),
        "gen2_ms_per_1000": spread([run.gen2_ms_per_1000 for run in runs]),
        "metrics_p50_ratio": spread([run.metrics_p50_ratio for run in runs]),
        "series_change": spread([run.series_change for run in runs]),
        "rss_slope_kb_per_1000": spread([run.rss_slope_kb_per_1000 for run in runs]),
        "not_valid": [asdict(run) for run in runs if run.validity != "valid"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--num-prompts", type=int, default=4000, help="per run (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the step time (default: %(default)s)")
    parser.add_argument("--parallel", type=int, default=1, metavar="K", help="runs at a time (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run directories there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atom-clean-runs-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        seeds = range(args.first_seed, args.first_seed + args.runs)
        runs: list[Run] = []
        with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
            for run in pool.map(lambda seed: one_run(seed, args, folder), seeds):
                runs.append(run)
                grown = ", ".join(run.grows) or "nothing"
                print(f"run {run.seed}: {run.validity}, {run.requests} requests, grows: {grown}", flush=True)
    found = report(runs, args)
    print(json.dumps(found))
    return 0 if found["verdicts_of_growth"] <= found["allowed"] and not found["not_valid"] else 1


if __name__ == "__main__":
    sys.exit(main())
