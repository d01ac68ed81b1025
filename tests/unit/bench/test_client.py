"""The client over real sockets against a server that plays a script. Cases are named by their symptom."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atom.bench.arrivals import Arrivals
from atom.bench.load import PlannedRequest
from atom.bench.records import Outcome
from atom.bench.rundir import read_jsonl
from atom.recipes.errors import RunError


async def test_records_of_a_good_load(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer(tokens=4))
    loaded = await load(server.url, 6, max_concurrency=2)
    outcome = loaded.outcome
    assert (outcome.sent, outcome.completed, outcome.failed, outcome.cancelled) == (6, 6, 0, 0)
    assert not outcome.interrupted
    assert [record.index for record in loaded.records] == list(range(6))
    for record in loaded.records:
        assert (record.output_tokens, record.prompt_tokens, len(record.chunk_ns)) == (4, 5, 4)
        assert outcome.started_ns <= record.ready_ns <= record.sent_ns <= record.first_ns
        assert record.first_ns <= record.last_ns <= record.end_ns <= outcome.ended_ns
        assert list(record.chunk_ns) == sorted(record.chunk_ns)
        assert record.scheduled_ns is None
        assert record.lane in (0, 1)
    assert sorted(json.loads(body)["index"] for body in server.requests) == list(range(6))


async def test_connections_are_kept_alive(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    loaded = await load(server.url, 9, max_concurrency=3)
    assert server.connections == 3
    assert sum(record.connect_ns is not None for record in loaded.records) == 3


async def test_server_disconnected_on_reuse_of_an_idle_connection(serve: Any, load: Any, wire: Any) -> None:
    """A server that closes idle connections while a request is on its way: sent again once, on a new connection."""

    def script(number: int, body: bytes) -> list[Any]:
        if number == 1:
            return [wire.CLOSE]  # the second request of the first connection is never answered
        return wire.good_answer()

    server = serve(script)
    loaded = await load(server.url, 2)
    assert [record.outcome for record in loaded.records] == ["completed", "completed"]
    assert [record.retries for record in loaded.records] == [0, 1]
    assert server.connections == 2


async def test_reset_on_reuse_of_an_idle_connection(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: [wire.RESET] if number == 1 else wire.good_answer())
    loaded = await load(server.url, 2)
    assert [record.retries for record in loaded.records] == [0, 1]
    assert loaded.outcome.completed == 2


async def test_idle_connection_closed_between_requests_is_not_used(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: [*wire.good_answer(), wire.CLOSE])
    loaded = await load(server.url, 3, request_rate=20.0, max_concurrency=None)
    assert loaded.outcome.completed == 3
    assert server.connections == 3


async def test_fresh_connection_closed_without_an_answer_is_a_failure_and_sent_once(
    serve: Any, load: Any, wire: Any
) -> None:
    server = serve(lambda number, body: [wire.CLOSE])
    loaded = await load(server.url, 1)
    record = loaded.records[0]
    assert (record.outcome, record.error_class, record.retries) == (Outcome.FAILED, "connection", 0)
    assert "before it answered" in record.error_message
    assert len(server.requests) == 1


async def test_connection_close_header_is_obeyed(serve: Any, load: Any, wire: Any) -> None:
    body = wire.stream_of(wire.text_chunk("a", "stop"), wire.usage_chunk(5, 1))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    server = serve(lambda number, request: [head % len(body) + body])
    loaded = await load(server.url, 3)
    assert loaded.outcome.completed == 3
    assert server.connections == 3


async def test_body_until_the_connection_ends(serve: Any, load: Any, wire: Any) -> None:
    body = wire.stream_of(wire.text_chunk("a", "stop"), wire.usage_chunk(5, 1))
    server = serve(lambda number, request: [wire.SSE_HEAD_EOF, body, wire.CLOSE])
    loaded = await load(server.url, 2)
    assert loaded.outcome.completed == 2
    assert loaded.records[0].anomalies == {}


async def test_unicode_decode_error_on_a_character_split_between_packets(serve: Any, load: Any, wire: Any) -> None:
    whole = wire.event(json.dumps(wire.text_chunk("é漢🙂", "stop"), ensure_ascii=False).encode())
    pieces = [whole[i : i + 1] for i in range(len(whole))]
    actions: list[Any] = [wire.SSE_HEAD]
    for piece in pieces:
        actions += [wire.http_chunk(piece), 0.0005]
    actions += [wire.http_chunk(wire.event(wire.usage_chunk(5, 1)) + b"data: [DONE]\n\n") + wire.END]
    server = serve(lambda number, request: actions)
    loaded = await load(server.url, 1, keep_text=True)
    assert (loaded.records[0].outcome, loaded.records[0].text) == ("completed", "é漢🙂")


async def test_half_a_packet_taken_for_a_whole_event(serve: Any, load: Any, wire: Any) -> None:
    """The response split inside the head, inside a chunk size, inside `data:` and inside JSON."""
    answer = b"".join(part for part in wire.good_answer(tokens=5))
    for size in (1, 7, 64):
        pieces: list[Any] = []
        for start in range(0, len(answer), size):
            pieces += [answer[start : start + size], 0.0002]
        server = serve(lambda number, request, pieces=pieces: pieces)
        loaded = await load(server.url, 1)
        assert loaded.outcome.completed == 1, loaded.records[-1].error_message


async def test_chunks_in_one_read_share_their_time(serve: Any, load: Any, wire: Any) -> None:
    """Coalesced chunks are visible as such: equal times, not a made-up gap."""
    first = wire.http_chunk(wire.event(wire.text_chunk("a")))
    two = b"".join(wire.http_chunk(wire.event(wire.text_chunk(t))) for t in "bc")
    last = wire.http_chunk(wire.stream_of(wire.text_chunk("d", "stop"), wire.usage_chunk(5, 4))) + wire.END
    server = serve(lambda number, request: [wire.SSE_HEAD, first, 0.05, two, 0.05, last])
    times = (await load(server.url, 1)).records[0].chunk_ns
    assert len(times) == 4
    assert times[1] == times[2]
    assert times[0] < times[1] < times[3]


async def test_truncated_stream_keeps_its_partial_record(serve: Any, load: Any, wire: Any) -> None:
    for ending in (wire.CLOSE, wire.RESET):
        server = serve(
            lambda number, request, ending=ending: [
                wire.SSE_HEAD,
                wire.http_chunk(wire.event(wire.text_chunk("a"))),
                0.1,
                ending,
            ]
        )
        loaded = await load(server.url, 1)
        record = loaded.records[-1]
        assert (record.outcome, record.error_class) == (Outcome.FAILED, "truncated")
        assert len(record.chunk_ns) == 1
        assert record.first_ns == record.last_ns


async def test_http_error_is_a_failure_with_its_message(serve: Any, load: Any) -> None:
    body = b'{"error":{"message":"temperature must not be negative","code":400}}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    server = serve(lambda number, request: [head + body])
    loaded = await load(server.url, 3)
    assert loaded.outcome.failed == 3
    assert loaded.records[0].error_class == "http_400"
    assert loaded.outcome.first_error == "http_400: temperature must not be negative"
    assert server.connections == 1


async def test_nobody_listens(load: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    loaded = await load(f"http://127.0.0.1:{port}", 2)
    assert loaded.outcome.failed == 2
    assert loaded.records[0].error_class == "connect"
    assert loaded.records[0].sent_ns is None


async def test_not_a_http_server(serve: Any, load: Any) -> None:
    server = serve(lambda number, request: [b"SSH-2.0-OpenSSH_9.2\r\n"])
    record = (await load(server.url, 1)).records[0]
    assert (record.outcome, record.error_class) == (Outcome.FAILED, "protocol")
    assert "SSH-2.0" in record.error_message


async def test_request_timeout_keeps_the_partial_record(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda n, b: [wire.SSE_HEAD, wire.http_chunk(wire.event(wire.text_chunk("a"))), wire.HANG])
    record = (await load(server.url, 1, request_timeout=0.3)).records[0]
    assert (record.outcome, record.error_class, len(record.chunk_ns)) == (Outcome.FAILED, "timeout", 1)
    assert record.end_ns - record.sent_ns >= 0.29e9


async def test_what_this_client_ends_itself_is_no_anomaly_of_the_server(serve: Any, load: Any, wire: Any) -> None:
    """A timeout, a cancellation and a refused connection leave cut streams, but the server cut none of them."""
    half = [wire.SSE_HEAD, wire.http_chunk(wire.event(wire.text_chunk(" a")))[:-9], wire.HANG]
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def answer(number: int, body: bytes) -> list[Any]:
        if number == 1:
            loop.call_soon_threadsafe(loop.call_later, 0.3, stop.set)
        return half

    server = serve(answer)
    timed_out = (await load(server.url, request_timeout=0.3)).records[0]
    cancelled = (await load(server.url, stop=stop)).records[0]
    refused = (await load("http://127.0.0.1:1")).records[0]
    assert [timed_out.outcome, cancelled.outcome, refused.outcome] == ["failed", "cancelled", "failed"]
    assert [timed_out.error_class, cancelled.error_class, refused.error_class] == ["timeout", "cancelled", "connect"]
    assert [dict(record.anomalies) for record in (timed_out, cancelled, refused)] == [{}, {}, {}]
    assert refused.sent_ns is None
    cut = serve(lambda number, body: [*half[:2], wire.CLOSE])
    assert (await load(cut.url)).records[0].anomalies["connection_cut"] == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirect_says_where_to(serve: Any, load: Any, status: int) -> None:
    head = b"HTTP/1.1 %d Elsewhere\r\nLocation: https://there/v1\x1b[31m\r\nContent-Length: 4\r\n\r\ngone" % status
    record = (await load(serve(lambda number, body: [head]).url)).records[0]
    assert record.error_class == f"http_{status}"
    assert "https://there/v1" in (record.error_message or "")
    assert "\x1b" not in (record.error_message or "")


async def test_connecting_and_sending_are_counted(serve: Any, load: Any, wire: Any) -> None:
    """A request that got no connection was started, not sent; the live count adds up with the records."""
    loaded = await load("http://127.0.0.1:1", 3)
    assert (loaded.outcome.started, loaded.outcome.sent, loaded.outcome.failed) == (3, 0, 3)
    server = serve(lambda number, body: wire.good_answer())
    loaded = await load(server.url, 60, max_concurrency=4, num_warmups=5)
    assert (loaded.outcome.started, loaded.outcome.sent, loaded.outcome.completed) == (60, 60, 60)
    (end,) = (line for line in read_jsonl(loaded.run_dir.client / "0.jsonl") if line["kind"] == "measured_end")
    assert (end["started"], end["sent"]) == (60, 60)
    assert end["running_integral_ns"] >= sum(record.end_ns - record.sent_ns for record in loaded.records)


async def test_api_key_headers_and_path(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    await load(server.url + "/prefix/", 1, api_key="secret", headers={"X-Trace": "7", "user-agent": "me"}, path="/v1/x")
    head = server.heads[0].decode()
    assert head.startswith("POST /prefix/v1/x HTTP/1.1\r\n")
    fields = Counter(line.partition(":")[0].lower() for line in head.split("\r\n")[1:])
    assert fields["user-agent"] == fields["authorization"] == fields["x-trace"] == fields["host"] == 1
    assert "Authorization: Bearer secret" in head


async def test_stop_keeps_what_was_recorded(serve: Any, load: Any, wire: Any) -> None:
    def script(number: int, body: bytes) -> list[Any]:
        if number < 2:
            return wire.good_answer()
        return [wire.SSE_HEAD, wire.http_chunk(wire.event(wire.text_chunk("a"))), wire.HANG]

    server = serve(script)
    stop = asyncio.Event()

    async def interrupt() -> None:
        while len(server.requests) < 4:  # noqa: ASYNC110 (the server is a thread)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        stop.set()

    interrupter = asyncio.create_task(interrupt())
    loaded = await load(server.url, 50, max_concurrency=2, stop=stop)
    await interrupter
    outcome = loaded.outcome
    assert outcome.interrupted
    assert (outcome.completed, outcome.cancelled, outcome.failed, outcome.sent) == (2, 2, 0, 4)
    cancelled = [record for record in loaded.records if record.outcome == Outcome.CANCELLED]
    assert [len(record.chunk_ns) for record in cancelled] == [1, 1]


async def test_stop_ends_the_preparation_with_its_thread_and_file(
    load: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests are still to be made: the thread that makes them is gone when the load returns."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    files: list[Any] = []
    spooled = tempfile.SpooledTemporaryFile

    class Endless(wire.FixedSource):  # type: ignore[misc, name-defined]
        made = 0

        def request(self, index: int) -> PlannedRequest:
            self.made += 1
            if index == 3:
                loop.call_soon_threadsafe(stop.set)
            return super().request(index)  # type: ignore[no-any-return]

    def open_file(*args: Any) -> Any:
        files.append(spooled(*args))
        return files[-1]

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", open_file)
    source = Endless(10**12)
    loaded = await load("http://127.0.0.1:1", source=source, stop=stop)
    made = source.made
    assert (loaded.outcome.interrupted, loaded.outcome.sent, loaded.records) == (True, 0, [])
    assert [file.closed for file in files] == [True]
    await asyncio.sleep(0.05)
    assert source.made == made


async def test_warmups_are_a_phase_of_their_own_and_respect_max_concurrency(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: [0.02, *wire.good_answer()])
    loaded = await load(server.url, 4, num_warmups=6, max_concurrency=2)
    assert server.most_open <= 2
    bodies = [json.loads(body) for body in server.requests]
    assert ["warmup" in body for body in bodies] == [True] * 6 + [False] * 4
    assert len(loaded.records) == 4
    assert min(record.sent_ns for record in loaded.records) >= loaded.outcome.started_ns
    lines = (loaded.run_dir.requests / "0.jsonl").read_text().splitlines()
    assert Counter(json.loads(line)["phase"] for line in lines) == {"warmup": 6, "measured": 4}


async def test_concurrency_is_never_exceeded(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: [0.01, *wire.good_answer()])
    loaded = await load(server.url, 30, max_concurrency=3, request_rate=1000.0)
    assert loaded.outcome.completed == 30
    assert server.most_open <= 3
    for record in loaded.records:
        assert record.scheduled_ns <= record.ready_ns <= record.sent_ns


async def test_rate_without_a_limit_opens_as_many_connections_as_needed(serve: Any, load: Any, wire: Any) -> None:
    """A pool with a limit of its own would queue requests inside the client."""
    server = serve(lambda number, body: [0.3, *wire.good_answer()])
    loaded = await load(server.url, 120, max_concurrency=None)
    assert loaded.outcome.completed == 120
    assert server.connections == 120


async def test_large_request_body_and_large_event(serve: Any, load: Any, wire: Any) -> None:
    """50,000 tokens of context in one body; an event far larger than a read."""
    text = "x" * 2_000_000
    answer = wire.stream_of(wire.text_chunk(text, "stop"), wire.usage_chunk(50_000, 1))
    server = serve(lambda number, body: [wire.SSE_HEAD, wire.http_chunk(answer) + wire.END])

    class Big(wire.FixedSource):
        def request(self, index: int) -> Any:
            plan = super().request(index)
            return type(plan)(json.dumps({"prompt": list(range(50_000))}).encode(), 50_000, 1)

    loaded = await load(server.url, source=Big(1), keep_text=True)
    assert loaded.records[0].text == text
    assert json.loads(server.requests[0])["prompt"][-1] == 49_999


async def test_duration_starts_nothing_after_it(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: [0.05, *wire.good_answer()])
    loaded = await load(server.url, 10_000, max_concurrency=2, duration=0.3)
    outcome = loaded.outcome
    assert not outcome.interrupted
    assert 0 < outcome.sent < 10_000
    assert outcome.completed == outcome.sent
    assert max(record.sent_ns for record in loaded.records) <= outcome.started_ns + 0.4e9


async def test_loop_without_uvloop_is_the_same(serve: Any, load: Any, wire: Any) -> None:
    uvloop = pytest.importorskip("uvloop")
    server = serve(lambda number, body: wire.good_answer())

    def run() -> Any:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(load(server.url, 5, max_concurrency=2))

    loaded = await asyncio.to_thread(run)
    assert loaded.outcome.completed == 5


@pytest.mark.parametrize("file", ["requests/0.jsonl", "client/0.jsonl"])
async def test_records_that_cannot_be_written_end_the_run(
    serve: Any, load: Any, wire: Any, tmp_path: Path, file: str
) -> None:
    path = tmp_path / "run-0" / file
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    server = serve(lambda number, body: [0.01, *wire.good_answer()])
    with pytest.raises(RunError, match="No space left"):
        await load(server.url, 100_000)


def test_infinite_rate_is_the_default() -> None:
    assert math.isinf(Arrivals().request_rate)
