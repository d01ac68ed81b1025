"""Text of an exact number of tokens, and the errors of tokenizers that cannot be used."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from atom.bench.datasets.text import load_tokenizer, word_list
from atom.bench.load import Api
from atom.bench.random_load import RandomSource
from atom.bench.words import WORDS
from atom.recipes.errors import UsageError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer that puts one special token before a prompt. Trained here, so no download."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator([word for word in WORDS for _ in range(4)] + [" ".join(WORDS)] * 4, trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.enable_truncation(8)  # must not be heeded: it would cut counts short
    folder = tmp_path_factory.mktemp("tokenizer")
    inner.save(str(folder / "tokenizer.json"))
    return folder


def encode(tokenizer: Path, text: str, *, special: bool) -> list[int]:
    inner = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    inner.no_truncation()
    return list(inner.encode(text, add_special_tokens=special).ids)


def test_any_words_are_as_many_tokens(tokenizer: Path) -> None:
    words = word_list(tokenizer)
    assert words.exact
    assert len(words) > 200
    rng = np.random.default_rng(0)
    for count in (1, 2, 17, 3000):
        text = words.text(rng.integers(0, len(words), size=count).tolist())
        assert len(encode(tokenizer, text, special=False)) == count
        assert load_tokenizer(tokenizer).count(text, special_tokens=True) == count + 1


@pytest.mark.parametrize("prefix", [0, 30])
def test_random_text_has_the_tokens_asked_for_with_those_the_server_adds(tokenizer: Path, prefix: int) -> None:
    load = RandomSource(
        num_prompts=6,
        api=Api.COMPLETIONS,
        model="m",
        input_len=40,
        range_ratio=0.5,
        prefix_len=prefix,
        num_prefixes=2 if prefix else 1,
        text=True,
        tokenizer=tokenizer,
    )
    prompts = []
    for index in range(6):
        plan = load.request(index)
        prompts.append(encode(tokenizer, json.loads(plan.body)["prompt"], special=True))
        assert len(prompts[-1]) == plan.input_len
        assert prefix + 20 <= len(prompts[-1]) <= prefix + 60
    if prefix:
        begin = [tuple(prompt[: prefix + 1]) for prompt in prompts]
        assert begin[0] == begin[2] == begin[4] != begin[1] == begin[3] == begin[5]
    assert len({tuple(prompt[prefix + 1 :]) for prompt in prompts}) == 6


def test_a_prompt_of_fewer_tokens_than_the_server_adds_still_has_a_word(tokenizer: Path) -> None:
    load = RandomSource(num_prompts=1, api=Api.COMPLETIONS, model="m", input_len=1, text=True, tokenizer=tokenizer)
    plan = load.request(0)
    assert len(encode(tokenizer, json.loads(plan.body)["prompt"], special=True)) == plan.input_len == 2


def test_chat_counts_the_message_alone(tokenizer: Path) -> None:
    load = RandomSource(num_prompts=1, api=Api.CHAT, model="m", input_len=33, tokenizer=tokenizer)
    plan = load.request(0)
    (message,) = json.loads(plan.body)["messages"]
    assert len(encode(tokenizer, message["content"], special=False)) == 33
    assert plan.input_len is None, "the template's tokens are the server's to count"


def test_text_without_a_tokenizer_claims_no_token_count() -> None:
    load = RandomSource(num_prompts=2, api=Api.COMPLETIONS, model="m", input_len=7, text=True)
    plan = load.request(0)
    assert len(json.loads(plan.body)["prompt"].split()) == 7
    assert plan.input_len is None
    assert load.describe()["prompt"] == "text"


def test_a_tokenizer_with_too_few_words_is_refused(tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({"the": 0, "▁of": 1}, unk_token="the"))
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"--tokenizer .* too few"):
        word_list(tmp_path)


def test_missing_file_and_wrong_file_name_the_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--tokenizer .*meta-llama.*names of\s+models are not looked up"):
        load_tokenizer(Path("meta-llama/Llama-3"))
    with pytest.raises(UsageError, match=r"--tokenizer .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UsageError, match=r"--tokenizer .*no tokenizer that can be read"):
        load_tokenizer(tmp_path)


def test_missing_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match="pip install tokenizers"):
        load_tokenizer(tmp_path / "somewhere.json")
