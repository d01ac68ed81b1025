"""The load generator against an emitter of known times: how true its stamps are, and how much it can take.

    python tests/benchmarks/bench_client.py [truth|rate|short|all]

The client is pinned to one core, the emitter (tests/benchmarks/emitter.py) to another.

truth: 64 and 256 streams, all emitting in the same 10 ms tick; ITL and TTFT as the client printed them beside the
       emitter's own stamps.
rate:  the emitter at full rate: token-bearing chunks per second of wall time and of the client's CPU time.
short: requests of one token: requests per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from atom.bench.load import Api, Endpoint, LoadSpec
from atom.bench.random_load import RandomSource
from atom.bench.records import read_records
from atom.bench.rundir import RunDirectory, read_jsonl
from atom.bench.runner import run_in_loop, run_load
from atom.bench.summary import summarize

EMITTER = Path(__file__).with_name("emitter.py")


class Emitter:
    def __init__(self, folder: Path, core: int | None, *options: str) -> None:
        self.log = folder / "log.jsonl"
        port_file = folder / "port"
        self.process = subprocess.Popen(
            [sys.executable, str(EMITTER), "--port-file", str(port_file), *options],
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        )
        while not (port_file.exists() and port_file.read_text()):
            if self.process.poll() is not None:
                raise SystemExit("the emitter ended")
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{port_file.read_text()}"

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def load(url: str, folder: Path, *, streams: int, requests: int, tokens: int) -> tuple[dict[str, Any], RunDirectory]:
    """Run it and return the summary's values, with the CPU seconds of this process under `cpu_s`."""
    source = RandomSource(num_prompts=requests, api=Api.COMPLETIONS, model="emitter", input_len=4, output_len=tokens)
    endpoint = Endpoint(base_url=url, model="emitter")
    spec = LoadSpec(name="random", endpoint=endpoint, source=source, max_concurrency=streams, num_warmups=streams)
    run_dir = RunDirectory(folder / "run")
    before = time.process_time()
    run_in_loop(run_load(spec, run_dir, None, asyncio.Event()))
    cpu = time.process_time() - before
    summary = summarize(run_dir)
    return {
        **{k: f["value"] for k, f in summary["figures"].items()},
        "cpu_s": cpu,
        "reasons": summary["reasons"],
    }, run_dir


def truth(core: int | None, streams: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emitter = Emitter(folder, core, "--log", str(folder / "log.jsonl"), "--tick-ms", "10")
        tokens = 100
        try:
            got, run_dir = load(emitter.url, folder, streams=streams, requests=int(streams * seconds), tokens=tokens)
        finally:
            emitter.close()
        sent = list(read_jsonl(emitter.log))[streams:]
        gaps = np.concatenate([np.diff(line["sent_ns"]) for line in sent]) / 1e6
        ttft = np.asarray([line["sent_ns"][0] - line["received_ns"] for line in sent]) / 1e6
        mine = np.concatenate([np.diff(np.unique(r.chunk_ns)) for r in read_records(run_dir)]) / 1e6
        print(
            f"{streams:5d} streams  ITL p1/p50/p99: emitter {_quantiles(gaps)}, client {_quantiles(mine)} ms"
            f"  TTFT mean: emitter {ttft.mean():.2f}, client {got['mean_ttft_ms']:.2f} ms"
            f"  coalesced {got['coalesced_share']:.2%}  CPU {got['client_cpu_share']:.0%}  {'; '.join(got['reasons'])}"
        )


def _quantiles(values: Any) -> str:
    return "/".join(f"{value:.2f}" for value in np.percentile(values, [1, 50, 99]))


def rate(core: int | None, streams: int, requests: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emitter = Emitter(folder, core, "--full-rate")
        try:
            got, run_dir = load(emitter.url, folder, streams=streams, requests=requests, tokens=tokens)
        finally:
            emitter.close()
        chunks = requests * tokens
        size = sum(path.stat().st_size for path in run_dir.request_files())
        print(
            f"{streams:5d} streams × {tokens} tokens: {chunks / got['duration']:,.0f} chunks/s of wall time, "
            f"{chunks / got['cpu_s']:,.0f} per CPU second, {requests / got['duration']:,.0f} requests/s "
            f"({requests / got['cpu_s']:,.0f} per CPU second); records {size >> 20} MiB"
        )
        print("      " + json.dumps({"peak_rss_mib": _peak_rss_mib()}))


def _peak_rss_mib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) >> 10
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=["truth", "rate", "short", "all"])
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each truth run")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    other = cores[1] if len(cores) > 1 else None
    if other is not None:
        os.sched_setaffinity(0, {cores[0]})
    if options.what in ("truth", "all"):
        for streams in (64, 256):
            truth(other, streams, options.seconds)
    if options.what in ("rate", "all"):
        rate(other, streams=64, requests=1000, tokens=1000)
    if options.what in ("short", "all"):
        rate(other, streams=64, requests=10_000, tokens=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
