"""Scraping servers that answer, refuse, lie, drip and hang: always a complete line, null where nothing was seen."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from atom.diag.dialects import VALUE_NAMES
from atom.diag.http_fetch import ScrapeError, fetch
from atom.diag.metrics_path import find_metrics, metrics_paths
from atom.diag.metrics_scraper import MetricsScraper
from atom.recipes.errors import UsageError
from atom.recipes.known_servers import METRICS_PATHS
from atom.recipes.recipe import Metrics

BODY = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3\nother{a="b"} 1\n'


@contextlib.contextmanager
def peer(behave: Callable[[socket.socket], None], asked: list[bytes] | None = None) -> Iterator[str]:
    """A listener that reads a request, notes its path in `asked`, and then does what `behave` says."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(30)
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    head = connection.recv(65536)
                    if asked is not None:
                        asked.append(head.split(b" ")[1])
                    behave(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        finally:
            stop.set()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def answer(body: bytes, head: bytes = b"HTTP/1.1 200 OK") -> Callable[[socket.socket], None]:
    data = head + b"\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    return lambda connection: connection.sendall(data)


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(1000):
        connection.sendall(b"a 1\n")
        time.sleep(0.05)


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def scrape(url: str, timeout_s: float = 5.0) -> dict[str, Any]:
    line = MetricsScraper(url, "auto", timeout_s=timeout_s).scrape(123)
    assert line["scheduled_ns"] == 123
    assert set(line["values"]) == set(VALUE_NAMES)
    assert line["sent_ns"] > 0
    return line


def test_a_good_answer() -> None:
    with peer(answer(BODY)) as url:
        line = scrape(url)
    assert line["error"] is None
    assert (line["status"], line["body_bytes"], line["series"], line["families"]) == (200, len(BODY), 2, 2)
    assert line["latency_ns"] > 0
    assert line["connect_ns"] > 0
    assert line["values"]["running"] == 3.0
    assert line["values"]["waiting"] is None


def test_the_time_is_from_first_byte_sent_to_last_byte_read() -> None:
    def slow(connection: socket.socket) -> None:
        time.sleep(0.2)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\na ")
        time.sleep(0.2)
        connection.sendall(b"1\n")

    with peer(slow) as url:
        line = scrape(url)
    assert line["latency_ns"] >= 0.4e9


@pytest.mark.parametrize(
    ("behave", "timeout_s", "error"),
    [
        (answer(b"no", b"HTTP/1.1 404 Not Found"), 5.0, "HTTP 404"),
        (answer(bytes(range(256))), 5.0, "no Prometheus text"),
        (answer(b'[{"iter": 1}]'), 5.0, "no Prometheus text"),
        (answer(b"<html>\nServer error\n</html>\n"), 5.0, "no Prometheus text"),
        (answer(gzip.compress(BODY), b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip"), 5.0, "compressed (gzip)"),
        (lambda connection: connection.sendall(b"\x00garbage\r\n\r\n"), 5.0, "BadStatusLine"),
        (lambda connection: None, 5.0, "RemoteDisconnected"),
        (
            lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na"),
            5.0,
            "IncompleteRead",
        ),
        (lambda connection: time.sleep(1), 0.3, "no complete answer within 0.3 s"),
        (drip, 0.3, "no complete answer within 0.3 s"),
        (lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 500), 5.0, "HTTPException"),
    ],
    ids=[
        "404",
        "garbage",
        "json",
        "html",
        "gzip",
        "no-http",
        "closed",
        "truncated",
        "hangs",
        "drips",
        "endless-headers",
    ],
)
def test_bad_answers_are_recorded(behave: Callable[[socket.socket], None], timeout_s: float, error: str) -> None:
    with peer(behave) as url:
        line = scrape(url, timeout_s)
    assert error in line["error"]
    assert line["values"]["running"] is None
    assert line["series"] is line["families"] is line["family_series"] is None
    if error.startswith("no complete"):
        assert line["latency_ns"] is None


def test_text_that_is_not_utf_8_is_read() -> None:
    with peer(answer(BODY + b'odd{a="\xff\xfe"} 2\n')) as url:
        line = scrape(url)
    assert (line["error"], line["series"], line["malformed_lines"]) == (None, 3, 0)


def test_families_are_recorded_once_and_then_what_changed() -> None:
    bodies = [b"a 1\nb 1\n", b"a 2\nb 2\n", b'a{r="1"} 1\na{r="2"} 1\nb 1\n', b"b 1\nc 1\n"]
    served = iter(bodies)
    with peer(lambda connection: answer(next(served))(connection)) as url:
        scraper = MetricsScraper(url, "auto")
        seen = [scraper.scrape(0)["family_series"] for _ in bodies]
    assert seen == [{"a": 1, "b": 1}, {}, {"a": 2}, {"a": 0, "c": 1}]


def test_only_so_many_families_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atom.diag.metrics_scraper.MAX_FAMILIES", 3)
    served = (b"".join(b"n%d_%d 1\n" % (turn, n) for n in range(5)) for turn in itertools.count())
    with peer(lambda connection: answer(next(served))(connection)) as url:
        scraper = MetricsScraper(url, "auto")
        first, second = scraper.scrape(0), scraper.scrape(0)
    assert first["families"] == 5
    assert len(first["family_series"]) == 3
    assert second["family_series"] == dict.fromkeys(first["family_series"], 0)


# ---- where the text is ---------------------------------------------------------------------------------------------


def routes(answers: dict[bytes, bytes]) -> tuple[list[bytes], Callable[[socket.socket], None]]:
    """Requested paths, and a behaviour for `peer` that needs them before it answers."""
    asked: list[bytes] = []

    def behave(connection: socket.socket) -> None:
        path = asked[-1]
        connection.sendall(answers.get(path, b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"))

    return asked, behave


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def find(answers: dict[bytes, bytes], metrics: Metrics) -> tuple[str, list[str], list[str | None]]:
    """Path that was chosen, paths that were asked, and what was wrong with each."""
    asked, behave = routes(answers)
    with peer(behave, asked) as url:
        base = url.removesuffix("/metrics")
        place = find_metrics(base, metrics_paths(metrics))
    return (
        place.url.removeprefix(base),
        [path.decode() for path in asked],
        [attempt["error"] for attempt in place.tried],
    )


def test_tensorrt_llm_is_only_asked_for_its_prometheus_text() -> None:
    answers = {b"/metrics": ok(b"[]"), b"/prometheus/metrics": ok(BODY)}
    path = METRICS_PATHS["trtllm"][0]
    assert find(answers, Metrics(dialect="trtllm", path=path)) == (path, [path], [None])


def test_an_unknown_server_is_asked_for_both() -> None:
    answers = {b"/metrics": ok(b"[]"), b"/prometheus/metrics": ok(BODY)}
    paths = ["/metrics", "/prometheus/metrics"]
    assert find(answers, Metrics()) == ("/prometheus/metrics", paths, ["no Prometheus text", None])
    assert find({}, Metrics()) == ("/metrics", paths, ["HTTP 404", "HTTP 404"])


def test_a_redirect_within_the_server_is_followed_once() -> None:
    moved = b"HTTP/1.1 307 Moved\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n"
    answers = {b"/metrics": moved % b"/metrics/", b"/metrics/": ok(BODY)}
    assert find(answers, Metrics(dialect="vllm")) == ("/metrics/", ["/metrics", "/metrics/"], ["HTTP 307", None])
    for target in (b"/metrics", b"http://192.0.2.1/metrics"):
        url, asked, _ = find({b"/metrics": moved % target}, Metrics(dialect="vllm"))
        assert (url, asked) == ("/metrics", ["/metrics"])


def test_a_refused_connection_is_recorded() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        line = scrape(f"http://127.0.0.1:{unused.getsockname()[1]}/metrics")
    assert line["error"] == "connection refused"
    assert line["latency_ns"] is None


def test_an_endless_body_is_bounded() -> None:
    with peer(flood) as url, pytest.raises(ScrapeError, match="larger than 100000 bytes"):
        fetch(url, max_bytes=100_000)


def test_the_schedule_skips_what_a_slow_scrape_covered() -> None:
    lines: list[Any] = []
    stop = threading.Event()

    def slow(connection: socket.socket) -> None:
        time.sleep(0.25)
        answer(BODY)(connection)

    def record(line: Any) -> None:
        lines.append(line)
        if len(lines) == 3:
            stop.set()

    with peer(slow) as url:
        MetricsScraper(url, "auto", period_s=0.1).run(record, stop)
    gaps = [round((b["scheduled_ns"] - a["scheduled_ns"]) / 1e8) for a, b in itertools.pairwise(lines)]
    assert all(gap >= 3 for gap in gaps)


def test_a_url_that_is_none() -> None:
    with pytest.raises(UsageError, match="must look like"):
        MetricsScraper("localhost:8000", "auto")
