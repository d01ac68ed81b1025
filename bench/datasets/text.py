"""Prompts as text: of words that are one token each, so that a count of words is a count of tokens.

A text of random tokens is seldom the tokens it was made of: its pieces merge when it is encoded again, and tools that
cut and extend it until its length fits change what is shared between prompts. Here those words of a tokenizer's
vocabulary are used which stay one token wherever they stand between spaces; that they do is checked by encoding them
again. Any sequence of such words has exactly as many tokens, and prompts that share words share tokens. Without a
tokenizer the words are common English ones (`bench/words.py`), and only the server's usage says how many tokens they
became.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from atom.bench.load import Api
from atom.bench.words import WORDS
from atom.recipes.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TextTokenizer", "WordList", "load_tokenizer", "word_list"]

MAX_TOKENIZER_BYTES: Final = 256 << 20
MAX_WORDS: Final = 8192
_MIN_WORDS: Final = 16
"""Fewer would make prompts that repeat themselves."""
_WORD: Final = re.compile(r"[Ġ▁ ]([a-z]{2,16})")
"""A vocabulary's entry for a word after a space: byte-level BPE, SentencePiece, others."""


@dataclass(frozen=True, slots=True)
class WordList:
    """Words to make prompts of."""

    words: tuple[str, ...]
    exact: bool
    """Every word is known to be one token."""
    special_tokens: int = 0
    """Tokens that a server adds to a completion's prompt (such as a beginning of sequence)."""

    def __len__(self) -> int:
        return len(self.words)

    def text(self, indices: Iterable[int]) -> str:
        """The words at `indices`, between spaces."""
        return " ".join([self.words[index] for index in indices])

    def words_for(self, tokens: int, api: Api) -> int:
        """How many words make a prompt of `tokens` tokens. A chat's template comes on top."""
        return tokens if api is Api.CHAT else max(1, tokens - self.special_tokens)

    def tokens_of(self, words: int, api: Api) -> int | None:
        """Prompt tokens of that many words; None where only the server can count them."""
        return None if api is Api.CHAT or not self.exact else words + self.special_tokens


class TextTokenizer:
    """Counts tokens as the server will."""

    def __init__(self, path: Path, inner: Tokenizer) -> None:
        self.path = path
        self.inner = inner
        self.special_tokens = int(inner.num_special_tokens_to_add(False))

    def count(self, text: str, *, special_tokens: bool) -> int:
        """Tokens of `text`. `special_tokens`: with those that a server adds to a completion's prompt."""
        return len(self.inner.encode(text, add_special_tokens=special_tokens).ids)


def word_list(tokenizer: Path | None) -> WordList:
    """The words to use with `tokenizer` (a tokenizer.json, or the directory that holds it). UsageError names
    `--tokenizer` if it has too few words of one token."""
    return WordList(WORDS, exact=False) if tokenizer is None else _word_list(tokenizer)


@lru_cache(maxsize=4)
def _word_list(path: Path) -> WordList:
    tokenizer = load_tokenizer(path)

    def one_each(text: str, count: int) -> bool:
        return tokenizer.count(text, special_tokens=False) == count

    entries = sorted(tokenizer.inner.get_vocab(with_added_tokens=False).items(), key=lambda entry: entry[1])
    matches = [match[1] for entry, _ in entries if (match := _WORD.fullmatch(entry))]
    words = [word for word in dict.fromkeys(matches) if one_each(word, 1) and one_each(f"{word} {word}", 2)][:MAX_WORDS]
    if len(words) < _MIN_WORDS:
        raise UsageError(
            f"--tokenizer {path}: only {len(words)} lower-case words are one token each, too few to make text of an "
            "exact length from; send token ids, or leave --tokenizer out (lengths are words then)"
        )
    rng = np.random.default_rng(0)
    for _ in range(2):  # each word with neighbours of all kinds
        order = rng.permutation(len(words)).tolist()
        if not one_each(" ".join([words[index] for index in order]), len(words)):
            raise UsageError(
                f"--tokenizer {path}: words that are one token each become others beside each other, so that no text "
                "of an exact length can be made; send token ids, or leave --tokenizer out (lengths are words then)"
            )
    return WordList(tuple(words), exact=True, special_tokens=tokenizer.special_tokens)


@lru_cache(maxsize=4)
def load_tokenizer(path: Path) -> TextTokenizer:
    """UsageError that names `--tokenizer` where it cannot be read, or where the package is not installed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError(
            "--tokenizer needs the package tokenizers: pip install tokenizers, or leave the option out"
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        size = file.stat().st_size
        if not file.is_file() or size > MAX_TOKENIZER_BYTES:
            raise UsageError(f"--tokenizer {file}: must be a file of at most {MAX_TOKENIZER_BYTES >> 20} MiB")
        inner = Tokenizer.from_buffer(file.read_bytes())
    except OSError as error:
        raise UsageError(
            f"--tokenizer {file}: {error.strerror}; give a tokenizer.json or the directory that holds one (names of "
            "models are not looked up)"
        ) from None
    except UsageError:
        raise
    except Exception as error:  # the library raises Exception itself
        raise UsageError(f"--tokenizer {file}: no tokenizer that can be read ({error})") from None
    inner.no_truncation()
    inner.no_padding()
    return TextTokenizer(file, inner)
