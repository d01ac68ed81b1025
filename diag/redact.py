"""Secrets stay out of run directories: people attach those to pull requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["REDACTED", "redact_arguments", "redact_environment"]

REDACTED: Final = "<redacted>"
_SECRET: Final = re.compile(r"(^|[^a-z])(api-?_?key|token|secret|password|passwd|credentials?)([^a-z]|$)", re.I)
_NOT_SECRET: Final = re.compile(r"tokens|token[-_](ids?|len|type|range)|tokenizer", re.I)


def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(name)) and not _NOT_SECRET.search(name)


def redact_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Values of variables named like secrets (HF_TOKEN, X_API_KEY, …) replaced."""
    return {name: REDACTED if _is_secret(name) else value for name, value in env.items()}


def redact_arguments(command: Sequence[str]) -> list[str]:
    """Values of options named like secrets (`--api-key X`, `--api-key=X`, `-e HF_TOKEN=X`) replaced."""
    shown: list[str] = []
    after_secret = False
    for word in command:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            after_secret = not equals and _is_secret(word)
        elif after_secret:  # also the further values of an option that takes several
            shown.append(REDACTED)
            continue
        shown.append(f"{name}={REDACTED}" if equals and _is_secret(name) else word)
    return shown
