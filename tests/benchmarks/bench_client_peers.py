"""Load generators beside each other, against an emitter of known times: what each says, what was true, what it costs.

    python tests/benchmarks/bench_client_peers.py --vllm-python VENV/bin/python --aiperf VENV/bin/aiperf --tokenizer DIR

`atom bench random`, `vllm bench serve` and `aiperf profile` run as their own commands, one at a time, all processes of
each on the same one core, the emitter (tests/benchmarks/emitter.c) on another. DIR has the tokenizer that the others
make their prompts with (a Hugging Face directory); what is not named is left out.

ticks:     all streams get a chunk in the same 10 ms tick. ITL and mean TTFT over all requests, from the lists that each
           client writes, beside the emitter's own stamps; "short or missing" is the share of gaps that a client has
           below 1 ms or not at all, because it took several chunks for one moment.
full rate: everything is sent as fast as the client takes it. Chunks per second of CPU time.

CPU time is that of all processes of a client from the arrival of the first measured request to the end of the command:
without start-up and warm-up, but with all that a client leaves for later, such as parsing and results. The lists that
`ticks` needs are not asked for at full rate.

Each round goes over all clients, and to standard error. The tables have each client's best round: the one with ITL p1
and p99 nearest the truth, or with most chunks per CPU second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from known_times import Emitter, build_emitter, gaps_ms, in_words, quantiles, ttft_ms

from atom.bench.rundir import read_jsonl

TICK_MS = 10.0
SHORT_MS = 1.0
"""No tick makes such a gap, unless the emitter itself was late."""
TOKENS = 100
"""Of a stream in ticks: it lasts a second."""
FULL_STREAMS, FULL_TOKENS = 64, 1000
SAMPLE_S = 0.05
RUN_LIMIT_S = 300.0

VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What the command does, without the parts of it that need a GPU build or the package's metadata."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Load:
    streams: int
    requests: int
    tokens: int
    detailed: bool
    """Whether the client is to write its lists of times."""


@dataclass(frozen=True)
class Reported:
    """A client's own result, in seconds and ms: a TTFT per request and the ITL of all, if these were written."""

    duration_s: float
    completed: int
    ttft_ms: Floats
    itl_ms: Floats


@dataclass(frozen=True)
class Client:
    name: str
    command: Callable[[str, Path, Load], Sequence[str]]
    """Of the emitter's URL and a folder to write into."""
    read: Callable[[Path], Reported]
    env: dict[str, str | None]
    """None: not set."""


def atom() -> Client:
    def command(url: str, folder: Path, load: Load) -> Sequence[str]:
        return [
            *(sys.executable, "-m", "atom.cli.main", "bench", "random", "--base-url", url, "--model", "emitter"),
            *("--random-input-len", "4", "--random-output-len", str(load.tokens), "--ignore-eos"),
            *("--num-prompts", str(load.requests), "--max-concurrency", str(load.streams)),
            *("--num-warmups", str(load.streams), "--vocab-size", "32000", "--no-gpu-telemetry", "--quiet"),
            *("--json", str(folder / "result.json"), "--output-dir", str(folder / "run")),
            *(["--save-detailed"] if load.detailed else []),
        ]

    return Client("atom", command, read_vllm_json, {})


def vllm(python: Path, tokenizer: Path) -> Client:
    def command(url: str, folder: Path, load: Load) -> Sequence[str]:
        return [
            *(str(python), "-c", VLLM_BENCH_SERVE, "--backend", "openai", "--base-url", url, "--model", "emitter"),
            *("--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", "4"),
            *("--random-output-len", str(load.tokens), "--ignore-eos", "--num-prompts", str(load.requests)),
            *("--max-concurrency", str(load.streams), "--num-warmups", str(load.streams), "--disable-tqdm"),
            *("--ready-check-timeout-sec", "0", "--save-result", "--result-dir", str(folder)),
            *("--result-filename", "result.json", *(["--save-detailed"] if load.detailed else [])),
        ]

    version = first_line(python, "-c", "from vllm.version import __version__; print(__version__)")
    return Client(f"vllm bench serve {version}", command, read_vllm_json, {"HF_HUB_OFFLINE": "1"})


def aiperf(program: Path, tokenizer: Path) -> Client:
    def command(url: str, folder: Path, load: Load) -> Sequence[str]:
        return [
            *(str(program), "profile", "--url", url, "--model", "emitter", "--endpoint-type", "completions"),
            *("--streaming", "--tokenizer", str(tokenizer), "--use-server-token-count", "--isl", "4"),
            *("--osl", str(load.tokens), "--request-count", str(load.requests), "--concurrency", str(load.streams)),
            *("--warmup-request-count", str(load.streams), "--num-dataset-entries", str(load.requests)),
            *("--no-gpu-telemetry", "--no-server-metrics", "--ui", "none", "--artifact-dir", str(folder / "out")),
        ]

    # Offline, it takes a tokenizer's directory for the name of a repository.
    return Client(f"aiperf {first_line(program, '--version')}", command, read_aiperf, {"HF_HUB_OFFLINE": None})


def first_line(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        raise SystemExit(f"{command[0]} does not say its version: {done.stderr.strip()[-500:]}")
    return done.stdout.strip().splitlines()[-1].split("+")[0]


def read_vllm_json(folder: Path) -> Reported:
    """Result and lists of `vllm bench serve --save-detailed`, which `atom bench` writes as well."""
    result = json.loads((folder / "result.json").read_text())
    done = [index for index, error in enumerate(result.get("errors", [])) if not error]
    return Reported(
        result["duration"],
        result["completed"],
        np.asarray([result["ttfts"][index] for index in done]) * 1e3,
        np.asarray([gap for index in done for gap in result["itls"][index]]) * 1e3,
    )


def read_aiperf(folder: Path) -> Reported:
    records = list(read_jsonl(folder / "out" / "profile_export.jsonl"))
    records = [r for r in records if r["metadata"]["benchmark_phase"] == "profiling" and not r.get("error")]
    starts, ends = ([r["metadata"][f"request_{which}_ns"] for r in records] for which in ("start", "end"))
    gaps = [r["metrics"]["inter_chunk_latency"]["value"] for r in records if "inter_chunk_latency" in r["metrics"]]
    ttft = np.asarray([r["metrics"]["time_to_first_token"]["value"] for r in records])
    return Reported((max(ends) - min(starts)) / 1e9, len(records), ttft, np.concatenate(gaps))


class CpuTime:
    """CPU time of a session's processes while they run: (monotonic ns, seconds so far), a sample at a time.

    Between samples it is taken as growing evenly. A process that ended counts in its parent's time.
    """

    TICKS_PER_S = os.sysconf("SC_CLK_TCK")

    def __init__(self, session: int) -> None:
        self.session = session
        self.samples: list[tuple[int, float]] = []
        self._known: list[Path] = []
        self._looked_ns = 0

    def sample(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns > 5e8:
            everything = [path / "stat" for path in Path("/proc").iterdir() if path.name.isdigit()]
            self._known = [path for path in everything if (stat := _stat(path)) and int(stat[3]) == self.session]
            self._looked_ns = now_ns
        stats = [stat for path in self._known if (stat := _stat(path))]
        self.samples.append((now_ns, sum(int(ticks) for stat in stats for ticks in stat[11:15]) / self.TICKS_PER_S))

    def since(self, begin_ns: int) -> float:
        """Until the end."""
        times, seconds = np.asarray(self.samples).T
        return float(seconds.max() - np.interp(begin_ns, times, np.maximum.accumulate(seconds)))


def _stat(path: Path) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: session is 3; own and reaped children's CPU time are 11 to 14."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return None


def run_client(client: Client, command: Sequence[str], core: int, log: Path) -> CpuTime:
    """Until it has ended, with all that it started. Its exit status is of no interest where its result is there."""
    env = {**os.environ, **{name: value for name, value in client.env.items() if value is not None}}
    for name, value in client.env.items():
        if value is None:
            env.pop(name, None)
    deadline = time.monotonic() + RUN_LIMIT_S
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd=log.parent,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        cpu = CpuTime(process.pid)
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{client.name} took longer than {RUN_LIMIT_S:.0f} s")
                cpu.sample()
                time.sleep(SAMPLE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return cpu


@dataclass(frozen=True)
class Measured:
    reported: Reported
    sent: list[dict[str, Any]]
    """The emitter's log of the measured requests."""
    cpu_s: float


def measure(client: Client, load: Load, program: Path, cores: tuple[int, int], *options: str) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "client.log"
        emitter = Emitter(program, cores[1], folder, "--log", str(folder / "log.jsonl"), *options)
        try:
            cpu = run_client(client, client.command(emitter.url, folder, load), cores[0], log)
        finally:
            emitter.close()
        try:
            reported = client.read(folder)
        except (OSError, ValueError, KeyError) as error:
            raise SystemExit(f"{client.name} left no result: {error!r}\n{log.read_text()[-2000:]}") from error
        if reported.completed != load.requests:
            raise SystemExit(f"{client.name}: {reported.completed} of {load.requests} requests succeeded")
        # Warm-up requests came before all others.
        sent = sorted(read_jsonl(emitter.log), key=lambda line: line["received_ns"])[-load.requests :]
        begin_ns = sent[0]["kernel_ns"] or sent[0]["received_ns"]
        return Measured(reported, sent, cpu.since(begin_ns))


def ticks(load: Load, program: Path, cores: tuple[int, int], client: Client) -> tuple[float, str]:
    """How far from the truth (ms), and the table's row."""
    got = measure(client, load, program, cores, "--tick-ms", str(TICK_MS))
    mine, theirs = got.reported.itl_ms, gaps_ms(line["sent_ns"] for line in got.sent)
    off = sum(abs(quantiles(mine)[name] - quantiles(theirs)[name]) for name in ("p1", "p99"))
    short = [1 - np.count_nonzero(gaps >= SHORT_MS) / len(theirs) for gaps in (mine, theirs)]
    return off, (
        f"| {client.name} | {load.streams} | {in_words(mine)} | {in_words(theirs)} "
        f"| {got.reported.ttft_ms.mean():.2f} | {ttft_ms(got.sent).mean():.2f} | {short[0]:.1%} | {short[1]:.1%} "
        f"| {got.reported.duration_s:.2f} | {got.cpu_s:.2f} |"
    )


def full_rate(load: Load, program: Path, cores: tuple[int, int], client: Client) -> tuple[float, str]:
    """CPU seconds per chunk, and the table's row."""
    got = measure(client, load, program, cores, "--full-rate")
    chunks = load.requests * load.tokens
    return got.cpu_s / chunks, f"| {client.name} | {chunks:,} | {got.cpu_s:.2f} | {chunks / got.cpu_s:,.0f} |"


def best(rounds: int, clients: Sequence[Client], one: Callable[[Client], tuple[float, str]]) -> list[str]:
    rows: dict[str, list[tuple[float, str]]] = {client.name: [] for client in clients}
    for _ in range(rounds):
        for client in clients:
            rows[client.name].append(one(client))
            print(rows[client.name][-1][1], file=sys.stderr, flush=True)
    return [min(of_client)[1] for of_client in rows.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[], help="ticks, full-rate; default: both")
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vLLM")
    parser.add_argument("--aiperf", type=Path, help="the program")
    parser.add_argument("--tokenizer", type=Path, help="for the prompts of these two")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="of ticks")
    parser.add_argument("--seconds", type=int, default=4, help="of ticks: streams one after the other, a second each")
    parser.add_argument("--full-requests", type=int, default=600, help="of 1,000 chunks, at full rate")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    what = options.what or ["ticks", "full-rate"]
    if unknown := set(what) - {"ticks", "full-rate"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if (options.vllm_python or options.aiperf) and options.tokenizer is None:
        parser.error("--tokenizer is needed with --vllm-python and --aiperf")
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        parser.error("two cores are needed: one for the clients, one for the emitter")
    cores = available[0], available[-1]
    os.sched_setaffinity(0, {cores[1]})  # looking at a client's CPU time costs it none
    program = build_emitter()
    clients = [atom()]
    if options.vllm_python:
        clients.append(vllm(options.vllm_python.absolute(), options.tokenizer.resolve()))
    if options.aiperf:
        clients.append(aiperf(options.aiperf.absolute(), options.tokenizer.resolve()))
    if "ticks" in what:
        rows: list[str] = []
        for streams in options.streams:
            load = Load(streams, streams * options.seconds, TOKENS, detailed=True)
            rows += best(options.rounds, clients, partial(ticks, load, program, cores))
        print("| client | streams | ITL p1/p50/p99, ms | true | mean TTFT, ms | true ", end="")
        print("| short or missing | true | load took, s | CPU s |")
        print("|---|---|---|---|---|---|---|---|---|---|", *rows, sep="\n", flush=True)
    if "full-rate" in what:
        load = Load(FULL_STREAMS, options.full_requests, FULL_TOKENS, detailed=False)
        rows = best(options.rounds, clients, partial(full_rate, load, program, cores))
        print("\n| client | chunks | CPU s | chunks per CPU s |")
        print("|---|---|---|---|", *rows, sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
