"""AIPerf and its processes: they end with this one, however it goes. `recipes/supervisor.py` answers for them as for a
server, so that not even `kill -9` of this process leaves AIPerf behind, loading the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from atom.recipes.errors import RunError
from atom.recipes.processes import read_stat
from atom.recipes.server import kill_labelled
from atom.recipes.spawn import module_command
from atom.recipes.supervisor import SupervisorConfig

__all__ = ["STOP_GRACE_S", "AiperfProcess"]

STOP_GRACE_S: Final = 20.0
"""After SIGINT, for its own export; then it is killed."""
_LOG_MAX_BYTES: Final = 256 << 20
_EVENT_BYTES: Final = 8 << 20
"""Of one event at most: a line of the log, or the last ones."""


class AiperfProcess:
    """AIPerf and all it starts. `wait` returns when none of it is left."""

    def __init__(self, supervisor: asyncio.subprocess.Process, label: str) -> None:
        self._supervisor = supervisor
        self._label = label

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], log: Path) -> AiperfProcess:
        own = read_stat(os.getpid())
        assert own is not None
        config = SupervisorConfig(
            label=str(uuid.uuid4()),
            prepare=[],
            command=list(command),
            stop_command=None,
            env=dict(env),
            cwd=None,
            log_path=str(log.absolute()),
            log_max_bytes=_LOG_MAX_BYTES,
            stop_signal=int(signal.SIGINT),
            stop_grace_s=STOP_GRACE_S,
            detached=False,
            launcher_pid=own.pid,
            launcher_start_ticks=own.start_ticks,
            scratch=None,
        )
        supervisor = await asyncio.create_subprocess_exec(
            *module_command("atom.recipes.supervisor", isolated=True),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=_EVENT_BYTES,
        )
        process = cls(supervisor, config.label)
        process._say(json.dumps(asdict(config)))
        return process

    def stop(self) -> None:
        """Let it end: SIGINT, and after `STOP_GRACE_S` SIGKILL."""
        self._say("stop")

    def kill(self) -> None:
        self._say("kill")

    async def wait(self) -> int:
        """Its exit status, as in `subprocess.Popen.returncode`; -SIGKILL where nobody saw it. RunError if it cannot be
        run."""
        assert self._supervisor.stdout is not None
        events = {}
        while line := await self._supervisor.stdout.readline():
            event = json.loads(line)
            events[event["event"]] = event
        await self._supervisor.wait()
        if "done" not in events:  # the supervisor was killed
            await asyncio.to_thread(kill_labelled, self._label)
        if (failed := events.get("exec_failed")) is not None:
            raise RunError(f"cannot run {failed['argv0']}: {failed['message']}")
        status = events.get("done", {}).get("status")
        return -int(signal.SIGKILL) if status is None else int(status)

    def _say(self, line: str) -> None:
        assert self._supervisor.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # it has ended, which `wait` sees
            self._supervisor.stdin.write(line.encode() + b"\n")
