"""Whatever is sent: an answer below 500, in time, and the server is there for the next one."""

from __future__ import annotations

import json
import socket
import string
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.engine.server.fields import _CHAT, _COMPLETION
from atom.engine.server.protocol import ChatCompletionRequest, CompletionRequest
from tests.server_process import FAST, RunningServer, running_server

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
FIELDS = sorted(
    {*CompletionRequest.__struct_fields__, *ChatCompletionRequest.__struct_fields__, *_COMPLETION, *_CHAT, "tokens"}
)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(*FAST, "--max-model-len", "256", "--max-body-bytes", "200K") as running:
        yield running
        assert "Traceback" not in running.log_text()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as it:
        yield it


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"]


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63, -(2**63) - 1, 10**30]),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e308, 5e-324, 1.0, 0.5]),
)
TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["", "\x00", "\ud800", "🙂", "<|bos|>", "a" * 2000]))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*FIELDS, "role", "content", "type", "text", "0", "5"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@QUICK
@given(path=st.sampled_from(PATHS), changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_wrong_types_and_huge_numbers(client: httpx.Client, path: str, changes: dict[str, Any]) -> None:
    body = json.dumps({**VALID[path], **changes}).encode()  # NaN and lone surrogates included
    check(client.post(path, content=body))


@QUICK
@given(
    path=st.sampled_from(PATHS),
    data=st.data(),
)
def test_broken_json(client: httpx.Client, path: str, data: st.DataObject) -> None:
    body = bytearray(json.dumps(VALID[path]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(body)))
        match data.draw(st.sampled_from(["cut", "insert", "replace"])):
            case "cut":
                del body[position : position + data.draw(st.integers(1, 10))]
            case "insert":
                body[position:position] = data.draw(st.binary(min_size=1, max_size=4))
            case "replace":
                body[position : position + 1] = data.draw(st.binary(min_size=1, max_size=1))
    check(client.post(path, content=bytes(body)))


@QUICK
@given(body=st.binary(max_size=200), path=st.sampled_from(PATHS))
def test_no_json_at_all(client: httpx.Client, path: str, body: bytes) -> None:
    response = client.post(path, content=body)
    check(response)
    assert response.status_code == 400


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 150_000,
        b'{"a":' * 30_000,
        b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": "a", "seed": ' + b"1" * 100_000 + b"}",
        b'{"prompt": "a", "temperature": 1e' + b"9" * 1000 + b"}",
        b'{"prompt": "' + b"\\u0000" * 1000 + b'"}',
        b'{"prompt": [' + b"1," * 60_000 + b"1]}",
        b'{"prompt": [' + b"99999999999999999999," * 5000 + b"1]}",
        b'{"prompt": [[]' + b",[]" * 30_000 + b"]}",
        b'{"prompt": ["",' + b'"",' * 30_000 + b'""]}',
        b'{"messages": [' + b'{"role":"user","content":"x"},' * 5000 + b'{"role":"user","content":"x"}]}',
        b'{"stop": [' + b'"x",' * 40_000 + b'"x"], "prompt": "a"}',
        b'{"logit_bias": {' + b",".join(b'"%d":1' % index for index in range(15_000)) + b'}, "prompt": "a"}',
        b'{"tokens": [' + b"1," * 60_000 + b"1]}",
        b"x" * 300_000,
    ],
    ids=lambda body: f"{body[:16].decode()}…{len(body)}",
)
def test_large_and_deep_bodies(client: httpx.Client, path: str, body: bytes) -> None:
    check(client.post(path, content=body))


def exchange(port: int, data: bytes, *, close: bool = False) -> bytes:
    """Send bytes on a connection of their own; what comes back until the server closes, or for a moment."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        received = bytearray()
        try:
            connection.sendall(data)
            if close:
                return b""
            connection.settimeout(0.15)
            while piece := connection.recv(1 << 16):
                received += piece
        except (TimeoutError, ConnectionError):
            pass
        return bytes(received)


BODY = json.dumps(VALID["/v1/completions"]).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff" * 2000,
        b"\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/%00%0a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nX-Request-Id: a\x01b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-Request-Id: \xff\r\n\r\n",
        b"GET /health HTTP/1.1\r\nAuthorization: \xff\xfe\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 200,
        HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
        HEAD + b"Content-Length: x\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 3\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 100000\r\n\r\n" + BODY,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + BODY,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 2000,
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + BODY,
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
        HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
        HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + b"garbage after the body\r\n\r\n",
    ],
    ids=lambda data: ascii(data[:60]),
)
@pytest.mark.parametrize("close", [False, True])
def test_raw_garbage(server: RunningServer, client: httpx.Client, data: bytes, close: bool) -> None:
    received = exchange(server.port, data, close=close)
    assert b"HTTP/1.1 500" not in received
    assert client.get("/health").status_code == 200


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=300), head=st.booleans())
def test_random_bytes_on_a_socket(server: RunningServer, client: httpx.Client, data: bytes, head: bool) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall((HEAD if head else b"") + data)
    assert client.get("/health").status_code == 200


def test_nothing_of_it_stayed(server: RunningServer) -> None:
    """Runs last in this file: every sequence that the bodies above started is gone, and the log is small."""
    assert server.get("/load").json() == {"server_load": 0}
    metrics = server.metrics()
    assert metrics['atom:scheduler_requests{dp_rank="0",state="running"}'] == 0
    assert metrics['atom:scheduler_kv_cache_blocks{dp_rank="0",state="used"}'] == 0
    assert len(server.log_text()) < 100_000


def test_names_of_unknown_fields_do_not_fill_the_log(server: RunningServer, client: httpx.Client) -> None:
    for index in range(300):
        name = f"unknown_{index}_{string.ascii_letters * 20}"
        assert client.post("/v1/completions", json={**VALID["/v1/completions"], name: 1}).status_code == 200
    assert server.log_text().count("unknown_") <= 100
