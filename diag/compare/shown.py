"""A comparison's plan and document as others may see them: people attach those to pull requests. What arms and loads
put into environments, arguments and options loses its secrets, by the rules of `bench/redact.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from atom.bench.redact import REDACTED, redact_arguments, redact_environment, redact_option, redact_text

__all__ = ["shown"]

_ENVIRONMENTS: Final = frozenset(("env", "variables"))
_ARGUMENTS: Final = frozenset(("server_args", "command"))


def shown(value: Any, name: str = "") -> Any:
    """A JSON value, which stood under `name`. Names of its own fields (`key`) are no names of secrets."""
    if isinstance(value, Mapping):
        if name in _ENVIRONMENTS:
            return redact_environment({one: str(text) for one, text in value.items()})
        if name == "options":
            return {flag: REDACTED if flag == "header" else redact_option(flag, one) for flag, one in value.items()}
        return {one: shown(content, str(one)) for one, content in value.items()}
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Sequence):
        texts = name in _ARGUMENTS and all(isinstance(one, str) for one in value)
        return redact_arguments(value) if texts else [shown(one) for one in value]
    return value
