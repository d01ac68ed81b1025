"""The engine's exception tree. The tools have their own in `recipes/errors.py`; the two meet only over HTTP.

AtomEngineError
├── ConfigError             a value the user gave is wrong; also a ValueError
│   ├── ModelLoadError      a model directory or file is missing, malformed or unsupported
│   └── RequestError        one request is wrong: carries the parameter's name for the 400 response
│       └── ContextLengthError   the prompt plus max_tokens do not fit the model's context
├── EngineDeadError         the EngineCore process is gone; every open request fails with it
├── OutputsNotConsumedError get_output() on a manager whose outputs queue nothing fills; also a RuntimeError
└── QueueFullError          admission refused: too many requests are waiting
"""

from __future__ import annotations

__all__ = [
    "AtomEngineError",
    "ConfigError",
    "ContextLengthError",
    "EngineDeadError",
    "ModelLoadError",
    "OutputsNotConsumedError",
    "QueueFullError",
    "RequestError",
]


class AtomEngineError(Exception):
    """Root of everything the engine raises on purpose."""


class ConfigError(AtomEngineError, ValueError):
    """A configuration value is wrong. The message names the flag or field and what would be right."""


class ModelLoadError(ConfigError):
    """A model directory or file is missing, malformed or of an architecture that is not supported."""


class RequestError(ConfigError):
    """One request is wrong. `param` is the name of the offending field as the client spelled it, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt, or the prompt plus `max_tokens`, exceeds the model's context length."""


class EngineDeadError(AtomEngineError):
    """The EngineCore process died or failed; nothing can be served any more."""


class OutputsNotConsumedError(AtomEngineError, RuntimeError):
    """`get_output()` was called on a manager whose `consumes_outputs_queue` is cleared: nothing would ever arrive."""


class QueueFullError(AtomEngineError):
    """Too many requests are waiting; the client should retry later (HTTP 503)."""
