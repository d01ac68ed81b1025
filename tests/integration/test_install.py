"""The base distribution in a virtual environment of its own: beside someone's torch and numpy it changes nothing, and
it measures a server by URL. The wheel is built once; the packages come from the index that pip is set up with."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done  # type: ignore[no-any-return]


def fake_wheel(folder: Path, name: str, version: str) -> Path:
    """A distribution that only claims to be installed, as a vendor's build of `name` would be."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", f"__version__ = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{name}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def installed(python: Path) -> dict[str, str]:
    rows = json.loads(run(python, "-m", "pip", "list", "--format", "json").stdout)
    return {row["name"].lower(): row["version"] for row in rows}


class StandIn(http.server.BaseHTTPRequestHandler):
    """The least that an OpenAI-compatible server streams: four tokens and a usage chunk."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.reply(json.dumps({"object": "list", "data": [{"id": "stand-in", "object": "model"}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunks = [
            {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": " x", "finish_reason": None}]}
        ] * 4
        usage = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
        events = [*chunks, {"id": "c", "object": "text_completion", "choices": [], "usage": usage}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.reply(body.encode(), "text/event-stream")


@pytest.fixture
def stand_in() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.timeout(600)
def test_base_install_changes_no_package_and_benches_a_url(tmp_path: Path, stand_in: str) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    vendor = [fake_wheel(tmp_path, "torch", "1.99.0"), fake_wheel(tmp_path, "vllm", "0.1.0")]
    # An older numpy than the newest is what a vendor's image typically holds.
    run(python, "-m", "pip", "install", "-q", *vendor, "numpy<2.3", "psutil==5.9.8", "httpx==0.27.0")
    before = installed(python)

    run(python, "-m", "pip", "install", "-q", ROOT)

    after = installed(python)
    assert {name: after.get(name) for name in before} == before
    assert "atom-serving" in after
    atom = tmp_path / "venv" / "bin" / "atom"
    assert run(atom, "--version", cwd=tmp_path).stdout.strip()
    done = run(
        *(atom, "bench", "random", "--base-url", stand_in, "--num-prompts", "3", "--max-concurrency", "1"),
        *("--random-input-len", "8", "--random-output-len", "4", "--output-dir", tmp_path / "run", "--json", "-"),
        cwd=tmp_path,
    )
    result = json.loads(done.stdout)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (3, 0, 12)
