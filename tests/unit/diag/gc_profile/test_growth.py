"""Growth verdicts of whole runs: what leaks is said to, what does not is not, and too little says nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from atom.bench.rundir import RunDirectory
from atom.diag.gc_profile.evidence import read_evidence
from atom.diag.gc_profile.growth import find_growth, warm_up_s
from atom.diag.gc_profile.model import Growth, GrowthVerdict

Builder = Callable[..., Any]


def judge(run: Any, seed: int = 0) -> Mapping[str, Growth]:
    return find_growth(read_evidence(RunDirectory.open(run.write())), seed=seed)


def growing(growth: Mapping[str, Growth]) -> set[str]:
    return {name for name, one in growth.items() if one.verdict is GrowthVerdict.GROWS}


def test_twenty_clean_runs_give_at_most_one_verdict_of_growth(synthetic: Builder) -> None:
    """Scrapes and pauses are noisy, memory moves by a step of the allocator, passes come at random."""
    verdicts = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        step, at, wave = rng.uniform(0, 4), rng.uniform(0, 90), rng.uniform(5, 30)
        passes = [(float(start), float(rng.lognormal(-4, 0.5))) for start in np.sort(rng.uniform(0, 89, 14))]
        run = synthetic(
            f"clean-{seed}",
            seed=seed,
            seconds=90,
            requests_per_s=3,
            chunks=1,
            passes=passes,
            stalls=[(start, 0.3) for start in rng.uniform(0, 89, 5)],
            scrape_ms=lambda t, rng=rng, wave=wave: (6 + 2 * np.sin(t / wave)) * rng.lognormal(0, 0.3),
            rss_mb=lambda t, step=step, at=at: 100 + step * (t > at),
        )
        verdicts += sorted(growing(judge(run, seed)))
    assert len(verdicts) <= 1, verdicts


def test_what_leaks_grows(synthetic: Builder) -> None:
    run = synthetic(
        passes=[(0.5 + i, 0.02 + 0.001 * i) for i in range(119)],
        scrape_ms=lambda t: 20 + t,
        series=lambda t: 500 + 20 * t,
        rss_mb=lambda t: 100 + 0.5 * t,
    )
    growth = judge(run)
    wanted = {"gen2_pause_ms", "gen2_share", "metrics_ms", "metrics_series", "metrics_body_bytes", "rss_mb"}
    assert growing(growth) == wanted
    assert growth["rss_mb"].per == "1,000 requests"
    assert growth["rss_mb"].slope == pytest.approx(50, rel=0.02)  # 0.5 MB a second, 10 requests a second
    assert growth["rss_mb"].first == pytest.approx(114, rel=0.02)  # the middle of 20 to 36.7 s
    assert growth["rss_mb"].last == pytest.approx(156, rel=0.02)
    assert growth["metrics_series"].slope == pytest.approx(2000, rel=0.02)
    assert growth["threads"].verdict is GrowthVerdict.FLAT


def test_too_small_a_rise_is_flat(synthetic: Builder) -> None:
    growth = judge(synthetic(rss_mb=lambda t: 100 + 0.004 * t, series=lambda t: 500 + t / 20))
    assert not growing(growth)
    assert growth["rss_mb"].reason == "rises, but by less than 1%"
    assert growth["metrics_series"].reason == "rises, but by less than 5 series and 10 series per 1,000 requests"


def test_a_step_is_no_growth(synthetic: Builder) -> None:
    growth = judge(synthetic(rss_mb=lambda t: 100 + 40 * (t > 75) + 20 * (t > 60)))
    assert growth["rss_mb"].verdict is GrowthVerdict.FLAT
    assert growth["rss_mb"].reason.startswith(("rises, but not steadily: ", "no rise"))


def test_probes_that_wait_longer_and_longer_grow(synthetic: Builder) -> None:
    """Few of ten a second wait, and the mean stays below 5 ms."""
    run = synthetic(stalls=[(i + 0.03, 0.01 + 0.0009 * i) for i in range(118)])
    growth = judge(run)["health_ms"]
    assert growth.verdict is GrowthVerdict.GROWS
    assert growth.last is not None
    assert growth.last < 10


def test_what_was_seen_at_both_ends_is_no_fitted_line(synthetic: Builder) -> None:
    """A line through a share that accelerates begins below zero."""
    passes = [(0.5 + i, 0.3 * (i / 118) ** 4) for i in range(118)]
    growth = judge(synthetic(passes=passes))["gen2_share"]
    assert growth.verdict is GrowthVerdict.GROWS
    assert growth.first is not None
    assert 0 <= growth.first < 0.01
    assert growth.last == pytest.approx(sum(pause for start, pause in passes if start > 103.3) / 16.7, rel=0.05)


def test_what_rises_in_the_warm_up_only_is_flat(synthetic: Builder) -> None:
    assert warm_up_s(1740) == 290
    assert warm_up_s(120) == 20
    assert warm_up_s(30) == 10
    growth = judge(synthetic(rss_mb=lambda t: 100 + min(t, 19), series=lambda t: 500 + min(t, 19)))
    assert not growing(growth)


def test_too_little_says_nothing_and_why(synthetic: Builder) -> None:
    growth = judge(synthetic(seconds=12, passes=[(8, 0.1)], with_health=False))
    reasons = {name: one.reason for name, one in growth.items() if one.verdict is GrowthVerdict.NOT_ENOUGH_DATA}
    assert reasons["gen2_pause_ms"] == "1 pass after the first 4 s (warm-up), 6 needed"
    assert reasons["gen2_share"] == "8 seconds after the first 4 s (warm-up), 16 needed"
    assert reasons["health_ms"] == "no probe was recorded"
    assert reasons["rss_mb"] == "8 samples after the first 4 s (warm-up), 16 needed"
    few = judge(synthetic("few", seconds=100, requests_per_s=0.3))
    assert few["rss_mb"].reason.endswith("requests completed meanwhile, 50 needed")


def test_without_requests_the_slope_is_per_minute_or_by_the_servers_count(synthetic: Builder) -> None:
    run = synthetic(with_requests=False, rss_mb=lambda t: 100 + 0.5 * t)
    growth = judge(run)
    assert (growth["rss_mb"].verdict, growth["rss_mb"].per) == (GrowthVerdict.GROWS, "minute")
    assert growth["rss_mb"].slope == pytest.approx(30, rel=0.02)
    scrapes = [
        {"sent_ns": run.ns(moment), "latency_ns": 1, "values": {"requests_finished": 70 + 20.0 * moment}, "error": None}
        for moment in range(120)
    ]
    run.lines("server/metrics-api.jsonl", scrapes)
    counted = find_growth(read_evidence(RunDirectory.open(run.directory)))["rss_mb"]
    assert counted.per == "1,000 requests"
    assert counted.slope == pytest.approx(25, rel=0.02)


def test_the_same_seed_gives_the_same_verdicts(synthetic: Builder) -> None:
    run = synthetic(seconds=60)
    assert judge(run, 4) == judge(run, 4)


def test_flat_says_whether_a_rise_is_excluded(synthetic: Builder) -> None:
    """Calm scrapes exclude a rise; wild ones show none and exclude none."""
    rng = np.random.default_rng(7)
    calm = judge(synthetic("calm", scrape_ms=lambda t: 20 + rng.normal(0, 0.2)))["metrics_ms"]
    wild = judge(synthetic("wild", seconds=40, scrape_ms=lambda t: 20 * rng.lognormal(0, 1.0)))["metrics_ms"]
    assert (calm.verdict, calm.excludes_rise) == (GrowthVerdict.FLAT, True)
    assert (wild.verdict, wild.excludes_rise) == (GrowthVerdict.FLAT, False)
    assert "has room" in wild.reason
