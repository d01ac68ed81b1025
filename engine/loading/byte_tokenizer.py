"""A tokenizer that needs no files: one token per byte, and three special ones. For simulated runs without a model, for
dummy weights, and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from atom.engine.errors import RequestError
from atom.engine.loading.chat_template import ChatTemplate
from atom.engine.loading.tokenizer_base import MAX_ID, Tokenizer, encodable

NUM_BYTES: Final = 256
BOS_ID: Final = 256
EOS_ID: Final = 257
PAD_ID: Final = 258
_SPECIAL: Final = {BOS_ID: "<|bos|>", EOS_ID: "<|eos|>", PAD_ID: "<|pad|>"}
_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are bytes, 256..258 special. Any larger id stands for the byte `id % 256`, so that the output of a
    simulated or dummy model of any vocabulary can be shown; `vocab_size` says how many ids that model has."""

    is_byte_level = True

    def __init__(self, vocab_size: int = NUM_BYTES + len(_SPECIAL), chat_template: ChatTemplate | None = None) -> None:
        super().__init__(
            vocab_size=max(vocab_size, NUM_BYTES + len(_SPECIAL)),
            eos_token_ids=(EOS_ID,),
            bos_token_id=BOS_ID,
            special_tokens={
                "bos_token": _SPECIAL[BOS_ID],
                "eos_token": _SPECIAL[EOS_ID],
                "pad_token": _SPECIAL[PAD_ID],
            },
            chat_templates={"default": chat_template or ChatTemplate(_TEMPLATE, "ByteTokenizer")},
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(encodable(text).encode("utf-8"))

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        pieces: list[bytes] = []
        for token_id in token_ids:
            if not 0 <= token_id <= MAX_ID:
                raise RequestError(f"token ids must be from 0 to {MAX_ID}")
            if token_id not in _SPECIAL:
                pieces.append(bytes((token_id % NUM_BYTES,)))
            elif not skip_special_tokens:
                pieces.append(_SPECIAL[token_id].encode())
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        if token_id in _SPECIAL or not 0 <= token_id <= MAX_ID:
            return None
        return bytes((token_id % NUM_BYTES,))

    def is_special(self, token_id: int) -> bool:
        return token_id in _SPECIAL

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)
