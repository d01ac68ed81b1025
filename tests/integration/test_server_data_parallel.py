"""A server with two simulated EngineCores: load, aborts, metrics, profiles, and the loss of one core."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.server_process import RunningServer, running_server, sse_events, wait_for

FLAGS = ("-dp", "2", "--max-num-seqs", "4", "--dp-dispatch-limit", "5", "--sim-base-ms", "2")
ENDLESS: dict[str, Any] = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(*FLAGS) as running:
        yield running


def of_ranks(server: RunningServer, name: str, **labels: str) -> list[float]:
    """A sample per dp rank, of `name` with these further labels."""
    samples = server.metrics()
    found = []
    for rank in range(2):
        parts = [f'dp_rank="{rank}"', *(f'{key}="{value}"' for key, value in labels.items())]
        (value,) = [
            value
            for sample, value in samples.items()
            if sample.startswith(f"{name}{{") and all(part in sample for part in parts)
        ]
        found.append(value)
    return found


def test_it_says_how_many_engines_it_has(server: RunningServer) -> None:
    assert server.ready["data_parallel_size"] == 2
    info = server.get("/server_info").json()
    assert info["data_parallel_size"] == 2
    assert info["config"]["parallel"]["data_parallel_size"] == 2
    assert set(info["pids"]) == {"api", "core-0", "core-1"}


def test_more_than_both_engines_can_hold_is_served_by_both(server: RunningServer) -> None:
    before = of_ranks(server, "atom:request_queue_time_seconds_count")
    with ThreadPoolExecutor(16) as pool, httpx.Client(base_url=server.url, timeout=30) as client:

        def ask(number: int) -> tuple[int, int]:
            body = {"prompt": f"request {number}", "max_tokens": 8, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            return answer.status_code, answer.json()["usage"]["completion_tokens"]

        assert list(pool.map(ask, range(48))) == [(200, 8)] * 48
    after = of_ranks(server, "atom:request_queue_time_seconds_count")
    served = [now - then for now, then in zip(after, before, strict=True)]
    assert sum(served) == 48
    assert min(served) >= 12, served


def test_clients_that_leave_free_both_engines_and_what_was_held_back(server: RunningServer) -> None:
    leave = threading.Event()
    with ThreadPoolExecutor(16) as pool, httpx.Client(base_url=server.url, timeout=30) as client:

        def leave_early(_: int) -> None:
            with client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
                assert response.status_code == 200
                leave.wait(30)

        gone = [pool.submit(leave_early, number) for number in range(16)]
        wait_for(lambda: server.get("/load").json() == {"server_load": 16})  # 10 in hand, 6 held back
        wait_for(lambda: of_ranks(server, "atom:scheduler_requests", state="running") == [4.0, 4.0])
        leave.set()
        for one in gone:
            one.result(30)
    wait_for(lambda: server.get("/load").json() == {"server_load": 0})
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    # A core reports with its next step, so what it freed shows once both have had one.
    assert of_ranks(server, "atom:scheduler_requests", state="running") == [0.0, 0.0]
    assert of_ranks(server, "atom:scheduler_kv_cache_blocks", state="used") == [0.0, 0.0]


def test_max_waiting_counts_what_waits_in_all() -> None:
    flags = ("-dp", "2", "--max-num-seqs", "4", "--dp-dispatch-limit", "1", "--max-waiting", "3")
    with (
        running_server(*flags) as server,
        ThreadPoolExecutor(5) as pool,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        leave = threading.Event()

        def stay(_: int) -> None:
            with client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
                assert response.status_code == 200
                leave.wait(30)

        staying = [pool.submit(stay, number) for number in range(5)]
        wait_for(lambda: server.metrics()["atom:requests_held_back"] == 3)
        samples = server.metrics()
        assert samples["atom:requests_waiting"] == 3
        assert sum(value for name, value in samples.items() if name.startswith("vllm:num_requests_waiting")) == 3
        refused = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        leave.set()
        for one in staying:
            one.result(30)
        wait_for(lambda: server.metrics()["atom:requests_waiting"] == 0)
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_the_loss_of_one_engine_ends_all_with_an_error() -> None:
    with (
        running_server(*FLAGS, "--sim-base-ms", "20") as server,
        ThreadPoolExecutor(12) as pool,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):

        def stream(_: int) -> str:
            with client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
                return "".join(response.iter_text())

        streams = [pool.submit(stream, number) for number in range(12)]
        wait_for(lambda: of_ranks(server, "atom:scheduler_requests", state="running") == [4.0, 4.0])
        pids = server.get("/server_info").json()["pids"]
        os.kill(pids["core-1"], signal.SIGKILL)
        for one in streams:
            text = one.result(30)
            assert sse_events(text)[-1]["error"]["code"] == "engine_dead"
            assert "[DONE]" not in text
        assert server.process.wait(30) == 1
        assert "EngineCore 1" in server.log_text()
        assert not psutil.pid_exists(pids["core-0"])
