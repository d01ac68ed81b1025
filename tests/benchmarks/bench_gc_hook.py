"""What the GC hook costs a busy server: `python tests/benchmarks/bench_gc_hook.py --pairs 8`.

Loads the simulated engine at a step time of zero, so that the API process is what limits, once with the hook and once
without, in alternating order (AB, BA, AB, …), each time on a fresh server. Compared are the CPU seconds of the API
process per request and the throughput, as relative differences within pairs with a 95% bootstrap interval over the
pairs; beside them stands the hook's own measure of its CPU time. The first pair is a warm-up and does not count. Prints
a table and, as its last line, everything as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from atom.bench.rundir import RunDirectory
from atom.bench.runner import LoadOutcome
from atom.cli.load_choices import LOAD_DEFAULTS, random_load, server_choice
from atom.cli.load_run import LoadRunner
from atom.cli.progress import StatusLine
from atom.diag.gc_profile.profile import profile_run
from atom.diag.server_under_test import ServerUnderTest
from atom.diag.session import MeasuredSession
from atom.recipes.launcher import LaunchOptions
from atom.recipes.resolve import resolve_recipe

RESAMPLES = 20_000
NO_TIME = ["--sim-base-ms", "0", "--sim-prefill-us-per-token", "0", "--sim-decode-us-per-seq", "0"]


@dataclass(frozen=True)
class Run:
    pair: int
    hook: bool
    requests: int
    requests_per_s: float
    api_cpu: float
    """Cores that the API process used."""
    api_cpu_ms_per_request: float
    hook_cpu_share: float | None
    """The hook's own measure: its CPU time over the duration."""
    old_passes: int | None
    young_passes: int | None


def measure(pair: int, hook: bool, args: argparse.Namespace, folder: Path) -> Run:
    launch = LaunchOptions(extra_args=[*NO_TIME, *args.server_args])
    options: dict[str, Any] = {
        **LOAD_DEFAULTS,
        "recipe": "simulated",
        "num_prompts": args.num_prompts,
        "random_input_len": args.input_len,
        "random_output_len": args.output_len,
        "max_concurrency": args.concurrency,
        "num_warmups": args.concurrency,
        "ignore_eos": True,
        "seed": pair,
    }
    runner = LoadRunner(
        name="random",
        server=server_choice(options, launch),
        load=random_load(options),
        line=StatusLine(sys.stderr),
        quiet=True,
    )
    run_dir = RunDirectory(folder / f"{pair}-{'hook' if hook else 'none'}")
    cpu: list[float] = []

    def load(server: ServerUnderTest) -> LoadOutcome:
        assert server.server is not None
        api = psutil.Process(server.server.pid)
        before = sum(api.cpu_times()[:2])
        outcome = runner.run(server, run_dir)
        cpu.append(sum(api.cpu_times()[:2]) - before)
        return outcome

    recipe = resolve_recipe("simulated")
    outcome = MeasuredSession(recipe, run_dir, options=launch, gc_hook=hook, health_probe=False).run(load).outcome
    if outcome.completed != args.num_prompts:
        raise SystemExit(f"{outcome.completed} of {args.num_prompts} requests completed: {outcome.first_error}")
    seconds = (outcome.ended_ns - outcome.started_ns) / 1e9
    totals = profile_run(run_dir.path, shifts=1).totals
    return Run(
        pair=pair,
        hook=hook,
        requests=outcome.completed,
        requests_per_s=outcome.completed / seconds,
        api_cpu=cpu[0] / seconds,
        api_cpu_ms_per_request=cpu[0] * 1e3 / (outcome.completed + args.concurrency),
        hook_cpu_share=totals.hook_cpu_share,
        old_passes=totals.gen2_passes,
        young_passes=totals.young_passes,
    )


def difference(runs: list[Run], name: str) -> dict[str, Any]:
    """Mean relative difference (with ÷ without − 1) over pairs, and its interval."""
    by_pair = [
        {run.hook: getattr(run, name) for run in runs if run.pair == pair} for pair in sorted({r.pair for r in runs})
    ]
    ratios = np.array([pair[True] / pair[False] - 1 for pair in by_pair])
    draws = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.quantile(ratios[draws].mean(axis=1), [0.025, 0.975])
    return {
        "without": statistics.fmean(pair[False] for pair in by_pair),
        "with": statistics.fmean(pair[True] for pair in by_pair),
        "difference": float(ratios.mean()),
        "low": float(low),
        "high": float(high),
        "pairs": len(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="pairs that count (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=3000, help="per run (default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("server_args", nargs="*", help="after --: further flags of the server")
    args = parser.parse_args()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="atom-bench-hook-") as folder:
        for pair in range(args.pairs + 1):
            for hook in (True, False) if pair % 2 else (False, True):
                run = measure(pair, hook, args, Path(folder))
                print(
                    f"pair {pair} {'with   ' if hook else 'without'}: {run.requests_per_s:8.1f} req/s, "
                    f"{run.api_cpu_ms_per_request:.3f} ms of API CPU per request, {run.api_cpu:.2f} cores"
                    + ("" if run.hook_cpu_share is None else f", hook {run.hook_cpu_share:.3%}")
                    + (" (warm-up)" if pair == 0 else ""),
                    flush=True,
                )
                if pair:
                    runs.append(run)
    shares = [run.hook_cpu_share for run in runs if run.hook_cpu_share is not None]
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "api_cpu_ms_per_request": difference(runs, "api_cpu_ms_per_request"),
        "requests_per_s": difference(runs, "requests_per_s"),
        "hook_cpu_share": {"mean": statistics.fmean(shares), "max": max(shares)} if shares else None,
        "runs": [asdict(run) for run in runs],
    }
    print("\n| figure | without | with | difference | 95% interval | pairs |\n|---|---:|---:|---:|---:|---:|")
    for name in ("api_cpu_ms_per_request", "requests_per_s"):
        one = found[name]
        print(
            f"| {name} | {one['without']:.4g} | {one['with']:.4g} | {one['difference']:+.2%} "
            f"| {one['low']:+.2%} to {one['high']:+.2%} | {one['pairs']} |"
        )
    if shares:
        print(
            f"\nThe hook's own CPU time: {statistics.fmean(shares):.3%} of the wall clock, at most {max(shares):.3%}."
        )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
