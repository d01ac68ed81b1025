"""What a replay of sessions shows: rows, shares, waits, the scenario's verdict, swim lanes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from atom.bench.agentic.report import agentic_section
from atom.bench.agentic.validity import SCENARIOS, find_scenario, scenario_reasons
from atom.bench.records import WARMUP, Outcome, RequestRecord
from atom.bench.report.swim_lanes import MAX_LANES, MAX_REQUESTS, swim_lanes
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.summary import summarize
from atom.cli.agentic_tables import agentic_tables
from atom.cli.render import markdown, table_width
from atom.recipes.errors import UsageError

MS = 1_000_000
MVP = "inferencex-agentx-mvp"
LOAD = {"scenario": MVP, "recordings": 2, "concurrency": 1, "name": "aiperf-agentic", "model": "m", "client": "native"}
OVERFLOW = "This model's maximum context length is 4096 tokens"


def a_request(index: int, begin: float, end: float, **changes: Any) -> RequestRecord:
    """Sent and ended at these milliseconds, its first token half way, 5 output tokens."""
    tags = {
        "trace": "t",
        "root": "0:t",
        "agent": "main",
        "depth": 0,
        "parent": None,
        "lane_session": 0,
        "theoretical_cached_blocks": 3,
        "theoretical_blocks": 4,
        **changes.pop("tags", {}),
    }
    sent, last = int(begin * MS), int(end * MS)
    fields: dict[str, Any] = {
        "index": index,
        "lane": 0,
        "session": "0:t",
        "turn": 0,
        "outcome": Outcome.COMPLETED,
        "sent_ns": sent,
        "first_ns": (sent + last) // 2,
        "last_ns": last,
        "end_ns": last,
        "chunk_ns": [(sent + last) // 2, last],
        "prompt_tokens": 100,
        "output_tokens": 5,
        "tokens_from": "usage",
        "tags": tags,
    }
    return RequestRecord(**{**fields, **changes})


def a_failure(index: int, begin: float, end: float, message: str) -> RequestRecord:
    return a_request(
        index, begin, end, outcome=Outcome.FAILED, error_class="http", error_message=message, first_ns=None
    )


def section_of(tmp_path: Path, *records: RequestRecord, **load: Any) -> Any:
    return agentic_section(RunDirectory(tmp_path), {**LOAD, **load}, records, 0, interrupted=False)


def test_rows_by_turn_and_by_depth(tmp_path: Path) -> None:
    sub = {"agent": "a", "depth": 1, "parent": "0:t"}
    section = section_of(
        tmp_path,
        a_request(0, 0, 10),
        a_request(1, 20, 30, turn=1),
        a_request(2, 40, 50, turn=2),
        a_request(3, 60, 70, turn=200),
        a_request(4, 60, 70, session="0:t/a", tags=sub),
    ).content
    assert [(row["from_turn"], row["to_turn"], row["requests"]) for row in section["by_turn"]] == [
        (1, 1, 2),
        (2, 3, 2),
        (128, None, 1),
    ]
    assert [(row["depth"], row["requests"]) for row in section["by_depth"]] == [(0, 4), (1, 1)]
    assert section["all"]["theoretical_cached_share"] == 0.75


def test_a_server_that_does_not_say_what_it_had_cached_is_no_zero(tmp_path: Path) -> None:
    section = section_of(tmp_path, a_request(0, 0, 10))
    assert section.content["all"]["realised_cached_share"] is None
    known = section_of(tmp_path, a_request(0, 0, 10, cached_tokens=0), a_request(1, 0, 10, cached_tokens=50))
    assert known.content["all"]["realised_cached_share"] == 0.25


def test_interactivity_is_of_the_time_per_token_with_its_share_of_ttft(tmp_path: Path) -> None:
    """TTFT 10 ms, TPOT 10 ÷ 4 ms, 5 tokens: 4.5 ms per token."""
    section = section_of(tmp_path, *(a_request(i, 0, 20) for i in range(3)))
    assert section.figures["interactivity"].value == pytest.approx(1000 / 4.5)


def test_what_is_not_known_of_a_request_is_in_no_mean(tmp_path: Path) -> None:
    unknown = {"prompt_tokens": None, "output_tokens": None, "tokens_from": None}
    row = section_of(tmp_path, a_request(0, 0, 10), a_request(1, 0, 10, **unknown)).content["all"]
    assert (row["completed"], row["mean_input_tokens"], row["mean_output_tokens"]) == (2, 100, 5)
    row = section_of(tmp_path, a_request(0, 0, 10, **unknown)).content["all"]
    assert (row["mean_input_tokens"], row["mean_output_tokens"]) == (None, None)


def test_tokens_that_came_in_one_read_have_no_time_each(tmp_path: Path) -> None:
    at_once = a_request(0, 0, 20, first_ns=20 * MS, chunk_ns=[20 * MS])
    section = section_of(tmp_path, at_once)
    assert section.content["all"]["median_tpot_ms"] is None
    assert section.content["all"]["median_ttft_ms"] == 20
    assert section.figures["interactivity"].value is None
    both = section_of(tmp_path, at_once, a_request(1, 0, 20))
    assert both.content["all"]["median_tpot_ms"] == 2.5
    assert both.figures["interactivity"].n == 1


def test_waits_for_sub_agents(tmp_path: Path) -> None:
    """The main agent's turns end at 10 and begin again at 100; sub-agents work from 20 to 60 and from 50 to 80."""
    one, two = ({"agent": name, "depth": 1, "parent": "0:t"} for name in "ab")
    section = section_of(
        tmp_path,
        a_request(0, 0, 10),
        a_request(1, 100, 110, turn=1),
        a_request(2, 20, 30, session="0:t/a", tags=one),
        a_request(3, 40, 60, session="0:t/a", turn=1, tags=one),
        a_request(4, 50, 80, session="0:t/b", tags=two),
    )
    assert section.figures["max_join_wait_s"].value == pytest.approx(0.060)
    assert section.figures["p50_join_wait_s"].n == 1
    assert section.figures["p50_subagent_s"].value == pytest.approx(0.035)


def test_sessions_finished_open_and_beyond_the_context(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    with run_dir.client_writer() as client:
        client.append({"kind": "session_end", "t_ns": 1, "session": "0:t"})
        client.append({"kind": "session_end", "t_ns": 1, "session": 7})
    records = [
        a_request(0, 0, 10),
        a_request(1, 20, 30, session="1:u", tags={"root": "1:u", "trace": "u", "lane_session": 1}),
        a_failure(2, 40, 50, OVERFLOW),
    ]
    records[2].tags = {**(records[2].tags or {}), "root": "2:t", "lane_session": 2}
    section = agentic_section(run_dir, LOAD, records, 0, interrupted=False)
    assert [session["ended"] for session in section.content["sessions"]] == ["finished", "open", "overflow"]
    values = {name: figure.value for name, figure in section.figures.items()}
    assert values["sessions_started"] == 3
    assert values["sessions_finished"] == 1
    assert values["sessions_recycled"] == 2
    assert values["sessions_overflowed"] == 1
    assert values["context_overflows"] == 1


def test_too_many_requests_beyond_the_context_are_against_the_run() -> None:
    fine = [a_request(i, 0, 10) for i in range(99)]
    assert scenario_reasons(LOAD, [*fine, a_failure(99, 0, 1, OVERFLOW)], interrupted=False) == ([], [])
    measured, scenario = scenario_reasons(
        LOAD, [*fine, a_failure(99, 0, 1, OVERFLOW), a_failure(100, 0, 1, OVERFLOW)], interrupted=False
    )
    assert measured == scenario
    assert measured[0].startswith("context_overflow_rate_exceeded: 2 of 101")
    other = [*fine, *(a_failure(i, 0, 1, "boom") for i in range(50))]
    assert scenario_reasons(LOAD, other, interrupted=False)[0] == [], "other failures have their own threshold"


def test_too_few_requests_of_known_tokens_are_against_the_run() -> None:
    records = [a_request(i, 0, 10, tokens_from="chunks" if i < 3 else "usage") for i in range(100)]
    measured, _ = scenario_reasons(LOAD, records, interrupted=False)
    assert measured[0].startswith("insufficient_profile_metric_coverage: tokens and TTFT are known of 97 of 100")
    assert scenario_reasons(LOAD, records[1:], interrupted=False)[0] != []
    assert scenario_reasons(LOAD, records[2:], interrupted=False)[0] == []


def test_what_was_overridden_is_against_the_scenario_only() -> None:
    load = {**LOAD, "scenario_conflicts": ["--benchmark-duration 60: at least 900 s count"]}
    measured, scenario = scenario_reasons(load, [a_request(0, 0, 10)], interrupted=True)
    assert measured == []
    assert [reason.split(":")[0] for reason in scenario] == ["unsafe_override", "run_cancelled"]
    assert scenario_reasons({**load, "scenario": None}, [], interrupted=True) == ([], [])


def test_a_scenario_says_what_it_fixes() -> None:
    good = {"duration": 900.0, "cache_bust": "first_turn_prefix", "system_idle_gap_cap": 10.0, "ignore_eos": True}
    scenario = SCENARIOS[MVP]
    assert scenario.conflicts(good) == []
    bad = {"duration": 899.0, "cache_bust": "none", "system_idle_gap_cap": None, "ignore_eos": False}
    assert scenario.conflicts(bad) == [
        "--benchmark-duration 899: at least 900 s count",
        "--cache-bust none: first_turn_prefix is fixed",
        "--system-idle-gap-cap-seconds none: 10 is fixed",
        "--ignore-eos off: on is fixed",
    ]
    assert find_scenario("none") is None
    with pytest.raises(UsageError, match="--scenario must be one of"):
        find_scenario("other")


def a_run(tmp_path: Path, *records: RequestRecord) -> RunDirectory:
    run_dir = RunDirectory(tmp_path)
    run_dir.write_run_json({"load": LOAD, "measured_start_ns": 0})
    with run_dir.requests_writer() as writer:
        for record in records:
            writer.append_line(record.to_line())
    with run_dir.client_writer() as client:
        counts = {"started": len(records), "sent": len(records), "running_integral_ns": None, "interrupted": False}
        client.append({"kind": "measured_start", "t_ns": 0})
        client.append({"kind": "measured_end", "t_ns": 10**9, **counts})
    return run_dir


def test_the_summary_has_the_section_and_its_reasons(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, *(a_request(i, i, i + 10) for i in range(20)), a_failure(20, 0, 1, OVERFLOW))
    summary = summarize(run_dir)
    assert summary["validity"] == Validity.NOT_VALID
    assert any(reason.startswith("context_overflow_rate_exceeded") for reason in summary["reasons"])
    assert summary["agentic"]["scenario"]["official_submission"] is False
    tables = agentic_tables(summary)
    text = "\n".join(cell for table in tables for row in table.rows for cell in row)
    assert "main" in text
    assert "1 requests, 1 sessions" in text
    assert any("does not count for it" in note for note in tables[-1].notes)
    assert agentic_tables({"figures": {}}) == []


def test_what_few_requests_do_not_support_is_marked(tmp_path: Path) -> None:
    summary = summarize(a_run(tmp_path, *(a_request(i, i, i + 10) for i in range(3))))
    assert summary["figures"]["interactivity"]["supported"] is False
    by_turn, by_depth, replay = agentic_tables(summary)
    for row in (*by_turn.rows, *by_depth.rows):
        assert [cell.endswith("†") for cell in row] == [False] * 4 + [True] * 3 + [False] * 2
    assert "tok/s †: 1 ÷ p90" in dict(replay.rows)["interactivity"]
    told = [sum(note.startswith("† fewer than 10") for note in table.notes) for table in (by_turn, by_depth, replay)]
    assert told == [0, 1, 0]


def test_rows_of_six_digits_fit_into_80_cells(tmp_path: Path) -> None:
    summary = summarize(a_run(tmp_path, a_request(0, 0, 10)))
    sub = {"agent": "a", "depth": 1, "parent": "0:t"}
    summary["agentic"]["by_depth"] += section_of(tmp_path, a_request(1, 0, 1, tags=sub)).content["by_depth"]
    for row in (*summary["agentic"]["by_turn"], *summary["agentic"]["by_depth"]):
        row |= {"requests": 12345, "mean_input_tokens": 123456.7, "mean_output_tokens": 1234.5, "interactivity": 123.4}
        row |= {"median_ttft_ms": 12345.6, "p99_ttft_ms": 12345.6, "realised_cached_share": 1.0, "from_turn": 64}
        row |= {"theoretical_cached_share": 1.0, "to_turn": 127}
    for table in agentic_tables(summary)[:2]:
        assert table_width(table) <= 80
    lines = markdown(agentic_tables(summary)).splitlines()
    assert "| turns | req | tokens: in | tokens: out | TTFT: p50 (ms) | TTFT: p99 (ms) | interactivity |" in lines[2]
    assert not [line for line in lines if line.startswith("- -")]


def test_no_word_about_cached_tokens_where_there_was_no_request(tmp_path: Path) -> None:
    none = agentic_tables(summarize(a_run(tmp_path / "none")))[-1]
    some = agentic_tables(summarize(a_run(tmp_path / "some", a_request(0, 0, 10))))[-1]
    assert "cache: real" not in dict(none.rows)
    assert "cache: real" in dict(some.rows)


@pytest.mark.parametrize(("client", "why"), [("aiperf", "AIPerf's theory counts each"), ("native", "sessions share")])
def test_more_in_the_cache_than_in_theory_is_explained(tmp_path: Path, client: str, why: str) -> None:
    first = a_request(0, 0, 10, cached_tokens=45, tags={"theoretical_cached_blocks": 0})
    fine = [a_request(i, 0, 10, turn=1, cached_tokens=70) for i in range(1, 20)]
    (note,) = section_of(tmp_path, first, *fine, client=client).content["notes"]
    assert note.startswith(f"turn 1: 45.0% of the prompts were in the server's cache, 0.0% in theory: {why}")
    assert section_of(tmp_path, *fine, client=client).content["notes"] == []
    assert section_of(tmp_path, client="aiperf").content["notes"] == ["AIPerf has left no record of a measured request"]


def test_swim_lanes_are_bounded_and_escaped() -> None:
    evil = {"root": "<script>alert(1)</script>", "trace": "t"}
    many = [a_request(i, i, i + 0.5, lane=i % 60, tags=evil) for i in range(5000)]
    page = swim_lanes(many, 0, 5000 * MS)
    assert "<script" not in page
    assert page.count("<rect") <= 3 * MAX_REQUESTS
    assert page.count('text-anchor="end">') <= MAX_LANES + 1
    assert f"the first {MAX_LANES} of 60 lanes" in page


def test_swim_lanes_show_warm_up_overlaps_and_failures() -> None:
    sub = {"agent": "a", "depth": 1, "parent": "0:t"}
    page = swim_lanes(
        [
            a_request(0, -50 + 100, 90, phase=WARMUP),
            a_request(1, 110, 150),
            a_request(2, 120, 140, session="0:t/a", tags=sub),
            a_failure(3, 160, 170, "a < b"),
        ],
        100 * MS,
        200 * MS,
    )
    assert "a &lt; b" in page
    assert "sub-agent</span>" in page
    rows = {float(y) for y in re.findall(r'<rect class="f[01]" x="[^"]*" y="([^"]*)"', page)}
    assert len(rows) == 2, "overlapping requests lie below each other"
    assert swim_lanes([], 0, MS) == ""


def test_a_client_that_names_no_lanes_has_its_sessions_put_into_few() -> None:
    roots = [{"root": f"{i}:t"} for i in range(3)]
    records = [
        a_request(0, 0, 10, lane=None, tags=roots[0]),
        a_request(1, 5, 20, lane=None, tags=roots[1]),
        a_request(2, 12, 30, lane=None, tags=roots[2]),
    ]
    page = swim_lanes(records, 0, 30 * MS)
    assert re.findall(r'text-anchor="end">(\d+)</text>', page) == ["0", "1"]
