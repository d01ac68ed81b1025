"""The load generator against an emitter of known times: how true its stamps are, and how much it can take.

    python tests/benchmarks/bench_client.py [truth|rate|short|flat|hold ...] [--streams 64 256] [--workers 1] [--json -]

The client is pinned to one core per worker, the emitter (tests/benchmarks/emitter.c, built on first use with a C
compiler; --emitter PATH: built elsewhere) to another.

truth: streams that all get a chunk in the same 10 ms tick; ITL and TTFT as the client printed them beside the emitter's
       own stamps, and the client's stamp of each chunk minus the emitter's.
rate:  the emitter at full rate: token-bearing chunks per second of wall time and of the client's CPU time.
short: requests of one token: requests per second.
flat:  ten million chunks: resident memory on the way.
hold:  2,000 requests per second on a Poisson schedule: requested against achieved rate, and how late they were sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from known_times import Emitter, build_emitter, gaps_ms, in_words, quantiles, ttft_ms

from atom.bench.arrivals import Arrivals
from atom.bench.load import Api, Endpoint, LoadSpec, Shard
from atom.bench.random_load import RandomSource
from atom.bench.records import read_records
from atom.bench.rundir import RunDirectory, read_jsonl
from atom.bench.runner import Progress, run_in_loop, run_load
from atom.bench.static_load import StaticLoad
from atom.bench.summary import summarize
from atom.bench.workers import run_workers

TICK_MS = 10.0
TOKENS = 100
"""Of a stream of `truth`: it lasts a second."""


@dataclass(frozen=True)
class Setup:
    emitter: Path
    emitter_core: int | None
    workers: int
    seconds: float
    report: Callable[[dict[str, Any], str], None]


@dataclass
class Loaded:
    figures: dict[str, Any]
    reasons: list[str]
    checks: list[dict[str, Any]]
    cpu_s: float
    wall_s: float
    """From the start of the measured phase until everything was parsed and written."""
    run_dir: RunDirectory
    source: RandomSource


def load(
    setup: Setup,
    url: str,
    folder: Path,
    *,
    requests: int,
    tokens: int,
    streams: int | None = None,
    rate: float = float("inf"),
    on_progress: Callable[[Progress], None] | None = None,
) -> Loaded:
    source = RandomSource(num_prompts=requests, api=Api.COMPLETIONS, model="emitter", input_len=4, output_len=tokens)
    workload = StaticLoad(source=source, arrivals=Arrivals(request_rate=rate))
    spec = LoadSpec(
        name="random",
        endpoint=Endpoint(base_url=url, model="emitter"),
        workload=workload,
        max_concurrency=streams,
        num_warmups=streams or 64,
        shard=Shard(0, setup.workers),
    )
    run_dir = RunDirectory(folder / "run")
    before = _cpu_s()
    run = run_load if setup.workers == 1 else run_workers
    outcome = run_in_loop(run(spec, run_dir, on_progress, asyncio.Event()))
    cpu_s, wall_s = _cpu_s() - before, (time.monotonic_ns() - outcome.started_ns) / 1e9
    summary = summarize(run_dir)
    figures = {name: figure["value"] for name, figure in summary["figures"].items()}
    return Loaded(figures, summary["reasons"], summary["checks"], cpu_s, wall_s, run_dir, source)


def truth(setup: Setup, streams: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emitter = Emitter(
            setup.emitter, setup.emitter_core, folder, "--log", str(folder / "log.jsonl"), "--tick-ms", str(TICK_MS)
        )
        try:
            got = load(
                setup, emitter.url, folder, streams=streams, requests=int(streams * setup.seconds), tokens=TOKENS
            )
        finally:
            emitter.close()
        sent = {line["crc"]: line for line in read_jsonl(emitter.log)}
        records = list(read_records(got.run_dir))
        pairs = [(record, sent[zlib.crc32(got.source.request(record.index).body)]) for record in records]
        theirs = gaps_ms(line["sent_ns"] for _, line in pairs)
        mine = gaps_ms(np.unique(record.chunk_ns) for record, _ in pairs)
        late = np.concatenate(
            [np.subtract(r.chunk_ns, line["sent_ns"]) for r, line in pairs if len(r.chunk_ns) == len(line["sent_ns"])]
        )
        ttft = ttft_ms(line for _, line in pairs)
        figures, late_us = got.figures, np.percentile(late / 1e3, [1, 50, 99])
        values = {
            "streams": streams,
            "workers": setup.workers,
            "itl_ms": {"emitter": quantiles(theirs), "client": quantiles(mine)},
            "mean_ttft_ms": {"emitter": ttft.mean(), "client": figures["mean_ttft_ms"]},
            "late_us": dict(zip(("p1", "p50", "p99"), late_us.tolist(), strict=True)),
            "coalesced_share": figures["coalesced_share"],
            "cpu_us_per_chunk": got.cpu_s / ((len(records) + streams) * TOKENS) * 1e6,  # with those of the warm-up
            "client_cpu_share": figures["client_cpu_share"],
            "stamps": _stamps(got.run_dir),
            "not_valid": got.reasons,
        }
        setup.report(
            {"truth": values},
            f"{streams:5d} streams  ITL p1/p50/p99: emitter {in_words(theirs)}, client {in_words(mine)} ms\n"
            f"               TTFT mean: emitter {ttft.mean():.3f}, client {figures['mean_ttft_ms']:.3f} ms\n"
            f"               chunk stamp − emitter's, p1/p50/p99: {'/'.join(f'{v:.0f}' for v in late_us)} µs, "
            f"stamps: {json.dumps(values['stamps'])}\n"
            f"               coalesced {figures['coalesced_share']:.2%}, CPU {figures['client_cpu_share']:.0%}, "
            f"{values['cpu_us_per_chunk']:.1f} µs per chunk  {'; '.join(got.reasons)}",
        )


def _stamps(run_dir: RunDirectory) -> dict[str, int]:
    """Where the arrival times came from, over all workers."""
    total: dict[str, int] = {}
    for path in sorted(run_dir.client.glob("*.jsonl")):
        for line in read_jsonl(path):
            for source, count in (line.get("stamps") or {}).items():
                total[source] = total.get(source, 0) + count
    return total


def rate(setup: Setup, name: str, *, streams: int, requests: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        emitter = Emitter(setup.emitter, setup.emitter_core, folder, "--full-rate")
        try:
            got = load(setup, emitter.url, folder, streams=streams, requests=requests, tokens=tokens)
        finally:
            emitter.close()
        duration = got.wall_s
        values = {
            "streams": streams,
            "tokens": tokens,
            "workers": setup.workers,
            "chunks_per_s": requests * tokens / duration,
            "chunks_per_cpu_s": requests * tokens / got.cpu_s,
            "requests_per_s": requests / duration,
            "requests_per_cpu_s": requests / got.cpu_s,
            "records_mib": sum(path.stat().st_size for path in got.run_dir.request_files()) / 2**20,
            "failed": got.figures["failed"],
        }
        setup.report(
            {name: values},
            f"{streams:5d} streams × {tokens} tokens: {values['chunks_per_s']:,.0f} chunks/s of wall time, "
            f"{values['chunks_per_cpu_s']:,.0f} per CPU second; {values['requests_per_s']:,.0f} requests/s, "
            f"{values['requests_per_cpu_s']:,.0f} per CPU second; {values['failed']:.0f} failed",
        )


def flat(setup: Setup, chunks: int) -> None:
    tokens, marks = 1000, [chunks // 10, chunks // 2, chunks]
    resident: dict[int, float] = {}

    def look(progress: Progress) -> None:
        while len(resident) < len(marks) and progress.output_tokens >= marks[len(resident)]:
            resident[marks[len(resident)]] = _rss_mib()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emitter = Emitter(setup.emitter, setup.emitter_core, folder, "--full-rate")
        run_dir = RunDirectory(folder / "run")
        source = RandomSource(
            num_prompts=chunks // tokens, api=Api.COMPLETIONS, model="emitter", input_len=4, output_len=tokens
        )
        endpoint = Endpoint(base_url=emitter.url, model="emitter")
        spec = LoadSpec(name="random", endpoint=endpoint, workload=StaticLoad(source=source), max_concurrency=64)
        begin = time.monotonic()
        try:
            outcome = run_in_loop(run_load(spec, run_dir, look, asyncio.Event()))
        finally:
            emitter.close()
        took = time.monotonic() - begin
        resident.setdefault(chunks, _rss_mib())
    values = {"resident_mib": resident, "took_s": took, "completed": outcome.completed}
    text = ", ".join(f"{mib:.1f} MiB at {count:,}" for count, mib in resident.items())
    setup.report({"flat": values}, f"{chunks:,} chunks in {took:.1f} s: {text}")


def hold(setup: Setup, per_second: float, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emitter = Emitter(setup.emitter, setup.emitter_core, folder, "--tick-ms", str(TICK_MS))
        try:
            requests = round(per_second * seconds)
            got = load(setup, emitter.url, folder, requests=requests, tokens=5, rate=per_second)
        finally:
            emitter.close()
        sent = sorted((r.scheduled_ns, r.sent_ns) for r in read_records(got.run_dir) if r.sent_ns is not None)
        due, went = np.asarray(sent, dtype=np.int64).T
        late = np.percentile((went - due) / 1e6, [50, 99, 100])
        planned_s, took_s = (due.max() - due.min()) / 1e9, (went.max() - went.min()) / 1e9
        values = {
            "requested_rps": (len(sent) - 1) / planned_s,
            "achieved_rps": (len(sent) - 1) / took_s,
            "late_ms": dict(zip(("p50", "p99", "max"), late.tolist(), strict=True)),
            "checks": got.checks,
            "client_cpu_share": got.figures["client_cpu_share"],
            "not_valid": got.reasons,
        }
        setup.report(
            {"hold": values},
            f"{requests:,} requests on a Poisson schedule: {values['requested_rps']:,.1f} req/s requested, "
            f"{values['achieved_rps']:,.1f} achieved ({planned_s / took_s - 1:+.3%}); sent late by p50/p99/max "
            f"{'/'.join(f'{v:.2f}' for v in late)} ms; CPU {got.figures['client_cpu_share']:.0%}; "
            + "; ".join(check["detail"] for check in got.checks if check["name"] == "littles_law")
            + f"  {'; '.join(got.reasons)}",
        )


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _cpu_s() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[], help="truth, rate, short, flat, hold; default: all")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="of truth")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each truth run")
    parser.add_argument("--workers", type=int, default=1, help="processes of the client, a core each")
    parser.add_argument("--chunks", type=int, default=10_000_000, help="of flat")
    parser.add_argument("--hold-rps", type=float, default=2000.0)
    parser.add_argument("--hold-seconds", type=float, default=60.0)
    parser.add_argument("--emitter", type=Path, help="the compiled emitter, instead of building it")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="one JSON line per measurement as well; -: only these"
    )
    options = parser.parse_args()
    what = options.what or ["truth", "rate", "short", "flat", "hold"]
    if unknown := set(what) - {"truth", "rate", "short", "flat", "hold"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    only_json = str(options.json) == "-"

    def report(values: dict[str, Any], text: str) -> None:
        if not only_json:
            print(text, flush=True)
        if options.json is not None:
            line = json.dumps(values, default=float)
            if only_json:
                print(line, flush=True)
            else:
                with options.json.open("a") as file:
                    file.write(line + "\n")

    options.emitter = options.emitter or build_emitter()
    cores = sorted(os.sched_getaffinity(0))
    emitter_core = None
    if len(cores) > options.workers:
        emitter_core = cores[-1]
        os.sched_setaffinity(0, set(cores[: options.workers]))
    setup = Setup(options.emitter, emitter_core, options.workers, options.seconds, report)
    if "truth" in what:
        for streams in options.streams:
            truth(setup, streams)
    if "rate" in what:
        rate(setup, "rate", streams=64, requests=1000, tokens=1000)
    if "short" in what:
        rate(setup, "short", streams=64, requests=20_000, tokens=1)
    if "flat" in what:
        flat(setup, options.chunks)
    if "hold" in what:
        hold(setup, options.hold_rps, options.hold_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
