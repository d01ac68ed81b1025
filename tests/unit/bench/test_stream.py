"""What chunks mean: token-bearing or not, token counts, endings, errors. Cases are named by the symptom that a client
shows when it gets them wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.load import Api
from atom.bench.records import Outcome, RequestRecord
from atom.bench.stream import StreamReader

SSE = {"content-type": "text/event-stream; charset=utf-8"}


def sse(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(content: str | None, finish: str | None = None, **more: object) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "text": content, "finish_reason": finish}], **more}


def delta(content: object = None, finish: str | None = None, **fields: object) -> dict[str, Any]:
    if content is not None:
        fields["content"] = content
    return {"id": "c", "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(output: int, prompt: int = 7, **more: object) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output, **more}


def read(
    *values: object, api: Api = Api.COMPLETIONS, done: bool = True, cut: bool = False, keep_text: bool = False
) -> RequestRecord:
    """Feed one event per read, at times 1, 2, 3, …"""
    reader = StreamReader(api, keep_text=keep_text)
    reader.begin(200, SSE)
    events = [*values, b"[DONE]"] if done else values
    for number, value in enumerate(events, 1):
        reader.feed(sse(value), number)
    reader.finish(cut=cut)
    record = RequestRecord(index=0)
    reader.fill(record)
    return record


def chat(*values: object, **more: Any) -> RequestRecord:
    return read(*values, api=Api.CHAT, **more)


def test_plain_stream() -> None:
    record = read(text("a"), text("b"), text("c", "length"), {"choices": [], "usage": usage(3)})
    assert record.outcome == Outcome.COMPLETED
    assert (record.chunk_ns, record.chunk_tokens) == ([1, 2, 3], None)
    assert (record.first_ns, record.last_ns) == (1, 3)
    assert (record.prompt_tokens, record.output_tokens, record.tokens_from) == (7, 3, "usage")
    assert (record.finish_reason, record.anomalies) == ("length", {})


def test_index_error_on_the_usage_chunk_with_empty_or_missing_choices() -> None:
    for last in ({"choices": [], "usage": usage(1)}, {"usage": usage(1)}, {"choices": None, "usage": usage(1)}):
        record = read(text("a", "stop"), last)
        assert (record.outcome, record.output_tokens, record.anomalies) == (Outcome.COMPLETED, 1, {})


def test_role_only_chunk_is_not_the_first_token() -> None:
    record = chat(delta("", role="assistant"), delta("Hi"), delta("!", "stop"))
    assert record.chunk_ns == [2, 3]


def test_reasoning_counts_as_the_first_token() -> None:
    for name in ("reasoning_content", "reasoning"):
        record = chat(delta(None, role="assistant"), delta(**{name: "hm"}), delta("Hi"), delta(None, "stop"))
        assert record.chunk_ns == [2, 3]


def test_null_deltas_and_tool_calls() -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": None}}]
    arguments = [{"index": 0, "function": {"arguments": "{}"}}]
    record = chat(
        {"choices": [{"index": 0, "delta": None, "finish_reason": None}]},
        delta(None, tool_calls=None, reasoning_content=None),
        delta(None, tool_calls=call),
        delta(None, tool_calls=arguments),
        delta(None, "tool_calls"),
        {"choices": [], "usage": usage(2)},
    )
    assert (record.chunk_ns, record.outcome, record.finish_reason) == ([3, 4], Outcome.COMPLETED, "tool_calls")


def test_error_json_in_a_200_stream_is_a_failure() -> None:
    record = read(text("a"), {"error": {"message": "boom", "code": 500}})
    assert (record.outcome, record.error_class, record.error_message) == (Outcome.FAILED, "server_error", "boom")
    assert record.chunk_ns == [1]
    assert record.anomalies["error_chunk"] == 1


def test_error_event_is_a_failure() -> None:
    reader = StreamReader(Api.COMPLETIONS)
    reader.begin(200, SSE)
    reader.feed(sse(text("a")) + b'event: error\ndata: {"error":{"message":"gone"}}\n\n', 1)
    reader.finish()
    reader.fill(record := RequestRecord(index=0))
    assert (record.outcome, record.error_class, record.error_message) == (Outcome.FAILED, "server_error", "gone")


def test_error_body_with_status_200_is_a_failure() -> None:
    reader = StreamReader(Api.COMPLETIONS)
    reader.begin(200, {"content-type": "application/json"})
    reader.feed(b'{"error":{"message":"no such model"}}', 1)
    reader.finish()
    reader.fill(record := RequestRecord(index=0))
    assert (record.error_class, record.error_message) == ("server_error", "no such model")


def test_answer_without_a_stream_is_a_failure() -> None:
    reader = StreamReader(Api.COMPLETIONS)
    reader.begin(200, {"content-type": "application/json"})
    reader.feed(json.dumps(text("all at once", "stop")).encode(), 1)
    reader.finish()
    reader.fill(record := RequestRecord(index=0))
    assert (record.outcome, record.error_class) == (Outcome.FAILED, "not_streamed")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"max_tokens: too large"}}', "max_tokens: too large"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"error":"plain"}', "plain"),
        (b"<html>bad gateway</html>", "<html>bad gateway</html>"),
        (b"", "no body"),
        (b"[" * 100_000, "[" * 2000),
    ],
)
def test_http_error_says_why(body: bytes, message: str) -> None:
    reader = StreamReader(Api.COMPLETIONS)
    reader.begin(400, {"content-type": "application/json"})
    reader.feed(body, 1)
    reader.finish()
    reader.fill(record := RequestRecord(index=0))
    assert (record.status, record.error_class, record.error_message) == (400, "http_400", message)


def test_abort_that_looks_successful_is_a_failure() -> None:
    record = read(text("a"), text("", "abort"))
    assert (record.outcome, record.error_class, record.finish_reason) == (Outcome.FAILED, "aborted", "abort")
    assert record.anomalies == {"finish_abort": 1}


def test_missing_done_is_counted_and_no_failure_if_the_stream_said_it_was_over() -> None:
    record = read(text("a", "stop"), {"choices": [], "usage": usage(1)}, done=False)
    assert (record.outcome, record.anomalies) == (Outcome.COMPLETED, {"missing_done": 1})


def test_truncated_stream_is_a_failure_and_keeps_its_chunks() -> None:
    for cut in (False, True):
        record = read(text("a"), text("b"), done=False, cut=cut)
        assert (record.outcome, record.error_class, record.chunk_ns) == (Outcome.FAILED, "truncated", [1, 2])


def test_half_an_event_at_the_end_is_seen() -> None:
    reader = StreamReader(Api.COMPLETIONS)
    reader.begin(200, SSE)
    reader.feed(sse(text("a")) + b'data: {"choices', 1)
    reader.finish(cut=True)
    reader.fill(record := RequestRecord(index=0))
    assert record.anomalies == {"partial_event": 1, "connection_cut": 1}


def test_done_without_its_blank_line_is_done() -> None:
    reader = StreamReader(Api.COMPLETIONS)
    reader.begin(200, SSE)
    reader.feed(sse(text("a", "stop")) + b"data: [DONE]", 1)
    reader.finish()
    reader.fill(record := RequestRecord(index=0))
    assert record.outcome == Outcome.COMPLETED
    assert record.anomalies["unterminated_event"] == 1


def test_chunks_after_done_are_no_tokens() -> None:
    record = read(text("a"), text("b"), text("c", "stop"), b"[DONE]", text("d"))
    assert record.chunk_ns == [1, 2, 3]
    assert record.anomalies["after_done"] == 2


def test_stream_without_a_token_is_a_failure() -> None:
    assert read().error_class == "empty"
    assert chat(delta("", role="assistant")).error_class == "empty"


@pytest.mark.parametrize(
    "payload",
    [
        b"{",
        b"null",
        b"[]",
        b'{"choices": 5}',
        b'{"choices": ["x"]}',
        b'{"choices": [{"text": 5}]}',
        b'{"choices": [], "usage": 3}',
        b'{"choices": [], "usage": {"completion_tokens": -1}}',
        b'{"choices": [], "usage": {"completion_tokens": "9"}}',
        b'{"choices": [{"text": "\xff"}]}',
        b"[" * 100_000,
    ],
)
def test_event_that_is_no_chunk_is_a_failure_that_shows_it(payload: bytes) -> None:
    record = read(text("a"), payload, text("b", "stop"))
    assert (record.outcome, record.error_class) == (Outcome.FAILED, "bad_event")
    assert record.anomalies["bad_event"] == 1
    assert record.chunk_ns[0] == 1


def test_output_tokens_are_the_servers_not_the_chunks() -> None:
    """Speculative decoding: one chunk carries several tokens."""
    record = read(text("a b c"), text("d e"), text("f", "length"), {"choices": [], "usage": usage(9)})
    assert (record.output_tokens, len(record.chunk_ns), record.chunk_tokens) == (9, 3, None)


def test_tokens_per_chunk_from_continuous_usage() -> None:
    record = read(
        text("abc", usage=usage(3)),
        text("", usage=usage(5)),
        text("f", "length", usage=usage(6)),
        {"choices": [], "usage": usage(6)},
    )
    assert (record.chunk_ns, record.chunk_tokens, record.output_tokens) == ([1, 2, 3], [3, 2, 1], 6)
    assert record.anomalies == {}


def test_tokens_per_chunk_from_token_ids() -> None:
    def chunk(content: str, ids: list[int], finish: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": content, "token_ids": ids, "finish_reason": finish}]}

    record = read(chunk("ab", [1, 2]), chunk("", [3]), chunk("", [], "stop"))
    assert (record.chunk_ns, record.chunk_tokens) == ([1, 2], [2, 1])
    assert (record.output_tokens, record.tokens_from) == (3, "token_ids")


def test_usage_that_contradicts_its_chunks_is_counted() -> None:
    record = read(text("a", usage=usage(1)), text("b", "stop", usage=usage(2)), {"choices": [], "usage": usage(4)})
    assert record.anomalies == {"usage_mismatch": 1}
    assert record.output_tokens == 4


def test_no_usage_means_chunks_are_counted_and_named_so() -> None:
    record = read(text("a"), text("b", "stop"))
    assert (record.output_tokens, record.tokens_from, record.anomalies) == (2, "chunks", {"no_usage": 1})


def test_half_a_character_is_a_token_when_the_total_says_so() -> None:
    values = (text("a"), text(""), text("é"), text("", "stop"))
    assert read(*values, {"choices": [], "usage": usage(3)}).chunk_ns == [1, 2, 3]
    assert read(*values, {"choices": [], "usage": usage(4)}).chunk_ns == [1, 2, 3, 4]
    assert read(*values, {"choices": [], "usage": usage(2)}).chunk_ns == [1, 3]
    assert read(*values).chunk_ns == [1, 3]


def test_compressed_stream_is_a_failure() -> None:
    reader = StreamReader(Api.COMPLETIONS)
    reader.begin(200, {**SSE, "content-encoding": "gzip"})
    reader.feed(b"\x1f\x8b", 1)
    reader.finish()
    reader.fill(record := RequestRecord(index=0))
    assert record.error_class == "protocol"


def test_cached_tokens() -> None:
    last = {"choices": [], "usage": usage(1, prompt_tokens_details={"cached_tokens": 4})}
    assert read(text("a", "stop"), last).cached_tokens == 4


def test_text_is_kept_on_request() -> None:
    values = [text("a"), text("b"), text('"\\'), text("é🙂"), text("c"), text("", "stop")]
    assert read(*values, keep_text=True).text == 'ab"\\é🙂c'
    assert read(*values).text is None


chunk_values = st.one_of(
    st.text(max_size=5).map(text),
    st.sampled_from(["a", " b", '"', "\\", "\n", "é", "\x7f", '"}],"x":[{"', ""]).map(text),
    st.tuples(st.sampled_from(["a", ""]), st.sampled_from(["stop", "length"])).map(lambda pair: text(*pair)),
    st.integers(0, 5).map(lambda n: text("a", usage=usage(n))),
    st.text(max_size=3).map(lambda t: {**text(t), "id": t}),
    st.text(max_size=3).map(delta),
    st.text(max_size=3).map(lambda t: delta(t, role="assistant")),
    st.text(max_size=3).map(lambda t: delta(None, reasoning_content=t)),
)


@given(st.lists(chunk_values, max_size=30), st.sampled_from(list(Api)), st.booleans(), st.integers(1, 5))
def test_template_changes_nothing(values: list[dict[str, Any]], api: Api, ascii_only: bool, per_read: int) -> None:
    """The shortcut for chunks that differ in their text alone gives what parsing each of them gives."""

    class NoShortcut(StreamReader):
        def _learn(self, payload: bytes, chunk: dict[str, Any]) -> None:
            pass

    records = []
    for kind in (StreamReader, NoShortcut):
        reader = kind(api, keep_text=True)
        reader.begin(200, SSE)
        events = [sse(json.dumps(value, ensure_ascii=ascii_only).encode()) for value in values]
        for number in range(0, len(events), per_read):
            reader.feed(b"".join(events[number : number + per_read]), number)
        reader.feed(sse(b"[DONE]"), 99)
        reader.finish()
        reader.fill(record := RequestRecord(index=0))
        records.append(record)
    assert records[0] == records[1]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("api", list(Api))
def test_template_is_used(api: Api, separators: tuple[str, str]) -> None:
    make = text if api is Api.COMPLETIONS else delta
    parsed = 0

    class Counting(StreamReader):
        def _chunk(self, payload: bytes, t_ns: int) -> None:
            nonlocal parsed
            parsed += 1
            super()._chunk(payload, t_ns)

    reader = Counting(api, keep_text=True)
    reader.begin(200, SSE)
    for number in range(50):
        reader.feed(sse(json.dumps(make(f" word{number}"), separators=separators).encode()) * 2, number)
    reader.fill(record := RequestRecord(index=0))
    assert parsed == 1
    assert record.chunk_ns == [number for number in range(50) for _ in "ab"]
    assert record.text == "".join(f" word{number}" * 2 for number in range(50))


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_garbage_never_raises(pieces: list[bytes]) -> None:
    reader = StreamReader(Api.CHAT)
    reader.begin(200, SSE)
    for piece in pieces:
        reader.feed(b"data: " + piece + b"\n\n", 1)
    reader.finish(cut=True)
    reader.fill(RequestRecord(index=0))


def test_definitions_page_names_every_anomaly_and_error_class() -> None:
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs" / "definitions.md").read_text()
    code = "".join(path.read_text() for path in sorted((root / "bench").glob("*.py")))
    names = set(re.findall(r'(?:_note|\.fail|\.stop)\(\s*(?:exchange, )?"(\w+)"', code))
    assert {"missing_done", "truncated", "protocol", "connect", "timeout"} <= names | {"timeout"}
    missing = {name for name in names if f"`{name}`" not in page and not name.startswith("finish_")}
    assert missing <= {"cancelled"}, missing


def test_error_object_of_older_servers_in_a_200_stream_is_a_failure() -> None:
    record = read(text("a"), {"object": "error", "message": "boom", "code": 500})
    assert (record.outcome, record.error_class, record.error_message) == (Outcome.FAILED, "server_error", "boom")


def test_error_event_whose_message_is_a_comment_is_a_failure() -> None:
    reader = StreamReader(Api.COMPLETIONS)
    reader.begin(200, SSE)
    reader.feed(sse(text("a")) + b"event: error\n: the worker died\n\n", 1)
    reader.finish()
    reader.fill(record := RequestRecord(index=0))
    assert (record.error_class, record.error_message) == ("server_error", "the worker died")


def test_content_in_parts_and_thoughts_bear_tokens() -> None:
    thought = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]
    record = chat(delta(thought), delta([{"type": "text", "text": "Hi"}]), delta([], "stop"), keep_text=True)
    assert (record.outcome, record.chunk_ns, record.text) == (Outcome.COMPLETED, [1, 2], "hmHi")


def test_function_call_of_the_older_api_bears_tokens() -> None:
    record = chat(delta(None, function_call={"name": "f", "arguments": "{}"}), delta(None, "function_call"))
    assert record.chunk_ns == [1]


@pytest.mark.parametrize("content", [7, {"text": "a"}, ["a"], [7]])
def test_content_that_is_no_text_is_a_bad_event(content: object) -> None:
    record = chat(delta("a"), delta(content))
    assert (record.error_class, record.anomalies["bad_event"]) == ("bad_event", 1)


def test_more_tokens_than_asked_are_counted_as_such() -> None:
    for asked, anomalies in ((2, {"more_tokens_than_asked": 1}), (3, {}), (None, {})):
        reader = StreamReader(Api.COMPLETIONS)
        reader.begin(200, SSE)
        reader.feed(sse(text("a b c", "length")) + sse({"choices": [], "usage": usage(3)}) + sse(b"[DONE]"), 1)
        reader.finish()
        reader.fill(record := RequestRecord(index=0, output_len=asked))
        assert (record.outcome, record.output_tokens, record.anomalies) == (Outcome.COMPLETED, 3, anomalies)
