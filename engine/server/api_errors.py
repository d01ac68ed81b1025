"""What a client sees when something is wrong: OpenAI's error object and the status that goes with it.

    {"error": {"message": "…", "type": "invalid_request_error", "param": "max_tokens", "code": null}}

`code` is null unless a client may want to act on it (`context_length_exceeded`, `model_not_found`, `queue_full`, …).
The same object ends a stream that fails after its first byte. The engine's own exceptions: `engine/errors.py`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from atom.engine.errors import ContextLengthError, EngineDeadError, QueueFullError, RequestError

INVALID_REQUEST: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"


class ApiError(Exception):
    """An answer other than 200. `headers` are added to the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = SERVER_ERROR if status >= 500 else INVALID_REQUEST
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def json(self) -> bytes:
        return msgspec.json.encode(self.body())


class ClientDisconnected(Exception):
    """The client is gone; nobody is left to answer."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """503 for what may work a little later, here or on another instance."""
    return ApiError(503, message, code=code, headers=((b"retry-after", b"1"),))


def shutting_down() -> ApiError:
    return unavailable("the server is shutting down", "shutting_down")


def engine_dead(message: str) -> ApiError:
    return ApiError(503, f"the engine is dead: {message}", code="engine_dead")


def from_exception(error: Exception) -> ApiError | None:
    """The answer for an exception that the engine raises on purpose; None for any other."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return invalid(str(error), error.param, "context_length_exceeded")
        case RequestError():
            return invalid(str(error), error.param)
        case QueueFullError():
            return unavailable(str(error), "queue_full")
        case EngineDeadError():
            return engine_dead(str(error))
    return None
