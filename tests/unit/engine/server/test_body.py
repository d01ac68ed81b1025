"""Reading and decoding request bodies."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.server import body as module
from atom.engine.server.api_errors import ApiError, ClientDisconnected
from atom.engine.server.body import BodyBudget, decode_body, read_body, read_request
from atom.engine.server.fields import check_completion_fields
from atom.engine.server.protocol import CompletionRequest, decode_completion


async def decode(data: bytes) -> CompletionRequest:
    return await decode_body(data, decode_completion, check_completion_fields)


async def refused(data: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await decode(data)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"null", None),
        (b'"x"', None),
        (b"{", None),
        (b'{"prompt": "a"} x', None),
        (b"\xff\xfe", None),
        (b'\xef\xbb\xbf{"prompt": "a"}', None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": "a", "unknown": "\xff"}', None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"prompt": "a", "temperature": NaN}', None),
        (b'{"prompt": "a", "temperature": Infinity}', None),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "temperature": "1"}', "temperature"),
        (b'{"prompt": "a", "max_tokens": 1.5}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "a", "stop": [1]}', "stop[0]"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        (b'{"prompt": "a", "stream_options": {"include_usage": 1}}', "stream_options.include_usage"),
        (b'{"prompt": null}', "prompt"),
        (b'{"prompt": [1.0]}', "prompt[0]"),
        (b'{"prompt": [[1, "a"]]}', "prompt[0][1]"),
        (b"{}", "prompt"),
        (b'{"prompt": "a", "suffix": "b"}', "suffix"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"x": ' * 100_000, None),
        (b'{"prompt": ' + b"[" * 100_000, None),
        (b'{"x": ' + b"[" * 3000 + b"]" * 3000 + b', "prompt": "a"}', None),
    ],
)
async def test_a_wrong_body_gets_a_400_that_says_where(data: bytes, param: str | None) -> None:
    error = await refused(data)
    assert error.param == param
    assert param is None or param in error.message


async def test_null_is_the_default_and_unknown_fields_are_ignored() -> None:
    request = await decode(b'{"prompt": "a", "max_tokens": null, "suffix": null, "tools": [1], "x": {"y": []}}')
    assert request == CompletionRequest(prompt="a")


SPACE = st.sampled_from(["", " ", "\n", "\t "])
INTEGERS = st.integers(min_value=-5, max_value=2**31 - 1)


@given(ids=st.lists(INTEGERS, min_size=1, max_size=40), space=SPACE, slice_bytes=st.integers(4, 60))
def test_a_large_token_prompt_decodes_in_slices_as_in_one(ids: list[int], space: str, slice_bytes: int) -> None:
    array_text = "[" + f"{space},{space}".join(map(str, ids)) + space + "]"
    data = f'{{"max_tokens": 3,{space}"prompt"{space}:{space}{array_text}, "n": 2}}'.encode()
    cut = cut_with(data, slice_bytes)
    if cut is not None:
        rest, marker, found = cut
        assert list(found) == ids
        assert json.loads(rest) == {"max_tokens": 3, "prompt": [marker], "n": 2}
    else:  # a slice without a comma in it: the whole body is decoded then
        assert max(len(str(token)) for token in ids) + 2 * len(space) + 2 > slice_bytes


@pytest.mark.parametrize(
    "array_text",
    ["[1,]", "[1, ]", "[1,,2]", "[,1]", "[1 2]", "[1.5]", "[1e3]", "[true]", '["1"]', "[1, null]", "[01]", "[--1]",
     "[99999999999]", "[1", "[[1]]", "[1,2,3,4,5,6,]", "[1,2,3,4,5,6, ]"],
)  # fmt: skip
@pytest.mark.parametrize("slice_bytes", [2, 3, 4, 5, 7, 11, 1000])
def test_what_is_no_flat_array_of_integers_is_not_cut(array_text: str, slice_bytes: int) -> None:
    assert cut_with(f'{{"prompt": {array_text}}}'.encode(), slice_bytes) is None


def cut_with(data: bytes, slice_bytes: int) -> tuple[bytes, int, array[int]] | None:
    before = module.SLICE_BYTES
    module.SLICE_BYTES = slice_bytes  # type: ignore[misc]
    try:
        return module._cut_token_array(data)
    finally:
        module.SLICE_BYTES = before  # type: ignore[misc]


async def test_a_large_body_is_decoded_whatever_its_prompt_is() -> None:
    filler = "x" * module.LARGE_BODY_BYTES
    ids = list(range(1000))
    for prompt in (ids, [ids, ids], filler, [filler, "y"]):
        request = await decode(json.dumps({"user": filler, "prompt": prompt, "n": 2}).encode())
        assert request.n == 2
        assert list(request.prompt) == list(prompt)
    error = await refused(json.dumps({"user": filler, "prompt": ids, "n": "2"}).encode())
    assert error.param == "n"
    error = await refused(json.dumps({"user": filler, "prompt": [*ids, 1.5]}).encode())
    assert error.param == "prompt[1000]"


async def test_a_nested_field_of_the_same_name_is_no_prompt() -> None:
    filler = "x" * module.LARGE_BODY_BYTES
    body = {"x": {"prompt": [1, 2, 3]}, "user": filler, "prompt": [4, 5]}
    assert list((await decode(json.dumps(body).encode())).prompt) == [4, 5]
    error = await refused(json.dumps({"x": {"prompt": [1, 2, 3]}, "user": filler}).encode())
    assert error.param == "prompt"


def receiver(messages: Iterable[dict[str, Any]]) -> Any:
    waiting = iter(messages)

    async def receive() -> dict[str, Any]:
        message = next(waiting, None)
        if message is None:
            await asyncio.sleep(3600)
        assert message is not None
        return {"type": "http.request", **message}

    return receive


def scope(**headers: str) -> dict[str, Any]:
    return {"headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]}


async def test_a_body_is_read_whole() -> None:
    assert await read_body(scope(), receiver([{"body": b"abc"}]), 3) == b"abc"
    parts: list[dict[str, Any]] = [
        {"body": b"ab", "more_body": True},
        {"body": b"", "more_body": True},
        {"body": b"c"},
    ]
    assert await read_body(scope(), receiver(parts), 3) == b"abc"


@pytest.mark.parametrize(
    ("headers", "messages"),
    [
        ({"content_length": "4"}, []),
        ({"content_length": "9" * 40}, []),
        ({}, [{"body": b"abcd"}]),
        ({}, [{"body": b"abcd", "more_body": True}]),
        ({"content_length": "3"}, [{"body": b"ab", "more_body": True}, {"body": b"cd"}]),
    ],
)
async def test_a_larger_body_is_refused_as_soon_as_that_is_known(
    headers: dict[str, str], messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(ApiError) as caught:
        await read_body(scope(**headers), receiver(messages), 3)
    assert caught.value.status == 413


async def test_a_client_that_leaves_or_pauses_ends_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClientDisconnected):
        await read_body(scope(), receiver([{"body": b"a", "more_body": True}, {"type": "http.disconnect"}]), 9)
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.01)
    with pytest.raises(ApiError) as caught:
        await read_body(scope(), receiver([{"body": b"a", "more_body": True}]), 9)
    assert caught.value.status == 408


async def test_bodies_together_are_bounded_and_given_back() -> None:
    budget = BodyBudget(1000)
    budget.max_total = 100

    async def take(size: int, *rest: dict[str, Any]) -> Any:
        body = b'{"model": "m", "prompt": "%b"}' % (b"x" * size)
        parts = [{"body": body, "more_body": bool(rest)}, *rest]
        return await read_request(scope(), receiver(parts), budget, decode_completion, check_completion_fields)

    assert (await take(10)).prompt == "x" * 10
    assert budget.held == 0
    with pytest.raises(ApiError) as caught:
        await take(200)
    assert caught.value.status == 503
    with pytest.raises(ClientDisconnected):
        await take(10, {"type": "http.disconnect"})
    with pytest.raises(ApiError):
        await take(0, {"body": b"no JSON any more"})
    assert budget.held == 0
