"""What a render of /metrics does to the event loop: `python tests/benchmarks/bench_metrics_render.py --series 40000`.

A task on the loop sleeps for 1 ms over and over (after `--busy-ms` of work each time) and notes how late it wakes,
without a scrape and during several, once with the interpreter's own switch interval and once with the exporter's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop

from atom.engine.api_sequence import ApiSequence
from atom.engine.config import CacheConfig
from atom.engine.messages import SchedulerStats
from atom.engine.sampling_params import SamplingParams
from atom.engine.server.metrics import exporter
from atom.engine.server.metrics.recorder import Recorder
from atom.engine.server.metrics.request_context import RequestContextGauges
from atom.engine.server.metrics.source import MetricsSource

SLEEP_S = 0.001
WARM_UP_S = 1.0


@dataclass
class Core:
    info: dict[str, Any] = field(default_factory=lambda: {"num_kv_blocks": 1000})


@dataclass
class Engine:
    latest_stats: list[SchedulerStats] = field(default_factory=lambda: [SchedulerStats()])
    engines: list[Core] = field(default_factory=lambda: [Core()])
    num_held_back: int = 0


def make_exporter(num_series: int) -> exporter.MetricsExporter:
    """With `num_series` series of ended requests, two each."""
    contexts = RequestContextGauges()
    for number in range(num_series // 2):
        sequence = ApiSequence(number, "", [1, 2], SamplingParams(), 0)
        sequence.output_token_ids.append(3)
        request_id = f"cmpl-{number:032x}"
        contexts.submitted(request_id, sequence)
        contexts.ended(request_id)
    source = MetricsSource(Recorder(4096, contexts=contexts), Engine(), {}, "model", CacheConfig())
    return exporter.MetricsExporter(source, "both")


async def measure(made: exporter.MetricsExporter, busy_s: float, renders: int) -> tuple[list[float], list[float], int]:
    """Seconds of each render, lateness of each wake-up meanwhile, bytes of the body."""
    late: list[float] = []

    async def wake_up() -> None:
        while True:
            end = time.perf_counter() + busy_s
            while time.perf_counter() < end:
                pass
            asleep = time.perf_counter()
            await asyncio.sleep(SLEEP_S)
            late.append(time.perf_counter() - asleep - SLEEP_S)

    task = asyncio.create_task(wake_up())
    await asyncio.sleep(WARM_UP_S)
    late.clear()
    seconds = []
    body = b""
    for _ in range(renders):
        start = time.perf_counter()
        body, _content_type = await made.render("")
        seconds.append(time.perf_counter() - start)
    task.cancel()
    return seconds, late, len(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--series", type=int, nargs="+", default=[0, 10_000, 40_000])
    parser.add_argument("--busy-ms", type=float, default=0.0, help="work of the loop per turn (default: %(default)s)")
    parser.add_argument("--renders", type=int, default=6)
    args = parser.parse_args()
    print("| series | body MB | switch interval ms | render ms | loop late p50 / p99 / max ms | turns |")
    print("|---|---|---|---|---|---|")
    ours = exporter.TURN_S
    for num_series in args.series:
        made = make_exporter(num_series)
        gc.collect()
        gc.freeze()
        for interval in (sys.getswitchinterval(), ours):
            exporter.TURN_S = interval  # type: ignore[misc]
            seconds, late, size = uvloop.run(measure(made, args.busy_ms / 1e3, args.renders))
            p50, p99, most = np.percentile(late, [50, 99, 100]) * 1e3
            print(
                f"| {num_series:,} | {size / 1e6:.2f} | {interval * 1e3:g} | {np.median(seconds) * 1e3:.0f} "
                f"| {p50:.2f} / {p99:.1f} / {most:.1f} | {len(late)} |"
            )
        made.close()


if __name__ == "__main__":
    main()
