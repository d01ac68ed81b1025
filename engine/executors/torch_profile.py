"""A torch profiler recording, for executors whose steps run in torch. Its trace opens in Perfetto or chrome://tracing.

The profiler sees the thread that starts it, so an executor calls all of this on the thread that runs its steps.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch

from atom.engine.errors import RequestError


class TorchProfile:
    """At most one recording at a time."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._path = Path()

    def start(self, directory: str) -> None:
        """Record from now on. Raises `RequestError` while recording, or when `directory` cannot be written."""
        if self._profiler is not None:
            raise RequestError("a profile is being recorded already")
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise RequestError(f"cannot create {folder}: {exc.strerror}", "directory") from exc
        if not os.access(folder, os.W_OK):
            raise RequestError(f"cannot write to {folder}", "directory")
        self._path = folder / f"trace-{os.getpid()}-{time.monotonic_ns()}.json.gz"
        # No CUDA activity: where no device is wanted, asking for one costs seconds.
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profiler.start()

    def stop(self) -> str:
        """Write the trace and return its path."""
        if self._profiler is None:
            raise RequestError("no profile is being recorded")
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self._path))
        return str(self._path)

    def span(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A named span in the trace; nothing while none is recorded."""
        return contextlib.nullcontext() if self._profiler is None else torch.profiler.record_function(name)
