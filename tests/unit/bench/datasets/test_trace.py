"""Traces: any valid one comes back as it was written, garbage is refused with its line, and prompts keep lengths, times
and shared prefixes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.bench.datasets.bodies import RequestFields
from atom.bench.datasets.prefix_cache import InfiniteCache
from atom.bench.datasets.text import word_list
from atom.bench.datasets.trace import TraceReplay, TraceSource, theoretical_hits
from atom.bench.datasets.trace_formats import Trace, TraceWindow, read_trace
from atom.bench.load import Api, Shard
from atom.recipes.errors import UsageError

same_folder = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def row(time: float, blocks: Sequence[int], input_len: int, output_len: int = 3) -> dict[str, Any]:
    return {"timestamp": time, "input_length": input_len, "output_length": output_len, "hash_ids": list(blocks)}


def mooncake(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return file


def load(trace: Trace, api: Api = Api.COMPLETIONS, **replay: Any) -> TraceSource:
    choice = TraceReplay(**replay)
    cached = None if choice.lengths_only else theoretical_hits(trace)
    return TraceSource(trace=trace, replay=choice, fields=RequestFields(api=api, model="m"), cached=cached)


def prompts(source: TraceSource) -> list[Any]:
    return [json.loads(source.request(index).body)["prompt"] for index in range(len(source))]


mooncake_rows = st.lists(
    st.tuples(
        st.integers(0, 10**9), st.lists(st.integers(0, 2**64 - 1), max_size=6), st.integers(1, 4), st.integers(1, 99)
    ),
    min_size=1,
    max_size=15,
)


@same_folder
@given(mooncake_rows, st.booleans())
def test_a_mooncake_trace_comes_back(tmp_path: Path, rows: list[Any], bailian: bool) -> None:
    """Blocks of 4 tokens; prompts whose last block is cut, whole, or not named."""
    written = [
        {**row(time, ids, max(1, len(ids) * 4 - 4 + rest), out), **({"chat_id": 1} if bailian else {})}
        for time, ids, rest, out in rows
        if ids or rest < 4
    ]
    if not written:
        return
    trace = read_trace(mooncake(tmp_path, written), TraceWindow(), block_size=4)
    by_time = sorted(written, key=lambda one: one["timestamp"])
    assert trace.format == ("bailian" if bailian else "mooncake")
    unit = 10**9 if bailian else 10**6
    assert trace.time_ns.tolist() == [one["timestamp"] * unit for one in by_time]
    assert trace.input_len.tolist() == [one["input_length"] for one in by_time]
    assert trace.output_len.tolist() == [one["output_length"] for one in by_time]
    assert [trace.blocks(i).tolist() for i in range(len(trace))] == [one["hash_ids"] for one in by_time]


@same_folder
@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20))
def test_a_burstgpt_trace_comes_back(tmp_path: Path, rows: list[tuple[float, int, int]]) -> None:
    file = tmp_path / "burst.csv"
    lines = [f"{time},ChatGPT,{asked},{answered},{asked + answered},API log\n" for time, asked, answered in rows]
    file.write_text(BURSTGPT + "".join(lines))
    trace = read_trace(file, TraceWindow())
    assert trace.format == "burstgpt"
    assert trace.time_ns.tolist() == [round(time * 1e9) for time, _, _ in sorted(rows, key=lambda one: one[0])]
    assert sorted(zip(trace.input_len.tolist(), trace.output_len.tolist(), strict=True)) == sorted(
        (asked, answered) for _, asked, answered in rows
    )
    assert theoretical_hits(trace) is None


@same_folder
@given(
    st.datetimes(min_value=datetime(2020, 1, 1), max_value=datetime(2030, 1, 1)),
    st.integers(0, 9),
    st.sampled_from(["", "Z", "+00:00", "+05:30", "-0800"]),
)
def test_azure_times_are_exact_to_their_seventh_digit(tmp_path: Path, time: datetime, digit: int, zone: str) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE + f"{time:%Y-%m-%d %H:%M:%S.%f}{digit}{zone},4808,10\r\n")
    trace = read_trace(file, TraceWindow())
    shift = {"+05:30": timedelta(hours=5, minutes=30), "-0800": timedelta(hours=-8)}.get(zone, timedelta())
    since = time.replace(tzinfo=UTC) - shift - datetime(1970, 1, 1, tzinfo=UTC)
    assert trace.time_ns.tolist() == [since // timedelta(microseconds=1) * 1000 + digit * 100]
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([4808], [10])


GOOD = json.dumps(row(1, [1], 5)) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"trace: no requests in it"),
        (GOOD + "{\n", r"trace:2: no JSON"),
        (GOOD + "\n" + "[1]\n", r"trace:3: must be a JSON object"),
        (GOOD + '{"timestamp": 1, "input_length": 3, "hash_ids": [1]}\n', r"trace:2: field 'output_length'.*None"),
        (GOOD + json.dumps(row(-1, [1], 5)), r"trace:2: field 'timestamp'"),
        (GOOD + json.dumps({**row(1, [1], 5), "timestamp": "1"}), r"trace:2: field 'timestamp'"),
        (GOOD + '{"timestamp": NaN, "input_length": 1, "output_length": 1}', r"trace:2: field 'timestamp'"),
        (GOOD + json.dumps({**row(1, [1], 5), "hash_ids": "1"}), r"trace:2: field 'hash_ids'"),
        (GOOD + json.dumps(row(1, [-1], 5)), r"trace:2: field 'hash_ids'"),
        (GOOD + json.dumps(row(1, [True], 5)), r"trace:2: field 'hash_ids'"),
        (GOOD + json.dumps(row(1, [1], 10**9)), r"trace:2: field 'input_length'"),
        (GOOD + json.dumps(row(1, [1, 2, 3], 5)), r"trace:2: field 'hash_ids' has 3 blocks.*--block-size"),
        ("a,b\n1,2\n", r"trace:1: no trace of a known format \(mooncake"),
        (BURSTGPT + "1,m,3,4,7,log\n1,m,3\n", r"trace:3: has 3 columns, the header 6"),
        (BURSTGPT + "1,m,3,4,7,log,extra\n", r"trace:2: has 7 columns, the header 6"),
        (BURSTGPT + "1,m,x,4,7,log\n", r"trace:2: field 'request tokens'.*'x'"),
        (BURSTGPT + "soon,m,3,4,7,log\n", r"trace:2: field 'timestamp'.*'soon'"),
        (BURSTGPT + "inf,m,3,4,7,log\n", r"trace:2: field 'timestamp'"),
        (BURSTGPT + '1,"m,3,4,7,log\n', r"trace:2: no line of a CSV file"),
        (BURSTGPT + "1,m,3,0,3,log\n", r"trace: no request is left \(1: no input or no output tokens\)"),
        (BURSTGPT, r"trace: no request is left"),
        (AZURE + "2023-02-30 00:00:00,1,1\n", r"trace:2: field 'timestamp' must be a time such as"),
        (AZURE + "2023-11-16 25:00:00,1,1\n", r"trace:2: field 'timestamp' must be a time such as"),
        (AZURE + "2023-11-16 18:15:46.6805900,1.5,1\n", r"trace:2: field 'contexttokens'"),
    ],
)
def test_what_is_wrong_is_said_with_file_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_trace(file, TraceWindow())


@pytest.mark.parametrize(
    "text",
    [BURSTGPT + f"1,m,{'x' * 5000},4,7,log\n", AZURE + f"{'y' * 5000},1,1\n", BURSTGPT + f"{'9' * 4000},m,3,4,7,log\n"],
)
def test_a_long_cell_is_cut_in_the_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"trace:2: field .*…$") as error:
        read_trace(file, TraceWindow())
    assert len(str(error.value)) < 300 + len(str(file))


@same_folder
@given(st.binary(max_size=200), st.sampled_from([b"", GOOD.encode(), BURSTGPT.encode(), AZURE.encode()]))
def test_garbage_is_a_usage_error_or_a_trace(tmp_path: Path, garbage: bytes, head: bytes) -> None:
    file = tmp_path / "trace"
    file.write_bytes(head + garbage)
    try:
        trace = read_trace(file, TraceWindow())
    except UsageError as error:
        said = str(error)
    else:
        assert len(trace) >= 1
        return
    assert str(file) in said


def test_a_format_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(AZURE + "2023-11-16 18:15:46.6805900,4808,10\r\n")
    with pytest.raises(UsageError, match="no column 'request tokens', which --trace-format burstgpt needs"):
        read_trace(file, TraceWindow(), format="burstgpt")
    with pytest.raises(UsageError, match="--trace-format must be one of"):
        read_trace(file, TraceWindow(), format="alibaba")
    file.write_text(GOOD)
    with pytest.raises(UsageError, match="--trace-format is azure, a CSV file"):
        read_trace(file, TraceWindow(), format="azure")


def test_a_header_with_more_columns_in_another_order_is_read_by_name(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text('Session ID,Response tokens,Timestamp,Model,Request tokens\n7,18,5,"a, b",472\n')
    trace = read_trace(file, TraceWindow())
    assert (trace.time_ns.tolist(), trace.input_len.tolist(), trace.output_len.tolist()) == ([5 * 10**9], [472], [18])


def test_windows_limits_and_their_counts(tmp_path: Path) -> None:
    rows = [row(1000 * second, [second], 4 + second % 3 * 10, 1 + second % 2 * 10) for second in range(12)]
    file = mooncake(tmp_path, rows)

    def taken(**window: Any) -> Trace:
        return read_trace(file, TraceWindow(**window), block_size=32)

    assert (taken(start=3, end=6).time_ns // 10**9).tolist() == [3, 4, 5]
    assert taken(start=3, end=6).dropped == {"outside --trace-start and --trace-end": 9}
    assert (taken(num_prompts=2).time_ns // 10**9).tolist() == [0, 1]
    assert taken(num_prompts=2).facts.sha256 is None
    assert taken().facts.sha256 is not None
    dropped = taken(max_input_len=14, max_output_len=5)
    assert dropped.dropped == {"input beyond --max-input-len": 4, "output beyond --max-output-len": 4}
    assert (dropped.input_len.max(), dropped.output_len.max()) == (14, 1)
    clipped = taken(max_input_len=14, max_output_len=5, clip=True)
    assert len(clipped) == 12
    assert clipped.clipped == {"input beyond --max-input-len": 4, "output beyond --max-output-len": 6}
    assert (clipped.input_len.max(), clipped.output_len.max()) == (14, 5)


@pytest.mark.parametrize(
    ("window", "flag"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"max_input_len": 0}, "--max-input-len"),
        ({"max_output_len": -1}, "--max-output-len"),
        ({"start": -1.0}, "--trace-start"),
        ({"start": 5.0, "end": 5.0}, "--trace-end"),
        ({"end": float("nan")}, "--trace-end"),
    ],
)
def test_windows_that_cannot_be_are_refused(window: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        TraceWindow(**window)


@pytest.fixture
def shared(tmp_path: Path) -> Trace:
    """Three prompts that begin alike, with a cut last block each, and one of its own."""
    rows = [
        row(27_482, [46, 47, 48], 1100),
        row(27_482, [46, 47, 49], 1536),
        row(30_000.5, [46, 47, 48], 1100),
        row(30_535, [90], 10),
    ]
    return read_trace(mooncake(tmp_path, rows), TraceWindow())


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_prompts_share_what_the_trace_shares_and_are_as_long(shared: Trace) -> None:
    source = load(shared, seed=3)
    first, second, third, other = prompts(source)
    assert [len(first), len(second), len(third), len(other)] == [1100, 1536, 1100, 10]
    assert common_prefix(first, second) == 1024
    assert first == third
    assert common_prefix(first, other) == 0
    plan = source.request(1)
    assert (plan.input_len, plan.output_len) == (1536, 3)
    assert prompts(load(shared, seed=4))[0] != first


def test_theoretical_hits_are_those_of_a_cache_without_end(shared: Trace) -> None:
    source = load(shared)
    hits = [0, 1024, 1099, 0]
    assert [source.request(i).tags for i in range(4)] == [{"theoretical_cached_tokens": hit} for hit in hits]
    said = source.describe()
    assert said["theoretical_cached_tokens"] == sum(hits)
    assert said["theoretical_hit_rate"] == pytest.approx(sum(hits) / (1100 + 1536 + 1100 + 10))


def test_a_block_counts_only_after_the_same_prefix() -> None:
    cache = InfiniteCache(16)
    assert [cache.send(ids, 40) for ids in ([1, 2, 3], [5, 2, 3], [1, 2, 4], [5, 2, 3], [1])] == [0, 0, 32, 39, 16]
    assert len(cache) == 7


def test_a_block_counts_as_far_as_an_earlier_prompt_reached_into_it() -> None:
    cache = InfiniteCache(16)
    assert [cache.send(ids, length) for ids, length in (([1, 2], 20), ([1, 2, 3], 40), ([1, 2, 3], 40))] == [0, 20, 39]


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 4)), max_size=12))
def test_theoretical_hits_are_the_longest_common_beginnings(sent: list[tuple[list[int], int]]) -> None:
    """Against the tokens themselves, compared one by one."""
    cache = InfiniteCache(4)
    earlier: list[list[int]] = []
    for ids, rest in sent:
        tokens = [token for block in ids for token in range(10 * block, 10 * block + 4)][: 4 * len(ids) - 4 + rest]
        best = max((common_prefix(tokens, other) for other in earlier), default=0)
        assert cache.send(ids, len(tokens)) == min(best, len(tokens) - 1)
        earlier.append(tokens)


def test_lengths_only_shares_nothing(shared: Trace) -> None:
    source = load(shared, lengths_only=True)
    texts = prompts(source)
    assert [len(text) for text in texts] == [1100, 1536, 1100, 10]
    assert max(common_prefix(texts[i], texts[j]) for i in range(4) for j in range(i)) < 4
    assert source.request(1).tags is None
    assert source.describe()["theoretical_hit_rate"] is None


def test_times_begin_with_the_first_request_and_scale(shared: Trace) -> None:
    assert load(shared).offsets_ns().tolist() == [0, 0, 2_518_500_000, 3_053_000_000]  # type: ignore[union-attr]
    slower = load(shared, time_scale=2.0).offsets_ns()
    assert slower is not None
    assert slower.tolist() == [0, 0, 5_037_000_000, 6_106_000_000]
    assert load(shared, use_timestamps=False).offsets_ns() is None
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="--time-scale"):
            load(shared, time_scale=wrong)


def test_warmups_are_none_of_the_measured_prompts(shared: Trace) -> None:
    source = load(shared)
    measured = prompts(source)
    warm = [json.loads(source.warmup(i).body)["prompt"] for i in range(8)]
    assert max(common_prefix(one, other) for one in measured for other in warm) < 4
    assert len({tuple(one) for one in warm}) == 8


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_same_seed_same_requests_for_any_number_of_workers(shared: Trace, workers: int) -> None:
    alone = load(shared, seed=5)
    whole = [alone.request(index) for index in range(4)]
    found = {}
    for number in range(workers):
        source = pickle.loads(pickle.dumps(alone))  # noqa: S301 (as workers get it)
        shard = Shard(number, workers)
        found.update({index: source.request(index) for index in range(4) if shard.owns(index)})
    assert [found[index] for index in range(4)] == whole


def test_text_has_the_same_structure_in_words(shared: Trace) -> None:
    source = load(shared, Api.CHAT)
    texts = [json.loads(source.request(i).body)["messages"][0]["content"].split() for i in range(4)]
    assert [len(text) for text in texts] == [1100, 1536, 1100, 10]
    assert common_prefix(texts[0], texts[1]) == 1024
    assert set(texts[0]) <= set(word_list(None).words)
    assert source.request(0).input_len is None
    assert any("no --tokenizer" in note for note in source.describe()["notes"])


def test_token_ids_lie_in_the_servers_vocabulary(shared: Trace) -> None:
    tokens = np.concatenate([np.array(one) for one in prompts(load(shared, vocab_size=512))])
    assert (tokens.min(), tokens.max()) == (64, 479)
