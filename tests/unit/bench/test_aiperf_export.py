"""A run in AIPerf's files, and AIPerf's lines as records of a run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.agentic.aiperf_records import WORKER, import_records
from atom.bench.agentic.generate import GenerateConfig, generate_traces
from atom.bench.agentic.load import AgenticLoad
from atom.bench.agentic.theory import session_hits
from atom.bench.agentic.weka import parse_trace
from atom.bench.aiperf_export import RECORDS_FILE, SUMMARY_FILE, export_aiperf
from atom.bench.load import Api
from atom.bench.records import MEASURED, WARMUP, Outcome, RequestRecord, read_records
from atom.bench.rundir import RunDirectory, read_jsonl
from atom.bench.summary import summarize
from atom.bench.wall_clock import WallClock

MS = 1_000_000
START, UNIX = 1_000 * MS, 1_700_000_000_000 * MS
"""The same moment on both clocks."""
TAGS = {
    "trace": "t",
    "root": "0:t",
    "agent": "main",
    "depth": 0,
    "parent": None,
    "lane_session": 0,
    "trace_input_len": 100,
    "theoretical_cached_blocks": 3,
    "theoretical_blocks": 4,
    "theoretical_cached_tokens": 75,
}


def a_record(index: int, **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "index": index,
        "lane": 0,
        "session": "0:t",
        "turn": index,
        "outcome": Outcome.COMPLETED,
        "status": 200,
        "ready_ns": START + 9 * MS,
        "sent_ns": START + 10 * MS,
        "first_ns": START + 30 * MS,
        "last_ns": START + 60 * MS,
        "end_ns": START + 61 * MS,
        "chunk_ns": [START + 30 * MS, START + 40 * MS, START + 40 * MS, START + 60 * MS],
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "output_tokens": 4,
        "tokens_from": "usage",
        "tags": TAGS,
    }
    return RequestRecord(**{**fields, **changes})


def a_run(path: Path, *records: RequestRecord, load: dict[str, Any] | None = None) -> RunDirectory:
    run_dir = RunDirectory(path)
    run_dir.write_run_json(
        {
            "start_ns": START,
            "start_unix_ns": UNIX,
            "command": ["atom", "bench", "x"],
            "measured_start_ns": START,
            "load": {
                "name": "x",
                "model": "m",
                "api": "chat",
                "seed": 3,
                "recordings": 1,
                "scenario": None,
                **(load or {}),
            },
        }
    )
    with run_dir.requests_writer() as writer:
        for record in records:
            writer.append_line(record.to_line())
    return run_dir


def exported(run_dir: RunDirectory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    folder = run_dir.path / "aiperf"
    export_aiperf(run_dir, summarize(run_dir, write=False), folder)
    return list(read_jsonl(folder / RECORDS_FILE)), json.loads((folder / SUMMARY_FILE).read_text())


def test_a_request_in_aiperfs_words(tmp_path: Path) -> None:
    (line,), _ = exported(a_run(tmp_path, a_record(0)))
    values = {tag: metric["value"] for tag, metric in line["metrics"].items()}
    assert values["time_to_first_token"] == 20
    assert values["time_to_second_token"] == 10
    assert values["request_latency"] == 50
    assert values["inter_token_latency"] == 10  # (50 − 20) ÷ 3: one value per request
    assert values["inter_chunk_latency"] == [10, 20]  # two chunks in one read are one arrival
    assert values["usage_prompt_cache_read_tokens"] == 64
    assert values["usage_total_tokens"] == 104
    assert values["output_token_throughput_per_user"] == pytest.approx(100)
    meta = line["metadata"]
    assert meta["request_start_ns"] == UNIX + 10 * MS
    assert meta["credit_issued_ns"] == UNIX + 9 * MS
    assert meta["benchmark_phase"] == "profiling"
    assert (meta["conversation_id"], meta["turn_index"], meta["agent_depth"]) == ("t", 0, 0)
    assert line["error"] is None


def test_tokens_that_came_in_one_read_have_no_time_each(tmp_path: Path) -> None:
    moment = START + 60 * MS
    (line,), summary = exported(a_run(tmp_path, a_record(0, first_ns=moment, last_ns=moment, chunk_ns=[moment] * 4)))
    assert "inter_token_latency" not in line["metrics"]
    assert "inter_token_latency" not in summary
    assert line["metrics"]["time_to_first_token"]["value"] == 50


def test_what_is_not_known_is_left_out_and_failures_have_no_metrics(tmp_path: Path) -> None:
    bare = a_record(0, prompt_tokens=None, cached_tokens=None, tokens_from="chunks", tags=None, session=None)
    failed = a_record(1, outcome=Outcome.FAILED, status=500, error_class="http", error_message="boom")
    cancelled = a_record(2, outcome=Outcome.CANCELLED, error_class="cancelled", error_message="by the client")
    never = a_record(
        3, outcome=Outcome.FAILED, sent_ns=None, ready_ns=None, error_class="connect", error_message="refused"
    )
    lines, summary = exported(a_run(tmp_path, bare, failed, cancelled, never))
    assert len(lines) == 3, "a request that never began is none of AIPerf's records"
    assert "usage_prompt_tokens" not in lines[0]["metrics"]
    assert "input_sequence_length" not in lines[0]["metrics"]
    assert "usage_completion_tokens" not in lines[0]["metrics"]
    assert "conversation_id" not in lines[0]["metadata"]
    assert lines[1]["metrics"] == {}
    assert lines[1]["error"] == {"code": 500, "type": "http", "message": "boom"}
    assert lines[2]["metadata"]["was_cancelled"] is True
    assert lines[2]["error"] is None
    assert summary["request_count"]["avg"] == 1
    assert summary["error_request_count"]["avg"] == 2
    assert "total_usage_prompt_tokens" not in summary
    assert {e["error_details"]["message"]: e["count"] for e in summary["error_summary"]} == {"boom": 1, "refused": 1}


def test_warm_up_is_kept_apart_and_the_theoretical_share_is_of_blocks(tmp_path: Path) -> None:
    run_dir = a_run(
        tmp_path, a_record(0, phase=WARMUP), a_record(1), a_record(2), load={"scenario": "inferencex-agentx-mvp"}
    )
    lines, summary = exported(run_dir)
    assert [line["metadata"]["benchmark_phase"] for line in lines] == ["warmup", "profiling", "profiling"]
    assert summary["warmup_metrics"]["time_to_first_token"]["count"] == 1
    assert summary["time_to_first_token"]["count"] == 2
    assert set(summary["time_to_first_token"]) >= {"avg", "p1", "p50", "p99", "std", "min", "max", "unit", "sum"}
    assert summary["theoretical_prefix_cache_hit"] == {"unit": "%", "avg": 75.0, "count": 8, "sum": 6}
    assert summary["overall_usage_prompt_cache_read_pct"]["avg"] == 64


def test_the_cached_share_is_of_the_prompts_whose_cache_is_told(tmp_path: Path) -> None:
    records = (a_record(0), a_record(1, cached_tokens=None), a_record(2, prompt_tokens=None))
    _, summary = exported(a_run(tmp_path, *records))
    assert summary["overall_usage_prompt_cache_read_pct"]["avg"] == 64


@pytest.mark.parametrize(
    ("load", "phase"),
    [
        ({"request_rate": "inf", "max_concurrency": 8}, {"type": "concurrency", "concurrency": 8}),
        ({"request_rate": "inf", "num_prompts": 9}, {"type": "concurrency", "concurrency": 9, "requests": 9}),
        ({"request_rate": 2.0, "arrival_pattern": "poisson"}, {"type": "poisson", "rate": 2.0}),
        ({"request_rate": 2.0, "arrival_pattern": "constant"}, {"type": "constant", "rate": 2.0}),
        (
            {"request_rate": 2.0, "arrival_pattern": "gamma", "burstiness": 0.5, "max_concurrency": 3},
            {"type": "gamma", "rate": 2.0, "smoothness": 0.5, "concurrency": 3},
        ),
        (
            {
                "request_rate": "inf",
                "arrival_pattern": "poisson",
                "num_prompts": 30,
                "ramp": {"strategy": "linear", "start_rps": 1.0, "end_rps": 5.0},
            },
            {
                "type": "poisson",
                "requests": 30,
                "rate_series": {"points": [{"time_s": 0.0, "qps": 1.0}, {"time_s": 10.0, "qps": 5.0}]},
            },
        ),
        ({"request_rate": "inf", "source": {"timestamps_used": True}}, {"type": "fixed_schedule"}),
    ],
)
def test_arrivals_in_aiperfs_words(load: dict[str, Any], phase: dict[str, Any], tmp_path: Path) -> None:
    _, summary = exported(a_run(tmp_path, a_record(0), load=load))
    (found,) = summary["input_config"]["phases"]
    assert found == {"name": "profiling", "kind": "profiling", **phase}


def test_an_exponential_ramp_is_many_straight_ones(tmp_path: Path) -> None:
    ramp = {"strategy": "exponential", "start_rps": 1.0, "end_rps": 4.0}
    _, summary = exported(a_run(tmp_path, a_record(0), load={"request_rate": "inf", "ramp": ramp, "num_prompts": 60}))
    points = summary["input_config"]["phases"][0]["rate_series"]["points"]
    assert (points[0]["qps"], points[8]["qps"], points[-1]["qps"]) == pytest.approx((1, 2, 4))
    sent = sum((a["qps"] + b["qps"]) / 2 * (b["time_s"] - a["time_s"]) for a, b in pairwise(points))
    assert sent == pytest.approx(60, rel=0.01)


@pytest.mark.parametrize(
    ("load", "dataset"),
    [
        ({}, {"type": "synthetic"}),
        ({"source": {"random_input_len": 5}}, {"type": "synthetic"}),
        ({"input_file": "w.json"}, {"type": "file", "path": "w.json", "format": "weka_trace"}),
        (
            {"source": {"trace_format": "burstgpt", "dataset": {"path": "b.csv"}}},
            {"type": "file", "path": "b.csv", "format": "burst_gpt_trace"},
        ),
        (
            {"source": {"trace_format": "azure", "dataset": {"path": "a.csv"}}},
            {"type": "file", "path": "a.csv"},
        ),
        ({"source": {"dataset": {"path": "chats.jsonl"}}}, {"type": "file", "path": "chats.jsonl"}),
    ],
)
def test_the_dataset_is_the_file_that_was_sent(load: dict[str, Any], dataset: dict[str, Any], tmp_path: Path) -> None:
    _, summary = exported(a_run(tmp_path, a_record(0), load=load))
    assert summary["input_config"]["datasets"] == [{"name": "main", **dataset}]


def test_no_result_of_this_client_is_an_official_submission(tmp_path: Path) -> None:
    _, summary = exported(a_run(tmp_path, a_record(0), load={"scenario": "inferencex-agentx-mvp"}))
    assert summary["metadata"]["submission_valid"] is False
    assert "not_produced_by_aiperf" in summary["metadata"]["submission_invalid_reasons"]
    assert "aiperf_version" not in summary


def test_agents_of_one_tree_are_one_root(tmp_path: Path) -> None:
    child = {**TAGS, "agent": "a1", "depth": 1, "parent": "0:t"}
    lines, _ = exported(a_run(tmp_path, a_record(0), a_record(1, session="0:t/a1", tags=child)))
    main, sub = (line["metadata"] for line in lines)
    assert sub["conversation_id"] == "t::sa:a1"
    assert sub["parent_correlation_id"] == main["x_correlation_id"]
    assert sub["root_correlation_id"] == main["root_correlation_id"]


@given(moment=st.integers(0, 1 << 60))
def test_wall_clock_there_and_back(moment: int) -> None:
    clock = WallClock.now()
    assert clock.monotonic(clock.wall_ns(moment)) == moment


def test_a_run_of_an_older_version_has_a_wall_clock_to_the_second() -> None:
    clock = WallClock.of_run({"start_ns": 5, "start_time": "2026-01-01T00:00:00+0000"})
    assert clock.wall_ns(5) == 1_767_225_600 * 10**9
    assert WallClock.of_run({}).wall_ns(7) == 7


# AIPerf's lines as records

CONFIG = GenerateConfig(num_sessions=3, turns=4, input_len=600, output_len=8, subagents=0.6, block_size=16)


def aiperf_line(trace: str, agent: str | None, turn: int, **changes: Any) -> dict[str, Any]:
    main = f"root-{trace}"
    own = main if agent is None else f"{main}-{agent}"
    meta = {
        "session_num": 0,
        "x_correlation_id": own,
        "root_correlation_id": main,
        "conversation_id": trace if agent is None else f"{trace}::sa:{agent}",
        "source_trace_id": trace,
        "turn_index": turn,
        "credit_issued_ns": UNIX + 9 * MS,
        "request_start_ns": UNIX + 10 * MS,
        "request_end_ns": UNIX + 70 * MS,
        "benchmark_phase": "profiling",
        "was_cancelled": False,
        "agent_depth": 0 if agent is None else 1,
        **({} if agent is None else {"parent_correlation_id": main}),
        **changes.pop("metadata", {}),
    }
    values = {
        "time_to_first_token": 20.0,
        "request_latency": 50.0,
        "inter_chunk_latency": [10.0, 0.0, 20.0],
        "output_sequence_length": 4,
        "usage_completion_tokens": 4,
        "usage_prompt_tokens": 640,
        "usage_prompt_cache_read_tokens": 600,
        **changes.pop("metrics", {}),
    }
    metrics = {tag: {"value": value, "unit": "x"} for tag, value in values.items()}
    return {"metadata": meta, "metrics": metrics, "error": None, **changes}


def imported(path: Path, *lines: object, stopped: bool = False) -> tuple[RunDirectory, list[RequestRecord], Any]:
    folder = path / "artifacts"
    folder.mkdir()
    (folder / RECORDS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    load = AgenticLoad(sessions=generate_traces(CONFIG, 5), api=Api.CHAT, model="m", concurrency=2)
    run_dir = RunDirectory(path / "run")
    result = import_records(run_dir, folder, load.sessions, WallClock(START, UNIX), stopped=stopped)
    return run_dir, list(read_records(run_dir, None)), result


def test_aiperfs_request_as_a_record(tmp_path: Path) -> None:
    sessions = generate_traces(CONFIG, 5)
    session = next(session for session in sessions if len(session.agents) > 1)
    agent = session.agents[1]
    run_dir, records, result = imported(
        tmp_path, aiperf_line(session.name, None, 1), aiperf_line(session.name, agent.name, 0)
    )
    main, sub = records
    assert (main.sent_ns, main.first_ns, main.last_ns) == (START + 10 * MS, START + 30 * MS, START + 60 * MS)
    assert list(main.chunk_ns) == [START + ms * MS for ms in (30, 40, 40, 60)]
    assert (main.prompt_tokens, main.cached_tokens, main.output_tokens) == (640, 600, 4)
    assert main.input_len is None
    assert main.lane is None
    tags = main.tags or {}
    hits = session_hits(session)[0][1]
    assert tags["trace_input_len"] == session.agents[0].turns[1].input_len
    assert (tags["theoretical_cached_blocks"], tags["theoretical_blocks"]) == (hits.cached, hits.total)
    assert sub.session == f"0:{session.name}/{agent.name}"
    assert (sub.tags or {})["parent"] == main.session
    assert result.completed == 2
    assert run_dir.request_files() == [run_dir.requests / f"{WORKER}.jsonl"]


def test_lines_that_are_none_of_aiperfs_are_counted(tmp_path: Path) -> None:
    name = generate_traces(CONFIG, 5)[0].name
    bad: list[object] = [{}, {"metadata": 3}, [], {"metadata": {"request_start_ns": "x"}}]
    bad.append(aiperf_line(name, None, 0, metrics={"usage_prompt_tokens": "many"}))
    _, records, result = imported(tmp_path, *bad, aiperf_line(name, None, 0))
    assert len(records) == 1
    assert result.facts["unreadable_lines"] == 4  # and one that is no object


def test_failures_cancellations_and_other_conversations(tmp_path: Path) -> None:
    name = generate_traces(CONFIG, 5)[0].name
    error = {"code": 400, "type": "BadRequest", "message": "maximum context length is 10"}
    run_dir, records, result = imported(
        tmp_path,
        aiperf_line(name, None, 0, metadata={"benchmark_phase": "warmup"}),
        aiperf_line(name, None, 1, error=error),
        aiperf_line(name, None, 2, metadata={"was_cancelled": True}),
        aiperf_line("another", None, 0),
        stopped=True,
    )
    assert [record.phase for record in records] == [WARMUP, MEASURED, MEASURED, MEASURED]
    assert [record.outcome for record in records] == ["completed", "failed", "cancelled", "completed"]
    assert records[1].error_message == error["message"]
    assert "theoretical_blocks" not in (records[3].tags or {})
    assert result.facts["requests_of_no_known_turn"] == 1
    assert (result.completed, result.failed, result.cancelled) == (1, 1, 1)
    end = list(read_jsonl(run_dir.client / f"{WORKER}.jsonl"))[-1]
    assert end["interrupted"] is True
    assert end["running_integral_ns"] is None


def test_agents_that_a_recording_does_not_name(tmp_path: Path) -> None:
    """Found by both in the same way, under other names; members of a group have numbers that are not known here."""
    requests = [
        {"t": float(i), "type": "s", "model": "m", "in": 16 * len(ids), "out": 9, "hash_ids": ids, "api_time": 1.5}
        for i, ids in enumerate(
            [list(range(10)), list(range(100, 110)), [*range(10), 11], [*range(100, 110), 111], [*range(10), 11, 12]]
        )
    ]
    trace = {"id": "t", "models": ["m"], "block_size": 16, "hash_id_scope": "local", "requests": requests}
    session = parse_trace(trace, "here")
    assert session is not None
    folder = tmp_path / "artifacts"
    folder.mkdir()
    meta = {
        "conversation_id": "t::aux:000",
        "agent_depth": 1,
        "parent_correlation_id": "root-t",
        "x_correlation_id": "a",
    }
    group = {**meta, "conversation_id": "t::wg:000_001", "x_correlation_id": "b"}
    lines = [
        aiperf_line("t", None, 0),
        aiperf_line("t", None, 0, metadata=meta),
        aiperf_line("t", None, 0, metadata=group),
    ]
    (folder / RECORDS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_dir = RunDirectory(tmp_path / "run")
    load = AgenticLoad(sessions=(session,), api=Api.CHAT, model="m", concurrency=1)
    result = import_records(run_dir, folder, load.sessions, WallClock(START, UNIX), stopped=False)
    main, helper, member = (record.tags or {} for record in read_records(run_dir))
    assert [agent.name for agent in session.agents] == ["main", "fa:000"]
    assert (main["depth"], helper["agent"], helper["depth"], helper["theoretical_blocks"]) == (0, "fa:000", 1, 10)
    assert (member["agent"], member["depth"], member["parent"]) == ("wg:000_001", 1, "0:t")
    assert "theoretical_blocks" not in member
    assert result.facts["requests_of_no_known_turn"] == 1


def test_a_session_is_finished_when_its_main_agent_is(tmp_path: Path) -> None:
    session = generate_traces(CONFIG, 5)[0]
    last = len(session.agents[0].turns) - 1
    run_dir, _, _ = imported(tmp_path, aiperf_line(session.name, None, last))
    ended = [line for line in read_jsonl(run_dir.client / f"{WORKER}.jsonl") if line["kind"] == "session_end"]
    assert [line["session"] for line in ended] == [f"0:{session.name}"]
