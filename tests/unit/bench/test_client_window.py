"""Several workers in one summary: each judged by itself, all of them together the run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atom.bench.client_window import read_client_window
from atom.bench.metrics import Figure
from atom.bench.rundir import RunDirectory
from atom.bench.summary import summarize
from atom.bench.validity import Client, _saturation

FIGURES = {name: Figure(20.0, "ms", 100, "x") for name in ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")}


def worker(name: str, cpu: float = 0.1, lag: float = 0.0, late: float = 0.0) -> Client:
    return Client(cpu_share=cpu, lag_ms=[lag] * 100, send_lag_ms=[late] * 100, worker=name)


def test_one_saturated_worker_of_eight_is_named_and_not_averaged_away() -> None:
    client = Client.merged([*(worker(str(n)) for n in range(7)), worker("7", cpu=0.97)])
    assert client.cpu_share == 0.97
    assert _saturation(client, FIGURES) == ["client saturated: worker 7's event loop used 97% of a CPU"]


@pytest.mark.parametrize(("lag", "late"), [(30.0, 0.0), (0.0, 30.0)])
def test_late_worker_is_named_though_most_are_on_time(lag: float, late: float) -> None:
    client = Client.merged([*(worker(str(n)) for n in range(199)), worker("199", lag=lag, late=late)])
    reasons = _saturation(client, FIGURES)
    assert len(reasons) == 2  # at the median and at p99
    assert all("worker 199's" in reason for reason in reasons)


def test_the_worst_of_several_stands_for_them() -> None:
    client = Client.merged([worker("0", cpu=0.92), worker("1", cpu=0.99), worker("2")])
    (reason,) = _saturation(client, FIGURES)
    assert reason == "client saturated: worker 1's event loop used 99% of a CPU (the worst of 2 such workers)"


def test_a_single_process_has_no_name() -> None:
    client = Client.merged([worker("0", cpu=0.95)])
    assert _saturation(client, FIGURES) == ["client saturated: its event loop used 95% of a CPU"]
    assert client.each() == []


def client_lines(run_dir: RunDirectory, name: str, start: int, end: int | None, **more: Any) -> None:
    window = {"t_ns": start + 100, "start_ns": start, "phase": "measured", "cpu_share": 0.5, "lag_ms": [1.0]}
    with run_dir.client_writer(name) as writer:
        writer.append({"kind": "measured_start", "t_ns": start + 3, "start_ns": start})
        writer.append({"kind": "window", **window})
        if end is not None:
            counts = {"started": 2, "sent": 2, "running_integral_ns": 10, "interrupted": False, **more}
            writer.append({"kind": "measured_end", "t_ns": end, **counts})


def test_a_worker_that_ends_at_once_is_not_busy(tmp_path: Path) -> None:
    """A quarter of a millisecond of start and end is all CPU, and says nothing about the load."""
    run_dir = RunDirectory(tmp_path)
    run_dir.write_run_json({"load": {"workers": 2}})
    for name, lasted in (("0", 2_000_000_000), ("1", 250_000)):
        with run_dir.client_writer(name) as writer:
            writer.append({"kind": "measured_start", "t_ns": 0, "start_ns": 0})
            window = {"t_ns": lasted, "start_ns": 0, "phase": "measured", "cpu_share": 1.0 if name == "1" else 0.2}
            writer.append({"kind": "window", **window, "lag_ms": []})
            counts = {"started": 0, "sent": 0, "running_integral_ns": 0, "interrupted": False}
            writer.append({"kind": "measured_end", "t_ns": lasted, **counts})
    both = read_client_window(run_dir, run_dir.read_run_json(), Counter())
    assert [worker.cpu_share for worker in both.workers.values()] == [pytest.approx(0.2), None]
    assert not [reason for reason in summarize(run_dir)["reasons"] if "saturated" in reason]


def window_of(run_dir: RunDirectory) -> Any:
    return read_client_window(run_dir, run_dir.read_run_json(), Counter())


def test_unequal_ends_are_one_phase(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.write_run_json({"load": {"workers": 2}})
    client_lines(run_dir, "0", 1000, 5000)
    client_lines(run_dir, "1", 1000, 9000, interrupted=True)
    window = window_of(run_dir)
    assert (window.start_ns, window.end_ns, window.ended, window.interrupted) == (1000, 9000, True, True)
    assert (window.started, window.sent, window.busy_ns) == (4, 4, 20)


def test_a_worker_without_an_end_leaves_the_whole_without_one(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.write_run_json({"load": {"workers": 2}})
    client_lines(run_dir, "0", 1000, 5000)
    client_lines(run_dir, "1", 1000, None)
    window = window_of(run_dir)
    assert (window.ended, window.started, window.busy_ns, window.end_ns) == (False, None, None, 5000)
    assert summarize(run_dir)["validity"] == "interrupted"


def test_a_worker_whose_file_is_missing_makes_a_valid_run_not_valid(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    run_dir.write_run_json({"load": {"workers": 3}})
    for name in ("0", "2"):
        client_lines(run_dir, name, 1000, 5000, started=0, sent=0, running_integral_ns=0)
    run_dir.seal("valid")
    summary = summarize(run_dir)
    assert summary["validity"] == "not valid"
    assert "client/*.jsonl is missing or incomplete: how the run ended is not known" in summary["reasons"]


def test_workers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    for name in ("10", "9", "x"):
        client_lines(run_dir, name, 1000, 5000)
    assert list(window_of(run_dir).workers) == ["9", "10", "x"]
