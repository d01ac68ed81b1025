"""One MPI job of this project's ranks: starts it, waits, ends it, and says in one line which rank failed and how."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

import atom
from atom.bench.rundir import JsonlFile
from atom.recipes.errors import RunError

__all__ = ["run_job"]

_GRACE_S: Final = 10.0
_POLL_S: Final = 0.05
_MOST_OUTPUT: Final = 1 << 24


def run_job(command: Sequence[str], *, trace_dir: Path, log: Path, timeout_s: float) -> str:
    """Run `command`, whose ranks trace into `trace_dir`; returns the last line of its standard output. Standard error
    goes to `log`. RunError if a rank fails or nothing ends within `timeout_s`; whatever happens, no process is left."""
    output = log.with_suffix(".out")
    with log.open("wb") as errors, output.open("wb") as out:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=_environment(), start_new_session=True
            )
        except OSError as error:
            raise RunError(f"cannot start {command[0]}: {error.strerror}") from None
        try:
            status = _wait(process, timeout_s)
        finally:
            _end(process)
    lines = _tail(output)
    with contextlib.suppress(OSError):
        output.unlink()
    if status is None:
        raise RunError(f"not over after {timeout_s:.0f} s ({_unfinished(trace_dir)}); {log} has what the ranks said")
    if status != 0:
        raise RunError(f"{_blame(trace_dir, log, status)}; the traces in {trace_dir} are readable up to there")
    return lines[-1] if lines else ""


def _environment() -> dict[str, str]:
    """Ranks import the atom that this process runs, and start no threads of their own for linear algebra."""
    own = [str(Path(one).parent) for one in atom.__path__]
    path = [*own, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    until = time.monotonic() + timeout_s
    while (status := process.poll()) is None and time.monotonic() < until:
        time.sleep(_POLL_S)
    return status


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end its ranks; kill what does not."""
    if process.poll() is not None:
        return
    family = [process.pid, *_children(process.pid)]
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    for pid in reversed(family):
        if pid != process.pid or process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(psutil.Error):
        yield from (child.pid for child in psutil.Process(pid).children(recursive=True))


# Who it was


def _blame(trace_dir: Path, log: Path, status: int) -> str:
    """The rank that ended first, by its guard's record; what ranks said of themselves; or what the launcher said."""
    exits = sorted(_exits(trace_dir), key=lambda one: one["t"])
    killed = next((one for one in exits if one["signal"] is not None), None)
    if killed is not None:
        return f"rank {killed['rank']} was killed by {killed['signal']}"
    said = _errors(trace_dir)
    if said:
        return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in said.items())
    last = " ".join(_tail(log)[-1:])
    who = f"rank {exits[0]['rank']} ended with status {exits[0]['status']}" if exits else f"exit status {status}"
    return f"{who}: {last[:300]}" if last else who


def _exits(trace_dir: Path) -> Iterator[dict[str, Any]]:
    for path in trace_dir.glob("rank-*.exit.json"):
        with contextlib.suppress(OSError, ValueError):
            one = json.loads(path.read_text())
            if isinstance(one, dict) and {"rank", "signal", "status", "t"} <= one.keys():
                yield one


def _errors(trace_dir: Path) -> dict[str, list[int]]:
    """What ranks say in the last lines of their traces → which ones."""
    said: dict[str, list[int]] = {}
    for rank, end in _ends(trace_dir):
        if end is not None and isinstance(end.get("error"), str):
            said.setdefault(end["error"], []).append(rank)
    return said


def _unfinished(trace_dir: Path) -> str:
    ranks = [str(rank) for rank, end in _ends(trace_dir) if end is None]
    return f"no end from rank {', '.join(ranks)}" if ranks else "the ranks have ended, their launcher has not"


def _ends(trace_dir: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Rank → the end line of its trace."""
    for path in sorted(trace_dir.glob("rank-*.jsonl"), key=lambda one: (len(one.name), one.name)):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal():
            lines = deque(JsonlFile(path), maxlen=1)
            yield int(number), lines[0] if lines and lines[0].get("e") == "end" else None


def _tail(path: Path) -> list[str]:
    """The last lines of a text that are not empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MOST_OUTPUT))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []
