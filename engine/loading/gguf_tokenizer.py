"""A `tokenizers.Tokenizer` rebuilt from a GGUF file's metadata (byte-level BPE vocabularies), without torch.

A GGUF has no tokenizer.json: it stores tokens, merges, token types and the *name* of the pre-tokenizer, whose regular
expression every reader has to know. The expressions are those of the models' own tokenizer.json files, which
llama.cpp's `llm_tokenizer_bpe` lists by the same names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from atom.engine.errors import ModelLoadError
from atom.engine.loading.gguf_file import GGUFFile

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_SPLIT: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"

_GPT2_STYLE: Final = frozenset(["gpt-2", "gpt2", "default"])
_DIGITS_STYLE: Final = frozenset(["smollm", "starcoder", "refact", "command-r", "codeshell"])
_LLAMA3_STYLE: Final = frozenset(["llama3", "llama-v3", "llama-bpe"])
_QWEN2_STYLE: Final = frozenset(["qwen2", "deepseek-r1-qwen"])


def build_gguf_tokenizer(file: GGUFFile) -> Backend:
    """The tokenizer that the file's metadata describes. Raises `ModelLoadError` naming the key at fault."""
    kind = file.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported (byte-level 'gpt2' is); "
            "give --tokenizer a directory with the model's tokenizer.json"
        )
    tokens = file.array("tokenizer.ggml.tokens", str)
    if not tokens:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.tokens is missing")
    style = file.text("tokenizer.ggml.pre") or "default"
    merges = [merge.partition(" ")[::2] for merge in file.array("tokenizer.ggml.merges", str)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        # Llama 3's own tokenizer looks a word up whole before it merges.
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=style in _LLAMA3_STYLE)
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.merges does not fit its tokens: {error}") from None
    backend = Backend(model)
    backend.pre_tokenizer = _pre_tokenizer(style, file.path)
    if style in _QWEN2_STYLE:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, tokens, file.array("tokenizer.ggml.token_type", int))
    _add_bos(backend, file, tokens, style)
    return backend


def _pre_tokenizer(style: str, path: Path) -> pre_tokenizers.PreTokenizer:
    if style in _GPT2_STYLE:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if style in _DIGITS_STYLE:
        # Digits come first, as in the model's own tokenizer.json: whitespace before a number is then a word of its own.
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if style in _LLAMA3_STYLE or style in _QWEN2_STYLE:
        pattern = _LLAMA3_SPLIT if style in _LLAMA3_STYLE else _QWEN2_SPLIT
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ModelLoadError(
        f"{path}: tokenizer.ggml.pre {style!r} is not supported; "
        "give --tokenizer a directory with the model's tokenizer.json"
    )


def _add_special_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    marked = list(zip(tokens, types, strict=False))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in marked if kind == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token, kind in marked if kind == _USER_DEFINED]
    )


def _add_bos(backend: Backend, file: GGUFFile, tokens: list[str], style: str) -> None:
    """llama.cpp's rule: Llama 3 vocabularies start with BOS unless the file says otherwise, others when it says so."""
    bos = file.integer("tokenizer.ggml.bos_token_id")
    wanted = file.metadata.get("tokenizer.ggml.add_bos_token", style in _LLAMA3_STYLE)
    if wanted is True and bos is not None and 0 <= bos < len(tokens):
        backend.post_processor = processors.TemplateProcessing(
            single=["BOS", "$A"],
            pair=["BOS", "$A", "BOS:1", "$B:1"],
            special_tokens=[{"id": "BOS", "ids": [bos], "tokens": [tokens[bos]]}],
        )
