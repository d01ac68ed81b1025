"""HTTPS: a certificate nobody vouches for is refused, and accepted on request."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from atom.bench.records import Outcome


@pytest.fixture
def https_port(tmp_path: Path, wire: Any) -> Iterator[int]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command for a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command = ["openssl", "req", *options, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as sock:
                    data = b""
                    while b"\r\n\r\n" not in data or not data.endswith(b"}"):
                        if not (more := sock.recv(1 << 16)):
                            break
                        data += more
                    for action in wire.good_answer():
                        sock.sendall(action)
            except OSError:
                continue

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(2)
    listener.close()


async def test_unknown_certificate_is_refused_with_the_reason(https_port: int, load: Any) -> None:
    record = (await load(f"https://127.0.0.1:{https_port}", 1)).records[0]
    assert (record.outcome, record.error_class) == (Outcome.FAILED, "connect")
    assert "certificate" in record.error_message.lower()


async def test_unknown_certificate_is_accepted_on_request(https_port: int, load: Any) -> None:
    record = (await load(f"https://127.0.0.1:{https_port}", 1, verify_tls=False)).records[0]
    assert record.outcome == Outcome.COMPLETED, record.error_message
    assert record.output_tokens == 3
