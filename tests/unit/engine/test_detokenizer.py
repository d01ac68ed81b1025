"""Pieces of text add up to the decode of the whole, for tokenizers of every kind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from atom.engine.detokenizer import (
    MAX_HELD_TOKENS,
    ByteDetokenizer,
    DetokenizerFactory,
    SupportsDecode,
    WindowDetokenizer,
)
from atom.engine.errors import ModelLoadError
from atom.engine.loading.byte_tokenizer import ByteTokenizer
from atom.engine.loading.tokenizer import HFTokenizer, load_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café — 日本語 🙂🙂 ünïcödé",
    "  def f(x):\n    return x",
]


def wrap(backend: Tokenizer, vocab_size: int | None = None) -> HFTokenizer:
    return HFTokenizer(
        backend, vocab_size=vocab_size, eos_token_ids=(), bos_token_id=None, special_tokens={}, chat_templates={}
    )


def byte_level_bpe() -> HFTokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>", "<|pad|>"]
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool>", "日本"])
    return wrap(backend, vocab_size=len(backend.get_vocab()) + 7)  # padded, as models' embeddings are


def sentencepiece_like() -> HFTokenizer:
    """Metaspace with byte fallback, as Llama 2 has it: a leading space is dropped at the start of a text only."""
    pieces = ["▁the", "▁quick", "▁", "q", "u", "i", "c", "k", "t", "h", "e", "▁fox", ",", ".", "é"]
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {piece: len(vocab) + index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("</s>", special=True)])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(backend)


def word_pieces() -> HFTokenizer:
    words = ["[UNK]", "play", "##ing", "##ed", "un", "##s", "the", "it", "a", "'", "."]
    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]"])
    backend.decoder = decoders.WordPiece(cleanup=False)
    return wrap(backend)


def in_pieces(tokenizer: SupportsDecode, ids: Sequence[int], sizes: Sequence[int], skip: bool) -> str:
    """Feed `ids` in chunks of the given sizes (cyclically)."""
    detokenizer = factory_of(tokenizer).create(skip)
    text, start, turn = "", 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        text += detokenizer.append(ids[start : start + size])
        start, turn = start + size, turn + 1
    return text + detokenizer.finish()


_FACTORIES: dict[int, tuple[SupportsDecode, DetokenizerFactory]] = {}


def factory_of(tokenizer: SupportsDecode) -> DetokenizerFactory:
    if id(tokenizer) not in _FACTORIES:
        _FACTORIES[id(tokenizer)] = (tokenizer, DetokenizerFactory(tokenizer))
    return _FACTORIES[id(tokenizer)][1]


BYTE_LEVEL, BYTES, METASPACE, WORDS = byte_level_bpe(), ByteTokenizer(300), sentencepiece_like(), word_pieces()
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTES], ids=["bpe", "bytes"])
@settings(deadline=None)
@given(data=st.data(), sizes=SIZES, skip=st.booleans())
def test_by_table_equals_decode_for_any_ids(
    tokenizer: HFTokenizer | ByteTokenizer, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    assert factory_of(tokenizer).by_table
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert in_pieces(tokenizer, ids, sizes, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(text=st.text(max_size=60), sizes=SIZES)
def test_by_table_gives_back_the_text(text: str, sizes: list[int]) -> None:
    assert in_pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text), sizes, True) == text


@settings(deadline=None)
@given(text=st.text(alphabet="the quick fox,.é日🙂", max_size=60), sizes=SIZES, skip=st.booleans())
def test_by_window_equals_decode(text: str, sizes: list[int], skip: bool) -> None:
    assert not factory_of(METASPACE).by_table
    ids = METASPACE.encode(text)
    assert in_pieces(METASPACE, ids, sizes, skip) == METASPACE.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 10), max_size=40), sizes=SIZES, skip=st.booleans())
def test_word_pieces_equal_decode(ids: list[int], sizes: list[int], skip: bool) -> None:
    assert in_pieces(WORDS, ids, sizes, skip) == WORDS.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(ids=st.lists(st.sampled_from([0, 1, 258, 259, 260, 270, 272]), max_size=40), sizes=SIZES, skip=st.booleans())
def test_special_tokens_do_not_eat_the_space_of_the_next_word(ids: list[int], sizes: list[int], skip: bool) -> None:
    assert in_pieces(METASPACE, ids, sizes, skip) == METASPACE.decode(ids, skip_special_tokens=skip)


def test_half_a_character_is_held_back_and_flushed_as_replacement() -> None:
    ids = list("é🙂".encode())
    detokenizer = factory_of(BYTES).create(True)
    assert [detokenizer.append([token]) for token in ids] == ["", "é", "", "", "", "🙂"]
    assert detokenizer.append(ids[2:4]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_broken_byte_tokens_are_not_held_for_ever() -> None:
    detokenizer = factory_of(METASPACE).create(True)
    assert isinstance(detokenizer, WindowDetokenizer)
    broken = [2 + 0xFF] * 50
    pieces = [detokenizer.append([token]) for token in broken]
    assert "".join(pieces) + detokenizer.finish() == METASPACE.decode(broken)
    assert max(len(piece) for piece in pieces) <= MAX_HELD_TOKENS
    assert len(detokenizer._window) <= 2 * MAX_HELD_TOKENS


def test_a_window_of_tokens_without_text_stays_small() -> None:
    detokenizer = factory_of(METASPACE).create(False)
    assert isinstance(detokenizer, WindowDetokenizer)
    for _ in range(1000):
        detokenizer.append([10_000])  # no such token
    assert len(detokenizer._window) <= 2 * MAX_HELD_TOKENS
    assert detokenizer.append([258]) == "the"


def test_a_tokenizer_whose_decoder_does_more_than_join_bytes_is_not_read_by_table() -> None:
    class Shouting(ByteTokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return super().decode(token_ids, skip_special_tokens).upper()

    tokenizer = Shouting()
    factory = DetokenizerFactory(tokenizer)
    assert not factory.by_table
    detokenizer = factory.create(True)
    assert "".join(detokenizer.append([byte]) for byte in b"loud") + detokenizer.finish() == "LOUD"


@pytest.mark.embedded_model
def test_embedded_model() -> None:
    try:
        tokenizer = load_tokenizer("embedded", None)
    except ModelLoadError as error:
        pytest.skip(str(error))
    factory = factory_of(tokenizer)
    assert isinstance(factory.create(True), ByteDetokenizer)

    @settings(deadline=None)
    @given(ids=st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30), sizes=SIZES, skip=st.booleans())
    def any_ids(ids: list[int], sizes: list[int], skip: bool) -> None:
        assert in_pieces(tokenizer, ids, sizes, skip) == tokenizer.decode(ids, skip_special_tokens=skip)

    any_ids()
    text = "naïve café — 日本語 🙂\n\tdef f(x):"
    assert in_pieces(tokenizer, tokenizer.encode(text), [1], True) == text
