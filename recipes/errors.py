"""The tools' exception tree and the exit statuses they map to (`cli/main.py` does the mapping, in one place).

AtomError                    exit status 1
├── UsageError               2: a flag, file or field is wrong; the message names it and what would be right
├── RunError                 1: the run failed (server died, all requests failed, health never came)
│   └── ServerDiedError
├── GateError                3: a gate failed (regression, SLO, divergence)
└── InvalidRunError          4: measured, but not valid evidence (censored, client saturated, inconclusive)
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["AtomError", "ExitStatus", "GateError", "InvalidRunError", "RunError", "ServerDiedError", "UsageError"]


class ExitStatus(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    GATE = 3
    INVALID = 4
    INTERRUPTED = 130
    TERMINATED = 143


class AtomError(Exception):
    """Root of everything the tools raise on purpose. `status` is the exit status of the command."""

    status: ExitStatus = ExitStatus.FAILED


class UsageError(AtomError, ValueError):
    status = ExitStatus.USAGE


class RunError(AtomError):
    status = ExitStatus.FAILED


class ServerDiedError(RunError):
    """A server that a recipe started is gone. The message has its exit status and the last lines of its log.

    `server_status` is that status, as in `subprocess.Popen.returncode`; None where it is not known. `cause` is what
    happened in one line, without the log.
    """

    def __init__(self, message: str, server_status: int | None = None, *, cause: str | None = None) -> None:
        super().__init__(message)
        self.server_status = server_status
        self.cause = cause or message.partition("\n")[0]


class GateError(AtomError):
    status = ExitStatus.GATE


class InvalidRunError(AtomError):
    status = ExitStatus.INVALID
