"""A real `python -m atom.engine.server` for tests: started on a free port, stopped and reaped whatever happens.

with running_server("--sim-base-ms", "1") as server:
    server.client().models.list()
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import httpx
import openai
import psutil

READY_TIMEOUT_S = 60.0
SIMULATED = ("--executor", "simulated", "--tokenizer", "bytes", "--sim-vocab-size", "512")
"""Deterministic, quick to start, and without any file."""
FAST = ("--sim-base-ms", "0", "--sim-prefill-us-per-token", "0", "--sim-decode-us-per-seq", "0")
"""As fast as Python can."""


@dataclass
class RunningServer:
    process: subprocess.Popen[str]
    log: IO[str]
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        url: str = self.ready["url"]
        return url

    @property
    def port(self) -> int:
        port: int = self.ready["port"]
        return port

    @property
    def model(self) -> str:
        model: str = self.ready["model"]
        return model

    @property
    def pid(self) -> int:
        return self.process.pid

    def core_pid(self) -> int:
        pid: int = self.get("/server_info").json()["pids"]["core-0"]
        return pid

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **kwargs)

    def client(self, **kwargs: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **kwargs})

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        samples = {}
        for line in self.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def log_text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextlib.contextmanager
def running_server(*flags: str, simulated: bool = True, env: dict[str, str] | None = None) -> Iterator[RunningServer]:
    """A server that is ready. On the way out it and its cores are gone, killed if they must be."""
    command = [sys.executable, "-m", "atom.engine.server", "--port", "0", *(SIMULATED if simulated else ()), *flags]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        server = RunningServer(process, log)
        children: list[psutil.Process] = []
        try:
            server.ready = _wait_until_ready(server)
            children = psutil.Process(process.pid).children(recursive=True)
            yield server
            if process.poll() is None:
                process.terminate()
                process.wait(30)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            _, alive = psutil.wait_procs(children, timeout=10)
            for child in alive:
                child.kill()
        assert not alive, f"the cores outlived their server: {alive}"


def _wait_until_ready(server: RunningServer) -> dict[str, Any]:
    assert server.process.stdout is not None
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if select.select([server.process.stdout], [], [], 0.2)[0]:
            line = server.process.stdout.readline()
            if not line:
                break
            ready: dict[str, Any] = json.loads(line)
            assert ready["event"] == "ready"
            return ready
    server.process.kill()
    raise AssertionError(f"the server is not ready; its log:\n{server.log_text()}")


def wait_for(condition: Any, timeout: float = 15.0) -> Any:
    """The first true value of `condition()`; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def sse_events(text: str) -> list[Any]:
    """The data of a whole event stream; `[DONE]` as a string."""
    found = re.findall(r"data: (.*)\n\n", text)
    return [event if event == "[DONE]" else json.loads(event) for event in found]
