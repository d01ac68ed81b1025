"""`--probe-outputs` of a load: asked when it is over, of the same server, in none of its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from atom.bench.rundir import RunDirectory
from atom.diag.compare.outputs import prompt, read_outputs
from atom.diag.compare.scores import score_run

ROOT = Path(__file__).parents[2]


class Handler(BaseHTTPRequestHandler):
    """Streams four tokens, or answers at once where that is asked."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self.answer(json.dumps({"data": [{"id": "m"}]} if known else {}).encode(), 200 if known else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["stream"]:
            chunks: list[Any] = [{"choices": [{"index": 0, "text": f" {i}", "finish_reason": None}]} for i in range(4)]
            chunks[-1]["choices"][0]["finish_reason"] = "length"
            usage = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
            events = [json.dumps(one) for one in (*chunks, {"choices": [], "usage": usage})]
            self.answer("".join(f"data: {one}\n\n" for one in (*events, "[DONE]")).encode(), kind="text/event-stream")
        else:
            self.answer(json.dumps({"choices": [{"text": f"<{body['prompt']}>"}]}).encode())

    def answer(self, data: bytes, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    handler = type("Asked", (Handler,), {"asked": []})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", handler.asked  # type: ignore[attr-defined]
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def bench(url: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    load = ("--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "6", "--max-concurrency", "2")
    command = [sys.executable, "-m", "atom.cli.main", "bench", "random", "--base-url", url, *load, *more]
    return subprocess.run(
        [*command, "--output-dir", str(folder), "--quiet"],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".src")},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_outputs_are_asked_after_the_load(tmp_path: Path, server: tuple[str, list[dict[str, Any]]]) -> None:
    url, asked = server
    result = bench(url, tmp_path / "run", "--probe-outputs", "3")
    assert result.returncode in (0, 4), result.stderr  # a load this small may find its client to blame
    assert [one["stream"] for one in asked] == [True] * 6 + [False] * 3
    assert [output.text for output in read_outputs(tmp_path / "run").values()] == [f"<{prompt(i)}>" for i in range(3)]
    assert score_run(tmp_path / "run").counts.completed == 6
    assert RunDirectory.open(tmp_path / "run").read_summary()["figures"]["completed"]["value"] == 6


def test_too_many_are_refused(tmp_path: Path) -> None:
    result = bench("http://127.0.0.1:9", tmp_path / "run", "--probe-outputs", "300")
    assert result.returncode == 2
    assert "--probe-outputs" in result.stderr
    assert not (tmp_path / "run").exists()
