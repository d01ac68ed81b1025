"""Which tokens end a sequence, from a model directory's or a GGUF file's own metadata; no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from atom.engine.errors import ModelLoadError
from atom.engine.loading.source import read_json, read_json_if_present

MAX_EOS_IDS: Final = 64
_ID: Final = re.compile(r"[0-9]{1,10}")


def hf_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Union of generation_config.json's `eos_token_id` (else config.json's) and the tokenizer's `eos_token`.

    The model's own ids come first. Empty when the directory names none.
    """
    generation = folder / "generation_config.json"
    raw = read_json_if_present(generation).get("eos_token_id")
    if raw is None:
        generation = folder / "config.json"
        raw = read_json_if_present(generation).get("eos_token_id")
    ids = _checked(raw, generation)
    tokenizer_id = _tokenizer_eos_id(folder)
    if tokenizer_id is not None and tokenizer_id not in ids:
        ids.append(tokenizer_id)
    return tuple(ids)


def gguf_eos_token_ids(metadata: dict[str, Any], path: Path) -> tuple[int, ...]:
    """End-of-sequence, end-of-turn and end-of-message ids of a GGUF file, without duplicates."""
    ids: list[int] = []
    for name in ("eos", "eot", "eom"):
        for token_id in _checked(metadata.get(f"tokenizer.ggml.{name}_token_id"), path):
            if token_id not in ids:
                ids.append(token_id)
    return tuple(ids)


def _checked(raw: Any, path: Path) -> list[int]:
    values = [] if raw is None else raw if isinstance(raw, list) else [raw]
    if len(values) > MAX_EOS_IDS or any(type(value) is not int or value < 0 for value in values):
        raise ModelLoadError(f"{path}: eos_token_id must be a token id or a list of at most {MAX_EOS_IDS}")
    return list(dict.fromkeys(values))


def _tokenizer_eos_id(folder: Path) -> int | None:
    config = read_json_if_present(folder / "tokenizer_config.json")
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for key, entry in decoder.items():
            if isinstance(entry, dict) and entry.get("content") == token and _ID.fullmatch(key):
                return int(key)
    backend = folder / "tokenizer.json"
    if backend.exists():
        added = read_json(backend).get("added_tokens")
        for entry in added if isinstance(added, list) else []:
            if isinstance(entry, dict) and entry.get("content") == token and type(entry.get("id")) is int:
                return int(entry["id"])
    return None
