"""Which point a sweep measures next, which one is the knee, what it is worth; objectives, backlogs, sweep.json."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.bench.backlog import backlog
from atom.bench.records import RequestRecord
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.slo import check_objectives, parse_objectives, percentiles_of
from atom.bench.sweep import (
    Plan,
    Point,
    State,
    Swept,
    arrival_seconds,
    calm_seconds,
    conclude,
    judge_point,
    parse_plan,
    point_label,
    point_seed,
)
from atom.bench.sweep_index import SweepIndex, index_path
from atom.recipes.errors import ExitStatus, UsageError


def point(value: float, state: State = State.MET, *, tok_s: float = 1.0, e2el: float = 1.0, **more: Any) -> Point:
    def figure(number: float) -> dict[str, Any]:
        return {"value": number, "unit": "u", "n": 10, "definition": "d", "supported": True}

    figures = {"completed": 10, "output_throughput": tok_s, "median_e2el_ms": e2el, "request_throughput": tok_s}
    fields: dict[str, Any] = {
        "value": value,
        "attempt": 1,
        "directory": f"arms/concurrency-{value:g}/run-1",
        "seed": 1,
        "validity": Validity.NOT_VALID if state is State.UNKNOWN else Validity.VALID,
        "reasons": [],
        "figures": {name: figure(number) for name, number in figures.items()},
        "objectives": [],
        "keeps_up": None,
        "backlog": None,
        "state": state,
        "why": "" if state is State.MET else "why",
    }
    return Point(**{**fields, **more})


def searched(plan: Plan, limit: float) -> list[Point]:
    """The points of a search where everything above `limit` is too much."""
    points: list[Point] = []
    while (value := plan.next(points)) is not None:
        points.append(point(value, State.MET if value <= limit else State.BROKEN))
        assert len(points) < 100
    return points


@given(limit=st.integers(1, 4096), resolution=st.sampled_from([0.01, 0.1, 0.5]))
def test_search_brackets_the_limit_as_closely_as_it_says(limit: int, resolution: float) -> None:
    plan = parse_plan(Swept.CONCURRENCY, "auto", resolution=resolution, max_points=50, go_on=False, judged=True)
    points = searched(plan, limit)
    assert len({p.value for p in points}) == len(points)
    assert all(p.value.is_integer() for p in points)
    knee = conclude(plan, points, parse_objectives(["p99_ttft_ms<=1"])).knee
    assert knee is not None
    above = [p.value for p in points if p.state is State.BROKEN]
    assert knee.value <= limit
    if limit < 4096:
        assert min(above) - knee.value == 1 or min(above) / knee.value - 1 <= resolution


@given(limit=st.floats(0.6, 5000), resolution=st.sampled_from([0.01, 0.1]))
def test_search_of_a_rate(limit: float, resolution: float) -> None:
    plan = parse_plan(Swept.RATE, "auto:0.5-10000", resolution=resolution, max_points=50, go_on=False, judged=True)
    points = searched(plan, limit)
    met, above = ([p.value for p in points if (p.state is State.MET) == wanted] for wanted in (True, False))
    assert max(met) <= limit < min(above)
    assert min(above) / max(met) - 1 <= resolution


def test_list_stops_at_the_first_that_is_too_much_unless_told_to_go_on() -> None:
    def run(go_on: bool) -> list[float]:
        plan = parse_plan(Swept.CONCURRENCY, "1,2,4,8", resolution=0.1, max_points=9, go_on=go_on, judged=True)
        points: list[Point] = []
        while (value := plan.next(points)) is not None:
            points.append(point(value, State.MET if value < 2 else State.BROKEN))
        return [p.value for p in points]

    assert run(False) == [1, 2]
    assert run(True) == [1, 2, 4, 8]


def test_point_without_evidence_is_measured_once_more_and_never_the_knee() -> None:
    plan = parse_plan(Swept.CONCURRENCY, "1,2,4", resolution=0.1, max_points=9, go_on=False, judged=True)
    slo = parse_objectives(["p99_ttft_ms<=1"])
    points = [point(1), point(2, State.UNKNOWN)]
    assert plan.next(points) == 2
    again = [*points, point(2, attempt=2)]
    assert plan.next(again) == 4
    assert conclude(plan, [*again, point(4)], slo).status is ExitStatus.OK
    twice = [*points, point(2, State.UNKNOWN, attempt=2)]
    assert plan.next(twice) == 4
    between = conclude(plan, [*twice, point(4)], slo)
    assert (between.status, between.knee is not None and between.knee.value) == (ExitStatus.OK, 4)
    last = conclude(plan, [*twice, point(4, State.BROKEN)], slo)
    assert (last.status, last.validity) == (ExitStatus.INVALID, Validity.NOT_VALID)
    assert last.knee is not None
    assert last.knee.value == 1
    assert "at least C1" in last.reasons[0]


def test_search_ends_where_there_is_no_evidence() -> None:
    plan = parse_plan(Swept.CONCURRENCY, "auto", resolution=0.1, max_points=9, go_on=False, judged=True)
    points = [point(1), point(2, State.UNKNOWN), point(2, State.UNKNOWN)]
    assert plan.next(points) is None


@pytest.mark.parametrize(
    ("points", "fail_below", "status"),
    [
        ([point(1), point(2)], None, ExitStatus.OK),
        ([point(1, State.BROKEN)], None, ExitStatus.GATE),
        ([point(1, State.BROKEN, validity=Validity.NOT_VALID)], None, ExitStatus.INVALID),
        ([point(1, State.UNKNOWN)], None, ExitStatus.INVALID),
        ([point(1), point(2), point(4, State.BROKEN)], 2, ExitStatus.OK),
        ([point(1), point(2), point(4, State.BROKEN)], 3, ExitStatus.GATE),
        ([point(1), point(2), point(4, State.UNKNOWN)], 2, ExitStatus.OK),
        ([point(1), point(2), point(4, State.UNKNOWN)], 3, ExitStatus.INVALID),
        ([point(1, State.BROKEN)], 3, ExitStatus.GATE),
        ([], None, ExitStatus.FAILED),
    ],
)
def test_status(points: list[Point], fail_below: float | None, status: ExitStatus) -> None:
    plan = Plan(swept=Swept.CONCURRENCY, values=(1, 2, 4))
    assert conclude(plan, points, parse_objectives(["p99_ttft_ms<=1"]), fail_below).status is status


def test_knee_by_curvature_is_where_throughput_stops_to_pay() -> None:
    """Throughput of a server that saturates at 1,000 tok/s: latency rises from there on."""
    plan = Plan(swept=Swept.CONCURRENCY, judged=False)
    points: list[Point] = []
    while (value := plan.next(points)) is not None:
        rate = min(100 * value, 1000.0)
        points.append(point(value, tok_s=rate, e2el=1000 * value * 10 / rate))
    assert [p.value for p in points] == [1, 2, 4, 8, 16, 32]
    conclusion = conclude(plan, points, [])
    assert conclusion.knee is not None
    assert conclusion.knee.value in (8, 16)
    assert conclusion.knee.how == "curvature"
    short = conclude(plan, points[:2], [])
    assert short.knee is None, "two points have no curvature"
    assert short.notes == ["no knee found: fewer than 3 valid points"]


@pytest.mark.parametrize(
    ("throughputs", "latencies", "why"),
    [
        ((100, 200, 400, 800), (100, 101, 104, 110), "throughput still grows|does not flatten"),
        ((100, 200, 399, 801), (100, 99, 102, 100), "throughput still grows|does not flatten"),
        ((100, 198, 400, 790), (101, 100, 100.5, 100.2), "throughput still grows|does not flatten"),
        ((100, 141, 200, 283), (100, 141, 200, 283), "does not flatten|still grows|no clear bend"),
        ((1000, 1010, 1005, 1002), (10, 20, 40, 80), "does not flatten"),
        ((500, 500, 500, 500), (10, 20, 40, 80), "the same at all points"),
    ],
)
def test_a_line_without_a_bend_has_no_knee(
    throughputs: tuple[float, ...], latencies: tuple[float, ...], why: str
) -> None:
    plan = Plan(swept=Swept.CONCURRENCY, values=(1, 2, 4, 8), judged=False)
    points = [point(v, tok_s=t, e2el=e) for v, t, e in zip(plan.values, throughputs, latencies, strict=True)]
    conclusion = conclude(plan, points, [])
    assert conclusion.knee is None
    assert re.match(f"no knee found: .*({why})", conclusion.notes[-1])
    assert conclude(plan, points, [], fail_below=1).status is ExitStatus.INVALID


@given(
    saturates=st.sampled_from([2, 4, 8, 16]),
    noise=st.lists(st.floats(-0.02, 0.02), min_size=14, max_size=14),
    count=st.integers(3, 7),
)
def test_knee_is_where_a_noisy_server_saturates_or_nowhere(saturates: int, noise: list[float], count: int) -> None:
    plan = Plan(swept=Swept.CONCURRENCY, values=tuple(2.0**i for i in range(count)), judged=False)
    points = [
        point(
            value,
            tok_s=100 * min(value, saturates) * (1 + noise[2 * i]),
            e2el=100 * max(1.0, value / saturates) * (1 + noise[2 * i + 1]),
        )
        for i, value in enumerate(plan.values)
    ]
    knee = conclude(plan, points, []).knee
    if saturates < plan.values[-1]:
        assert knee is not None
        # A doubling more costs 3% of the span of latency here, and noise alone gives as much of throughput.
        assert knee.value in (saturates, 2 * saturates)
    else:
        assert knee is None


def test_every_point_has_prompts_of_its_own_and_the_seed_decides() -> None:
    seeds = [point_seed(0, Swept.CONCURRENCY, value, attempt) for value in (1, 2, 4) for attempt in (1, 2)]
    assert len(set(seeds)) == 6
    assert seeds == [point_seed(0, Swept.CONCURRENCY, value, attempt) for value in (1, 2, 4) for attempt in (1, 2)]
    assert point_seed(1, Swept.CONCURRENCY, 1, 1) not in seeds
    assert point_label(Swept.RATE, 2.5) == "rate-2.5"


@pytest.mark.parametrize(
    ("swept", "text", "message"),
    [
        (Swept.CONCURRENCY, "1,2,x", "whole numbers"),
        (Swept.CONCURRENCY, "1,2.5", "whole numbers"),
        (Swept.CONCURRENCY, "0,1", "whole numbers"),
        (Swept.CONCURRENCY, "1,1", "twice"),
        (Swept.RATE, "1,-2", "positive rates"),
        (Swept.RATE, "nan,1", "positive rates"),
        (Swept.RATE, "inf,1", "positive rates"),
        (Swept.CONCURRENCY, "auto:8-4", "end above"),
        (Swept.CONCURRENCY, "auto:x", "whole numbers"),
    ],
)
def test_values_that_cannot_be_are_refused_with_their_flag(swept: Swept, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse_plan(swept, text, resolution=0.1, max_points=9, go_on=False, judged=True)
    assert str(error.value).startswith(swept.flag)


@pytest.mark.parametrize(
    ("text", "figure", "limit"),
    [
        ("p99_ttft_ms<=500", "p99_ttft_ms", 500),
        ("ttft_p99 <= 0.5s", "p99_ttft_ms", 500),
        ("p99.9_itl_ms<50ms", "p99.9_itl_ms", 50),
        ("error_rate<=1%", "error_rate", 0.01),
        ("output_throughput>=100", "output_throughput", 100),
        ("mean_tpot_ms > 1", "mean_tpot_ms", 1),
    ],
)
def test_objectives(text: str, figure: str, limit: float) -> None:
    one = parse_objectives([text])[0]
    assert (one.figure, one.limit) == (figure, pytest.approx(limit))
    assert parse_objectives([one.expression]) == [one]
    above, below = (check_objectives([one], {figure: limit * factor})[0].met for factor in (2, 0.5))
    assert {above, below} == {True, False}
    assert check_objectives([one], {})[0].met is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p99_ttft_ms=500", "must look like"),
        ("p99_ttft_ms<=", "must look like"),
        ("p99_tftt_ms<=5", "did you mean"),
        ("p0_ttft_ms<=5", "between 0 and 100"),
        ("p99_ttft_ms<=5%", "no %"),
        ("completed>=5ms", "is in requests"),
    ],
)
def test_objectives_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_objectives([text])


def test_percentiles_of_objectives_are_computed() -> None:
    assert percentiles_of(parse_objectives(["p95_ttft_ms<=1", "itl_p99.9<=1", "error_rate<=1%"])) == [95.0, 99.9]


def test_judging_a_point() -> None:
    def summary(validity: str = "valid", completed: int = 10, failed: int = 0, ttft: float | None = 5.0) -> Any:
        values = {"completed": completed, "failed": failed, "p99_ttft_ms": ttft}
        figures = {name: {"value": value} for name, value in values.items()}
        return {"figures": figures, "validity": validity, "reasons": ["r"], "load": {"failed_request_threshold": 0.1}}

    slo = parse_objectives(["p99_ttft_ms<=6", "error_rate<=5%"])
    assert judge_point(summary(), slo, None)[:2] == (State.MET, "")
    assert judge_point(summary(ttft=7), slo, None)[:2] == (State.BROKEN, "breaks p99_ttft_ms<=6")
    assert judge_point(summary(failed=1), slo, None)[:2] == (State.BROKEN, "breaks error_rate<=0.05")
    assert judge_point(summary("not valid", failed=5), slo, None)[:2] == (State.BROKEN, "5 of 15 requests failed")
    assert judge_point(summary("failed", completed=0, failed=5), slo, None)[0] is State.BROKEN
    assert judge_point(summary("not valid"), slo, None)[:2] == (State.UNKNOWN, "r")
    assert judge_point(summary(ttft=None), slo, None)[0] is State.UNKNOWN


def queue(rate: float, capacity: float, seconds: float, seed: int) -> list[RequestRecord]:
    """Requests that arrive at random and are served one after the other, `capacity` a second."""
    rng = random.Random(seed)
    now, free, records = 0.0, 0.0, []
    while (now := now + rng.expovariate(rate)) < seconds:
        free = max(free, now) + 1 / capacity
        times: dict[str, Any] = {"scheduled_ns": int(now * 1e9), "sent_ns": int(now * 1e9), "end_ns": int(free * 1e9)}
        records.append(RequestRecord(index=len(records), outcome="completed", **times))
    return records


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), load=st.floats(0.05, 0.8))
def test_server_that_keeps_up_is_not_called_overloaded(seed: int, load: float) -> None:
    found = backlog(queue(100 * load, 100, 60, seed))
    assert found is not None
    assert found.keeps_up is not False


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), load=st.floats(1.3, 10))
def test_overload_is_seen(seed: int, load: float) -> None:
    found = backlog(queue(100 * load, 100, 30, seed))
    assert found is not None
    assert found.keeps_up is False
    assert found.finished < found.arrived


def test_too_short_a_schedule_tells_nothing() -> None:
    long = [
        RequestRecord(index=i, scheduled_ns=i * 10_000_000, sent_ns=i * 10_000_000, end_ns=5_000_000_000 + i)
        for i in range(100)
    ]
    for records in (long, long[:10]):
        found = backlog(records)
        assert found is not None
        assert found.keeps_up is None
    assert backlog([RequestRecord(index=0, sent_ns=1, end_ns=2)]) is None


def burst(rate: float, count: int, *, takes_s: float) -> list[RequestRecord]:
    """All are served at once, and take as long as one another."""
    due = [int(i * 1e9 / rate) for i in range(count)]
    return [
        RequestRecord(index=i, outcome="completed", scheduled_ns=at, sent_ns=at, end_ns=at + int(takes_s * 1e9))
        for i, at in enumerate(due)
    ]


def test_a_schedule_short_beside_its_requests_never_shows_that_a_server_keeps_up() -> None:
    found = backlog(burst(2000, 150, takes_s=0.6))
    assert found is not None
    assert found.keeps_up is None
    assert "10% of the rate was completed" in found.detail
    wanted = re.search(r"--num-prompts (\d+) may do", found.detail)
    assert wanted is not None
    longer = backlog(burst(2000, int(wanted[1]) + 2, takes_s=0.6))
    assert longer is not None
    assert longer.keeps_up is True
    slower = backlog(burst(2000, 150, takes_s=0.6), calm_s=0.1)
    assert slower is not None
    assert slower.keeps_up is False, "six times as long as where it kept up, at a tenth of the rate"
    few = backlog(burst(2000, 42, takes_s=0.6), calm_s=0.5)
    assert few is not None
    assert few.keeps_up is None


@given(rate=st.floats(1, 5000), count=st.integers(50, 400), takes_s=st.floats(0.001, 10))
def test_a_server_that_serves_all_at_once_is_never_called_overloaded(rate: float, count: int, takes_s: float) -> None:
    found = backlog(burst(rate, count, takes_s=takes_s), calm_s=takes_s)
    assert found is not None
    assert found.keeps_up is not False


def test_completions_far_below_the_rate_are_no_keeping_up_whatever_the_queue_looks_like() -> None:
    """A stall in the first half: from then on as much ends as arrives, but the queue stays."""
    records = burst(100, 2000, takes_s=0.01)
    stalled = [replace(r, end_ns=30_000_000_000 + 12_000_000 * i) for i, r in enumerate(records)]
    found = backlog(stalled, calm_s=0.01)
    assert found is not None
    assert found.keeps_up is False
    assert "of the rate was completed" in found.detail


def test_point_of_which_it_is_not_known_whether_the_server_keeps_up_is_neither_knee_nor_passes_a_gate() -> None:
    values = {"completed": 150, "failed": 0, "p50_e2el_ms": 600.0}
    summary = {
        "figures": {name: {"value": value} for name, value in values.items()},
        "validity": "valid",
        "reasons": [],
        "load": {"failed_request_threshold": 0.1},
    }
    slo = parse_objectives(["p50_e2el_ms<=1s"])
    state, why, _ = judge_point(summary, slo, backlog(burst(2000, 150, takes_s=0.6)))
    assert state is State.UNKNOWN
    assert why.startswith("whether the server keeps up is not known")
    plan = parse_plan(Swept.RATE, "auto:20-2000", resolution=0.1, max_points=20, go_on=False, judged=True)
    unknown: dict[str, Any] = {"state": state, "validity": Validity.VALID}
    points = [point(1000, keeps_up=True), point(2000, **unknown), point(2000, attempt=2, **unknown)]
    assert plan.next(points) is None
    assert [p.verdict for p in points] == ["yes", "unknown", "unknown"]
    conclusion = conclude(plan, points, slo, fail_below=1500)
    assert conclusion.knee is not None
    assert conclusion.knee.value == 1000
    assert conclusion.status is ExitStatus.INVALID
    assert conclude(plan, points, slo, fail_below=900).status is ExitStatus.OK
    alone = conclude(plan, points[1:], slo, fail_below=900)
    assert (alone.knee, alone.status) == (None, ExitStatus.INVALID)


def test_schedule_of_a_point_grows_with_what_requests_take() -> None:
    assert arrival_seconds([]) == 30
    assert arrival_seconds([point(1, e2el=1000)]) == 30
    assert arrival_seconds([point(1, e2el=10_000), point(2, State.UNKNOWN, e2el=20_000)]) == 160
    assert arrival_seconds([point(1, State.BROKEN, e2el=20_000)]) == 30
    assert arrival_seconds([point(1, e2el=1e9)]) == 600
    assert calm_seconds([point(4, e2el=900, keeps_up=True), point(2, e2el=500, keeps_up=True), point(1)]) == 0.5
    assert calm_seconds([point(1)]) is None


def test_verdict_says_in_words_what_is_no_evidence() -> None:
    assert point(1, State.UNKNOWN).verdict == "NOT VALID"
    assert point(1, State.UNKNOWN, validity=Validity.VALID).verdict == "unknown"
    assert point(1, State.BROKEN, validity=Validity.NOT_VALID).verdict == "no (NOT VALID)"
    assert point(1, State.BROKEN).verdict == "no"


def test_throughput_that_still_grows_by_half_at_the_highest_point_is_no_knee() -> None:
    plan = Plan(swept=Swept.CONCURRENCY, most=64, judged=False)
    rates, latencies = (50, 100, 195, 380, 700, 1100, 1700), (100, 101, 104, 110, 118, 150, 195)
    points = [point(2**i, tok_s=r, e2el=e) for i, (r, e) in enumerate(zip(rates, latencies, strict=True))]
    conclusion = conclude(plan, points, [])
    assert conclusion.knee is None
    assert conclusion.notes[-1].startswith("no knee found: throughput still grows at C64")


def index() -> SweepIndex:
    plan = Plan(swept=Swept.CONCURRENCY, values=(1, 2), most_why="why")
    options = {"--seed": 0, "--random-input-len": 8}
    slo = parse_objectives(["p99_ttft_ms<=5"])
    points = [point(1, objectives=check_objectives(slo, {"p99_ttft_ms": 4}))]
    return SweepIndex(plan=plan, objectives=slo, fail_below=2.0, options=options, points=points, sessions=1)


def test_index_comes_back_and_names_what_differs(tmp_path: Path) -> None:
    run_dir, written = RunDirectory(tmp_path), index()
    written.write(run_dir, conclude(written.plan, written.points, written.objectives))
    assert SweepIndex.read(run_dir) == written
    assert written.difference(written.options) is None
    assert written.difference({"--seed": 1, "--random-input-len": 8}) == "--seed was 0, now it is 1"
    assert written.difference({"--seed": 0}) == "--random-input-len was 8, now it is not given"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("plan", None),
        ("plan", {"swept": "nothing"}),
        ("slo", [1]),
        ("points", [{}]),
        ("points", 5),
        ("options", []),
        ("sessions", -1),
        ("schema_version", "9.0"),
        ("directory", "arms/../../etc/run-1"),
        ("figures", {"completed": {"value": "many"}}),
        ("state", "splendid"),
        ("value", "NaN"),
    ],
)
def test_damaged_index_is_a_usage_error_that_names_the_file(tmp_path: Path, field: str, value: Any) -> None:
    run_dir = RunDirectory(tmp_path)
    index().write(run_dir)
    content = json.loads(index_path(run_dir).read_text())
    (content if field in content else content["points"][0])[field] = value
    index_path(run_dir).write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"sweep\.json"):
        SweepIndex.read(run_dir)
