"""Tokenizers: against transformers, byte by byte, chat templates, and broken directories."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from atom.engine.errors import ModelLoadError, RequestError
from atom.engine.loading.byte_tokenizer import BOS_ID, EOS_ID, ByteTokenizer
from atom.engine.loading.gguf_file import GGUFFile
from atom.engine.loading.tokenizer import HFTokenizer, gguf_tokenizer, load_tokenizer
from tests.tiny_models import CHAT_TEMPLATE, EOS_IDS, IM_END, IM_START, VOCAB_SIZE, write_gguf, write_tokenizer

TEXTS = [
    "",
    "Hello world",
    " leading and trailing ",
    "a  b   c\t\td\n\n\ne \r\n f",
    "it's we'll THEY'RE I'd 'tis",
    "1234567890 3.14159 1,000 x2y3z 007",
    "naïve café Ångström ﬁ e\u0301",
    "漢字かな交じり文 한국어 العربية עברית ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤦🏽",
    "def f(x):\n    return x**2  # ¹²³ ½ Ⅷ ٣\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_start|> <|im_end|>x<|im_end|",
    "\x00\x01\x7f\u200b\u2028\ufeff\ufffd",
    "a" * 300 + " " * 40,
    "https://example.com/?q=%20&x=[1]{2}~`",
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  hé\n"},
    {"role": "assistant", "content": "ok", "tool_calls": None},
    {"role": "user", "content": ""},
]


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> HFTokenizer:
    tokenizer = load_tokenizer(str(tiny_llama))
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


def test_directory_agrees_with_transformers(tiny: HFTokenizer, tiny_llama: Path) -> None:
    from transformers import PreTrainedTokenizerFast  # AutoTokenizer imports every model, which takes 10 s

    theirs = PreTrainedTokenizerFast.from_pretrained(tiny_llama)
    for text in TEXTS:
        ids = tiny.encode(text)
        assert ids == theirs.encode(text)
        assert tiny.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert tiny.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    for generation in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=generation)
        assert tiny.apply_chat_template(MESSAGES, add_generation_prompt=generation) == expected


def test_properties(tiny: HFTokenizer) -> None:
    assert tiny.is_byte_level
    assert tiny.vocab_size == VOCAB_SIZE
    assert tiny.eos_token_ids == EOS_IDS
    assert tiny.bos_token_id == 0
    assert tiny.special_tokens["eos_token"] == "<|im_end|>"
    assert [tiny.is_special(token_id) for token_id in (0, 1, 2, 3, 9999)] == [True, True, True, False, False]
    assert tiny.token_text(IM_START) == "<|im_start|>"
    assert tiny.token_text(9999) == ""
    assert tiny.token_bytes(IM_START) is None
    assert tiny.token_bytes(9999) is None


@given(text=st.text(max_size=80))
def test_bytes_of_tokens_make_up_the_text(text: str, tiny: HFTokenizer) -> None:
    ids = tiny.encode(text)
    pieces = [tiny.token_bytes(token_id) for token_id in ids]
    if any(tiny.is_special(token_id) for token_id in ids):
        return
    assert b"".join(piece for piece in pieces if piece is not None).decode() == text
    assert tiny.decode(ids) == text


def test_batches(tiny: HFTokenizer) -> None:
    assert tiny.encode_batch(TEXTS) == [tiny.encode(text) for text in TEXTS]
    assert tiny.encode_batch([]) == []


def test_half_a_surrogate_pair_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="unpaired surrogate at character 1"):
        ByteTokenizer().encode("a\ud800b")


def test_half_a_surrogate_pair_in_a_batch(tiny: HFTokenizer) -> None:
    for texts in (["\udfff"], ["fine", "\ud83d"]):
        with pytest.raises(RequestError, match="unpaired surrogate"):
            tiny.encode_batch(texts)
    with pytest.raises(RequestError, match="unpaired surrogate"):
        tiny.encode("\ud83d")


@pytest.mark.parametrize("token_id", [-1, 1 << 32, 1 << 70])
def test_ids_out_of_range(token_id: int, tiny: HFTokenizer) -> None:
    for tokenizer in (tiny, ByteTokenizer()):
        with pytest.raises(RequestError, match="token ids must be from 0"):
            tokenizer.decode([token_id])
        assert tokenizer.token_bytes(token_id) is None
        assert not tokenizer.is_special(token_id)
    assert tiny.decode([5000]) == ""


def test_model_vocabulary_bounds_the_ids(tiny_llama: Path) -> None:
    assert load_tokenizer(str(tiny_llama), vocab_size=512).vocab_size == 512


def test_added_tokens_that_are_not_special(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("gap é", special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode("<think>gap é")
    assert ids == [VOCAB_SIZE, VOCAB_SIZE + 1]
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"<think>", "gap é".encode()]
    assert tokenizer.decode(ids) == "<think>gap é"


def test_a_tokenizer_with_byte_fallback(tmp_path: Path) -> None:
    """The SentencePiece kind: text is not the concatenation of the tokens' bytes, so no bytes are offered."""
    vocabulary = {"<unk>": 0, "▁": 1, "▁the": 2, "t": 3, "h": 4, "e": 5, "<0xC3>": 6, "<0xA9>": 7, "th": 8, "the": 9}
    backend = Tokenizer(
        models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("▁", "the")], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert not tokenizer.is_byte_level
    assert tokenizer.decode(tokenizer.encode("the é")) == "the é"
    assert tokenizer.token_bytes(2) is None
    assert tokenizer.token_text(2) == " the"
    assert tokenizer.token_text(6) == "�"
    assert tokenizer.eos_token_ids == ()
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template(MESSAGES)
    assert caught.value.param == "messages"


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(str(tmp_path)).encode("x" * 50)) == 50
    assert len(load_tokenizer(str(tmp_path)).encode("x")) == 1


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_where_templates_come_from(folder: Path, tmp_path: Path) -> None:
    set_config(folder, chat_template="from-config")
    assert load_tokenizer(str(folder)).apply_chat_template([]) == "from-config"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from-json"}))
    assert load_tokenizer(str(folder)).apply_chat_template([]) == "from-json"
    (folder / "chat_template.jinja").write_text("from-jinja")
    assert load_tokenizer(str(folder)).apply_chat_template([]) == "from-jinja"
    (tmp_path / "own.jinja").write_text("own {{ eos_token }}{{ extra }}")
    own = load_tokenizer(str(folder), chat_template=str(tmp_path / "own.jinja"))
    assert own.apply_chat_template([], extra="!") == "own <|im_end|>!"


def test_named_templates(folder: Path) -> None:
    set_config(
        folder,
        chat_template=[{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0] }}"}],
    )
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=["t"]) == "t"


def test_variables_cannot_replace_the_messages(tiny: HFTokenizer) -> None:
    with pytest.raises(TypeError):
        tiny.apply_chat_template([], messages=MESSAGES)  # type: ignore[misc]


def test_tokenizer_of_another_directory(tmp_path: Path, tiny_llama: Path) -> None:
    write_tokenizer(tmp_path / "only-a-tokenizer", chat_template="other")
    tokenizer = load_tokenizer(str(tiny_llama), tokenizer=str(tmp_path / "only-a-tokenizer"))
    assert tokenizer.apply_chat_template([]) == "other"


def test_eos_with_damaged_added_tokens(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    set_config(folder, added_tokens_decoder={"9" * 5000: {"content": "<|im_end|>"}, "x": {"content": "<|im_end|>"}})
    assert load_tokenizer(str(folder)).eos_token_ids == (IM_END,)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "garbage": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json: is not a valid tokenizer"),
    "binary": (lambda f: (f / "tokenizer.json").write_bytes(b"\xff\x00"), "tokenizer.json: is not a valid tokenizer"),
    "config": (lambda f: (f / "tokenizer_config.json").write_text("!"), "tokenizer_config.json: is not valid JSON"),
    "template": (
        lambda f: set_config(f, chat_template="{% if %}"),
        "tokenizer_config.json: the chat template does not",
    ),
    "template-type": (lambda f: set_config(f, chat_template=3), "chat_template must be a string or a list"),
    "template-list": (lambda f: set_config(f, chat_template=[{"name": 1}]), "chat_template must be a string or a list"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_directories_give_one_clear_error(fault: str, folder: Path) -> None:
    break_it, message = BROKEN[fault]
    break_it(folder)
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(str(folder))
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_template_file_that_is_not_there(tiny_llama: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"/nowhere\.jinja: cannot be read"):
        load_tokenizer(str(tiny_llama), chat_template="/nowhere.jinja")


def test_byte_tokenizer() -> None:
    tokenizer = load_tokenizer("/nowhere", tokenizer="bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.vocab_size == 259
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert bytes(ids) == text.encode()
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([BOS_ID, 104, 105, EOS_ID]) == "hi"
    assert tokenizer.decode([BOS_ID, 104, EOS_ID], skip_special_tokens=False) == "<|bos|>h<|eos|>"
    assert tokenizer.decode([0xC3]) == "�"
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.token_text(EOS_ID) == "<|eos|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "user: hi\nassistant: "


def test_byte_tokenizer_of_a_larger_vocabulary() -> None:
    assert load_tokenizer("preset:qwen3-8b", vocab_size=999).vocab_size == 999
    tokenizer = load_tokenizer("preset:qwen3-8b")
    assert tokenizer.vocab_size == 151_936
    assert tokenizer.token_bytes(256 * 400 + 65) == b"A"
    assert tokenizer.decode([256 * 400 + 65, 66]) == "AB"


@pytest.mark.parametrize("pre_tokenizer", ["gpt-2", "qwen2", "llama-bpe", "smollm"])
def test_gguf_tokenizer_agrees_with_the_directory(pre_tokenizer: str, tmp_path: Path, tiny: HFTokenizer) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", pre_tokenizer=pre_tokenizer)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.apply_chat_template(MESSAGES) == tiny.apply_chat_template(MESSAGES)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.is_byte_level) == (VOCAB_SIZE, (IM_END,), True)
    bos = [0] if pre_tokenizer == "llama-bpe" else []  # its vocabularies begin with one unless the file says not to
    for text in TEXTS:
        assert tokenizer.encode(text)[: len(bos)] == bos
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == (
            unicodedata.normalize("NFC", text) if pre_tokenizer == "qwen2" else text
        )
        if pre_tokenizer == "gpt-2":
            assert tokenizer.encode(text) == tiny.encode(text)


def test_gguf_bos_follows_the_file(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "tiny.gguf", pre_tokenizer="llama-bpe"))
    file.metadata["tokenizer.ggml.add_bos_token"] = False
    assert gguf_tokenizer(file).encode("x", add_special_tokens=True) == gguf_tokenizer(file).encode("x", False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model 'llama' is not supported"),
        ("tokenizer.ggml.pre", "martian", "tokenizer.ggml.pre 'martian' is not supported"),
        ("tokenizer.ggml.tokens", [], "tokenizer.ggml.tokens is missing"),
        ("tokenizer.ggml.tokens", [1], "tokenizer.ggml.tokens must be an array of str"),
        ("tokenizer.ggml.merges", ["no such"], "tokenizer.ggml.merges does not fit its tokens"),
        ("tokenizer.ggml.eos_token_id", "2", "tokenizer.ggml.eos_token_id must be an integer"),
        ("tokenizer.ggml.bos_token_id", 1.5, "tokenizer.ggml.bos_token_id must be an integer"),
        ("tokenizer.chat_template", "{% x %}", "tokenizer.chat_template: the chat template does not compile"),
    ],
)
def test_broken_gguf_tokenizers(key: str, value: Any, message: str, tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "tiny.gguf"))
    file.metadata[key] = value
    with pytest.raises(ModelLoadError) as caught:
        gguf_tokenizer(file)
    assert message in str(caught.value)
    assert str(file.path) in str(caught.value)


@pytest.fixture(scope="module")
def smollm(embedded_model: Path) -> HFTokenizer:
    tokenizer = load_tokenizer("embedded")
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def smollm_reference(embedded_model: Path) -> Any:
    from transformers import PreTrainedTokenizerFast  # AutoTokenizer imports every model, which takes 10 s

    return PreTrainedTokenizerFast.from_pretrained(embedded_model.parent, gguf_file=embedded_model.name)


@pytest.mark.embedded_model
def test_embedded_tokenizer_agrees_with_transformers(smollm: HFTokenizer, smollm_reference: Any) -> None:
    # transformers knows no `smollm` pre-tokenizer; with the one of the model's own tokenizer.json it must agree on all.
    digits_first = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    full = Tokenizer.from_str(smollm_reference.backend_tokenizer.to_str())
    full.pre_tokenizer = pre_tokenizers.Sequence(digits_first)
    for text in TEXTS:
        ids = smollm.encode(text)
        assert ids == full.encode(text).ids
        if "½" not in text:
            assert ids == smollm_reference.encode(text)
        assert smollm.decode(ids, skip_special_tokens=False) == smollm_reference.decode(ids)
    assert smollm.apply_chat_template(MESSAGES) == smollm_reference.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert smollm.special_tokens["unk_token"] == smollm_reference.unk_token


@pytest.mark.embedded_model
def test_embedded_tokenizer_agrees_on_any_text(smollm: HFTokenizer, smollm_reference: Any) -> None:
    @given(text=st.text(alphabet=st.characters(exclude_categories=["Cs", "N"]), max_size=60))
    def check(text: str) -> None:
        assert smollm.encode(text) == smollm_reference.encode(text)

    check()


@pytest.mark.embedded_model
def test_digits_are_split_before_words(smollm: HFTokenizer) -> None:
    """As in the model's own tokenizer.json: the spaces before a number are one word. (transformers' reading of the
    GGUF knows no `smollm` pre-tokenizer and leaves the last space with the number.)"""
    pieces = [smollm.token_bytes(token_id) for token_id in smollm.encode("x  12   34")]
    assert pieces == [b"x", b"  ", b"1", b"2", b"   ", b"3", b"4"]


def test_the_template_of_the_tests_is_found(tiny: HFTokenizer) -> None:
    assert tiny.has_chat_template
    assert "im_start" in CHAT_TEMPLATE
    assert tiny.encode(tiny.apply_chat_template(MESSAGES), add_special_tokens=False)[0] == IM_START


@pytest.mark.parametrize("text", TEXTS)
def test_no_token_stands_for_more_than_the_longest(tiny: HFTokenizer, text: str) -> None:
    assert tiny.longest_token_chars is not None
    assert len(text) <= tiny.longest_token_chars * len(tiny.encode(text, add_special_tokens=False))


def test_a_token_that_swallows_white_space_has_no_bound(tiny_llama: Path) -> None:
    backend = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<cut>", lstrip=True)])
    tokenizer = HFTokenizer(backend, eos_token_ids=(), bos_token_id=None, special_tokens={}, chat_templates={})
    assert tokenizer.longest_token_chars is None
