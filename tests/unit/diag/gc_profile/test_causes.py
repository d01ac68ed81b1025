"""Each fault alone and together is named, and nothing else; the verdict says what it rests on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from atom.diag.gc_profile.model import CauseKind, Profile
from atom.diag.gc_profile.profile import profile_run

Builder = Callable[..., Any]

FAMILIES = {
    "prefill_context": lambda t: 10 * t,  # the builder's load is 10 requests a second
    "decode_context": lambda t: 10 * t,
}
LONGER_PASSES = [(3 + 8.0 * i, 0.01 * 1.25**i) for i in range(14)]
MORE_PASSES = [(0.5 + i, 0.005 + 0.001 * i) for i in range(118)]
RETENTION = {"rss_mb": lambda t: 100 + 0.12 * t}  # 12 MB per 1,000 requests
GAUGES = {"rss_mb": lambda t: 100 + 0.028 * t, "families": FAMILIES, "scrape_ms": lambda t: 5 + 0.5 * t}
BOTH = {**GAUGES, "rss_mb": lambda t: 100 + 0.15 * t}


def kinds(profile: Profile) -> set[CauseKind]:
    return {cause.kind for cause in profile.causes}


def test_a_clean_server_has_no_cause_and_no_problem(synthetic: Builder) -> None:
    profile = profile_run(synthetic(passes=[(40, 0.002), (80, 0.003)], stalls=[(50, 0.2)]).write())
    assert not profile.causes
    assert profile.is_problem is False
    assert profile.verdict.startswith("Garbage collection is not your problem: 2 gen-2 passes took 5 ms of 120 s")
    assert "by chance" in profile.verdict or "none of" in profile.verdict


def test_retention_alone(synthetic: Builder) -> None:
    profile = profile_run(synthetic(passes=LONGER_PASSES, **RETENTION).write())
    assert kinds(profile) == {CauseKind.HEAP_GROWS}
    statement = profile.causes[0].statement
    assert "12.0 MB per 1,000 requests" in statement
    assert "gen-2 passes take longer and longer (" in statement
    assert profile.is_problem is True


def test_a_heap_that_grows_before_any_pass_is_no_problem_yet(synthetic: Builder) -> None:
    profile = profile_run(synthetic(**RETENTION).write())
    assert kinds(profile) == {CauseKind.HEAP_GROWS}
    assert profile.is_problem is False
    assert "not your problem yet" in profile.verdict


@pytest.mark.parametrize("pauses", [(0.03, 0.07), (0.03, 0.07, 0.11), (0.07, 0.03, 0.11), (0.01,) * 3])
def test_few_passes_are_told_one_by_one_and_cited_if_each_is_longer(
    synthetic: Builder, pauses: tuple[float, ...]
) -> None:
    passes = [(30.0 * (i + 1), pause) for i, pause in enumerate(pauses)]
    profile = profile_run(synthetic(passes=passes, **RETENTION).write())
    assert sum(profile.few_passes, ()) == pytest.approx([x for start, pause in passes for x in (start, pause * 1e3)])
    cited = "each of 3 gen-2 passes took longer than the one before: 30, 70 and 110 ms"
    assert (cited in profile.causes[0].statement) is (pauses == (0.03, 0.07, 0.11))
    flat = profile_run(synthetic("flat", passes=passes).write())
    assert not flat.causes, "three in order are no evidence by themselves"


def test_many_passes_are_not_told_one_by_one(synthetic: Builder) -> None:
    assert profile_run(synthetic(passes=[(9.0 * i, 0.001) for i in range(9)]).write()).few_passes == ()


def test_gauges_alone_do_not_blame_the_heap_for_what_series_take(synthetic: Builder) -> None:
    profile = profile_run(synthetic(passes=MORE_PASSES, **GAUGES).write())
    assert kinds(profile) == {CauseKind.SERIES_PER_REQUEST}
    statement = profile.causes[0].statement
    assert "2 metric series are added per request" in statement
    assert "prefill_context (+1)" in statement
    assert "decode_context (+1)" in statement
    assert set(profile.growing_families) == set(FAMILIES)
    assert profile.is_problem is True
    assert "in the first window to" in profile.verdict
    assert "--what-if freeze" in profile.verdict


def test_both_together_are_both_named(synthetic: Builder) -> None:
    profile = profile_run(synthetic(passes=MORE_PASSES, **BOTH).write())
    assert kinds(profile) == {CauseKind.HEAP_GROWS, CauseKind.SERIES_PER_REQUEST}
    assert "of which new metric series hold" in profile.causes[0].statement


def test_renders_on_the_loop(synthetic: Builder) -> None:
    renders = [(0.3 + i, 0.15) for i in range(120)]
    profile = profile_run(synthetic(scrape_ms=lambda _: 150, stalls=renders).write())
    assert kinds(profile) == {CauseKind.RENDER_ON_LOOP}
    assert "120 of 120 scrapes held up a /health probe" in profile.causes[0].statement
    assert "slow first tokens" in profile.causes[0].statement
    assert profile.is_problem is False


def test_slow_scrapes_that_hold_up_nobody_are_no_cause(synthetic: Builder) -> None:
    assert not profile_run(synthetic(scrape_ms=lambda _: 150).write()).causes


def test_scrapes_that_wait_for_passes_are_not_blamed_for_them(synthetic: Builder) -> None:
    """Each scrape is stretched by the pass it falls into; the tokens wait for the pass."""
    passes = [(0.28 + i, 0.15) for i in range(118)]
    profile = profile_run(synthetic(scrape_ms=lambda _: 135, passes=passes, stalls=passes).write())
    assert CauseKind.RENDER_ON_LOOP not in kinds(profile)
    assert profile.is_problem is True
    assert "slow first tokens were in one" in profile.verdict


def test_passes_that_cost_while_nothing_grows_are_a_pattern_of_allocation(synthetic: Builder) -> None:
    passes = [(0.5 + i, 0.05) for i in range(119)]
    profile = profile_run(synthetic(passes=passes).write())
    assert kinds(profile) == {CauseKind.ALLOCATION_PATTERN}
    assert "thresholds 700, 10, 10" in profile.causes[0].statement
    assert "gc.freeze" in profile.causes[0].advice
    assert profile.totals.gen2_share == pytest.approx(0.05, rel=0.02)


def test_what_was_not_watched_is_not_known(synthetic: Builder) -> None:
    profile = profile_run(synthetic(with_hook=False, stalls=[(50, 0.7)]).write())
    assert profile.is_problem is None
    assert "no GC hook was in the API process" in profile.verdict
    assert "a /health probe waited 650 ms at most" in profile.verdict
    short = profile_run(synthetic("short", seconds=5).write())
    assert short.is_problem is None
    assert "Too short" in short.verdict


def test_another_process_that_collects_is_named(synthetic: Builder) -> None:
    run = synthetic(seconds=60)
    directory = run.write()
    core = synthetic("other", seconds=60, passes=[(10, 3.0)])
    lines = (core.write() / "server/gc-api-10.jsonl").read_text()
    (directory / "server/gc-core-11.jsonl").write_text(lines.replace('"pid": 10', '"pid": 11'))
    profile = profile_run(directory)
    assert profile.is_problem is True
    assert "core process 11 spends 5.0% of its time" in profile.verdict
    assert [(row.role, row.pid, row.hooked) for row in profile.processes] == [("api", 10, True), ("core", 11, True)]


def test_processes_without_the_hook_say_why(synthetic: Builder) -> None:
    run = synthetic(seconds=20)
    directory = run.write()
    sample = {"t_ns": run.ns(5), "pid": 12, "role": "core", "command": "python -I engine", "rss_bytes": 1 << 20}
    with (directory / "server/process.jsonl").open("a") as file:
        file.write(json.dumps(sample) + "\n")
    profile = profile_run(directory)
    row = next(row for row in profile.processes if row.pid == 12)
    assert not row.hooked
    assert row.reason == "started with -I, which ignores PYTHONPATH; attach to it instead (--pid)"
    assert row.rss_mb == 1
    assert row.gen2_passes is None


def test_a_share_that_is_much_only_at_the_end_is_told_from_the_last_window(synthetic: Builder) -> None:
    profile = profile_run(synthetic(passes=[(110, 0.2), (112, 0.2), (114, 0.1)]).write(), window_s=30)
    assert profile.is_problem is True
    assert "from 0% in the first window to 1.7% in the last" in profile.verdict


SHORT: dict[str, Any] = {"seconds": 19, "passes": [(1 + 2.0 * i, 0.05) for i in range(9)]}


def test_a_short_run_does_not_say_that_nothing_grows(synthetic: Builder) -> None:
    profile = profile_run(synthetic(rss_mb=lambda t: 101 + t, **SHORT).write())
    assert kinds(profile) == {CauseKind.ALLOCATION_PATTERN}
    said = f"{profile.causes[0].statement} {profile.causes[0].advice}"
    assert "not grow" not in said
    assert "no growth" not in said
    assert "whether memory and metric series grow is not known (12 samples after" in said
    assert "API RSS was 1" in said
    assert "measure for longer" in said


def test_a_series_per_request_is_named_in_a_short_run(synthetic: Builder) -> None:
    profile = profile_run(synthetic(families=FAMILIES, **SHORT).write())
    assert kinds(profile) == {CauseKind.SERIES_PER_REQUEST}
    assert "prefill_context (+1" in profile.causes[0].statement
    assert "1 per request" in profile.causes[0].statement


def test_labels_that_are_new_at_the_first_request_are_no_series_per_request(synthetic: Builder) -> None:
    families = {"latency_bucket": lambda t: 300 if t > 1 else 0, "rare": lambda t: t}
    assert CauseKind.SERIES_PER_REQUEST not in kinds(profile_run(synthetic(families=families, **SHORT).write()))


def test_series_that_nobody_saw_are_not_said_to_stand_still(synthetic: Builder) -> None:
    directory = synthetic(passes=LONGER_PASSES).write()
    path = directory / "server/metrics-api.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    failed = [{"sent_ns": line["sent_ns"], "latency_ns": None, "error": "HTTP 404"} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in failed))
    profile = profile_run(directory)
    assert profile.causes
    assert not any("no metric series" in cause.statement for cause in profile.causes)


def test_a_pass_in_a_short_rest_is_no_problem(synthetic: Builder) -> None:
    for seconds in (18.65, 19.2):
        run = synthetic(f"run{seconds}", seconds=seconds, passes=[(18.3, 0.02)])
        profile = profile_run(run.write(), window_s=2)
        assert profile.is_problem is False
        assert profile.windows[-1].end_s - profile.windows[-1].start_s >= 1


def test_two_passes_in_the_last_window_are_no_problem_and_a_row_of_them_is(synthetic: Builder) -> None:
    few = profile_run(synthetic("few", passes=[(105, 0.2), (115, 0.2)]).write(), window_s=20)
    assert few.is_problem is False
    many = profile_run(synthetic("many", passes=[(101 + 2 * i, 0.1) for i in range(8)]).write(), window_s=20)
    assert many.is_problem is True
    assert "to 4.0% in the last" in many.verdict
