"""The observed span in windows: borders, what counts where, and runs that ended too soon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atom.diag.gc_profile.profile import profile_run
from atom.diag.gc_profile.windows import default_window_s, edges_s
from atom.recipes.errors import UsageError

Builder = Callable[..., Any]


def test_forced_collections_of_known_length_are_reported_exactly(synthetic: Builder) -> None:
    lengths = np.random.default_rng(3).uniform(0.001, 0.3, 100)
    passes = [(1 + 1.1 * i, float(length)) for i, length in enumerate(lengths)]
    profile = profile_run(synthetic(passes=passes).write())
    totals = profile.totals
    assert totals.gen2_passes == 100
    assert totals.gen2_seconds == pytest.approx(lengths.sum(), rel=1e-6)
    assert totals.gen2_share == pytest.approx(lengths.sum() / 120, rel=1e-6)
    assert totals.gen2_mean_pause_ms == pytest.approx(lengths.mean() * 1e3, rel=1e-6)
    assert totals.gen2_max_pause_ms == pytest.approx(lengths.max() * 1e3, rel=1e-6)
    assert sum(window.gen2_passes or 0 for window in profile.windows) == 100
    in_windows = sum((window.gen2_share or 0) * (window.end_s - window.start_s) for window in profile.windows)
    assert in_windows == pytest.approx(lengths.sum(), rel=1e-6)


def test_a_pass_across_a_border_counts_by_its_parts(synthetic: Builder) -> None:
    profile = profile_run(synthetic(passes=[(29.0, 4.0)]).write(), window_s=30)
    shares = [window.gen2_share for window in profile.windows]
    assert shares == pytest.approx([1 / 30, 3 / 30, 0, 0])
    assert [window.gen2_passes for window in profile.windows] == [1, 0, 0, 0]


def test_requests_count_where_they_end(synthetic: Builder) -> None:
    profile = profile_run(synthetic().write(), window_s=60)
    assert profile.totals.requests == sum(window.requests or 0 for window in profile.windows)
    assert profile.windows[0].requests_per_s == pytest.approx(10, rel=0.02)
    assert profile.windows[1].ttft_mean_ms == pytest.approx(102, rel=0.02)
    assert profile.windows[1].itl_p50_ms == pytest.approx(20.4, rel=0.05)
    assert profile.windows[1].prompt_tok_per_s == pytest.approx(1000, rel=0.02)
    assert profile.windows[1].output_tok_per_s == pytest.approx(60, rel=0.02)
    assert profile.windows[1].health_p50_ms == pytest.approx(1.35, rel=0.1)
    assert profile.windows[1].api_cpu == pytest.approx(0.1)


@pytest.mark.parametrize(("duration", "window"), [(29 * 60, 300), (443, 60), (240, 30), (20, 5), (1800, 300), (3, 1)])
def test_the_default_window_is_one_that_people_use(duration: float, window: float) -> None:
    assert default_window_s(duration) == window


def test_borders() -> None:
    assert edges_s(120, 60) == [0, 60, 120]
    assert edges_s(130, 60) == [0, 60, 130]  # 10 s are no window of their own
    assert edges_s(150, 60) == [0, 60, 120, 150]
    assert edges_s(18.65, 2)[-2:] == [16, 18.65]  # nor is a rest of 0.65 s where 2 s were asked for
    assert edges_s(10, 60) == [0, 10]
    with pytest.raises(UsageError, match="--window"):
        edges_s(1e6, 0.1)


@pytest.mark.parametrize("window", [0, -1, float("nan"), float("inf")])
def test_a_window_has_a_length(synthetic: Builder, window: float) -> None:
    with pytest.raises(UsageError, match="--window"):
        profile_run(synthetic(seconds=5).write(), window_s=window)


def test_a_killed_run_ends_with_its_last_sign_of_life(synthetic: Builder) -> None:
    profile = profile_run(synthetic(seconds=60, ended=False, passes=[(30, 0.5)]).write())
    assert profile.totals.duration_s == pytest.approx(60, abs=1.1)
    assert profile.totals.gen2_seconds == pytest.approx(0.5)
    assert profile.validity is None
    assert any("did not come to its end" in note for note in profile.notes)


def test_a_server_that_died_leaves_null_afterwards(synthetic: Builder) -> None:
    run = synthetic(seconds=60, passes=[(10, 0.5)])
    directory = run.write()
    run.lines("client/0.jsonl", [{"kind": "measured_end", "t_ns": run.ns(120)}])
    profile = profile_run(directory, window_s=30)
    assert [window.gen2_share is None for window in profile.windows] == [False, False, True, True]
    assert profile.windows[3].rss_mb is None
    assert profile.windows[3].requests == 0


def test_without_requests_rates_come_from_the_servers_counters(synthetic: Builder) -> None:
    run = synthetic(seconds=60, with_requests=False)
    directory = run.write()
    scrapes = [
        {
            "sent_ns": run.ns(moment),
            "latency_ns": 5_000_000,
            "values": {"prompt_tokens": 70.0 * moment, "generation_tokens": 9.0 * moment, "requests_finished": moment},
            "error": None,
        }
        for moment in range(60)
    ]
    run.lines("server/metrics-api.jsonl", scrapes)
    profile = profile_run(directory)
    assert profile.windows[2].prompt_tok_per_s == pytest.approx(70)
    assert profile.windows[2].output_tok_per_s == pytest.approx(9)
    assert profile.windows[2].requests is None
    assert profile.attribution.first_tokens is None
    assert "no request" in profile.attribution.note


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run directory"):
        profile_run(tmp_path)
