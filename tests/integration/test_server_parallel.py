"""A server whose core spreads its model over workers: what it says of them, and that none outlives a killed one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atom.recipes.known_servers import KNOWN_ROLES
from tests.server_process import RunningServer, running_server
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)


def pids_of(server: RunningServer) -> dict[str, int]:
    pids: dict[str, int] = server.get("/server_info").json()["pids"]
    return pids


def flags(model: Path, *more: str) -> tuple[str, ...]:
    return ("--model", str(model), "--executor", "cpu", "--num-gpu-blocks-override", "64", "--num-threads", "2", *more)


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[RunningServer]:
    with running_server(*flags(tiny_llama, "-tp", "2"), simulated=False) as running:
        yield running


def test_it_answers_and_counts(server: RunningServer) -> None:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    first, second = (server.post("/v1/completions", body).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert first["usage"]["completion_tokens"] == 12
    metrics = server.metrics()
    assert [value for name, value in metrics.items() if name.startswith("atom:generation_tokens_total")] == [24.0]


def test_it_says_which_processes_it_has(server: RunningServer) -> None:
    info = server.get("/server_info").json()
    assert (info["tensor_parallel_size"], info["pipeline_parallel_size"]) == (2, 1)
    assert set(info["pids"]) == {"api", "core-0", *(f"worker-0-{rank}" for rank in range(2))}
    for name, pid in info["pids"].items():
        process = psutil.Process(pid)
        assert KNOWN_ROLES.role_of(" ".join(process.cmdline())) == name.partition("-")[0]
        if name.startswith("worker"):
            assert process.ppid() == info["pids"]["core-0"]
            listening = {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
            assert listening <= {"127.0.0.1"}, "others may connect"


def test_a_worker_killed_while_nothing_runs_ends_the_server_and_says_so(tiny_llama: Path) -> None:
    with running_server(*flags(tiny_llama, "-tp", "2"), simulated=False) as server:
        pids = pids_of(server)
        os.kill(pids["worker-0-1"], signal.SIGKILL)
        assert server.process.wait(30) == 1
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()))
        errors = [line for line in server.log_text().splitlines() if "was killed by SIGKILL" in line]
        assert errors
        assert "worker 1 (tp 1/2, pp 0/1)" in errors[0]
        assert "Traceback" not in server.log_text()


@pytest.mark.parametrize("victim", ["api", "core-0"])
def test_no_worker_outlives_a_killed_process(tiny_llama: Path, victim: str) -> None:
    with running_server(*flags(tiny_llama, "-pp", "2"), simulated=False) as server:
        pids = pids_of(server)
        os.kill(pids[victim], signal.SIGKILL)
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids.values() if pid != server.pid))
        server.process.wait(30)


def test_what_does_not_divide_is_one_line(tiny_llama: Path) -> None:
    refusal = "--tensor-parallel-size 3 does not divide the 4 attention heads"
    with (
        pytest.raises(AssertionError, match=refusal) as raised,
        running_server(*flags(tiny_llama, "-tp", "3"), simulated=False),
    ):
        pass
    assert "Traceback" not in str(raised.value)
