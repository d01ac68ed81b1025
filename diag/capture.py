"""The capture process: scrapes `/metrics`, probes `/health`, samples processes and GPUs beside a load, where that does
not disturb the client.

`python -m atom.diag.capture` reads one JSON line (`CaptureConfig`) from standard input and records until that input
ends, so it never outlives the session that started it. On its way out it prints one JSON line that says how much was
recorded and what went wrong. `CaptureProcess` is the session's side.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from atom.bench.rundir import JsonlWriter
from atom.diag.gpu_telemetry import GpuSampler
from atom.diag.health_probe import HealthProbe
from atom.diag.metrics_scraper import PERIOD_S, MetricsScraper
from atom.diag.metrics_target import MetricsTarget
from atom.diag.process_sampler import ProcessSampler
from atom.recipes.errors import RunError, UsageError
from atom.recipes.recipe import Roles
from atom.recipes.spawn import module_command

__all__ = ["CaptureConfig", "CaptureProcess", "MetricsTarget"]

_FINISH_S: Final = 1.0
"""What scrapes and probes that are under way may still take when the session ends; then they are cut."""
_STOP_TIMEOUT_S: Final = 15.0
_KILL_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    directory: str
    """`server/` of the run directory."""
    metrics: list[MetricsTarget] = field(default_factory=list)
    period_s: float = PERIOD_S
    label: str | None = None
    roots: list[int] = field(default_factory=list)
    listeners: list[int] = field(default_factory=list)
    """See `ProcessSampler` for the three lists of pids."""
    trees: list[int] = field(default_factory=list)
    health_url: str | None = None
    """None: no probe."""
    roles: dict[str, list[str]] = field(default_factory=dict)
    gpus: list[str] | None = None
    """Indices or UUIDs; empty: all of this host. None: no GPU telemetry."""
    gpus_required: bool = False
    """That there is none is to be said."""

    @classmethod
    def from_json(cls, text: str) -> CaptureConfig:
        raw: dict[str, Any] = json.loads(text)
        return cls(**{**raw, "metrics": [MetricsTarget(**target) for target in raw["metrics"]]})


class _Recorder:
    """A file that lines go to; a full disk costs lines, which are counted, never the capture.

    `late`: the file is made with its first line, because there may be none.
    """

    def __init__(self, path: Path, *, late: bool = False) -> None:
        self._writer = None if late else JsonlWriter(path)
        self.path = path
        self.lines = 0
        self.lost = 0
        self.error: str | None = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        try:
            if self._writer is None:
                self._writer = JsonlWriter(self.path)
            self._writer.append(record)
            self.lines += 1
        except (OSError, RunError, UsageError) as error:
            self.lost += 1
            self.error = self.error or str(error)


def main() -> None:
    # Ctrl-C and the end of a terminal reach whole groups; the session decides when captures end.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.readline()
    if not line:
        return  # the session died before it said anything
    config = CaptureConfig.from_json(line)
    directory = Path(config.directory)
    stop = threading.Event()
    jobs: list[tuple[_Recorder, Callable[[_Recorder, threading.Event], None]]] = []
    cuts: list[Callable[[], None]] = []
    for target in config.metrics:
        scraper = MetricsScraper(target.url, target.dialect, period_s=config.period_s)
        cuts.append(scraper.cut)
        jobs.append((_Recorder(directory / f"metrics-{target.role}.jsonl"), scraper.run))
    if config.health_url is not None:
        probe = HealthProbe(config.health_url)
        cuts.append(probe.cut)
        jobs.append((_Recorder(directory / "health.jsonl"), probe.run))
    if config.label or config.roots or config.listeners or config.trees:
        sampler = ProcessSampler(
            label=config.label,
            roots=config.roots,
            listeners=config.listeners,
            trees=config.trees,
            roles=Roles.from_dict(config.roles),
        )
        jobs.append((_Recorder(directory / "process.jsonl"), sampler.run))
    gpu = None if config.gpus is None else GpuSampler(config.gpus, required=config.gpus_required)
    if gpu is not None:
        jobs.append((_Recorder(directory / "gpu.jsonl", late=True), gpu.run))
    threads = [threading.Thread(target=run, args=(recorder, stop), daemon=True) for recorder, run in jobs]
    for thread in threads:
        thread.start()
    _tell({"started": len(jobs)})
    sys.stdin.read()  # until the session closes its end, or dies
    stop.set()
    _join(threads)
    for cut in cuts:
        cut()
    _join(threads)
    report: dict[str, dict[str, Any]] = {
        recorder.path.name: {"lines": recorder.lines, "lost": recorder.lost, "error": recorder.error}
        for recorder, _ in jobs
    }
    if gpu is not None:
        report["gpu.jsonl"]["problem"] = gpu.problem
    _tell(report)
    os._exit(0)  # a library's call that never returns must not hold this process up


def _join(threads: Sequence[threading.Thread]) -> None:
    """Give them `_FINISH_S` in all."""
    deadline = time.monotonic() + _FINISH_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _tell(message: Mapping[str, Any]) -> None:
    """One line for the session. One that was killed reads it no more, and its terminal is no place for a traceback."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")


class CaptureProcess:
    """A running capture."""

    def __init__(self, config: CaptureConfig) -> None:
        self._process = subprocess.Popen(
            module_command("atom.diag.capture"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended already, which the next line finds out
            self._process.stdin.write(json.dumps(asdict(config)) + "\n")
            self._process.stdin.flush()
        if not self._process.stdout.readline():  # it records from here on
            self._process.wait()
            raise RunError(f"the capture process did not start (status {self._process.returncode})")

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """End the capture: per file {lines, lost, error}, and what is wrong with it as reasons for the run."""
        try:
            output, _ = self._process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            output = self._last_words()
        try:
            report = cast("dict[str, dict[str, Any]]", json.loads(output))
        except ValueError:
            return {}, [f"the capture process ended early (status {self._process.returncode})"]
        return report, [
            *(f"capture: {entry['lost']} lines lost ({entry['error']})" for entry in report.values() if entry["lost"]),
            *(f"GPU telemetry: {entry['problem']}" for entry in report.values() if entry.get("problem")),
        ]

    def _last_words(self) -> str:
        """What a killed capture had said. A process that hangs in a driver cannot even be killed: it is left behind."""
        try:
            return self._process.communicate(timeout=_KILL_TIMEOUT_S)[0]
        except subprocess.TimeoutExpired:
            return ""


if __name__ == "__main__":
    main()
