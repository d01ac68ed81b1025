"""`load_tokenizer`: a model's tokenizer, from a Hugging Face directory's tokenizer.json or rebuilt from a GGUF file
(`engine/loading/gguf_tokenizer.py`). No torch: the API process uses this.

What a tokenizer does is said in `engine/loading/tokenizer_base.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from atom.engine.config import EMBEDDED_MODEL
from atom.engine.errors import ModelLoadError, RequestError
from atom.engine.loading.byte_tokenizer import ByteTokenizer
from atom.engine.loading.chat_template import ChatTemplate
from atom.engine.loading.eos import gguf_eos_token_ids, hf_eos_token_ids
from atom.engine.loading.gguf_file import GGUFFile
from atom.engine.loading.gguf_tokenizer import build_gguf_tokenizer
from atom.engine.loading.source import PRESET_PREFIX, read_json_if_present, read_text, resolve_model
from atom.engine.loading.tokenizer_base import MAX_ID, Tokenizer, encodable
from atom.engine.models.presets import preset_config

__all__ = ["BYTE_TOKENIZER", "HFTokenizer", "Tokenizer", "gguf_tokenizer", "load_tokenizer"]

BYTE_TOKENIZER: Final = "bytes"
"""`--tokenizer bytes`: the built-in byte-level tokenizer, which needs no files."""
MAX_TOKENIZER_BYTES: Final = 512 << 20
_SPECIAL_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_GGUF_ROLES: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_BYTE_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START: Final = "▁"


class HFTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, backend: Backend, *, vocab_size: int | None = None, **common: Any) -> None:
        """`vocab_size`: the model's; None: as many as the tokenizer has. `common`: see `Tokenizer`."""
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        super().__init__(vocab_size=vocab_size or max(vocabulary.values(), default=-1) + 1, **common)
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._backend = backend
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._tokens = {token_id: token for token, token_id in vocabulary.items()}
        self.is_byte_level = _is_byte_level(backend)
        if self.is_byte_level:
            self.longest_token_chars = _longest_token(backend, self._tokens.values(), added.values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # The batch call releases the GIL, the single one does not: 1.8 MB of text would stop every thread for seconds.
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        checked = [encodable(text) for text in texts]
        return [row.ids for row in self._backend.encode_batch_fast(checked, add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise RequestError(f"token ids must be from 0 to {MAX_ID}") from None
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        if not self.is_byte_level or token_id in self._special:
            return None
        token = self._tokens.get(token_id)
        return None if token is None else _byte_level_bytes(token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        if token_id in self._special:
            return self._special[token_id]
        token = self._tokens.get(token_id)
        if token is None:
            return ""
        if self.is_byte_level:
            return _byte_level_bytes(token).decode("utf-8", errors="replace")
        fallback = _BYTE_FALLBACK.fullmatch(token)
        if fallback:
            return bytes.fromhex(fallback[1]).decode("utf-8", errors="replace")
        return token.replace(_WORD_START, " ")


def load_tokenizer(
    model: str, tokenizer: str | None = None, chat_template: str | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer of a model, or of `tokenizer` (a directory, a .gguf file or "bytes") in its place.

    `chat_template`: path of a Jinja template that replaces the model's own. `vocab_size`: the model's, which bounds
    the ids (see `describe_model`); None: the tokenizer's own. Raises `ModelLoadError` naming the file at fault.
    """
    override = None
    if chat_template is not None:
        override = ChatTemplate(read_text(Path(chat_template)), f"--chat-template {chat_template}")
    if tokenizer == BYTE_TOKENIZER:
        return ByteTokenizer(vocab_size or 0, override)
    if tokenizer is None and model.startswith(PRESET_PREFIX):
        return ByteTokenizer(vocab_size or preset_config(model.removeprefix(PRESET_PREFIX)).vocab_size, override)
    name = tokenizer or model
    if name != EMBEDDED_MODEL and (Path(name) / "tokenizer.json").is_file():  # needs no config.json beside it
        return _load_hf(Path(name), override, vocab_size)
    source = resolve_model(name)
    if source.kind == "hf":
        return _load_hf(source.path, override, vocab_size)
    return gguf_tokenizer(GGUFFile(source.path), override, vocab_size)


def _load_hf(folder: Path, override: ChatTemplate | None, vocab_size: int | None) -> HFTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{folder}: has no tokenizer.json (a tokenizer.model alone is not supported); "
            f"give --tokenizer a directory that has one, or --tokenizer {BYTE_TOKENIZER}"
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelLoadError(f"{path}: more than {MAX_TOKENIZER_BYTES} bytes")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelLoadError(f"{path}: is not a valid tokenizer: {error}") from None
    config = read_json_if_present(folder / "tokenizer_config.json")
    names = {**read_json_if_present(folder / "special_tokens_map.json"), **config}
    special = {role: text for role in _SPECIAL_TOKEN_NAMES if (text := _token_content(names.get(role))) is not None}
    templates = {"default": override} if override else dict(_hf_templates(folder, config))
    return HFTokenizer(
        backend,
        vocab_size=vocab_size,
        eos_token_ids=hf_eos_token_ids(folder),
        bos_token_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        special_tokens=special,
        chat_templates=templates,
    )


def _token_content(entry: Any) -> str | None:
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _hf_templates(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, ChatTemplate]]:
    """By name. A chat_template.jinja file wins over chat_template.json and over tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        yield "default", ChatTemplate(read_text(file), str(file))
        return
    origin = folder / "chat_template.json"
    entry = read_json_if_present(origin).get("chat_template")
    if entry is None:
        origin = folder / "tokenizer_config.json"
        entry = config.get("chat_template")
    if isinstance(entry, str):
        yield "default", ChatTemplate(entry, str(origin))
    elif isinstance(entry, list):
        for row in entry:
            if not (
                isinstance(row, dict) and isinstance(row.get("name"), str) and isinstance(row.get("template"), str)
            ):
                raise ModelLoadError(f"{origin}: chat_template must be a string or a list of name and template")
            yield row["name"], ChatTemplate(row["template"], str(origin))
    elif entry is not None:
        raise ModelLoadError(f"{origin}: chat_template must be a string or a list of name and template")


def gguf_tokenizer(file: GGUFFile, override: ChatTemplate | None = None, vocab_size: int | None = None) -> HFTokenizer:
    """The tokenizer of an open GGUF file; the other parameters as in `load_tokenizer`."""
    backend = build_gguf_tokenizer(file)
    tokens = file.array("tokenizer.ggml.tokens", str)
    ids = {role: file.integer(f"tokenizer.ggml.{key}_token_id") for role, key in _GGUF_ROLES.items()}
    known = {role: token_id for role, token_id in ids.items() if token_id is not None and 0 <= token_id < len(tokens)}
    template = file.text("tokenizer.chat_template")
    templates = {"default": override} if override else {}
    if not templates and template is not None:
        templates = {"default": ChatTemplate(template, f"{file.path}: tokenizer.chat_template")}
    return HFTokenizer(
        backend,
        vocab_size=vocab_size,
        eos_token_ids=gguf_eos_token_ids(file.metadata, file.path),
        bos_token_id=known.get("bos_token"),
        special_tokens={role: tokens[token_id] for role, token_id in known.items()},
        chat_templates=templates,
    )


def _is_byte_level(backend: Backend) -> bool:
    """Whether decoding is the byte-level alphabet and nothing else."""
    if backend.decoder is None:
        return False
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    stages = state.get("decoders", [state])
    return [stage.get("type") for stage in stages] == ["ByteLevel"]


def _longest_token(backend: Backend, tokens: Iterable[str], added: Iterable[AddedToken]) -> int | None:
    """In characters, of a byte-level tokenizer: a token has as many bytes as its spelling has characters."""
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token swallows any amount of white space
    longest = max(map(len, tokens), default=0)
    if backend.normalizer is None:
        return longest
    state: dict[str, Any] = json.loads(backend.normalizer.__getstate__())
    # Composition makes one character of up to four; other normalizers may drop text altogether.
    return 4 * longest if state.get("type") == "NFC" else None


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for characters from U+0100 on.

    Source: `bytes_to_unicode` in https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _byte_level_bytes(token: str) -> bytes:
    """A token outside the alphabet (an added one) stands for its own UTF-8, as in the library's decoder."""
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
