"""The request log: one JSON line per completion, appended and flushed as it ends, so that a killed server leaves whole
lines. It is the operator's file; nothing in the process keeps what was written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from atom.engine.errors import ConfigError

log = logging.getLogger(__name__)


class RequestLine(msgspec.Struct, kw_only=True):
    """What is said of a request. Times in seconds; null where it did not get that far."""

    time: float
    """Unix time at which it ended."""
    request_id: str
    route: str
    model: str
    status: int
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reasons: list[str | None]
    ttft_s: float | None
    e2e_s: float
    error: str | None
    user: str | None
    safety_identifier: str | None
    metadata: dict[str, Any] | None


class RequestLog:
    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=1 << 16)
        except OSError as error:
            raise ConfigError(f"--request-log {path}: cannot be written: {error.strerror}") from None
        self._failed = False

    def write(self, line: RequestLine) -> None:
        """A full disk ends the log, not the server."""
        if self._failed:
            return
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as error:
            self._failed = True
            log.error("--request-log: cannot write any more: %s", error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.error("--request-log: the last lines were not written: %s", error)
