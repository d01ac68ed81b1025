"""Summaries, verdicts and exports of run directories written by hand."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.accounting import Counts
from atom.bench.export import junit, vllm_result
from atom.bench.metrics import Figure, collect
from atom.bench.records import Outcome, RequestRecord, read_records
from atom.bench.report.page import write_report
from atom.bench.report.series import MAX_POINTS, histogram, thin
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.summary import summarize
from atom.bench.validity import Client, judge
from atom.cli.render import bench_tables

S = 1_000_000_000
MS = 1_000_000
LOAD = {
    "name": "random",
    "model": "m",
    "num_prompts": 4,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 2,
    "failed_request_threshold": 0.1,
    "goodput_ms": {},
    "source": {"random_input_len": 8, "random_output_len": 4, "random_range_ratio": 0.0},
}

VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *(f"{how}_{what}_ms" for how in ("mean", "median", "std", "p99") for what in ("ttft", "tpot", "itl", "e2el")),
}
DETAILED_KEYS = {
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts", "errors"),
}


def request(index: int, sent: int, outcome: str = Outcome.COMPLETED, **more: Any) -> RequestRecord:
    """Sent at `sent` ms; four tokens, the first after 20 ms, then one each 10 ms."""
    chunks = [(sent + 20 + 10 * i) * MS for i in range(4)]
    fields: dict[str, Any] = {
        "ready_ns": sent * MS,
        "sent_ns": sent * MS,
        "first_ns": chunks[0],
        "last_ns": chunks[-1],
        "end_ns": chunks[-1],
        "chunk_ns": chunks,
        "prompt_tokens": 8,
        "input_len": 8,
        "output_len": 4,
        "output_tokens": 4,
        "tokens_from": "usage",
        **more,
    }
    if outcome == Outcome.FAILED:
        fields |= {"error_class": "http_500", "error_message": "<boom> & \x1b[31m"}
    return RequestRecord(index=index, outcome=outcome, **fields)


def run_directory(
    path: Path,
    records: list[RequestRecord],
    *,
    ended: bool = True,
    interrupted: bool = False,
    load: dict[str, Any] | None = None,
) -> RunDirectory:
    run_dir = RunDirectory(path)
    run_dir.write_run_json({"load": load or LOAD, "measured_start_ns": 0})
    with run_dir.requests_writer() as writer:
        for record in records:
            writer.append_line(record.to_line())
    with run_dir.client_writer() as writer:
        writer.append({"kind": "measured_start", "t_ns": 0, "requests": len(records)})
        window = {
            "kind": "window",
            "t_ns": S,
            "start_ns": 0,
            "cpu_share": 0.2,
            "lag_ms": [0.5, 1.0],
            "phase": "measured",
        }
        writer.append(window)
        if ended:
            busy = sum((r.end_ns or 0) - r.sent_ns for r in records if r.sent_ns is not None)
            writer.append(
                {
                    "kind": "measured_end",
                    "t_ns": 2 * S,
                    "started": len(records),
                    "sent": len([r for r in records if r.sent_ns is not None]),
                    "running_integral_ns": busy,
                    "interrupted": interrupted,
                }
            )
    return run_dir


def values(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: figure["value"] for name, figure in summary["figures"].items()}


def test_concurrency_of_a_client_that_does_not_count_it_is_from_the_records(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", [request(i, 650 * i) for i in range(4)])
    counted = summarize(run_dir)
    (path,) = run_dir.client.iterdir()
    path.write_text(re.sub(r'"running_integral_ns":\s*\d+', '"running_integral_ns":null', path.read_text()))
    summary = summarize(run_dir)
    figure = summary["figures"]["mean_concurrency"]
    assert figure["value"] == pytest.approx(0.1)
    assert "of the records" in figure["definition"]
    assert [note for note in summary["notes"] if "of the records" in note]
    assert not [note for note in counted["notes"] if "of the records" in note]
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "measured_end" not in line))
    killed = summarize(run_dir)
    assert values(killed)["mean_concurrency"] is None, "what was open when it was killed has no record"
    assert not [note for note in killed["notes"] if "of the records" in note]


def test_figures_of_a_small_run(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", [request(i, 650 * i) for i in range(4)])
    summary = summarize(run_dir)
    got = values(summary)
    assert (got["completed"], got["failed"], got["cancelled"], got["sent"]) == (4, 0, 0, 4)
    assert (got["duration"], got["request_throughput"], got["output_throughput"]) == (2.0, 2.0, 8.0)
    assert (got["total_token_throughput"], got["total_input_tokens"], got["total_output_tokens"]) == (24.0, 32, 16)
    assert (got["mean_ttft_ms"], got["p99_itl_ms"], got["mean_tpot_ms"], got["mean_e2el_ms"]) == (20, 10, 10, 50)
    assert (got["max_concurrent_requests"], got["max_output_tokens_per_s"], got["tokens_per_chunk"]) == (1, 8, 1)
    assert got["mean_concurrency"] == pytest.approx(0.1)
    assert "mean_ttft_scheduled_ms" not in got
    assert (summary["validity"], summary["reasons"]) == ("valid", [])
    assert [check["ok"] for check in summary["checks"]] == [True, None]
    assert run_dir.read_summary()["figures"] == summary["figures"]


def test_peak_counts_tokens_not_chunks(tmp_path: Path) -> None:
    records = [request(0, 0, output_tokens=40), request(1, 2000)]
    assert values(summarize(run_directory(tmp_path / "run", records)))["max_output_tokens_per_s"] == 40


def test_warmups_are_left_out(tmp_path: Path) -> None:
    records = [request(0, 0, phase="warmup"), request(0, 100)]
    run_dir = run_directory(tmp_path / "run", records)
    assert values(summarize(run_dir))["completed"] == 1


def little(summary: dict[str, Any]) -> dict[str, Any]:
    (check,) = (check for check in summary["checks"] if check["name"] == "littles_law")
    return check  # type: ignore[no-any-return]


@given(
    spans=st.lists(st.tuples(st.integers(0, 10_000), st.integers(50, 100)), min_size=60, max_size=120),
    unsent=st.lists(st.integers(0, 10_000), max_size=60),
)
def test_littles_law_is_an_identity_on_complete_records(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]], unsent: list[int]
) -> None:
    """Whatever the arrivals and however many requests never got a connection: no edge raises an alarm."""
    records = [request(i, sent, end_ns=(sent + took) * MS) for i, (sent, took) in enumerate([*spans, (12_000, 50)])]
    for i, moment in enumerate(unsent):
        record = request(1000 + i, moment, Outcome.CANCELLED, sent_ns=None, first_ns=None, last_ns=None, chunk_ns=[])
        records.append(record)
    summary = summarize(run_directory(tmp_path_factory.mktemp("little") / "run", records, interrupted=bool(unsent)))
    check = little(summary)
    assert check["ok"] is True
    assert "residual +0.00%" in check["detail"]
    got = values(summary)
    assert (got["started"], got["sent"]) == (len(records), len(spans) + 1)


def test_littles_law_finds_records_that_are_wrong(tmp_path: Path) -> None:
    records = [request(i, 50 * i) for i in range(100)]
    run_dir = run_directory(tmp_path / "run", records)
    path = run_dir.requests / "0.jsonl"
    path.write_text(
        "".join(r.to_line() + "\n" for r in (request(i, 50 * i, end_ns=(50 * i + 55) * MS) for i in range(100)))
    )
    summary = summarize(run_dir)
    assert little(summary)["ok"] is False
    assert summary["validity"] == "not valid"
    assert "Little" in summary["reasons"][0]


@pytest.mark.parametrize(("count", "every", "why"), [(49, 100, "50 are needed"), (60, 1, "10 are needed")])
def test_littles_law_is_not_judged_on_a_short_run(tmp_path: Path, count: int, every: int, why: str) -> None:
    run_dir = run_directory(tmp_path / "run", [request(i, every * i) for i in range(count)])
    summary = summarize(run_dir)
    assert little(summary)["ok"] is None
    assert little(summary)["detail"].startswith("not checked: ")
    assert why in little(summary)["detail"]
    assert summary["validity"] == "valid"


def test_connecting_is_a_figure_of_its_own(tmp_path: Path) -> None:
    """Of every request that opened a connection, also of one that failed then."""
    records = [
        request(0, 0, connect_ns=40 * MS),
        request(1, 650, Outcome.FAILED, connect_ns=60 * MS),
        *(request(i, 650 * i) for i in range(2, 12)),
    ]
    summary = summarize(run_directory(tmp_path / "run", records))
    assert (summary["figures"]["mean_connect_ms"]["value"], summary["figures"]["mean_connect_ms"]["n"]) == (50, 2)
    latencies, figures = bench_tables(summary)
    assert next(row for row in latencies.rows if row[0] == "connect")[1:] == ["50.00", "50.00 †", "59.80 †", "2"]
    assert any("connect" in note for note in figures.notes)
    quick = summarize(run_directory(tmp_path / "quick", [request(i, 650 * i, connect_ns=MS // 10) for i in range(4)]))
    assert "connect" not in [row[0] for row in bench_tables(quick)[0].rows]
    assert quick["figures"]["mean_connect_ms"]["n"] == 4
    reused = summarize(run_directory(tmp_path / "reused", [request(i, 650 * i) for i in range(4)]))
    assert "mean_connect_ms" not in reused["figures"]


def test_duration_ends_with_the_last_request(tmp_path: Path) -> None:
    """Not when the client was done with its books, and also where the last one failed without being sent."""
    run_dir = run_directory(tmp_path / "run", [request(0, 0), request(1, 500)])
    assert values(summarize(run_dir))["duration"] == pytest.approx(0.55)
    refused = request(1, 500, Outcome.FAILED, sent_ns=None, first_ns=None, last_ns=None, chunk_ns=[], end_ns=900 * MS)
    run_dir = run_directory(tmp_path / "refused", [request(0, 0), refused])
    assert values(summarize(run_dir))["duration"] == pytest.approx(0.9)


@pytest.mark.parametrize("tokens", [1, 2])
def test_itl_per_token_has_a_row_only_where_chunks_are_not_tokens(tmp_path: Path, tokens: int) -> None:
    """Coalesced arrivals make the two differ in every run by chance; tokens per chunk do not depend on chance."""
    chunks = [20 * MS, 20 * MS, 40 * MS, 55 * MS]
    record = request(0, 0, chunk_ns=chunks, chunk_tokens=[tokens] * 4, output_tokens=4 * tokens)
    summary = summarize(run_directory(tmp_path / "run", [record]))
    labels = [row[0] for row in bench_tables(summary)[0].rows]
    assert ("ITL per token" in labels) == (tokens != 1)


def test_client_that_measured_nothing_of_itself_has_no_row(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    summary = summarize(run_dir)
    assert not [row for row in bench_tables(summary)[1].rows if row[0] == "client"]


def test_killed_run_is_summed_up_to_its_last_record(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", [request(i, 650 * i) for i in range(4)], ended=False)
    with (run_dir.requests / "0.jsonl").open("a") as file:
        file.write('{"index": 9, "phase": "measu')
    summary = summarize(run_dir)
    assert values(summary)["duration"] == pytest.approx(2.0)
    assert values(summary)["completed"] == 4
    assert summary["validity"] == "interrupted"
    assert "did not come to its end" in summary["reasons"][0]
    write_report(run_dir, summary)
    assert run_dir.report_html.stat().st_size > 10_000


def test_empty_run_directory_is_summed_up_too(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    summary = summarize(run_dir)
    assert (values(summary)["duration"], values(summary)["completed"]) == (0, 0)
    write_report(run_dir, summary)


def test_failures_beyond_the_threshold_are_no_evidence(tmp_path: Path) -> None:
    records = [request(i, 650 * i, Outcome.FAILED if i == 0 else Outcome.COMPLETED) for i in range(4)]
    summary = summarize(run_directory(tmp_path / "one", records))
    assert summary["validity"] == "not valid"
    assert "--failed-request-threshold" in summary["reasons"][0]
    assert summary["errors"][0]["count"] == 1
    lenient = summarize(run_directory(tmp_path / "two", records, load={**LOAD, "failed_request_threshold": 0.25}))
    assert lenient["validity"] == "valid"


def test_all_failed(tmp_path: Path) -> None:
    summary = summarize(run_directory(tmp_path / "run", [request(i, i, Outcome.FAILED) for i in range(4)]))
    assert summary["validity"] == "failed"
    assert values(summary)["mean_ttft_ms"] is None


def test_interrupted_run(tmp_path: Path) -> None:
    records = [request(0, 0), request(1, 100, Outcome.CANCELLED)]
    summary = summarize(run_directory(tmp_path / "run", records, interrupted=True))
    assert summary["validity"] == "interrupted"
    assert values(summary)["cancelled"] == 1


def test_lost_request_is_found(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", [request(i, 650 * i) for i in range(4)])
    lines = (run_dir.requests / "0.jsonl").read_text().splitlines(keepends=True)
    (run_dir.requests / "0.jsonl").write_text("".join(lines[:-1]))
    summary = summarize(run_dir)
    assert summary["validity"] == "not valid"
    assert "unaccounted" in summary["reasons"][0]


def test_sealed_run_keeps_its_verdict(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", [request(0, 0)])
    run_dir.seal(Validity.FAILED, ["the server died"])
    summary = summarize(run_dir)
    assert (summary["validity"], summary["reasons"]) == ("failed", ["the server died"])


def client(cpu: float = 0.1, lag: float = 1.0, late: float = 1.0) -> Client:
    return Client(cpu_share=cpu, lag_ms=[lag] * 100, send_lag_ms=[late] * 100)


def verdict(condition: Client, *, ttft: float = 100.0, itl: float = 100.0, **more: float) -> list[str]:
    figures = {name: Figure(value, "", 1000, "") for name, value in more.items()} | {
        f"p{q}_{name}_ms": Figure(value, "ms", 9, "")
        for q in (50, 99)
        for name, value in (("ttft", ttft), ("itl", itl))
    }
    return judge(
        Counts(4, 4, 4, 0, 0),
        condition,
        figures,
        threshold=0.1,
        interrupted=False,
        ended=True,
        recorded=(4, 200 * MS),
        wall_s=2,
        busy_ns=int(0.2 * S),
    ).reasons


def test_saturated_client_is_no_evidence() -> None:
    assert verdict(client()) == []
    assert "CPU" in verdict(client(cpu=0.97))[0]
    assert "late" in verdict(client(lag=30))[0]
    assert "sent" in verdict(client(late=30))[0]
    assert verdict(client(lag=20)) == []  # a fifth of what is measured
    assert verdict(client(lag=4), ttft=8, itl=8) == []  # timers are that late on an idle machine
    assert len(verdict(client(lag=6), ttft=8, itl=8)) == 1
    few = Client(cpu_share=0.1, lag_ms=[80.0] * 9, send_lag_ms=[80.0] * 9)
    assert verdict(few) == []


def test_chunks_read_together_are_the_clients_fault_only_when_it_was_late() -> None:
    together = {"coalesced_share": 0.03, "median_itl_ms": 10.0}
    assert verdict(client(lag=1), **together) == []  # the server sends several at once
    assert "3.0% of chunks 10.0 ms apart were read together" in verdict(client(lag=6), ttft=1000, itl=50, **together)[0]
    assert verdict(client(lag=6), ttft=1000, itl=50, coalesced_share=0.005, median_itl_ms=10.0) == []


def test_an_answer_in_one_read_has_no_time_per_token(tmp_path: Path) -> None:
    one_read = request(0, 0, last_ns=request(0, 0).first_ns, chunk_ns=[request(0, 0).first_ns] * 4)
    summary = summarize(run_directory(tmp_path / "run", [one_read, request(1, 0)]))
    assert summary["figures"]["mean_tpot_ms"]["n"] == 1
    assert collect([one_read], {"tpot": 1000.0}).good == 0  # nor does it meet an objective on that
    assert summary["figures"]["mean_tpot_ms"]["value"] > 0


def test_a_client_that_notices_ends_late_makes_the_server_wait() -> None:
    assert (
        "took note of a response's end 20.0 ms late" in verdict(client(), mean_reaction_ms=20.0, mean_e2el_ms=100.0)[0]
    )
    assert verdict(client(), mean_reaction_ms=4.0, mean_e2el_ms=10.0) == []
    assert verdict(client(), mean_reaction_ms=20.0, mean_e2el_ms=1000.0) == []


async def test_where_times_of_arrival_come_from_is_in_the_summary(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    loaded = await load(server.url, 5)
    figures = summarize(loaded.run_dir)["figures"]
    assert figures["kernel_stamp_share"]["n"] >= 5
    assert 0 <= figures["kernel_stamp_share"]["value"] <= 1
    assert figures["mean_reaction_ms"]["value"] >= 0


async def test_requests_go_to_several_servers_in_turn_and_say_to_which(serve: Any, load: Any, wire: Any) -> None:
    servers = [serve(lambda number, body: wire.good_answer()) for _ in range(3)]
    loaded = await load(servers[0].url, 9, more_urls=tuple(one.url for one in servers[1:]))
    assert [record.server for record in loaded.records] == [0, 1, 2] * 3
    assert [len(one.requests) for one in servers] == [3, 3, 3]


def test_golden_keys_of_vllms_json(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", [request(i, 650 * i) for i in range(4)])
    result = vllm_result(run_dir, summarize(run_dir), backend="openai", metadata={"note": "x"})
    assert set(result) == VLLM_KEYS | {"atom", "note"}
    assert (result["completed"], result["request_rate"], result["mean_ttft_ms"]) == (4, "inf", 20)
    assert isinstance(result["completed"], int)
    assert isinstance(result["total_output_tokens"], int)
    assert result["request_goodput"] is None
    json.dumps(result, allow_nan=False)
    detailed = vllm_result(run_dir, summarize(run_dir), backend="openai", detailed=True)
    assert set(detailed) == VLLM_KEYS | DETAILED_KEYS | {"atom"}
    assert detailed["ttfts"] == [0.02] * 4
    assert detailed["itls"] == [pytest.approx([0.01] * 3)] * 4
    assert detailed["output_lens"] == [4] * 4


@pytest.mark.parametrize("failed", [0, 1, 2, 4])
def test_junit_agrees_with_the_verdict(tmp_path: Path, failed: int) -> None:
    """Failed requests within the threshold are none of a valid run's failures; any other verdict has one."""
    outcomes = [Outcome.FAILED] * failed + [Outcome.COMPLETED] * (4 - failed)
    records = [request(i, 650 * i, outcome) for i, outcome in enumerate(outcomes)]
    run_dir = run_directory(tmp_path / "run", records, load={**LOAD, "failed_request_threshold": 0.25})
    summary = summarize(run_dir)
    failures = int(ET.fromstring(junit(summary)).attrib["failures"])
    assert (summary["validity"] == "valid") == (failures == 0) == (failed <= 1)
    for validity in Validity:
        summary |= {"validity": str(validity), "reasons": []}
        assert (int(ET.fromstring(junit(summary)).attrib["failures"]) == 0) == (validity == Validity.VALID)


def test_goodput_is_requests_within_every_slo(tmp_path: Path) -> None:
    run_dir = run_directory(
        tmp_path / "run", [request(i, 650 * i) for i in range(4)], load={**LOAD, "goodput_ms": {"ttft": 30.0}}
    )
    assert values(summarize(run_dir))["request_goodput"] == 2.0


def test_junit_is_xml_whatever_a_server_said(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", [request(i, 650 * i, Outcome.FAILED) for i in range(4)])
    root = ET.fromstring(junit(summarize(run_dir)))
    assert root.attrib["failures"] == "2"
    assert {case.attrib["name"] for case in root.iter("testcase")} == {
        "accounting",
        "littles_law",
        "requests",
        "evidence",
    }
    good = run_directory(tmp_path / "good", [request(i, 650 * i) for i in range(4)])
    assert ET.fromstring(junit(summarize(good))).attrib["failures"] == "0"


def test_report_cannot_be_broken_by_what_a_server_said(tmp_path: Path) -> None:
    record = request(0, 0, Outcome.FAILED)
    record.error_message = "</script><script>alert(1)</script><!--"
    run_dir = run_directory(tmp_path / "run", [record, request(1, 100)])
    write_report(run_dir, summarize(run_dir))
    page = run_dir.report_html.read_text()
    assert "</script><script>alert" not in page
    assert page.count("<script>") == page.count("</script>") == 3
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_server_series_are_optional_and_tolerant(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path / "run", [request(0, 0)])
    lines: dict[str, list[object]] = {
        "gc-api-7.jsonl": [
            {"type": "hook"},
            {"type": "pass", "start_ns": 5 * MS, "stop_ns": 8 * MS},
            {"type": "pass"},
            3,
        ],
        "metrics-api.jsonl": [
            {"sent_ns": S, "latency_ns": 4 * MS, "error": None, "values": {"running": 3, "kv_usage": None}},
            {"sent_ns": "x"},
            {"sent_ns": S, "values": []},
        ],
        "process.jsonl": [
            {"t_ns": 0, "pid": 7, "role": "api", "rss_bytes": 2**20, "cpu_s": 1.0},
            {"t_ns": S, "pid": 7, "role": "api", "rss_bytes": 2**21, "cpu_s": 1.5},
            {"t_ns": None},
        ],
    }
    for name, entries in lines.items():
        (run_dir.server / name).write_text("\n".join(json.dumps(entry) for entry in entries) + "\n{torn")
    write_report(run_dir, summarize(run_dir))
    page = run_dir.report_html.read_text()
    data = json.loads(page.partition("const DATA = ")[2].partition(";</script>")[0])["series"]
    assert data["gc"] == {"api-7": [[0.005, 3.0]]}
    assert data["metrics"]["api"]["scrape_ms"] == [[1.0, 4.0]]
    assert data["metrics"]["api"]["running"] == [[1.0, 3.0]]
    assert data["process"]["api 7"] == {"rss_mb": [[0.0, 1.0], [1.0, 2.0]], "cores": [[1.0, 0.5]]}


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=300))
def test_histogram_loses_nothing(samples: list[float]) -> None:
    import numpy as np

    found = histogram(np.asarray(samples))
    assert found is not None
    assert sum(found["counts"]) + found["beyond"] == len(samples)


def test_plots_are_bounded() -> None:
    points = [[float(i), 0.0] for i in range(100_001)]
    thinned = thin(points)
    assert len(thinned) <= MAX_POINTS + 1
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])


def test_records_survive_the_round_trip(tmp_path: Path) -> None:
    record = request(3, 7, chunk_tokens=[1, 2, 3, 4], text="é", anomalies={"missing_done": 1}, lane=2, retries=1)
    run_dir = run_directory(tmp_path / "run", [record])
    assert [one.to_line() for one in read_records(run_dir)] == [record.to_line()]


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"index": "x"}',
        '{"index": 1, "chunk_ns": [1.5]}',
        '{"index": 1, "chunk_ns": [1], "chunk_tokens": [1, 2]}',
        '{"index": 1, "sent_ns": "soon"}',
        '{"index": 1, "error": "x"}',
    ],
)
def test_foreign_lines_are_no_records(tmp_path: Path, line: str) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    (run_dir.requests / "0.jsonl").write_text(line + "\n")
    assert list(read_records(run_dir, None)) == []


def test_unknown_fields_of_a_newer_minor_version_are_ignored(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    (run_dir.requests / "0.jsonl").write_text('{"index": 1, "phase": "measured", "outcome": "cancelled", "novel": 5}\n')
    assert [record.index for record in read_records(run_dir)] == [1]
