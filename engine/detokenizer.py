"""Text from token ids, a few at a time: the pieces add up to what `tokenizer.decode` makes of the whole.

Byte-level BPE, where every token is a string of bytes, goes by table: one list index per token in the common case.
Everything else (SentencePiece's metaspace, WordPiece), where decode(a) + decode(b) ≠ decode(ab), compares the decoded
text of a short window with and without the new tokens. Stop strings are cut out one layer up, in
`engine/output_processor.py`.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
MAX_HELD_TOKENS: Final = 8
"""A character has at most four bytes: text that still ends in U+FFFD after so many tokens is broken, not unfinished."""
PROBES: Final = 64
"""Random sequences that a table must decode as the tokenizer does before it is used."""


class SupportsDecode(Protocol):
    """What is needed of `engine.loading.tokenizer_base.Tokenizer`."""

    vocab_size: int

    @property
    def is_byte_level(self) -> bool: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes | None: ...

    def is_special(self, token_id: int) -> bool: ...


class IncrementalDetokenizer(Protocol):
    """State of one sequence."""

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        ...

    def finish(self) -> str:
        """What was held back, with U+FFFD for the bytes of unfinished characters. Call once, at the end."""
        ...


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer. Build it once: reading a table of 150,000 tokens takes some 0.1 s."""

    def __init__(self, tokenizer: SupportsDecode) -> None:
        self._tokenizer = tokenizer
        self._tables: dict[bool, _ByteTable] = {}
        if tokenizer.is_byte_level:
            skipping = _ByteTable.read(tokenizer)
            showing = skipping.with_special_tokens(tokenizer)
            if skipping.agrees_with(tokenizer) and showing.agrees_with(tokenizer):
                self._tables = {True: skipping, False: showing}

    @property
    def by_table(self) -> bool:
        """Whether the table is used: the tokenizer is byte-level and decodes as the table does."""
        return bool(self._tables)

    def create(self, skip_special_tokens: bool) -> IncrementalDetokenizer:
        if self._tables:
            return ByteDetokenizer(self._tables[skip_special_tokens])
        return WindowDetokenizer(self._tokenizer, skip_special_tokens)


class _ByteTable:
    """Per token its text when its bytes are whole characters, else None and its bytes in `partial`."""

    __slots__ = ("partial", "skip_special", "special", "texts")

    def __init__(
        self, texts: list[str | None], partial: dict[int, bytes], special: list[int], skip_special: bool
    ) -> None:
        self.texts = texts
        self.partial = partial
        self.special = special
        self.skip_special = skip_special

    @classmethod
    def read(cls, tokenizer: SupportsDecode) -> _ByteTable:
        """A table that skips special tokens."""
        texts: list[str | None] = []
        partial: dict[int, bytes] = {}
        special: list[int] = []
        for token in range(tokenizer.vocab_size):
            if tokenizer.is_special(token):
                special.append(token)
                texts.append("")
                continue
            raw = tokenizer.token_bytes(token) or b""  # a padded vocabulary has ids without a token
            try:
                texts.append(raw.decode("utf-8"))
            except UnicodeDecodeError:
                texts.append(None)
                partial[token] = raw
        return cls(texts, partial, special, skip_special=True)

    def with_special_tokens(self, tokenizer: SupportsDecode) -> _ByteTable:
        """The same, spelling them out."""
        texts = self.texts.copy()
        for token in self.special:
            texts[token] = tokenizer.decode([token], skip_special_tokens=False)
        return _ByteTable(texts, self.partial, self.special, skip_special=False)

    def bytes_of(self, token: int) -> bytes:
        text = self.texts[token] if 0 <= token < len(self.texts) else ""
        return self.partial[token] if text is None else text.encode("utf-8")

    def agrees_with(self, tokenizer: SupportsDecode) -> bool:
        """Whether random sequences decode to the same text both ways. A decoder may do more than join bytes."""
        rng = random.Random(0)
        for _ in range(PROBES):
            ids = [rng.randrange(len(self.texts)) for _ in range(16)]
            text = b"".join([self.bytes_of(token) for token in ids]).decode("utf-8", "replace")
            if text != tokenizer.decode(ids, skip_special_tokens=self.skip_special):
                return False
        return True


class ByteDetokenizer:
    """By table. Holds at most the three bytes that an unfinished character can have."""

    __slots__ = ("_held", "_table", "_texts")

    def __init__(self, table: _ByteTable) -> None:
        self._table = table
        self._texts = table.texts
        self._held = b""

    def append(self, token_ids: Sequence[int]) -> str:
        if not self._held and len(token_ids) == 1:
            try:
                text = self._texts[token_ids[0]]
            except IndexError:
                text = ""
            if text is not None:
                return text
        data = self._held + b"".join([self._table.bytes_of(token) for token in token_ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def finish(self) -> str:
        text, self._held = self._held.decode("utf-8", "replace"), b""
        return text


class WindowDetokenizer:
    """By comparing decodes of the tokens since the last emitted ones, with and without the new tokens.

    Where a decoder takes back text that it gave before (a run of byte tokens that turns out to be no UTF-8), what was
    emitted stands, and the pieces may differ from the decode of the whole in those characters.
    """

    __slots__ = ("_emitted", "_skip_special", "_tokenizer", "_window")

    def __init__(self, tokenizer: SupportsDecode, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []
        """The tokens of the last emission, then those held back."""
        self._emitted = 0
        """How many tokens of the window have been emitted."""

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join([self._append_one(token) for token in token_ids])

    def _append_one(self, token: int) -> str:
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        self._window.append(token)
        old = self._decode(self._window[: self._emitted])
        new = self._decode(self._window)
        held = len(self._window) - self._emitted
        if len(new) <= len(old):
            if held >= MAX_HELD_TOKENS:
                del self._window[self._emitted :]  # tokens without text; the window must not grow with them
            return ""
        if new.endswith(REPLACEMENT) and held < MAX_HELD_TOKENS:
            return ""
        del self._window[: self._emitted]
        self._emitted = len(self._window)
        return new[len(old) :]

    def finish(self) -> str:
        text = self._decode(self._window)[len(self._decode(self._window[: self._emitted])) :]
        self._window.clear()
        self._emitted = 0
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
