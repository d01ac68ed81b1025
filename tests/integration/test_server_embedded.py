"""End to end with a real model: the embedded default behind the server, asked by the `openai` client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server_process import RunningServer, running_server

pytestmark = pytest.mark.embedded_model

QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[RunningServer]:
    with running_server("--kv-cache-memory", "64M", simulated=False) as it:
        yield it


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client(timeout=120)


def test_it_answers(server: RunningServer, client: openai.OpenAI) -> None:
    assert server.model == "SmolLM2-135M-Instruct"
    assert server.ready["simulated"] is False
    answer = client.chat.completions.create(model=server.model, messages=QUESTION, temperature=0, max_tokens=24)
    text = answer.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    stream = client.chat.completions.create(
        model=server.model,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[-1].usage is not None
    assert answer.usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_the_same_seed_gives_the_same_text(server: RunningServer, client: openai.OpenAI) -> None:
    def ask(seed: int) -> Any:
        answer = client.chat.completions.create(
            model=server.model, messages=QUESTION, temperature=1.5, max_tokens=16, seed=seed, n=2
        )
        return [choice.message.content for choice in answer.choices]

    first = ask(5)
    assert ask(5) == first
    assert first[0] != first[1]


def test_logprobs_are_those_of_the_greedy_choice(server: RunningServer, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    for entry in answer.choices[0].logprobs.content or ():
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_a_stop_string_ends_it(server: RunningServer, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=server.model, prompt="1, 2, 3, 4, 5,", temperature=0, max_tokens=24, stop=[" 8"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == " 6, 7,"
