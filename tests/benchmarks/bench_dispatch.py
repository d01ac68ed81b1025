"""What a token costs the API process below HTTP: `python tests/benchmarks/bench_dispatch.py`.

A real core on the simulated executor sends steps of N tokens as fast as it can; counted is everything that the API
process does with them: ZMQ, msgpack, table look-up, detokenization, event objects, hand-over to the loop, and a sink
that only counts. HTTP on top of it: `bench_api_process.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import uvloop

from atom.engine.core_manager import CoreManager
from atom.engine.llm import config_from_options
from atom.engine.loading.tokenizer import load_tokenizer
from atom.engine.sampling_params import SamplingParams
from atom.engine.streaming import StreamDispatcher, TokenEvent


async def measure(streams: int, seconds: float, rounds: int, stop: tuple[str, ...]) -> list[tuple[float, float]]:
    """Tokens per second and CPU microseconds per token, per round."""
    tokenizer = load_tokenizer("embedded")
    config = config_from_options(
        executor="simulated",
        base_ms=0.0,
        decode_us_per_seq=0.0,
        prefill_us_per_token=0.0,
        vocab_size=tokenizer.vocab_size,
        max_num_seqs=streams,
        max_num_batched_tokens=max(2048, streams),
    )
    manager = CoreManager(config)
    await asyncio.to_thread(manager.start)
    try:
        dispatcher = StreamDispatcher(manager, tokenizer, asyncio.get_running_loop())
        tokens = 0

        def sink(event: TokenEvent) -> None:
            nonlocal tokens
            tokens += 1
            if event.finish_reason is not None and manager.is_alive:
                start()

        def start() -> None:
            params = SamplingParams(max_tokens=4000, ignore_eos=True, stop=stop)
            dispatcher.submit("bench", [1, 2, 3], params, sink)

        for _ in range(streams):
            start()
        await asyncio.sleep(1.0)
        results = []
        for _ in range(rounds):
            cpu, count, begin = time.process_time(), tokens, time.perf_counter()
            await asyncio.sleep(seconds)
            count = tokens - count
            results.append(
                (count / (time.perf_counter() - begin), (time.process_time() - cpu) / count * 1e6),
            )
        return results
    finally:
        await asyncio.to_thread(manager.shutdown, False, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| streams | stop string | tokens/s | API CPU µs per token |\n|---|---|---|---|")
    for stop in ((), ("\n\nnever\n\n",)):
        for rate, cost in uvloop.run(measure(args.streams, args.seconds, args.rounds, stop)):
            print(f"| {args.streams} | {'yes' if stop else 'no'} | {rate:,.0f} | {cost:.2f} |")


if __name__ == "__main__":
    main()
