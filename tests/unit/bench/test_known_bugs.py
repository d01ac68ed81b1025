"""What went wrong in other load generators, and must not here. Cases are numbered as in a list of public reports;
`CASES` says which test stands for each. Those in this file are over real sockets against a server that plays a script,
and named by their symptom.
"""

from __future__ import annotations

import ast
import json
import threading
from pathlib import Path
from typing import Any, Final

import pytest

from atom.bench.load import Api
from atom.bench.random_load import RandomSource
from atom.bench.records import Outcome
from atom.bench.rundir import Validity
from atom.bench.summary import summarize

TESTS: Final = Path(__file__).parents[2]
CLIENT, STREAM, METRICS = "unit/bench/test_client.py", "unit/bench/test_stream.py", "unit/bench/test_metrics.py"
EXITS, HERE = "integration/test_bench_exit_statuses.py", "unit/bench/test_known_bugs.py"

CASES: Final[dict[int, tuple[str, str]]] = {
    # A. Client overhead: event loop, GIL, pools, pacing
    1: (HERE, "test_client_collapses_on_contexts_of_fifty_thousand_tokens"),
    3: (HERE, "test_requests_in_bursts_above_the_rate_when_a_concurrency_limit_releases_them"),
    5: (EXITS, "test_exit_status"),
    7: (CLIENT, "test_request_timeout_keeps_the_partial_record"),
    9: (HERE, "test_more_than_a_hundred_requests_queue_in_the_client"),
    13: (CLIENT, "test_warmups_are_a_phase_of_their_own_and_respect_max_concurrency"),
    15: ("integration/test_session.py", "test_a_hanging_scrape_does_not_hold_the_session_up"),
    17: (EXITS, "test_exit_status"),
    # B. Keep-alive, resets, timeouts, environment
    19: (CLIENT, "test_server_disconnected_on_reuse_of_an_idle_connection"),
    21: (HERE, "test_proxy_of_the_environment_takes_the_requests"),
    23: ("unit/diag/test_gpu_telemetry.py", "test_what_a_card_does_not_have_is_null_and_asked_for_once"),
    # C. SSE framing
    25: (CLIENT, "test_unicode_decode_error_on_a_character_split_between_packets"),
    27: (CLIENT, "test_half_a_packet_taken_for_a_whole_event"),
    29: (HERE, "test_literal_newline_in_a_data_field"),
    31: (CLIENT, "test_chunks_in_one_read_share_their_time"),
    33: (HERE, "test_error_event_is_not_surfaced"),
    # D. Chunk against token
    35: (HERE, "test_itl_per_chunk_is_taken_for_itl_per_token_with_speculative_decoding"),
    37: (HERE, "test_peak_of_tokens_per_second_counts_chunks_and_lies_below_the_mean"),
    39: (HERE, "test_first_chunk_of_several_tokens_makes_the_others_look_fast"),
    41: (STREAM, "test_output_tokens_are_the_servers_not_the_chunks"),
    # E. First token, reasoning, role chunk
    43: (HERE, "test_role_only_chunk_is_taken_for_the_first_token"),
    45: (HERE, "test_ttft_leaves_reasoning_out"),
    47: (HERE, "test_ttft_leaves_reasoning_out"),
    49: (HERE, "test_ttft_leaves_reasoning_out"),
    51: (HERE, "test_null_tool_calls_are_a_type_error"),
    # F. usage and empty choices
    53: (HERE, "test_usage_chunk_with_empty_choices_is_an_index_error"),
    55: (HERE, "test_output_length_without_usage_is_taken_to_be_max_tokens"),
    57: (HERE, "test_garbage_text_is_counted_as_fewer_tokens"),
    # G. Errors hidden or miscounted
    59: (HERE, "test_error_in_a_stream_with_status_200_counts_as_success"),
    61: (HERE, "test_successes_are_missing_without_a_word"),
    63: (HERE, "test_fields_that_no_server_knows_make_every_request_a_400"),
    65: (EXITS, "test_exit_status"),
    # H. Data sets and semantics
    67: (HERE, "test_whether_ttft_has_the_wait_in_the_client_in_it"),
    69: ("unit/bench/datasets/test_trace.py", "test_a_header_with_more_columns_in_another_order_is_read_by_name"),
}
NOT_THE_CLIENTS: Final = {
    11: "a comparison of speed: docs/benchmarks.md",
    71: "a setting of a server",
    73: "a pause of a server: atom gc-profile finds it",
}


def test_every_case_has_its_test() -> None:
    assert sorted({*CASES, *NOT_THE_CLIENTS}) == list(range(1, 74, 2))
    for file, name in CASES.values():
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in names, f"{file} has no {name}"


def figures_of(loaded: Any) -> dict[str, Any]:
    summary = summarize(loaded.run_dir)
    return {name: figure["value"] for name, figure in summary["figures"].items()}


def chat(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def events(wire: Any, *values: Any, gap_s: float = 0.0) -> list[Any]:
    """A stream with one packet per value (a chunk, or the bytes of events), and `gap_s` between them."""
    actions: list[Any] = [wire.SSE_HEAD]
    for value in values:
        actions.append(wire.http_chunk(value if isinstance(value, bytes) else wire.event(value)))
        if gap_s:
            actions.append(gap_s)
    return [*actions, wire.http_chunk(b"data: [DONE]\n\n") + wire.END]


async def test_client_collapses_on_contexts_of_fifty_thousand_tokens(serve: Any, load: Any, wire: Any) -> None:
    """A prompt and an echo of it that are larger than any buffer on the way."""
    prompt = b'{"prompt":[' + b",".join([b"100"] * 50_000) + b"]}"
    echo = {**wire.text_chunk("a"), "prompt_token_ids": [100] * 50_000}

    class Long(wire.FixedSource):  # type: ignore[misc, name-defined]
        def request(self, index: int) -> Any:
            plan = super().request(index)
            return type(plan)(prompt, 50_000, 3)

    server = serve(lambda number, body: events(wire, echo, wire.text_chunk("b", "length"), wire.usage_chunk(50_000, 2)))
    loaded = await load(server.url, 8, source=Long(8), max_concurrency=8)
    assert loaded.outcome.completed == 8
    assert set(server.requests) == {prompt}
    assert all(len(record.chunk_ns) == 2 for record in loaded.records)


async def test_requests_in_bursts_above_the_rate_when_a_concurrency_limit_releases_them(
    serve: Any, load: Any, wire: Any
) -> None:
    server = serve(lambda number, body: events(wire, wire.text_chunk("a", "stop"), wire.usage_chunk(5, 1), gap_s=0.01))
    records = (await load(server.url, 40, request_rate=400.0, max_concurrency=2)).records
    assert server.most_open <= 2
    for record in records:
        assert record.scheduled_ns <= record.ready_ns <= record.sent_ns
        ended = sum(other.end_ns <= record.sent_ns for other in records)
        began = sum(other.sent_ns < record.sent_ns for other in records)
        due = sum(other.scheduled_ns <= record.sent_ns for other in records)
        assert began < due, "none goes before its time, however many are let through at once"
        assert began - ended < 2


async def test_more_than_a_hundred_requests_queue_in_the_client(serve: Any, load: Any, wire: Any) -> None:
    """The server answers when all 130 are there."""
    all_there = threading.Barrier(130)

    def script(number: int, body: bytes) -> list[Any]:
        all_there.wait(60)
        answer: list[Any] = wire.good_answer()
        return answer

    loaded = await load(serve(script).url, 130, max_concurrency=130)
    assert loaded.outcome.completed == 130


async def test_proxy_of_the_environment_takes_the_requests(
    serve: Any, load: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, server = serve(lambda number, body: [wire.CLOSE]), serve(lambda number, body: wire.good_answer())
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    loaded = await load(server.url, 3)
    assert loaded.outcome.completed == 3
    assert proxy.connections == 0


async def test_literal_newline_in_a_data_field(serve: Any, load: Any, wire: Any) -> None:
    """JSON over several `data:` lines is one event; a line break that the server did not mark breaks the event, which
    is a failure of that request alone."""
    pretty = json.dumps(wire.text_chunk("a", "stop"), indent=1).encode()
    marked = b"".join(b"data: " + line + b"\n" for line in pretty.split(b"\n")) + b"\n"
    forgotten = b"data: " + pretty + b"\n\n"
    server = serve(lambda number, body: events(wire, forgotten if number == 1 else marked, wire.usage_chunk(5, 1)))
    records = (await load(server.url, 3)).records
    assert [record.outcome for record in records] == ["completed", "failed", "completed"]
    assert records[1].error_class == "bad_event"
    assert [len(record.chunk_ns) for record in records] == [1, 0, 1]


async def test_error_event_is_not_surfaced(serve: Any, load: Any, wire: Any) -> None:
    error = b'event: error\ndata: {"message": "out of memory"}\n\n'
    server = serve(lambda number, body: events(wire, wire.text_chunk("a"), error))
    record = (await load(server.url, 1)).records[0]
    assert (record.outcome, record.error_class, record.error_message) == ("failed", "server_error", "out of memory")
    assert record.anomalies["error_event"] == 1
    assert len(record.chunk_ns) == 1, "what came before is kept"


def counted(wire: Any, text: str, tokens: int, finish: str | None = None) -> dict[str, Any]:
    """A chunk that carries `tokens` tokens, as a step with accepted drafts does."""
    chunk: dict[str, Any] = wire.text_chunk(text, finish)
    chunk["choices"][0]["token_ids"] = list(range(tokens))
    return chunk


async def test_itl_per_chunk_is_taken_for_itl_per_token_with_speculative_decoding(
    serve: Any, load: Any, wire: Any
) -> None:
    chunks = [counted(wire, " abc", 3, "length" if i == 4 else None) for i in range(5)]
    server = serve(lambda number, body: events(wire, *chunks, wire.usage_chunk(5, 15), gap_s=0.03))
    loaded = await load(server.url, 2)
    figures = figures_of(loaded)
    assert figures["tokens_per_chunk"] == 3
    assert figures["merged_share"] == 1
    assert figures["mean_per_token_itl_ms"] == pytest.approx(figures["mean_itl_ms"] / 3)
    assert any("3.00 tokens per chunk" in note for note in summarize(loaded.run_dir)["notes"])


async def test_peak_of_tokens_per_second_counts_chunks_and_lies_below_the_mean(
    serve: Any, load: Any, wire: Any
) -> None:
    chunks = [counted(wire, " many", 50, "length" if i == 3 else None) for i in range(4)]
    server = serve(lambda number, body: events(wire, *chunks, wire.usage_chunk(5, 200), gap_s=0.3))
    figures = figures_of(await load(server.url, 1))
    assert figures["total_output_tokens"] == 200
    assert figures["max_output_tokens_per_s"] >= figures["output_throughput"] > 100


async def test_first_chunk_of_several_tokens_makes_the_others_look_fast(serve: Any, load: Any, wire: Any) -> None:
    """TPOT divides by all tokens but one, whatever came with the first; the time per token of what follows does not."""
    chunks = [counted(wire, " first", 9), counted(wire, " b", 1), counted(wire, " c", 1, "length")]
    server = serve(lambda number, body: events(wire, *chunks, wire.usage_chunk(5, 11), gap_s=0.05))
    loaded = await load(server.url, 1)
    record, figures = loaded.records[0], figures_of(loaded)
    assert list(record.chunk_tokens) == [9, 1, 1]
    first, *_, last = record.chunk_ns
    assert figures["mean_tpot_ms"] == pytest.approx((last - first) / 1e6 / 10)
    assert figures["mean_per_token_itl_ms"] == pytest.approx((last - first) / 1e6 / 2)
    assert figures["merged_share"] == pytest.approx(1 / 3), "said beside it"


async def test_role_only_chunk_is_taken_for_the_first_token(serve: Any, load: Any, wire: Any) -> None:
    values = [chat({"role": "assistant", "content": ""}), chat({"content": "a"}), chat({}, "stop")]
    server = serve(lambda number, body: events(wire, *values, wire.usage_chunk(5, 1), gap_s=0.05))
    record = (await load(server.url, 1, api=Api.CHAT)).records[0]
    assert len(record.chunk_ns) == 1
    assert record.first_ns - record.sent_ns >= 40_000_000, "the role chunk came 50 ms before"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_ttft_leaves_reasoning_out(serve: Any, load: Any, wire: Any, field: str) -> None:
    values = [chat({"role": "assistant"}), chat({field: "hm"}), chat({field: "so"}), chat({"content": "42"}, "stop")]
    server = serve(lambda number, body: events(wire, *values, wire.usage_chunk(5, 3), gap_s=0.02))
    record = (await load(server.url, 1, api=Api.CHAT)).records[0]
    assert (record.outcome, len(record.chunk_ns)) == ("completed", 3)
    assert record.first_ns == record.chunk_ns[0]
    assert record.last_ns - record.first_ns >= 30_000_000


async def test_null_tool_calls_are_a_type_error(serve: Any, load: Any, wire: Any) -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": "{"}}
    values = [
        chat({"role": "assistant", "content": None, "tool_calls": None}),
        chat({"content": None, "tool_calls": [call]}),
        chat({"tool_calls": [{"index": 0, "function": {"name": None, "arguments": "}"}}]}),
        chat({"content": None, "tool_calls": None}, "tool_calls"),
    ]
    server = serve(lambda number, body: events(wire, *values, wire.usage_chunk(5, 2), gap_s=0.005))
    record = (await load(server.url, 1, api=Api.CHAT)).records[0]
    assert (record.outcome, record.output_tokens, len(record.chunk_ns)) == ("completed", 2, 2)


async def test_usage_chunk_with_empty_choices_is_an_index_error(serve: Any, load: Any, wire: Any) -> None:
    usage = wire.usage_chunk(7, 2)
    missing = {name: value for name, value in usage.items() if name != "choices"}
    null = {**usage, "choices": None}
    endings = [usage, missing, null]
    server = serve(
        lambda number, body: events(wire, wire.text_chunk("a"), wire.text_chunk("b", "stop"), endings[number])
    )
    records = (await load(server.url, 3)).records
    assert [(r.outcome, r.prompt_tokens, r.output_tokens) for r in records] == [("completed", 7, 2)] * 3
    assert [len(r.chunk_ns) for r in records] == [2, 2, 2]
    assert all(r.anomalies == {} for r in records)


async def test_output_length_without_usage_is_taken_to_be_max_tokens(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: events(wire, *(wire.text_chunk(t) for t in "ab"), wire.text_chunk("c", "stop")))
    loaded = await load(server.url, 1, source=wire.FixedSource(1, output_len=500))
    assert (loaded.records[0].output_tokens, loaded.records[0].tokens_from) == (3, "chunks")
    assert any("are counted from chunks" in note for note in summarize(loaded.run_dir)["notes"])
    source = RandomSource(num_prompts=1, api=Api.COMPLETIONS, model="m")
    assert json.loads(source.request(0).body)["stream_options"]["include_usage"] is True


async def test_garbage_text_is_counted_as_fewer_tokens(serve: Any, load: Any, wire: Any) -> None:
    """Tokens without text, or with replacement characters: the server says how many there were."""
    texts = ["\ufffd", "", "!!!!", "", "\ufffd"]
    values = [wire.text_chunk(text, "length" if i == 4 else None) for i, text in enumerate(texts)]
    server = serve(lambda number, body: events(wire, *values, wire.usage_chunk(5, 5)))
    record = (await load(server.url, 1)).records[0]
    assert (record.outcome, record.output_tokens, record.tokens_from) == ("completed", 5, "usage")


ERRORS: Final = [
    {"error": {"message": "out of memory", "type": "server_error", "code": 500}},
    {"error": "out of memory"},
    {"object": "error", "message": "out of memory", "type": "InternalServerError", "code": 500},
    {"error": {"message": "out of memory"}, "choices": []},
]


@pytest.mark.parametrize("error", ERRORS, ids=["openai", "text", "object", "with-choices"])
@pytest.mark.parametrize("tokens_before", [0, 2])
async def test_error_in_a_stream_with_status_200_counts_as_success(
    serve: Any, load: Any, wire: Any, error: dict[str, Any], tokens_before: int
) -> None:
    before = [wire.text_chunk(" t") for _ in range(tokens_before)]
    server = serve(lambda number, body: events(wire, *before, error))
    loaded = await load(server.url, 2)
    assert [r.outcome for r in loaded.records] == [Outcome.FAILED] * 2
    assert all("out of memory" in r.error_message for r in loaded.records)
    assert summarize(loaded.run_dir)["validity"] == Validity.FAILED


async def test_successes_are_missing_without_a_word(serve: Any, load: Any, wire: Any) -> None:
    """Answers of every kind: each request is in the records once, and the sum is checked."""

    def script(number: int, body: bytes) -> list[Any]:
        good: list[Any] = wire.good_answer()
        kinds = [good, [wire.CLOSE], [*good[:3], wire.RESET], [b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"]]
        kinds.append([b"garbage\r\n\r\n", wire.CLOSE])
        return kinds[number % len(kinds)]

    loaded = await load(serve(script).url, 30, max_concurrency=4)
    outcome = loaded.outcome
    assert outcome.completed + outcome.failed + outcome.cancelled == outcome.started == 30
    assert outcome.completed >= 6
    assert [record.index for record in loaded.records] == list(range(30))
    accounting = next(c for c in summarize(loaded.run_dir)["checks"] if c["name"] == "accounting")
    assert accounting["ok"] is True


@pytest.mark.parametrize("api", list(Api))
def test_fields_that_no_server_knows_make_every_request_a_400(api: Api) -> None:
    plain = RandomSource(num_prompts=1, api=api, model="m", sampling={"temperature": 0.0})
    content = "prompt" if api is Api.COMPLETIONS else "messages"
    body = json.loads(plain.request(0).body)
    assert set(body) == {"model", "stream", "stream_options", "max_tokens", "temperature", content}
    assert set(body["stream_options"]) == {"include_usage"}


async def test_whether_ttft_has_the_wait_in_the_client_in_it(serve: Any, load: Any, wire: Any) -> None:
    """TTFT begins when the request is sent; the wait for a slot is in `ttft_scheduled` alone, and both are there."""
    answer = events(wire, wire.text_chunk("a", "stop"), wire.usage_chunk(5, 1), gap_s=0.03)
    loaded = await load(serve(lambda number, body: answer).url, 10, request_rate=1000.0, max_concurrency=1)
    last = max(loaded.records, key=lambda record: record.sent_ns)
    waited_ms = (last.sent_ns - last.scheduled_ns) / 1e6
    assert waited_ms > 200, "nine answers of 60 ms went before"
    summary = summarize(loaded.run_dir, percentiles=(100.0,))
    figures = {name: figure["value"] for name, figure in summary["figures"].items()}
    assert figures["p100_ttft_scheduled_ms"] >= waited_ms
    assert figures["mean_ttft_ms"] == pytest.approx(sum((r.first_ns - r.sent_ns) / 1e6 for r in loaded.records) / 10)
    assert "request sent" in summary["figures"]["median_ttft_ms"]["definition"]
    assert "schedule" in summary["figures"]["median_ttft_scheduled_ms"]["definition"]
