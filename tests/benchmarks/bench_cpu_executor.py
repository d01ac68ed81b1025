"""Decode and prefill speed of the CPU executor in this process, without server, scheduler process or client.

    python tests/benchmarks/bench_cpu_executor.py [--model embedded] [--concurrency 1 8 32] [--kernels auto]

Random prompts, `--input-len` tokens in and `--output-len` out, all sequences at once. Printed per concurrency: output
tokens per second of the whole run and of the decode steps alone, and where the time of the steps went.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from atom.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from atom.engine.engine_core import EngineCore
from atom.engine.executors.cpu import CPUExecutor
from atom.engine.messages import AddRequest
from atom.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Row:
    concurrency: int
    output_tokens_per_s: float
    decode_tokens_per_s: float
    decode_step_ms: float
    prefill_tokens_per_s: float
    phase_share: dict[str, float]
    outside_share: float
    """Of the wall time, what was not spent inside steps: scheduling and hand-over."""


def measure(core: EngineCore, executor: CPUExecutor, concurrency: int, args: argparse.Namespace, first_id: int) -> Row:
    rng = np.random.default_rng(args.seed + concurrency)
    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, max_tokens=args.output_len, ignore_eos=True, seed=args.seed
    )
    for i in range(concurrency):
        prompt = rng.integers(0, core.info["vocab_size"], args.input_len).astype("<i4").tobytes()
        core.add_request(AddRequest(first_id + i, str(first_id + i), prompt, params, time.monotonic_ns()))
    assert executor.runner is not None
    before = dict(executor.runner.phase_seconds)
    prefill_s = decode_s = 0.0
    prefill_tokens = decode_tokens = output_tokens = decode_steps = 0
    started = time.perf_counter()
    while core.has_work:
        outputs = core.step()
        if outputs is None or outputs.stats is None:
            continue
        output_tokens += len(outputs.token_ids)
        stats = outputs.stats
        if stats.step_prefill_tokens:
            prefill_s += stats.step_seconds
            prefill_tokens += stats.step_prefill_tokens
        elif len(outputs.token_ids) == concurrency:
            decode_s += stats.step_seconds
            decode_steps += 1
            decode_tokens += len(outputs.token_ids)
    wall = time.perf_counter() - started
    phases = {name: value - before[name] for name, value in executor.runner.phase_seconds.items()}
    inside = sum(phases.values())
    return Row(
        concurrency,
        output_tokens / wall,
        decode_tokens / decode_s,
        decode_s / decode_steps * 1e3,
        prefill_tokens / prefill_s,
        {name: value / inside for name, value in phases.items()},
        1 - inside / wall,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto", choices=["auto", "attention", "torch"])
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=1, help="runs per concurrency; the fastest is printed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = EngineConfig(
        model=ModelConfig(model=args.model, load_format=args.load_format, dtype=args.dtype),
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=max(args.concurrency), max_num_batched_tokens=2048),
        executor="cpu",
        num_threads=args.num_threads,
    )
    executor = CPUExecutor(config, kernels=args.kernels)
    core = EngineCore(config, executor)
    facts = core.info
    print(f"{facts['architecture']}, {facts['dtype']}, kernels {facts['kernels']}, {facts['threads']} threads")
    print("concurrency | output tok/s | decode tok/s | decode step ms | prefill tok/s | batch/forward/sample | outside")
    try:
        first_id = 0
        for concurrency in args.concurrency:
            rows = []
            for _ in range(args.repeat):
                rows.append(measure(core, executor, concurrency, args, first_id))
                first_id += concurrency
            row = max(rows, key=lambda r: r.decode_tokens_per_s)
            shares = " / ".join(f"{share:.1%}" for share in row.phase_share.values())
            print(
                f"{row.concurrency:11d} | {row.output_tokens_per_s:12.1f} | {row.decode_tokens_per_s:12.1f} | "
                f"{row.decode_step_ms:14.2f} | {row.prefill_tokens_per_s:13.0f} | {shares} | {row.outside_share:.1%}",
                flush=True,
            )
    finally:
        core.shutdown()


if __name__ == "__main__":
    main()
