"""The file that one process's hook writes: `gc-<role>-<pid>.jsonl`.

Opened at the first record, so that short-lived helpers leave none; renamed when the process's role becomes known (a
title set after start). Lines: `hook` (what collects here, once), `pass`, `totals`, `end`. Whatever happens to the file
system is the hook's problem only.
"""

# ruff: noqa: PTH104, PTH118

from __future__ import annotations

import json
import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ACTION_FILE", "OWNER_FILE", "STOP_FILE", "Record", "Roles", "command_line", "start_ticks"]

ACTION_FILE = "gc-action-start"
STOP_FILE = "gc-hook-stop"
OWNER_FILE = "gc-hook-owner"

MAX_FILE_BYTES = 256 << 20
"""Beyond this, passes are counted as dropped and only totals are written."""


class Roles:
    """Role to regular expressions, searched in the command line; the most specific role first."""

    def __init__(self, patterns: Mapping[str, Sequence[str]]) -> None:
        self.patterns = [(role, [re.compile(one) for one in words]) for role, words in patterns.items()]

    def role_of(self, command: str) -> str:
        for role, patterns in self.patterns:
            if any(pattern.search(command) for pattern in patterns):
                return role
        return "other"


class Record:
    """The file of this process. Nothing here raises OSError: after a failure (a full disk) nothing more is written, so
    that a torn line stays the last."""

    def __init__(self, directory: str, roles: Roles) -> None:
        self.directory = directory
        self.roles = roles
        self.pid = os.getpid()
        self.fd = -1
        self.failed = False
        self.written = 0
        self.path: str | None = None
        self.role = "other"
        self.command = ""

    @property
    def unopened(self) -> bool:
        return self.fd < 0 and not self.failed

    @property
    def full(self) -> bool:
        return self.written > MAX_FILE_BYTES

    def open(self, header: dict[str, object]) -> None:
        """Begin the file; its `hook` line is the process's identity and `header`."""
        self.command = command_line()
        self.role = self.roles.role_of(self.command)
        ticks = start_ticks()
        identity = f'"pid":{self.pid},"start_ticks":{"null" if ticks is None else ticks},'
        try:
            self.path, self.fd = self._create(identity)
            self.written = os.fstat(self.fd).st_size
        except OSError:
            self.failed = True
            return
        first = {"type": "hook", "schema_version": header["schema_version"], "pid": self.pid}
        self.write_record({**first, "start_ticks": ticks, "ppid": os.getppid(), "role": self.role, **header})

    def _create(self, identity: str) -> tuple[str, int]:
        """A new file; or the one that this process began before an exec or a detach. Never another process's: pids are
        reused, and containers have the same ones."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        for path in self._paths(self.role):
            try:
                return path, os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                if _begins_with(path, identity):
                    return path, os.open(path, flags)
        raise FileExistsError(self.role)

    def _paths(self, role: str) -> list[str]:
        names = [f"gc-{role}-{self.pid}{suffix}.jsonl" for suffix in ("", *(f".{n}" for n in range(1, 100)))]
        return [os.path.join(self.directory, name) for name in names]

    def follow_title(self) -> None:
        """Rename the file if the process has taken a title that makes its role known."""
        command = command_line()
        if command == self.command or self.path is None:
            return
        self.command = command
        role = self.roles.role_of(command)
        if role == self.role:
            return
        try:
            path = next(path for path in self._paths(role) if not os.path.lexists(path))
            os.rename(self.path, path)
        except (OSError, StopIteration):
            return
        self.role, self.path = role, path

    def write_record(self, record: dict[str, object]) -> None:
        self.write(json.dumps(record, separators=(",", ":")) + "\n")

    def write(self, lines: str) -> None:
        if self.failed or self.fd < 0:
            return
        data = lines.encode()
        try:
            if os.write(self.fd, data) != len(data):
                self.failed = True
            self.written += len(data)
        except OSError:
            self.failed = True

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def command_line() -> str:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def start_ticks() -> int | None:
    """Start time in clock ticks since boot: with the pid an identity, and the same seen from inside a container."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _begins_with(path: str, identity: str) -> bool:
    """Whether the first line of a record has this identity."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return identity.encode() in os.read(fd, 1000)
    except OSError:
        return False
    finally:
        os.close(fd)
