"""What the measurements against the emitter share: the emitter as a process, and what its times say.

Its log has a line per stream: `kernel_ns` and `received_ns` (when the request arrived and was read), and `sent_ns`
(when each chunk was handed to the kernel). All times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def build_emitter() -> Path:
    """The compiled emitter; SystemExit if there is none and none can be built."""
    built = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("emitter.py")), "--build"], stdout=subprocess.PIPE, text=True
    )
    if built.returncode:
        raise SystemExit(built.returncode)
    return Path(built.stdout.strip())


class Emitter:
    """`options` are the emitter's own; `core`: None leaves it on all of them."""

    def __init__(self, program: Path, core: int | None, folder: Path, *options: str) -> None:
        self.log = folder / "log.jsonl"
        port_file = folder / "port"
        self.process = subprocess.Popen(
            [str(program), "--port-file", str(port_file), *options],
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


def gaps_ms(times_ns: Iterable[npt.ArrayLike]) -> npt.NDArray[np.float64]:
    """Between chunks of the same stream, over all streams."""
    return np.concatenate([np.diff(stream) for stream in times_ns]) / 1e6


def ttft_ms(lines: Iterable[Mapping[str, Any]]) -> npt.NDArray[np.float64]:
    """From a request's arrival to its first chunk, for each line of the log."""
    return np.asarray([line["sent_ns"][0] - (line["kernel_ns"] or line["received_ns"]) for line in lines]) / 1e6


def quantiles(values: npt.NDArray[np.float64]) -> dict[str, float]:
    return dict(zip(("p1", "p50", "p99"), np.percentile(values, [1, 50, 99]).tolist(), strict=True))


def in_words(values: npt.NDArray[np.float64]) -> str:
    return "/".join(f"{value:.2f}" for value in quantiles(values).values())
