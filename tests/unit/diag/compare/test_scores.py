"""Scores of runs: bench's figures on the whole phase, steady state in the window, and standard errors that are true."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.bench.accounting import Counts
from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.summary import summarize
from atom.diag.compare.blocks import Blocks
from atom.diag.compare.metrics import METRICS, metric
from atom.diag.compare.recorded import Recorded, read_recorded
from atom.diag.compare.scores import RunScore, censored, score_matched, score_run
from atom.diag.compare.window import Window
from atom.recipes.errors import UsageError

S = 1_000_000_000
MS = 1_000_000
LANES = 4
TOKENS = 20


def engine(seed: int, seconds: float, *, step_ms: float = 10.0, noise: float = 0.05, slow_s: float = 0.3) -> Any:
    """Ends of the steps of an engine that all streams share: correlated noise of `slow_s` seconds, in nanoseconds."""
    rng = np.random.default_rng(seed)
    count = int(seconds * 1e3 / step_ms)
    keep = np.exp(-step_ms / 1e3 / slow_s)
    drift, level = np.empty(count), 0.0
    for i, shock in enumerate(rng.normal(0, noise * np.sqrt(1 - keep**2), count)):
        level = keep * level + shock
        drift[i] = level
    return np.cumsum(np.rint(step_ms * MS * np.exp(drift + rng.normal(0, 0.01, count)))).astype(np.int64)


def streams(steps: Any, shift: int = 0) -> list[RequestRecord]:
    """Lanes that send the next request when one ends, staggered; a token per step, the first after three steps."""
    records, length = [], TOKENS + 3
    for lane in range(LANES):
        at = lane * 2
        while at + length < len(steps):
            sent = int(steps[at]) + shift
            chunks = [int(moment) + shift for moment in steps[at + 3 : at + length]]
            records.append((sent, chunks, lane))
            at += length
    records.sort(key=lambda one: (one[0], one[2]))
    return [
        RequestRecord(
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
            prompt_tokens=7,
            input_len=7,
            output_len=TOKENS,
            output_tokens=TOKENS,
            tokens_from="usage",
        )
        for index, (sent, chunks, lane) in enumerate(records)
    ]


def recorded(records: list[RequestRecord], **more: Any) -> Recorded:
    outcomes = Counter(one.outcome for one in records)
    return Recorded(
        path=Path("/nowhere"),
        tool="atom",
        records=records,
        start_ns=more.pop("start_ns", min(one.sent_ns or 0 for one in records)),
        end_ns=max(one.end_ns or 0 for one in records),
        clock="boot",
        load={"max_concurrency": LANES, "num_prompts": len(records), **more.pop("load", {})},
        counts=Counts.of(outcomes, started=len(records)),
        **more,
    )


def write_run(path: Path, records: list[RequestRecord], load: dict[str, Any] | None = None, **end: Any) -> RunDirectory:
    run_dir = RunDirectory(path)
    start = min(one.sent_ns or 0 for one in records)
    run_dir.write_run_json(
        {
            "host": {"boot_id": "one"},
            "measured_start_ns": start,
            "load": {"name": "random", "max_concurrency": LANES, "num_prompts": len(records), **(load or {})},
        }
    )
    with run_dir.requests_writer() as writer:
        for record in records:
            writer.append_line(record.to_line())
    last = max(one.end_ns or 0 for one in records)
    with run_dir.client_writer() as client:
        client.append({"kind": "measured_start", "t_ns": start, "start_ns": start})
        told = {"started": len(records), "sent": len(records), "running_integral_ns": None, "interrupted": False}
        client.append({"kind": "measured_end", "t_ns": last, **told, **end})
    return run_dir


def test_on_the_whole_phase_scores_are_the_figures_of_the_report(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", streams(engine(1, 20)), {"max_concurrency": None})
    figures = summarize(run_dir)["figures"]
    score = score_run(tmp_path / "run")
    assert not score.window.steady
    for name, figure in {
        "itl_p50": "median_itl_ms",
        "itl_p99": "p99_itl_ms",
        "itl_mean": "mean_itl_ms",
        "tpot_mean": "mean_tpot_ms",
        "ttft_mean": "mean_ttft_ms",
        "ttft_p99": "p99_ttft_ms",
        "e2el_p50": "median_e2el_ms",
        "output_throughput": "output_throughput",
        "request_throughput": "request_throughput",
    }.items():
        assert score.metrics[name].value == pytest.approx(figures[figure]["value"], rel=1e-6), name
        assert score.metrics[name].supported == figures[figure]["supported"], name
    assert score.metrics["itl_p50"].n == figures["median_itl_ms"]["n"]
    assert "all requests are sent at once" in score.notes[-1]


def test_the_window_leaves_out_what_is_not_steady() -> None:
    """An opening burst and a slow end that the whole phase would have in it."""
    steps = engine(2, 20, noise=0.0)
    records = streams(steps)
    for record in records[:LANES]:  # the burst waits
        record.sent_ns = (record.sent_ns or 0) - 2 * S
    run = recorded(records)
    score = score_run(run)
    assert score.window.steady
    assert score.metrics["ttft_p99"].value < 50
    assert score_run(run, run.whole).metrics["ttft_p99"].value > 1000
    rate = score.metrics["output_throughput"].value
    assert rate == pytest.approx(LANES * TOKENS / (TOKENS + 3) * 100, rel=0.01)
    assert score.metrics["input_throughput"].value == pytest.approx(rate * 7 / TOKENS, rel=0.02)


def test_scores_are_in_the_order_of_the_registry_and_positive() -> None:
    score = score_run(recorded(streams(engine(3, 10))))
    assert list(score.metrics) == [name for name in METRICS if name in score.metrics]
    assert "server_step_p50" not in score.metrics
    assert all(one.value > 0 and one.n > 0 for one in score.metrics.values())


def test_tokens_of_requests_that_did_not_complete_are_no_throughput() -> None:
    records = streams(engine(4, 10))
    before = score_run(recorded(records))
    window = before.window
    for record in records[::2]:
        record.outcome, record.error_class = Outcome.FAILED, "cut"
    after = score_run(recorded(records), window)
    ratio = after.metrics["output_throughput"].value / before.metrics["output_throughput"].value
    assert ratio == pytest.approx(0.5, abs=0.05)


def test_matched_runs_at_the_same_time_are_scored_on_the_same_window() -> None:
    base, head = recorded(streams(engine(5, 10))), recorded(streams(engine(6, 12), shift=S))
    pair = score_matched(base, head, concurrent=True)
    assert pair[0].window == pair[1].window
    apart = score_matched(base, head, concurrent=False)
    assert apart[0].window != apart[1].window
    other = score_matched(base, replace(head, clock="another"), concurrent=True)
    assert [one.window for one in other] == [one.window for one in apart]


def test_nothing_recorded_has_no_scores(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run")
    score = score_run(tmp_path / "run")
    assert not score.metrics
    assert score.censored == ["the load did not come to its end", "no request completed"]
    assert score.invalid == ["the run was never sealed: it was killed"]


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1 << 50), st.integers(0, 1000))
def test_scores_do_not_depend_on_when_it_was(shift: int, seed: int) -> None:
    steps = engine(seed, 4)
    here, there = score_run(recorded(streams(steps))), score_run(recorded(streams(steps, shift)))
    assert there.window.start_ns - here.window.start_ns == shift
    assert there.metrics == here.metrics


@pytest.mark.parametrize("slow_s", [0.02, 0.3])
def test_standard_errors_are_about_as_large_as_runs_differ(slow_s: float) -> None:
    """Forty runs of one engine: what a run says of its own uncertainty is how much they differ, within a factor that
    ten or twenty blocks allow. Requests one by one, or gaps, would be far too sure: streams share every step."""
    runs = [score_run(recorded(streams(engine(seed, 20, slow_s=slow_s)))) for seed in range(40)]
    for name in ("itl_p50", "itl_mean", "tpot_mean", "e2el_p50", "ttft_mean"):
        told = float(np.mean([one.metrics[name].log_se or np.nan for one in runs]))
        true = float(np.std(np.log([one.metrics[name].value for one in runs]), ddof=1))
        assert 0.65 < told / true < 1.5, (name, told, true)


def test_standard_error_of_a_quantile_is_the_textbooks_for_independent_samples() -> None:
    rng = np.random.default_rng(1)
    blocks = Blocks(Window(0, S, True), 0.0)
    told = []
    for _ in range(20):
        values, moments = rng.lognormal(0, 0.2, 4000), np.sort(rng.integers(0, S, 4000))
        told.append(blocks.se_of_quantile(blocks.of(moments), values, 0.5) or 0)
    # √(q(1−q)/n) ÷ density of the logarithm at its median
    assert np.mean(told) == pytest.approx(0.5 / np.sqrt(4000) * 0.2 * np.sqrt(2 * np.pi), rel=0.1)


def test_too_little_has_no_standard_error() -> None:
    blocks = Blocks(Window(0, S, True), 0.0)
    one = np.array([5]), np.array([1.0])
    assert blocks.se_of_quantile(*one, 0.5) is None
    assert blocks.se_of_mean(*one) is None
    same = np.array([5, 5]), np.array([1.0, 2.0])
    assert blocks.se_of_mean(*same) is None  # one block knows nothing of how blocks differ
    constant = np.arange(10), np.ones(10)
    assert blocks.se_of_mean(*constant) == pytest.approx(0, abs=1e-12)
    assert blocks.se_of_quantile(*constant, 0.5) == 0.0


def failing(records: list[RequestRecord], every: int) -> list[RequestRecord]:
    for record in records[::every]:
        record.outcome, record.error_class, record.error_message = Outcome.FAILED, "http_500", "boom"
        record.chunk_ns, record.first_ns, record.last_ns, record.output_tokens = [], None, None, None
    return records


@pytest.mark.parametrize(
    ("load", "every", "end", "expected"),
    [
        ({}, 0, {}, []),
        ({}, 20, {}, ["9 of 172 requests failed"]),
        ({"num_prompts": 200}, 0, {}, ["28 of 200 requests are missing"]),
        ({"duration_s": 10.0}, 20, {}, []),
        ({"duration_s": 10.0}, 5, {}, ["35 of 172 requests failed, more than 10%"]),
        ({"duration_s": 10.0, "failed_request_threshold": 0.5}, 5, {}, []),
        ({"num_prompts": 200}, 0, {"interrupted": True}, ["the load ended early", "28 of 200 requests are missing"]),
        ({"duration_s": 10.0}, 0, {"server_gone": "nobody answers"}, ["nobody answers"]),
        ({}, 1, {}, ["172 of 172 requests failed", "no request completed"]),
    ],
)
def test_what_makes_a_run_censored(
    tmp_path: Path, load: dict[str, Any], every: int, end: dict[str, Any], expected: list[str]
) -> None:
    records = streams(engine(7, 10, noise=0.0))
    if every:
        failing(records, every)
    write_run(tmp_path / "run", records, load, **end)
    assert censored(tmp_path / "run") == expected


def test_requests_cancelled_on_purpose_censor_nothing(tmp_path: Path) -> None:
    records = streams(engine(8, 10))
    for record in records[::10]:
        record.outcome, record.error_class = Outcome.CANCELLED, "cancelled"
    write_run(tmp_path / "run", records, {"cancellation_rate": 0.1})
    assert censored(tmp_path / "run") == []


def test_a_run_that_was_found_to_be_no_evidence_says_why(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", streams(engine(9, 5)))
    run_dir.seal(Validity.NOT_VALID, ["client saturated: its event loop used 97% of a core"])
    with (tmp_path / "run" / "requests" / "0.jsonl").open("a") as file:
        file.write("garbage\n")
    score = score_run(tmp_path / "run")
    assert score.invalid == [
        "client saturated: its event loop used 97% of a core",
        "1 unreadable line in requests/0.jsonl",
    ]


def test_the_servers_own_steps_where_they_were_scraped(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", streams(engine(10, 20)))
    with (run_dir.server / "metrics-api.jsonl").open("w") as file:
        for second in range(20):
            values = f'{{"timed_steps":{second * 100},"step_sum_s":{second * 0.9}}}'
            file.write(f'{{"sent_ns":{second * S},"latency_ns":1000,"values":{values}}}\n')
    score = score_run(tmp_path / "run").metrics["server_step_p50"]
    assert score.value == pytest.approx(9.0)
    assert score.log_se == pytest.approx(0.0, abs=1e-9)


def test_scores_go_through_json(tmp_path: Path) -> None:
    import json

    score: RunScore = score_run(recorded(streams(engine(11, 5))))
    value = json.loads(json.dumps(score.as_dict(), allow_nan=False))
    assert value["metrics"]["itl_p50"]["n"] == score.metrics["itl_p50"].n
    assert value["window"]["steady"] is True


def test_unknown_metrics_are_named() -> None:
    with pytest.raises(UsageError, match=r"no metric 'itl_p51'; there are itl_p50, itl_p99"):
        metric("itl_p51")


def test_a_directory_that_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no run directory"):
        read_recorded(tmp_path)
