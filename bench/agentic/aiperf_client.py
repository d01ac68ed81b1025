"""`--client aiperf`: the same sessions, server and seed given to an installed AIPerf, as a process of its own.

Its artifacts stay in `aiperf/` of the run directory; what it says of each request becomes a record there
(`bench/agentic/aiperf_records.py`), so that reports and comparisons read both clients alike. Facts of its command line
are of AIPerf 0.13.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

from atom.bench.agentic.aiperf_launch import VARIABLE
from atom.bench.agentic.aiperf_process import AiperfProcess
from atom.bench.agentic.aiperf_records import ARTIFACTS, TRACES, Imported, import_records
from atom.bench.agentic.scenario_load import ScenarioLoad
from atom.bench.aiperf_export import RECORDS_FILE
from atom.bench.load import Api, LoadSpec, Shard
from atom.bench.redact import REDACTED, redact, redact_text
from atom.bench.rundir import RunDirectory
from atom.bench.runner import LoadOutcome, OnProgress, Progress
from atom.bench.wall_clock import WallClock
from atom.recipes.errors import RunError, UsageError

__all__ = ["Aiperf", "AiperfClient", "find_aiperf"]

LAUNCH: Final = Path(__file__).with_name("aiperf_launch.py")
LOG_FILE: Final = "aiperf.log"
POLL_S: Final = 0.5
_NAMES_INTERPRETER: Final = ("#!", "'''exec' ")
"""How the first line of a script begins, or else its second."""
_HELP_TIMEOUT_S: Final = 120.0
_TAIL_BYTES: Final = 20_000

Pairs = list[tuple[str, str]]
"""Flags and their values."""


@dataclass(frozen=True, slots=True)
class Aiperf:
    """An installed AIPerf."""

    path: str
    version: str
    help: str
    """Of `aiperf profile`: its flags differ between versions."""

    def interpreter(self) -> list[str]:
        """What its script names as its interpreter. UsageError if that is no Python: then nothing can be handed to it
        but in its command line."""
        try:
            with open(self.path, "rb") as file:
                head = file.read(1024).decode(errors="replace").splitlines()
        except OSError as error:
            raise UsageError(f"--client aiperf: {self.path} cannot be read: {error.strerror}") from None
        lines = zip(head, _NAMES_INTERPRETER, strict=False)
        named = [line.removeprefix(start) for line, start in lines if line.startswith(start)]
        for words in map(_words, named):  # the second line where the path is too long for the first
            if any(Path(word).name.startswith("python") for word in words[:2]):
                return [word for word in words if word not in ("$0", "$@")]
        raise UsageError(
            f"--client aiperf: {self.path} is no Python script: a key, a header or a password in a URL would have to "
            "stand in its command line, where everybody can read it; name AIPerf's own script with --aiperf-executable"
        )

    def require(self, flag: str) -> str:
        """UsageError if this version has no such flag."""
        if flag not in self.help:
            raise UsageError(f"AIPerf {self.version} ({self.path}) has no {flag}: leave out what needs it")
        return flag


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return []


def find_aiperf(executable: str | None) -> Aiperf:
    """`executable`, or the one on PATH; UsageError if there is none, or it is none."""
    path = shutil.which(executable or "aiperf")
    if path is None:
        where = f"--aiperf-executable {executable}: cannot be run" if executable else "no aiperf on PATH"
        raise UsageError(
            f"--client aiperf: {where}; install AIPerf in an environment of its own and name it with "
            "--aiperf-executable"
        )
    version, text = _output(path, "--version"), _output(path, "profile", "--help")
    # Boxes of its help break long flags between lines; without their borders and blanks every flag is whole.
    flags = "".join(text.replace("│", " ").split())
    if "--endpoint-type" not in flags:
        raise UsageError(
            f"--client aiperf: {path} is not AIPerf: its `profile --help` names no --endpoint-type; name AIPerf's own "
            "script with --aiperf-executable"
        )
    return Aiperf(path, version.strip()[:40] or "?", flags)


def _output(path: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [path, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_HELP_TIMEOUT_S,
            check=False,
            env={**os.environ, "COLUMNS": "200"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--client aiperf: {path} cannot be run: {error}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UsageError(f"--client aiperf: {path} {arguments[0]} fails: {said[-1] if said else 'no message'}")
    return done.stdout


@dataclass(frozen=True, kw_only=True, slots=True)
class AiperfClient:
    """Runs one load in place of `bench/runner.py`. Used once."""

    executable: Aiperf
    traces: Callable[[Path], Path]
    """Directory to write to, if need be → trace file or directory."""
    load: ScenarioLoad
    unsafe_override: bool
    max_context_length: int | None
    num_dataset_entries: int | None
    server_metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        load, aiperf = self.load.load, self.executable
        if self.load.scenario is None:
            raise UsageError("--client aiperf replays sessions only under a --scenario")
        if load.tokenizer is None:
            raise UsageError("--client aiperf needs --tokenizer: the directory of the model's tokenizer")
        for flag, given in (
            ("--num-sessions", load.num_sessions),
            ("--cache-bust-nonce", load.nonce or None),
            ("--vocab-size", load.vocab_size),
            ("--continuous-usage-stats", load.continuous_usage_stats or None),
        ):
            if given is not None:
                raise UsageError(f"{flag} is for --client native: AIPerf has nothing like it here")
        if load.warmup_requests_per_lane:
            aiperf.require("--warmup-requests-per-lane")

    async def __call__(
        self, spec: LoadSpec, run_dir: RunDirectory, on_progress: OnProgress | None, stop: asyncio.Event
    ) -> LoadOutcome:
        """As `bench/runner.run_load`. RunError if AIPerf fails, after what it recorded has been taken over."""
        if spec.shard.of > 1:
            self.executable.require("--workers-max")
        folder = run_dir.path.absolute() / ARTIFACTS
        folder.mkdir(exist_ok=True)
        traces = await asyncio.to_thread(self.traces, folder / TRACES)
        command, hidden = self.command(spec, traces, folder), _hidden(spec, self.load)
        clock = WallClock.now()
        alone = replace(spec, shard=Shard())  # its own processes write no files of ours
        run_dir.write_run_json(
            {
                "load": alone.describe(),
                "aiperf": {"version": self.executable.version, "command": [*command, *_shown(hidden)]},
            }
        )
        status = await self._run(*self._start(command, hidden), folder, on_progress, stop)
        imported = await asyncio.to_thread(
            import_records, run_dir, folder, self.load.load.sessions, clock, stopped=stop.is_set()
        )
        run_dir.write_run_json({"aiperf": {**run_dir.read_run_json()["aiperf"], **imported.facts, "status": status}})
        if imported.start_ns is not None:
            run_dir.write_run_json({"measured_start_ns": imported.start_ns})
        if status != 0 and not stop.is_set():
            raise RunError(f"aiperf ended with status {status}: {_last_words(folder)}; all of it: {folder / LOG_FILE}")
        return _outcome(imported, stopped=stop.is_set())

    def command(self, spec: LoadSpec, traces: Path, folder: Path) -> list[str]:
        """AIPerf's command line for `spec`, without what is `_hidden`."""
        aiperf, load, endpoint = self.executable, self.load.load, spec.endpoint
        assert self.load.scenario is not None
        assert load.tokenizer is not None
        assert spec.duration is not None
        tokenizer = load.tokenizer if load.tokenizer.is_dir() else load.tokenizer.parent
        command = [aiperf.path, "profile", "--scenario", self.load.scenario]
        if self.unsafe_override:
            command.append("--unsafe-override")
        if not _carry_secrets(endpoint.base_urls):
            for url in endpoint.base_urls:
                command += ["--url", url]
        command += ["--endpoint-type", "chat" if endpoint.api is Api.CHAT else "completions"]
        command += ["--endpoint", endpoint.path, "--streaming", "--model", endpoint.model]
        command += ["--tokenizer", str(tokenizer.absolute()), "--use-server-token-count", "--no-gpu-telemetry"]
        command += ["--input-file", str(traces.absolute()), "--custom-dataset-type", "weka_trace"]
        command += ["--concurrency", str(load.concurrency), "--random-seed", str(load.seed)]
        command += ["--benchmark-duration", f"{spec.duration:g}", "--slice-duration", f"{spec.slice_duration:g}"]
        command += ["--failed-request-threshold", f"{spec.failed_request_threshold:g}"]
        command += ["--trajectory-start-min-ratio", f"{load.start_min_ratio:g}"]
        command += ["--trajectory-start-max-ratio", f"{load.start_max_ratio:g}"]
        command += ["--request-timeout-seconds", f"{endpoint.request_timeout:g}"]
        command += self._where_given(spec)
        for name, value in _inputs(self.load, secret=False):
            command += [name, value]
        if not load.ignore_eos:
            command += ["--extra-inputs", "ignore_eos:false"]
        return [*command, "--output-artifact-dir", str(folder), "--ui", "none"]

    def _where_given(self, spec: LoadSpec) -> list[str]:
        aiperf, load = self.executable, self.load.load
        grace = "--agentic-warmup-grace-period"
        options: Mapping[str, Any] = {
            "--benchmark-grace-period": spec.grace_period,
            "--trace-idle-gap-cap-seconds": load.trace_idle_gap_cap,
            "--system-idle-gap-cap-seconds": load.system_idle_gap_cap,
            "--max-context-length": self.max_context_length,
            "--num-dataset-entries": self.num_dataset_entries,
            "--cache-bust": str(load.cache_bust).replace("_", "-"),
            "--warmup-requests-per-lane": load.warmup_requests_per_lane or None,
            grace if grace in aiperf.help else "--warmup-grace-period": load.warmup_grace_period,
            "--workers-max": spec.shard.of if spec.shard.of > 1 else None,
        }
        given = [
            (aiperf.require(flag), f"{value:g}" if isinstance(value, float) else str(value))
            for flag, value in options.items()
            if value is not None
        ]
        metrics = ["--server-metrics", *self.server_metrics] if self.server_metrics else []
        return [*(part for pair in given for part in pair), *metrics]

    def _start(self, command: list[str], hidden: Pairs) -> tuple[list[str], dict[str, str]]:
        """What is started for `command` and what is hidden, and its environment."""
        env = _environment()
        if not hidden:
            return command, env
        env[VARIABLE] = json.dumps([part for pair in hidden for part in pair])
        return [*self.executable.interpreter(), str(LAUNCH), *command], env

    async def _run(
        self,
        command: list[str],
        env: Mapping[str, str],
        folder: Path,
        on_progress: OnProgress | None,
        stop: asyncio.Event,
    ) -> int:
        """AIPerf to its end, or to ours: nothing of it is left when this returns, however it does."""
        process = await AiperfProcess.start(command, env, folder / LOG_FILE)
        stopped = asyncio.ensure_future(stop.wait())
        ended = asyncio.ensure_future(process.wait())
        progress = _Watched(folder)
        try:
            while not ended.done() and not stopped.done():
                await asyncio.wait({ended, stopped}, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if on_progress is not None:
                    on_progress(progress.look())
            if not ended.done():
                process.stop()
                await asyncio.wait({ended})
        finally:
            stopped.cancel()
            process.kill()
            await asyncio.wait({ended})
        return ended.result()


def _environment() -> dict[str, str]:
    """Ours, without what would keep AIPerf from taking a tokenizer's directory (it asks the hub's cache instead)."""
    left_out = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _hidden(spec: LoadSpec, load: ScenarioLoad) -> Pairs:
    """Flags and values that no command line may have."""
    endpoint = spec.endpoint
    key = [] if endpoint.api_key is None else [("--api-key", endpoint.api_key)]
    urls = [("--url", url) for url in endpoint.base_urls] if _carry_secrets(endpoint.base_urls) else []
    headers = [("--header", f"{name}:{value}") for name, value in endpoint.headers.items()]
    return [*urls, *key, *headers, *_inputs(load, secret=True)]


def _shown(hidden: Pairs) -> list[str]:
    """For run.json."""
    return [part for flag, value in hidden for part in (flag, redact_text(value) if flag == "--url" else REDACTED)]


def _carry_secrets(urls: Sequence[str]) -> bool:
    return any(redact_text(url) != url for url in urls)


def _inputs(load: ScenarioLoad, *, secret: bool) -> Pairs:
    """Further fields of each request's body: those that hold secrets, or the others."""
    fields = {**load.load.sampling, **load.load.extra_body}
    return [
        ("--extra-inputs", f"{name}:{value if isinstance(value, str) else json.dumps(value)}")
        for name, value in fields.items()
        if (redact({name: value}) != {name: value}) == secret
    ]


class _Watched:
    """Progress, from the lines that AIPerf has written so far."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORDS_FILE
        self._offset = 0
        self._progress = Progress(total=None)
        self._begun_ns: int | None = None

    def look(self) -> Progress:
        progress = self._progress
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._take(line)
        if self._begun_ns is not None:
            progress.elapsed_s = (monotonic_ns() - self._begun_ns) / 1e9
        return progress

    def _take(self, line: bytes) -> None:
        progress = self._progress
        if b'"benchmark_phase":"profiling"' not in line:
            progress.phase = "warmup"
            return
        progress.phase = "measured"
        self._begun_ns = self._begun_ns or monotonic_ns()
        progress.started += 1
        try:
            record = json.loads(line)
            failed = record.get("error") is not None
            tokens = record.get("metrics", {}).get("output_sequence_length", {}).get("value")
        except (ValueError, AttributeError):
            return
        progress.failed += failed
        progress.completed += not failed
        progress.output_tokens += tokens if isinstance(tokens, int) else 0


def _outcome(imported: Imported, *, stopped: bool) -> LoadOutcome:
    return LoadOutcome(
        started_ns=imported.start_ns or 0,
        ended_ns=imported.end_ns or 0,
        started=imported.completed + imported.failed + imported.cancelled,
        sent=imported.completed + imported.failed + imported.cancelled,
        completed=imported.completed,
        failed=imported.failed,
        cancelled=imported.cancelled,
        interrupted=stopped,
        first_error=imported.first_error,
    )


def _last_words(folder: Path) -> str:
    """The line of its log that says most."""
    try:
        with (folder / LOG_FILE).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = [line.strip(" │•") for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        lines = []
    told = [line for line in lines if "Error" in line or "ERROR" in line or "error" in line]
    return (told or [line for line in lines if line] or ["it said nothing"])[-1][:300]
