"""The official `openai` client against a running server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server_process import RunningServer, running_server, sse_events, wait_for

CHAT: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--sim-base-ms", "1", "--served-model-name", "tiny", "alias", "--max-model-len", "512") as it:
        yield it


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def test_models(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["tiny", "alias"]
    assert models[0].max_model_len == 512  # type: ignore[attr-defined]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=7)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 7, 12)
    assert client.completions.create(model="alias", prompt="hello", max_tokens=7).model == "alias"


def test_the_kinds_of_prompts(client: openai.OpenAI) -> None:
    def texts(prompt: Any, **more: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, **more)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    (one,) = texts("abc")
    assert texts([97, 98, 99]) == [one]
    assert texts(["abc", "abc"]) == [one, one]
    assert texts([[97, 98, 99], [97, 98, 99]]) == [one, one]
    assert texts(["abc", "abcd"], n=2)[:2] == [one, one]
    assert texts("abc", echo=True) == [f"abc{one}"]
    assert texts([97, 98, 99], echo=True) == [f"abc{one}"]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=6)
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    parts: Any = [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    same = client.chat.completions.create(model="tiny", messages=parts, max_tokens=6)
    assert same.choices[0].message.content == choice.message.content


def test_chat_goes_on_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=20, n=2)
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=20, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts, roles = ["", ""], ["", ""]
    reasons: list[str | None] = [None, None]
    for chunk in chunks[:-1]:
        assert chunk.object == "chat.completion.chunk"
        assert (chunk.id, chunk.created, chunk.model) == (chunks[0].id, chunks[0].created, "tiny")
        assert chunk.usage is None
        for choice in chunk.choices:
            if not texts[choice.index] and choice.delta.role:
                roles[choice.index] = choice.delta.role
            assert reasons[choice.index] is None
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert roles == ["assistant", "assistant"]
    assert reasons == ["length", "length"]
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_one_event_per_token_and_usage_on_each(server: RunningServer) -> None:
    """Also for bytes that are no character yet: the simulated tokens are mostly parts of characters."""
    body = {
        "prompt": "hello",
        "max_tokens": 50,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    *chunks, last, done = sse_events(server.post("/v1/completions", body).text)
    assert done == "[DONE]"
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, 51))
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}
    assert all(chunk["usage"]["total_tokens"] == chunk["usage"]["completion_tokens"] + 5 for chunk in chunks)
    assert any(chunk["choices"][0]["text"] == "" for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 49 + ["length"]
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 50,
        "total_tokens": 55,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_without_options_has_no_usage(server: RunningServer) -> None:
    *chunks, done = sse_events(server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True}).text)
    assert done == "[DONE]"
    assert len(chunks) == 3
    assert all("usage" not in chunk for chunk in chunks)


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=4, logprobs=2, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.tokens[:5] == list("hello")
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 9
    values: list[Any] = list(logprobs.token_logprobs)
    assert values[0] is None
    assert all(value < 0 for value in values[1:])
    assert logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    streamed = client.completions.create(model="tiny", prompt="hello", max_tokens=4, logprobs=2, echo=True, stream=True)
    parts: list[Any] = [chunk.choices[0].logprobs for chunk in streamed]
    assert [token for part in parts for token in part.tokens or ()] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset or ()] == logprobs.text_offset


def test_many_logprobs(server: RunningServer) -> None:
    """So many that the answer is built in a thread."""
    body = {"prompt": "x" * 100, "max_tokens": 100, "logprobs": 20, "echo": True, "n": 2}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [200, 200]
    assert all(len(top) in (20, 21) for choice in choices for top in choice["logprobs"]["top_logprobs"][1:])


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2, stream=False
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 3
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.bytes is not None
        assert entry.logprob <= 0
    bare = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=3, logprobs=True)
    assert bare.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content or ()] == [[], [], []]


def test_vllm_extras(server: RunningServer, client: openai.OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt="ab", max_tokens=8, extra_body={"return_token_ids": True})
    shown = plain.choices[0].model_dump()
    assert shown["prompt_token_ids"] == [97, 98]
    assert len(shown["token_ids"]) == 8
    third = shown["token_ids"][2]
    stopped = client.completions.create(
        model="tiny", prompt="ab", max_tokens=8, extra_body={"stop_token_ids": [third], "return_token_ids": True}
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].model_dump()["stop_reason"] == third
    assert stopped.choices[0].model_dump()["token_ids"] == shown["token_ids"][:3]
    body = {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 1}
    entries = server.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1]["98"]["decoded_token"] == "b"
    chat = {"messages": CHAT, "max_tokens": 2, "prompt_logprobs": 0, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", chat).json()
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["choices"][0]["token_ids"]) == 2
    stream = server.post("/v1/completions", {"prompt": "ab", "max_tokens": 2, "stream": True, "return_token_ids": True})
    first, second, _ = sse_events(stream.text)
    assert first["choices"][0]["prompt_token_ids"] == [97, 98]
    assert first["choices"][0]["token_ids"] + second["choices"][0]["token_ids"] == shown["token_ids"][:2]
    assert "prompt_token_ids" not in second["choices"][0]


def test_stop_strings(client: openai.OpenAI) -> None:
    text = client.completions.create(model="tiny", prompt="stop", max_tokens=40).choices[0].text
    characters = [character for character in text if character not in "\ufffd\n" and character.isprintable()]
    stop = characters[3]
    answer = client.completions.create(model="tiny", prompt="stop", max_tokens=40, stop=[stop, "never"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].model_dump()["stop_reason"] == stop
    stream = client.completions.create(model="tiny", prompt="stop", max_tokens=40, stop=stop, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    shown = client.completions.create(
        model="tiny", prompt="stop", max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert shown.choices[0].text == text[: text.index(stop) + 1]


def test_seed_and_cached_tokens(client: openai.OpenAI) -> None:
    def answer(seed: int) -> Any:
        return client.completions.create(model="tiny", prompt="x" * 64, max_tokens=8, seed=seed)

    first, again, other = answer(1), answer(1), answer(2)
    assert first.choices[0].text == again.choices[0].text != other.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == 48


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_completion_errors_name_the_parameter(server: RunningServer, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().post("/completions", cast_to=object, body={"model": "tiny", "prompt": "a", **change})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [1], "content": "x"}]}, "messages[0].tool_calls"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_chat_errors_name_the_parameter(server: RunningServer, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().post("/chat/completions", cast_to=object, body={"messages": CHAT, **change})
    assert caught.value.param == param


def test_values_that_ask_for_nothing_are_taken(server: RunningServer) -> None:
    chat = {
        "messages": CHAT,
        "max_tokens": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "audio": None,
        "parallel_tool_calls": None,
        "store": False,
        "user": "somebody",
        "something_new": {"x": 1},
    }
    assert server.post("/v1/chat/completions", chat).status_code == 200
    assert "something_new" in server.log_text()


def test_errors_have_their_codes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert long.value.code == "context_length_exceeded"


def in_use(server: RunningServer) -> float:
    return server.metrics()['atom:scheduler_kv_cache_blocks{dp_rank="0",state="used"}']


def test_closing_a_stream_frees_its_blocks(server: RunningServer, client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt="x" * 100, max_tokens=400, stream=True)
    next(stream)
    assert in_use(server) > 0
    stream.close()
    wait_for(lambda: in_use(server) == 0)
    assert server.get("/load").json() == {"server_load": 0}


def test_a_client_timeout_ends_the_request(server: RunningServer) -> None:
    before = server.metrics()['atom:requests_finished_total{reason="abort"}']
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=0.1).completions.create(model="tiny", prompt="x", max_tokens=500)
    wait_for(lambda: server.metrics()['atom:requests_finished_total{reason="abort"}'] == before + 1)
    assert in_use(server) == 0


def test_a_full_queue_answers_503() -> None:
    flags = ("--max-num-seqs", "1", "--max-waiting", "2", "--sim-base-ms", "5")
    with running_server(*flags) as busy, ThreadPoolExecutor(20) as pool:
        body = {"prompt": "x", "max_tokens": 50}
        answers = [pool.submit(busy.post, "/v1/completions", body) for _ in range(20)]
        statuses = [answer.result().status_code for answer in answers]
        refused = [answer.result() for answer in answers if answer.result().status_code == 503]
    assert set(statuses) == {200, 503}
    for answer in refused:
        assert answer.json()["error"]["code"] in ("queue_full", "request_refused")
        assert answer.headers["retry-after"]


def test_without_chunked_prefill_a_prompt_must_fit_one_step() -> None:
    with running_server("--no-enable-chunked-prefill", "--max-num-batched-tokens", "256") as other:
        assert other.post("/v1/completions", {"prompt": "x" * 256, "max_tokens": 1}).status_code == 200
        refused = other.post("/v1/completions", {"prompt": "x" * 257, "max_tokens": 1})
        assert refused.status_code == 400
        assert "--max-num-batched-tokens" in refused.json()["error"]["message"]


def test_requests_leave_no_garbage_for_the_collector(server: RunningServer) -> None:
    """Objects in circles would have to wait for it, and it would have to stop the process for them."""

    def collected() -> float:
        return sum(value for name, value in server.metrics().items() if name.startswith("atom:gc_collected_total"))

    def passes() -> float:
        return server.metrics()['atom:gc_collections_total{generation="0"}']

    before, passes_before = collected(), passes()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for number in range(300):
            body = {"prompt": "x", "max_tokens": 2, "stream": number % 2 == 0, "n": 1 + number % 3}
            assert client.post("/v1/completions", json=body).status_code == 200
            assert client.post("/v1/completions", json={"prompt": 1}).status_code == 400
    assert collected() - before < 300
    assert passes() - passes_before < 30


async def test_cancelled_requests_leave_nothing(server: RunningServer) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def ask(stream: bool) -> None:
        answer: Any = await client.completions.create(model="tiny", prompt="x", max_tokens=400, stream=stream)
        async for _ in answer:
            pass

    async with client:
        tasks = [asyncio.create_task(ask(index % 2 == 0)) for index in range(20)]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(wait_for, lambda: in_use(server) == 0)


def test_tokenize_and_detokenize(server: RunningServer) -> None:
    reply = server.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert reply == {"count": 2, "max_model_len": 512, "tokens": [97, 98], "token_strs": ["a", "b"]}
    assert server.post("/detokenize", {"tokens": [97, 98]}).json() == {"prompt": "ab"}
    chat = server.post("/tokenize", {"messages": CHAT}).json()
    usage = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [512]})):
        assert server.post(path, body).status_code == 400


def test_the_other_endpoints(server: RunningServer) -> None:
    health = server.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert server.get("/ping").status_code == server.post("/ping").status_code == 200
    assert set(server.get("/version").json()) == {"version"}
    info = server.get("/server_info").json()
    assert info["simulated"] is True
    assert info["config"]["model"]["tokenizer"] == "bytes"
    assert server.post("/start_profile").status_code == 400
    assert server.post("/stop_profile").status_code == 400
    missing = server.get("/v2/models")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = server.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert server.get("/v1/models/").status_code == 404


def test_the_request_id_comes_back(server: RunningServer) -> None:
    assert server.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    generated = server.get("/health").headers["x-request-id"]
    assert generated
    assert server.get("/health", headers={"X-Request-Id": "x" * 200}).headers["x-request-id"] != "x" * 200
