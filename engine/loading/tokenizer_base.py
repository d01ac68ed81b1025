"""What the server and the tools need of a tokenizer: text to ids and back, the bytes of a token, the chat template.
Implementations: `engine/loading/tokenizer.py` (real ones), `engine/loading/byte_tokenizer.py` (needs no files).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Final

from atom.engine.errors import RequestError
from atom.engine.loading.chat_template import ChatTemplate

MAX_ID: Final = (1 << 32) - 1
"""Of any token; the `tokenizers` library has 32-bit ids."""


class Tokenizer(abc.ABC):
    """What the server and the tools need of a tokenizer."""

    #: Whether every token is a string of raw bytes, so that a stream can be assembled byte by byte.
    is_byte_level: bool
    #: The most characters of text that one token can stand for; None where there is no such bound. A text beyond that
    #: times the context length need not be tokenized to be refused.
    longest_token_chars: int | None = None

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
        special_tokens: dict[str, str],
        chat_templates: dict[str, ChatTemplate],
    ) -> None:
        self.vocab_size = vocab_size
        """Ids are below it. The model's vocabulary where that is known, which may be padded beyond the tokenizer's."""
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.special_tokens = special_tokens
        """By role (`bos_token`, …), as chat templates see them."""
        self._chat_templates = chat_templates

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises `RequestError` when the text has an unpaired surrogate."""

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode`, for many texts at once."""

    @abc.abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text; bytes that are no UTF-8 read as U+FFFD, ids without a token as nothing. Raises `RequestError` for ids
        that are no unsigned 32-bit integers."""

    @abc.abstractmethod
    def token_bytes(self, token_id: int) -> bytes | None:
        """Raw bytes of one token; None where `is_byte_level` is false or the id is special or unknown."""

    @abc.abstractmethod
    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` drops the token."""

    @abc.abstractmethod
    def token_text(self, token_id: int) -> str:
        """One token for display, as in logprobs; special tokens are spelled out."""

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt's text for a conversation; encode it with `add_special_tokens=False`.

        `kwargs` (`tools`, `documents`, `enable_thinking`, …) are variables of the template. As in Hugging Face,
        message fields that are None are left out. Raises `RequestError` when there is no template or it fails.
        """
        if not self._chat_templates:
            raise RequestError(
                "this model has no chat template: give --chat-template or use /v1/completions", "messages"
            )
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._chat_templates else "default"
        template = self._chat_templates.get(name) or next(iter(self._chat_templates.values()))
        variables: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens, **kwargs}
        variables["messages"] = [
            {key: value for key, value in message.items() if value is not None} for message in messages
        ]
        variables["add_generation_prompt"] = add_generation_prompt
        return template.render(variables)


def encodable(text: str) -> str:
    """`text`, or `RequestError`: JSON can carry half a surrogate pair, which has no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has an unpaired surrogate at character {error.start}") from None
    return text
