"""Results of `vllm bench serve` and AIPerf, scored like runs of this project."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.aiperf_export import export_aiperf
from atom.bench.export import vllm_result
from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.summary import summarize
from atom.diag.compare.foreign import read_foreign
from atom.diag.compare.recorded import read_recorded
from atom.diag.compare.scores import score_matched, score_run
from atom.recipes.errors import UsageError

S = 1_000_000_000
MS = 1_000_000
LANES = 4


def a_run(path: Path, requests: int = 200, failed: int = 0) -> RunDirectory:
    """A closed loop of four lanes; 8 tokens each, one every 10 ms or so, the first after 30."""
    rng, free, records = np.random.default_rng(3), [5 * S] * LANES, []
    for index in range(requests):
        lane = free.index(min(free))
        sent = free[lane]
        gaps = np.rint(rng.normal(10, 0.5, 7) * MS).astype(int)
        chunks = (sent + 30 * MS + np.cumsum([0, *gaps])).tolist()
        free[lane] = chunks[-1] + 100_000
        record = RequestRecord(
            index=index,
            lane=lane,
            outcome=Outcome.COMPLETED,
            status=200,
            ready_ns=sent,
            sent_ns=sent,
            first_ns=chunks[0],
            last_ns=chunks[-1],
            end_ns=chunks[-1],
            chunk_ns=chunks,
            prompt_tokens=50,
            input_len=50,
            output_len=8,
            output_tokens=8,
            tokens_from="usage",
        )
        if index < failed:
            record.outcome, record.error_class, record.error_message = Outcome.FAILED, "http_500", "boom"
        records.append(record)
    run_dir = RunDirectory(path)
    load = {"name": "random", "api": "completions", "max_concurrency": LANES, "num_prompts": requests}
    run_dir.write_run_json(
        {"start_ns": 0, "start_unix_ns": 1_796_074_784 * S, "measured_start_ns": 5 * S, "load": load}
    )
    with run_dir.requests_writer() as writer:
        for record in records:
            writer.append_line(record.to_line())
    with run_dir.client_writer() as client:
        client.append({"kind": "measured_start", "t_ns": 5 * S, "start_ns": 5 * S})
        told = {"started": requests, "sent": requests, "running_integral_ns": None, "interrupted": False}
        client.append({"kind": "measured_end", "t_ns": max(free), **told})
    run_dir.seal(Validity.VALID)
    return run_dir


def as_vllm(run_dir: RunDirectory, path: Path, **changes: Any) -> Path:
    result = vllm_result(run_dir, summarize(run_dir), backend="openai", detailed=True)
    path.write_text(json.dumps({**result, **changes}))
    return path


def as_aiperf(run_dir: RunDirectory, folder: Path) -> Path:
    export_aiperf(run_dir, summarize(run_dir), folder)
    return folder


def test_both_formats_score_like_the_run_they_are_of(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "run")
    own = score_run(run_dir.path)
    assert own.window.steady
    for path in (as_vllm(run_dir, tmp_path / "vllm.json"), as_aiperf(run_dir, tmp_path / "aiperf")):
        score = score_run(path)
        assert score.window.steady
        assert score.window.seconds == pytest.approx(own.window.seconds, rel=1e-6)
        assert not score.censored
        assert not score.invalid
        assert list(score.metrics) == list(own.metrics)
        for name, one in own.metrics.items():
            assert score.metrics[name].value == pytest.approx(one.value, rel=1e-5), (path, name)
            assert score.metrics[name].log_se == pytest.approx(one.log_se, rel=0.05, abs=1e-5), (path, name)


def test_their_clocks_are_not_laid_over_each_other(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "run")
    path = as_vllm(run_dir, tmp_path / "a.json")
    pair = score_matched(path, run_dir.path, concurrent=True)
    assert pair[0].window.steady
    assert read_recorded(path).clock is None


@pytest.mark.parametrize("how", [as_vllm, as_aiperf])
def test_failed_requests_censor(tmp_path: Path, how: Any) -> None:
    run_dir = a_run(tmp_path / "run", failed=3)
    path = how(run_dir, tmp_path / ("x.json" if how is as_vllm else "x"))
    score = score_run(path)
    assert score.censored == ["3 of 200 requests failed"]
    assert score.counts.completed == 197


def test_an_open_loop_of_vllm_is_one(tmp_path: Path) -> None:
    path = as_vllm(a_run(tmp_path / "run"), tmp_path / "a.json", request_rate=40.0, queue_times=[0.001] * 200)
    recorded = read_foreign(path)
    first = recorded.records[0]
    assert first.scheduled_ns == (first.sent_ns or 0) - MS
    ramp = as_vllm(a_run(tmp_path / "run2"), tmp_path / "b.json", request_rate=40.0, ramp_up_strategy="linear")
    assert read_foreign(ramp).steady().note == "the request rate changes throughout"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not one JSON object"),
        ("[]", "must hold a JSON object"),
        ("[" * 100_000, "is not one JSON object"),
        ('{"a": 1}\n{"a": 2}', "holds several results .* split it into one file each"),
        ('{"mean_ttft_ms": 5}', "save it with --save-result --save-detailed"),
        ("{}", "is no result of vllm bench serve: it has no list input_lens"),
        (
            '{"input_lens":[],"output_lens":[],"ttfts":[],"itls":[],"errors":[]}',
            "has no start_times: save it with a newer vLLM",
        ),
        (
            '{"input_lens":[1],"output_lens":[1],"start_times":[1],"ttfts":[1,2],"itls":[[]],"errors":[""]}',
            r"must be lists of one length, they have \[1, 2\]",
        ),
        (
            '{"input_lens":[1],"output_lens":[1],"start_times":[NaN],"ttfts":[1],"itls":[[]],"errors":[""]}',
            "request 0: start_times: must be a time in seconds, got 'nan'",
        ),
        (
            '{"input_lens":[1],"output_lens":[1],"start_times":[1],"ttfts":[1],"itls":[5],"errors":[""]}',
            "request 0: itls must be a list",
        ),
    ],
)
def test_what_is_no_result_is_said_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        score_run(path)
    assert str(path) in str(error.value)


def test_what_is_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file or directory"):
        read_foreign(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"has no profile_export.jsonl of AIPerf"):
        read_foreign(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UsageError, match="has no request of AIPerf's profiling phase"):
        read_foreign(tmp_path / "x.jsonl")


def test_lines_of_aiperf_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    folder = as_aiperf(a_run(tmp_path / "run"), tmp_path / "x")
    with (folder / "profile_export.jsonl").open("a") as file:
        file.write('{"metadata": {}}\nrubbish\n')
    assert score_run(folder).invalid == ["2 unreadable lines in profile_export.jsonl"]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.fixed_dictionaries(
        {
            name: st.lists(JSON, min_size=1, max_size=1)
            for name in ("input_lens", "output_lens", "start_times", "ttfts", "itls", "errors")
        }
    ),
    JSON,
    JSON,
)
def test_hostile_values_of_vllm_are_usage_errors(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, Any], rate: Any, limit: Any
) -> None:
    path = tmp_path_factory.mktemp("x") / "x.json"
    path.write_text(json.dumps({**columns, "request_rate": rate, "max_concurrency": limit, "queue_times": limit}))
    with contextlib.suppress(UsageError):
        score_run(path)


@given(
    st.dictionaries(
        st.sampled_from(
            (
                "request_start_ns",
                "request_end_ns",
                "benchmark_phase",
                "credit_issued_ns",
                "was_cancelled",
                "turn_index",
                "conversation_id",
            )
        ),
        JSON,
    ),
    JSON,
    JSON,
    JSON,
)
def test_hostile_values_of_aiperf_are_usage_errors(
    tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any], value: Any, error: Any, phases: Any
) -> None:
    folder = tmp_path_factory.mktemp("x")
    meta = {"request_start_ns": 5, "request_end_ns": 900_000_000, "benchmark_phase": "profiling", **metadata}
    metrics = {"time_to_first_token": {"value": 3.5}, "request_latency": {"value": 9.5}, "inter_chunk_latency": value}
    lines = [
        {"metadata": meta, "metrics": metrics, "error": None},
        {"metadata": meta, "metrics": {"inter_chunk_latency": {"value": value}, **dict(list(metrics.items())[:2])}},
        {"metadata": meta, "metrics": value, "error": error},
    ]
    (folder / "profile_export.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "profile_export_aiperf.json").write_text(json.dumps({"input_config": {"phases": phases}}))
    with contextlib.suppress(UsageError):
        score_run(folder)
