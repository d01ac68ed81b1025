"""Figures of a window: what is in it, what is not, and null where nothing was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.diag.server_captures import MEGABYTE
from atom.diag.server_figures import ServerFigure, server_figures, server_self_checks

SECOND = 1_000_000_000
START, END = 100 * SECOND, 110 * SECOND


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def hook(pid: int = 1, role: str = "api", collector: str = "generational") -> dict[str, Any]:
    return {
        "type": "hook",
        "schema_version": "1.0",
        "pid": pid,
        "role": role,
        "command": "x",
        "installed_ns": SECOND,
        "collector": collector,
        "old_generations": [2],
        "thresholds": [700, 10, 10],
    }


def one_pass(start: float, seconds: float) -> dict[str, Any]:
    begin = int(start * SECOND)
    stop = begin + int(seconds * SECOND)
    return {"type": "pass", "start_ns": begin, "stop_ns": stop, "generation": 2, "collected": 0, "uncollectable": 0}


def totals(at: float, passes: int = 0) -> dict[str, Any]:
    return {
        "type": "totals",
        "t_ns": int(at * SECOND),
        "recorded": passes,
        "dropped": 0,
        "old_passes": passes,
        "old_ns": 0,
    }


def figures(folder: Path) -> dict[str, ServerFigure]:
    found = server_figures(folder, START, END)
    assert all(figure.definition and figure.unit for figure in found)
    return {figure.key: figure for figure in found}


def test_nothing_seen_is_null_never_zero(tmp_path: Path) -> None:
    assert {figure.value for figure in figures(tmp_path).values()} == {None}
    assert {figure.n for figure in figures(tmp_path).values()} == {0}


def test_an_observed_process_without_a_pass_has_a_share_of_zero(tmp_path: Path) -> None:
    write(tmp_path / "gc-api-1.jsonl", hook(), totals(109))
    found = figures(tmp_path)
    assert found["gen2_share"].value == 0.0
    assert found["gen2_mean_pause_ms"].value is None


def test_passes_are_clipped_to_the_window(tmp_path: Path) -> None:
    write(
        tmp_path / "gc-api-1.jsonl",
        hook(),
        one_pass(90, 1),
        one_pass(99, 2),  # one second of it is inside
        one_pass(105, 0.5),
        one_pass(109.5, 1),  # half of it is inside
        one_pass(111, 1),
        totals(112),
    )
    write(tmp_path / "gc-core-2.jsonl", hook(2, "core"), one_pass(101, 5), totals(112))
    found = figures(tmp_path)
    assert found["gen2_share"].value == pytest.approx((1 + 0.5 + 0.5) / 10)
    assert found["gen2_share"].n == 3
    assert found["gen2_mean_pause_ms"].value == pytest.approx(750)
    assert found["gen2_mean_pause_ms"].n == 2


def test_a_record_that_ends_before_the_window_says_nothing_about_it(tmp_path: Path) -> None:
    write(tmp_path / "gc-api-1.jsonl", hook(), one_pass(90, 1), totals(95))
    assert figures(tmp_path)["gen2_share"].value is None


def test_the_collector_is_named(tmp_path: Path) -> None:
    write(tmp_path / "gc-api-1.jsonl", hook(collector="incremental"), totals(109))
    assert "increments" in figures(tmp_path)["gen2_share"].definition


def scrape(at: float, ms: float | None, **fields: Any) -> dict[str, Any]:
    latency = None if ms is None else int(ms * 1e6)
    return {"sent_ns": int(at * SECOND), "latency_ns": latency, "error": None, "body_bytes": 10, "series": 3} | fields


def test_scrapes(tmp_path: Path) -> None:
    write(
        tmp_path / "metrics-api.jsonl",
        scrape(99, 1000),
        scrape(101, 4, values={"running": 2.0}),
        scrape(102, 6, values={"running": 4.0}),
        scrape(103, 8, body_bytes=30, series=5, values={"running": None}),
        scrape(104, None, error="connection refused", body_bytes=None, series=None, values={"running": None}),
        scrape(110, 1000),
    )
    found = figures(tmp_path)
    assert found["metrics_p50_ms"].value == 6
    assert found["metrics_p50_ms"].n == 3
    assert "1 of 4 scrapes failed" in found["metrics_p50_ms"].definition
    assert found["metrics_body_bytes"].value == 30
    assert found["metrics_series"].value == 5
    assert found["running_requests_mean"].value == 3


def sample(at: float, pid: int, role: str, megabytes: int, cpu_s: float) -> dict[str, Any]:
    return {"t_ns": int(at * SECOND), "pid": pid, "role": role, "rss_bytes": megabytes * MEGABYTE, "cpu_s": cpu_s}


def test_processes(tmp_path: Path) -> None:
    write(
        tmp_path / "process.jsonl",
        sample(101, 1, "api", 100, 1.0),
        sample(101, 2, "api", 50, 2.0),
        sample(101, 3, "core", 999, 9.0),
        sample(109, 1, "api", 200, 5.0),
        sample(109, 2, "api", 60, 6.0),
        sample(111, 1, "api", 999, 9.0),
    )
    found = figures(tmp_path)
    assert found["rss_mb"].value == 200  # of two API processes the busiest, here in CPU time; the lower pid of equals
    assert found["rss_mb"].n == 2
    assert found["api_cpu"].value == pytest.approx(0.5)


def test_of_several_api_processes_the_busiest_counts(tmp_path: Path) -> None:
    write(tmp_path / "gc-api-1.jsonl", hook(1), one_pass(101, 0.5), totals(112))
    write(tmp_path / "gc-api-2.jsonl", hook(2), one_pass(101, 2), totals(112))
    write(tmp_path / "process.jsonl", sample(101, 1, "api", 100, 1.0), sample(109, 2, "api", 50, 2.0))
    found = figures(tmp_path)
    assert found["gen2_share"].value == pytest.approx(0.2)
    assert found["rss_mb"].value == 50


def test_self_checks_name_the_process(tmp_path: Path) -> None:
    write(tmp_path / "gc-api-1.jsonl", hook(), one_pass(101, 1), totals(109, passes=2))
    assert "pid 1 (api)" in server_self_checks(tmp_path)[0]
