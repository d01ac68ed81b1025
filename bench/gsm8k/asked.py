"""Whether two runs asked their questions the same way: only then is a difference the model's or the engine's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["asked_differently", "data_set"]

_SETTINGS: Final[Mapping[str, str]] = {
    "prompt": "prompt as",
    "num_fewshot": "--num-fewshot",
    "max_tokens": "--max-gen-toks",
    "stop": "stop",
    "sampling": "sampling",
    "extra_body": "--extra-body",
}
_OF_EXAMPLES: Final[Mapping[str, str]] = {"fewshot_sampler": "--fewshot-sampler", "fewshot_seed": "--fewshot-seed"}
_SHOWN_OF_HASH: Final = 12
_LONGEST: Final = 80


def asked_differently(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """`--max-gen-toks 256 in A, 64 in B` and the like, of two runs' `load` in run.json. Files are compared by their
    content, wherever they lie."""
    left, right = _asked(a), _asked(b)
    return [f"{name} {left[name]} in A, {right[name]} in B" for name in left if left[name] != right[name]]


def data_set(source: Mapping[str, Any]) -> str:
    """The problems by name, with the beginning of their file's hash."""
    return _file(source.get("problems"), source.get("origin"))


def _asked(load: Mapping[str, Any]) -> dict[str, str]:
    source = load.get("source")
    source = source if isinstance(source, dict) else {}
    asked = {"model": _text(load.get("model"))}
    asked |= {label: _text(source.get(name)) for name, label in _SETTINGS.items()}
    # Of no examples it does not matter where they would have come from.
    some = source.get("num_fewshot") != 0
    asked["examples"] = _examples(source) if some else "–"
    asked |= {label: _text(source.get(name)) if some else "–" for name, label in _OF_EXAMPLES.items()}
    return asked


def _examples(source: Mapping[str, Any]) -> str:
    """By their content where they are a file's: the same file may have another name elsewhere."""
    return _hash(source.get("fewshot_origin")) or _text(source.get("fewshot_examples"))


def _file(name: Any, origin: Any) -> str:
    digest = _hash(origin)
    return f"{_text(name)} ({digest})" if digest else _text(name)


def _hash(origin: Any) -> str:
    digest = origin.get("sha256") if isinstance(origin, dict) else None
    return f"sha256 {digest[:_SHOWN_OF_HASH]}" if isinstance(digest, str) else ""


def _text(value: Any) -> str:
    if value is None:
        return "not told"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
