"""What the scheduler costs per step with N sequences decoding: `python tests/benchmarks/bench_scheduler.py`.

Results are fed to it directly: no executor, no sleeping, no process. One step is always in flight, as in a running
engine, so step n+1 is scheduled before the tokens of step n are known. Sequences start at different lengths, so
that in each step about 1/block_size of them fill a block and need the next. Prints a Markdown table of medians: other
processes of the machine can only make a step slower.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from array import array

from atom.engine.config import SchedulerConfig
from atom.engine.executors.base import SchedulerOutput, StepResult
from atom.engine.executors.simulated import token_table
from atom.engine.kv_cache_manager import KVCacheManager
from atom.engine.messages import AddRequest
from atom.engine.sampling_params import SamplingParams
from atom.engine.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
EOS = (2,)


def decoding_scheduler(running: int, prompt_len: int, steps: int, prefix_caching: bool) -> Scheduler:
    """A scheduler whose `running` sequences all have been prefilled; prompts share nothing."""
    blocks = running * ((prompt_len + BLOCK_SIZE + steps) // BLOCK_SIZE + 2)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=max(running, 1 << 16)),
        KVCacheManager(blocks, BLOCK_SIZE, enable_prefix_caching=prefix_caching),
        max_model_len=1 << 20,
        eos_token_ids=EOS,
        vocab_size=VOCAB_SIZE,
    )
    for seq_id in range(running):
        prompt = array("i", token_table(seq_id, prompt_len + seq_id % BLOCK_SIZE, VOCAB_SIZE)).tobytes()
        scheduler.add(AddRequest(seq_id, f"r{seq_id}", prompt, SamplingParams(max_tokens=None), 0))
    while scheduler.waiting or any(len(seq.tokens) == seq.num_prompt_tokens for seq in scheduler.running):
        output = scheduler.schedule()
        assert output is not None
        scheduler.update(answer(output))
    return scheduler


def answer(output: SchedulerOutput) -> StepResult:
    seq_ids = [seq_id for seq_id, samples in zip(output.seq_ids, output.samples, strict=True) if samples]
    return StepResult(output.step, seq_ids, [100 + (output.step + seq_id) % 1000 for seq_id in seq_ids])


def measure(running: int, steps: int, prompt_len: int, prefix_caching: bool) -> dict[str, float]:
    """Median and 99th percentile in µs per call."""
    scheduler = decoding_scheduler(running, prompt_len, steps + 8, prefix_caching)
    in_flight = scheduler.schedule()
    assert in_flight is not None
    schedule_ns: list[int] = []
    update_ns: list[int] = []
    for _ in range(steps):
        result = answer(in_flight)
        t0 = time.perf_counter_ns()
        output = scheduler.schedule()
        t1 = time.perf_counter_ns()
        scheduler.update(result)
        t2 = time.perf_counter_ns()
        assert output is not None
        assert len(output.seq_ids) == running
        in_flight = output
        schedule_ns.append(t1 - t0)
        update_ns.append(t2 - t1)
    step_ns = [a + b for a, b in zip(schedule_ns, update_ns, strict=True)]
    return {
        "running": running,
        "schedule_us": statistics.median(schedule_ns) / 1e3,
        "update_us": statistics.median(update_ns) / 1e3,
        "step_us": statistics.median(step_ns) / 1e3,
        "step_p99_us": sorted(step_ns)[int(0.99 * (steps - 1))] / 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    rows = []
    for running in args.running:
        rows.append(measure(running, args.steps, args.prompt_len, not args.no_prefix_caching))
        gc.collect()
    if args.json:
        print(json.dumps(rows))
        return 0
    print("| running | schedule µs | update µs | step µs | step p99 µs | µs per sequence |")
    print("|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['running']} | {row['schedule_us']:.1f} | {row['update_us']:.1f} | {row['step_us']:.1f} "
            f"| {row['step_p99_us']:.1f} | {row['step_us'] / row['running']:.3f} |"
        )
    print(f"\nmedians of {args.steps} steps, block size {BLOCK_SIZE}, Python {sys.version.split()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
