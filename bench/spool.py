"""Requests made ready before the load starts, so that none has to be encoded while something is being timed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from atom.bench.load import PlannedRequest
from atom.recipes.errors import RunError

__all__ = ["RequestSpool"]

MAX_MEMORY: Final = 256 << 20
"""Bodies beyond this many bytes go to an unnamed temporary file."""


@dataclass(slots=True)
class _Entry:
    offset: int
    size: int
    input_len: int | None
    output_len: int | None
    session: str | None
    turn: int | None
    tags: Mapping[str, Any] | None


class RequestSpool:
    """Holds the bodies of many requests in bounded memory."""

    def __init__(self, requests: Iterable[PlannedRequest]) -> None:
        """Takes all of `requests`. RunError if the temporary file cannot hold them."""
        self._file = tempfile.SpooledTemporaryFile(MAX_MEMORY)  # noqa: SIM115 (closed by close)
        self._entries: list[_Entry] = []
        try:
            self._store(requests)
        except OSError as error:
            self.close()
            raise RunError(f"cannot keep the prepared requests in {tempfile.gettempdir()}: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def _store(self, requests: Iterable[PlannedRequest]) -> None:
        offset = 0
        for request in requests:
            self._file.write(request.body)
            self._entries.append(
                _Entry(
                    offset,
                    len(request.body),
                    request.input_len,
                    request.output_len,
                    request.session,
                    request.turn,
                    request.tags,
                )
            )
            offset += len(request.body)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> PlannedRequest:
        entry = self._entries[index]
        self._file.seek(entry.offset)
        body = self._file.read(entry.size)
        return PlannedRequest(body, entry.input_len, entry.output_len, entry.session, entry.turn, entry.tags)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take is not needed any more
            self._file.close()
