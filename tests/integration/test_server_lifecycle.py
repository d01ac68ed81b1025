"""How a server starts, stops, loses its engine, and treats clients that do not read."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.server_process import FAST, SIMULATED, RunningServer, running_server, sse_events, wait_for

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 100_000}


def run_to_exit(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atom.engine.server", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


class BackgroundStream:
    """A streamed completion, read by a thread."""

    def __init__(self, server: RunningServer, **body: Any) -> None:
        self.text = ""
        self.error: Exception | None = None
        self._request = {**LONG, "stream": True, **body}
        self._url = f"{server.url}/v1/completions"
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_for(lambda: self.text)

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._request, timeout=30) as response:
                assert response.status_code == 200
                for text in response.iter_text():
                    self.text += text
        except Exception as error:
            self.error = error

    def events(self) -> list[Any]:
        """All of them, once the response has ended."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert self.error is None
        return sse_events(self.text)


def test_the_port_is_announced_and_written(tmp_path: Path) -> None:
    path = tmp_path / "port"
    with running_server("--port-file", str(path)) as server:
        assert server.ready["host"] == "127.0.0.1"
        assert server.ready["pid"] == server.pid
        assert server.ready["simulated"] is True
        assert json.loads(path.read_text()) == server.port
        assert list(tmp_path.iterdir()) == [path]
        assert server.stop() == 0
        assert "Traceback" not in server.log_text()


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_to_exit("--executor", "simulated", "--port", port)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"--port {port}" in line
    assert not done.stdout


def test_a_port_that_is_taken_while_the_model_loads_is_one_line() -> None:
    """Two sockets may be bound to one port as long as neither listens."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "atom.engine.server", *SIMULATED, "--port", port]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                wait_for(lambda: psutil.Process(process.pid).children())
                taken.listen()
                out, err = process.communicate(timeout=30)
            finally:
                process.kill()
    assert (process.returncode, out) == (1, "")
    assert f"--port {port}" in err
    assert "Traceback" not in err


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    done = run_to_exit(str(tmp_path / "none"), "--executor", "simulated", "--port", "0")
    assert done.returncode == 1
    assert str(tmp_path / "none") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_blamed_alone(host: str) -> None:
    done = run_to_exit("--executor", "simulated", "--host", host, "--port", "8123")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: --host {host}: ")
    assert "--port" not in line


def test_an_unknown_fault_is_one_line() -> None:
    environment = {**os.environ, "ATOM_FAULTS": "retain-finished,typo"}
    command = [sys.executable, "-m", "atom.engine.server", *SIMULATED, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "ATOM_FAULTS" in line
    assert "retain-finished" in line


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_cores_start_ends_it_and_is_no_success(number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "atom.engine.server", *SIMULATED, "--port", "0", "-dp", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            children = wait_for(lambda: psutil.Process(process.pid).children())
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out) == (status, ""), err
    assert f"stopped by {number.name} before it was ready" in err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_sigterm_finishes_what_is_open() -> None:
    with running_server("--sim-base-ms", "2") as server:
        stream = BackgroundStream(server, max_tokens=700, stream_options={"include_usage": True})
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert client.get("/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: client.get("/health").status_code == 503)
            refused = client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert client.get("/metrics").status_code == 200
        *_, last, done = stream.events()
        assert done == "[DONE]"
        assert last["usage"]["completion_tokens"] == 700
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("end", ["timeout", "second signal"])
def test_what_cannot_finish_gets_an_error(end: str) -> None:
    seconds = "0.2" if end == "timeout" else "60"
    with running_server("--sim-base-ms", "5", "--shutdown-timeout", seconds) as server, ThreadPoolExecutor() as pool:
        stream = BackgroundStream(server)
        whole = pool.submit(server.post, "/v1/completions", LONG)
        wait_for(lambda: server.get("/load").json()["server_load"] == 2)
        server.process.send_signal(signal.SIGTERM)
        if end == "second signal":
            wait_for(lambda: server.get("/health").status_code == 503)
            server.process.send_signal(signal.SIGINT)
        assert stream.events()[-1]["error"]["code"] == "shutting_down"
        assert whole.result().status_code == 503
        assert server.process.wait(30) == 1


def test_an_engine_that_stops_answering_is_unhealthy_until_it_goes_on() -> None:
    with running_server("--sim-base-ms", "5", "--core-timeout", "0.5") as server:
        stream = BackgroundStream(server, max_tokens=800)
        assert server.get("/health").status_code == 200
        core = server.core_pid()
        os.kill(core, signal.SIGSTOP)
        try:
            health = wait_for(lambda: reply if (reply := server.get("/health")).status_code == 503 else None)
            assert health.json()["error"]["code"] == "engine_silent"
            assert "EngineCore 0" in health.json()["error"]["message"]
            refused = server.post("/v1/completions", {"prompt": "x"})
            assert refused.json()["error"]["code"] == "engine_silent"
        finally:
            os.kill(core, signal.SIGCONT)
        wait_for(lambda: server.get("/health").status_code == 200)
        stream.events()
        assert stream.text.endswith("data: [DONE]\n\n")


def test_a_dead_engine_fails_what_is_open_and_ends_the_server() -> None:
    with running_server("--sim-base-ms", "5") as server, ThreadPoolExecutor() as pool:
        stream = BackgroundStream(server)
        whole = pool.submit(server.post, "/v1/completions", LONG)
        wait_for(lambda: server.get("/load").json()["server_load"] == 2)
        with httpx.Client(base_url=server.url, timeout=30) as client:
            os.kill(server.core_pid(), signal.SIGKILL)
            health = wait_for(lambda: response if (response := client.get("/health")).status_code == 503 else None)
            assert health.json()["error"]["code"] == "engine_dead"
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        error = stream.events()[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        assert "[DONE]" not in stream.text
        failed = whole.result()
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_dead")
        assert server.process.wait(30) == 1
        assert "SIGKILL" in server.log_text()


def test_the_client_library_sees_an_error_in_the_stream() -> None:
    with running_server("--sim-base-ms", "5") as server:
        stream = server.client().completions.create(model=server.model, prompt="x", max_tokens=5000, stream=True)
        next(stream)
        core = server.core_pid()
        os.kill(core, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine died"):
            for _ in stream:
                pass


def test_a_killed_server_leaves_no_core() -> None:
    with running_server() as server:
        core = psutil.Process(server.core_pid())
        server.process.kill()
        server.process.wait()
        core.wait(10)


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    with running_server("--api-key", "k1", "k2", "--max-body-bytes", "2000", "--served-model-name", "m") as server:
        yield server


def test_the_api_key_guards_v1_alone(guarded: RunningServer) -> None:
    for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic k1"}, {"Authorization": "k1"}):
        for path in ("/v1/models", "/v1/nothing", "/v1/%6dodels"):
            refused = guarded.get(path, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
    for key in ("k1", "k2"):
        assert guarded.client(api_key=key).models.list().data[0].id == "m"
    with pytest.raises(openai.AuthenticationError):
        guarded.client(api_key="k3").models.list()
    assert guarded.get("/health").status_code == guarded.get("/metrics").status_code == 200
    assert "k1" not in guarded.get("/server_info").text


def test_oversized_bodies_get_a_413(guarded: RunningServer) -> None:
    headers = {"Authorization": "Bearer k1"}
    body = json.dumps({"prompt": "x" * 3000}).encode()

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    with httpx.Client(base_url=guarded.url, headers=headers, timeout=30) as client:
        for content in (body, chunks()):
            refused = client.post("/v1/completions", content=content)
            assert refused.status_code == 413
            assert refused.json()["error"]["code"] == "request_too_large"
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


class SlowReader:
    """A client with a small receive buffer that reads only when told."""

    def __init__(self, server: RunningServer, body: dict[str, Any]) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(30)
        self._socket.connect(("127.0.0.1", server.port))
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)

    def read_all(self) -> str:
        """The body, its chunked framing removed."""
        received = bytearray()
        while piece := self._socket.recv(1 << 16):
            received += piece
        self._socket.close()
        _, _, rest = bytes(received).partition(b"\r\n\r\n")
        body = bytearray()
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]
        return body.decode()

    def close(self) -> None:
        self._socket.close()


# A long name makes large events, and n many of them: some 6 MB have to be on their way before the kernel's buffers are
# full.
LARGE_EVENTS = (*FAST, "--served-model-name", "m" * 500)
LARGE_ANSWER: dict[str, Any] = {"prompt": "x", "max_tokens": 1200, "n": 16, "return_token_ids": True}


def test_a_slow_reader_gets_merged_events_and_holds_nobody_up() -> None:
    n, tokens = LARGE_ANSWER["n"], LARGE_ANSWER["max_tokens"]
    with running_server(*LARGE_EVENTS) as server:
        whole = server.post("/v1/completions", LARGE_ANSWER).json()["choices"]
        stream_options = {"include_usage": True, "continuous_usage_stats": True}
        streamed = {**LARGE_ANSWER, "stream": True, "stream_options": stream_options}
        slow, gone = SlowReader(server, streamed), SlowReader(server, streamed)
        wait_for(lambda: server.metrics()['atom:requests_finished_total{reason="length"}'] == 3 * n, timeout=60)
        used = server.metrics()['atom:scheduler_kv_cache_blocks{dp_rank="0",state="used"}']
        assert used == 0, "a reader that is slow holds no blocks"
        assert server.get("/load").json() == {"server_load": 2}
        gone.close()
        *chunks, usage, done = sse_events(slow.read_all())
        assert done == "[DONE]"
        assert usage["usage"]["completion_tokens"] == n * tokens
        assert len(chunks) < n * tokens, "nothing was merged: the reader was not slow"
        for index in range(n):
            mine = [(chunk["choices"][0], chunk["usage"]) for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert [token for choice, _ in mine for token in choice["token_ids"]] == whole[index]["token_ids"]
            assert "".join(choice["text"] for choice, _ in mine) == whole[index]["text"]
            assert [choice["finish_reason"] for choice, _ in mine] == [None] * (len(mine) - 1) + ["length"]
            counted = 0
            for choice, so_far in mine:
                counted += len(choice["token_ids"])
                assert so_far["completion_tokens"] == counted
        assert server.metrics()["atom:stream_events_merged_total"] >= n
        wait_for(lambda: server.get("/load").json() == {"server_load": 0})


def test_a_reader_that_stops_does_not_keep_the_server_from_ending() -> None:
    with running_server(*LARGE_EVENTS, "--shutdown-timeout", "0.5") as server:
        reader = SlowReader(server, {**LARGE_ANSWER, "stream": True})
        finished = 'atom:requests_finished_total{reason="length"}'
        wait_for(lambda: server.metrics()[finished] == LARGE_ANSWER["n"], timeout=60)
        assert server.stop() == 1
        reader.close()


def test_megabytes_of_prompt_do_not_stop_the_loop() -> None:
    """While they are decoded and tokenized, another stream goes on. What is too long for the model is refused."""
    with running_server("--sim-base-ms", "2", "--max-model-len", "4000") as server:
        stream = BackgroundStream(server, max_tokens=3000)
        ids = json.dumps({"prompt": [97] * 400_000}).encode()
        text = json.dumps({"prompt": "x" * 2_000_000}).encode()
        for body in (ids, text):
            before = stream.text.count("data: ")
            refused = httpx.post(f"{server.url}/v1/completions", content=body, timeout=60)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            assert stream.text.count("data: ") > before
        server.process.kill()


def test_the_request_log_has_a_line_per_completion(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with running_server("--request-log", str(path), "--sim-base-ms", "2") as server:
        server.post(
            "/v1/completions",
            {"prompt": "ab", "max_tokens": 3, "n": 2, "user": "u", "metadata": {"k": "v"}},
            headers={"X-Request-Id": "r1"},
        )
        stream = server.client().completions.create(model=server.model, prompt="x", max_tokens=5000, stream=True)
        next(stream)
        stream.close()
        lines = wait_for(lambda: rows if len(rows := path.read_text().splitlines()) == 2 else None)
    first, second = map(json.loads, lines)
    assert first["request_id"] == "r1"
    assert (first["user"], first["metadata"]) == ("u", {"k": "v"})
    assert (first["prompt_tokens"], first["completion_tokens"]) == (2, 6)
    assert first["finish_reasons"] == ["length", "length"]
    assert (first["status"], first["stream"], first["error"]) == (200, False, None)
    assert 0 < first["ttft_s"] <= first["e2e_s"]
    assert second["finish_reasons"] == ["abort"]
    assert abs(second["time"] - time.time()) < 60
