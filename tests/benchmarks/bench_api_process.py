"""How many chunks per second one API process streams: `python tests/benchmarks/bench_api_process.py`.

Starts `python -m atom.engine.server` on the simulated executor, which costs next to nothing, so that the API process
is what limits: token ids in, detokenized text out, one SSE event per token through real HTTP to a client that only
drains (`drain_client.py`). All streams ask for the same number of tokens; measured is the middle 80% of the events.
Every stream is then checked: it got exactly one event per token that its usage reports, so nothing was merged.

Exit status 1 when a stream failed or an event was merged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

FIRST, LAST = 0.1, 0.9
EXTRA_EVENTS = 2
"""The usage chunk and [DONE]."""
READY_TIMEOUT_S = 120.0
CLIENT = Path(__file__).with_name("drain_client.py")


@dataclass(frozen=True)
class Result:
    streams: int
    tokens_per_stream: int
    window_s: float
    chunks_per_s: float
    engine_limit_per_s: float
    """What the simulated executor could have produced."""
    api_cpu: float
    """CPUs that the API process used in the window; 1.0 is one core."""
    api_cpu_us_per_chunk: float
    core_cpu: float
    client_cpu_s: float
    api_rss_mb: float
    one_event_per_token: bool
    failure: str | None


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[psutil.Process, int]]:
    """The API process and its port."""
    with tempfile.TemporaryDirectory(prefix="atom-bench-") as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, "-m", "atom.engine.server", "--executor", "simulated", "--port", "0"]
        command += ["--port-file", str(port_file), "--max-num-seqs", str(args.streams)]
        command += [
            "--sim-base-ms",
            str(args.base_ms),
            "--sim-decode-us-per-seq",
            "0",
            "--sim-prefill-us-per-token",
            "0",
        ]
        command += ["--served-model-name", "simulated", "--block-size", "256", "--num-gpu-blocks-override", "65536"]
        log_path = Path(folder) / "server.log"
        with log_path.open("wb") as log:
            process = psutil.Popen([*command, *args.server_args], stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not (port_file.exists() and port_file.read_text().strip()):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the server did not start:\n{log_path.read_text()}")
                time.sleep(0.05)
            yield process, int(port_file.read_text())
        finally:
            process.terminate()
            try:
                process.wait(10)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(args: argparse.Namespace) -> Result:
    with server(args) as (api, port):
        (core,) = api.children()
        if args.pin:
            first, *others = sorted(os.sched_getaffinity(0))
            api.cpu_affinity([first])
            core.cpu_affinity(others or [first])
            os.sched_setaffinity(0, others or [first])  # the client inherits it
        command = [sys.executable, str(CLIENT), "--port", str(port), "--model", "simulated"]
        command += ["--streams", str(args.streams), "--tokens", str(args.tokens), "--marks", str(FIRST), str(LAST)]
        marks: list[tuple[dict[str, Any], float, float, int]] = []
        last: dict[str, Any] = {}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            for line in client.stdout:
                last = json.loads(line)
                if "mark" in last:
                    marks.append((last, cpu_seconds(api), cpu_seconds(core), api.memory_info().rss))
    return summarize(args, marks, last)


def summarize(
    args: argparse.Namespace, marks: list[tuple[dict[str, Any], float, float, int]], last: dict[str, Any]
) -> Result:
    if len(marks) != 2 or "usage" not in last:
        sys.exit(f"the streams ended early: {last.get('first_failure') or last}")
    (begin, api_begin, core_begin, _), (end, api_end, core_end, rss) = marks
    seconds = (end["ns"] - begin["ns"]) / 1e9
    chunks = end["events"] - begin["events"]
    exact = all(
        events - EXTRA_EVENTS == used == args.tokens for events, used in zip(last["events"], last["usage"], strict=True)
    )
    return Result(
        streams=args.streams,
        tokens_per_stream=args.tokens,
        window_s=seconds,
        chunks_per_s=chunks / seconds,
        engine_limit_per_s=args.streams / (args.base_ms / 1e3) if args.base_ms else float("inf"),
        api_cpu=(api_end - api_begin) / seconds,
        api_cpu_us_per_chunk=(api_end - api_begin) / chunks * 1e6,
        core_cpu=(core_end - core_begin) / seconds,
        client_cpu_s=last["cpu_seconds"],
        api_rss_mb=rss / 2**20,
        one_event_per_token=exact,
        failure=last["first_failure"],
    )


def table(results: list[Result]) -> str:
    lines = [
        "| streams | tokens each | window s | chunks/s | engine could | API CPUs | API µs CPU/chunk | core CPUs "
        "| API RSS MB | one event = one token |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r.streams} | {r.tokens_per_stream:,} | {r.window_s:.1f} | {r.chunks_per_s:,.0f} "
            f"| {r.engine_limit_per_s:,.0f} | {r.api_cpu:.2f} | {r.api_cpu_us_per_chunk:.1f} | {r.core_cpu:.2f} "
            f"| {r.api_rss_mb:.0f} | {'yes' if r.one_event_per_token else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048, help="per stream (default: %(default)s)")
    parser.add_argument("--base-ms", type=float, default=2.0, help="simulated step time (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--pin", action="store_true", help="API process on the first CPU, the others on the rest")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    parser.add_argument("server_args", nargs="*", help="after --: further flags of the server")
    args = parser.parse_args()
    results = [measure(args) for _ in range(args.repeat)]
    print(
        f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} CPUs, simulated executor\n"
    )
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=2))
    for result in results:
        if result.chunks_per_s > 0.9 * result.engine_limit_per_s:
            print("\nThe simulated engine was the limit, not the API process: lower --base-ms.", file=sys.stderr)
        if result.failure is not None or not result.one_event_per_token:
            print(f"\nNot one event per token: {result.failure or 'events and usage differ'}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
