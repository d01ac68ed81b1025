"""What is said of endpoints that were to be scraped: nothing where all is well, a sentence and its cause where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import RunDirectory
from atom.cli.render import bench_tables
from atom.cli.server_side import summed_up
from atom.diag.metrics_notes import metrics_notes
from atom.diag.metrics_scraper import CUT

S = 1_000_000_000


def scrapes(path: Path, *lines: dict[str, Any]) -> None:
    good = {"latency_ns": 10, "series": 3, "values": {"running": 1.0}, "error": None}
    path.write_text("".join(json.dumps({"sent_ns": i * S + 1, **good, **line}) + "\n" for i, line in enumerate(lines)))


def refused(count: int = 1) -> list[dict[str, Any]]:
    return [{"latency_ns": None, "series": None, "error": "connection refused"}] * count


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        ([{}] * 4, None),
        (refused(4), "metrics of x: no metrics in 4 scrapes (connection refused)"),
        ([{}, *refused(), {}], "metrics of x: 1 of 3 scrapes failed (connection refused)"),
        ([{}, {"latency_ns": None, "series": None, "error": CUT}], None),
        ([{"series": 0, "values": {"running": None}}] * 2, "metrics of x: no series in 2 scrapes: "),
        (
            [{"series": 7, "values": {"running": None}}] * 2,
            "metrics of x: 7 series in its last scrape, none with a name",
        ),
        ([{"sent_ns": 99 * S}], "metrics of x: not scraped in the measured phase"),
    ],
)
def test_one_endpoint(tmp_path: Path, lines: list[dict[str, Any]], note: str | None) -> None:
    scrapes(tmp_path / "metrics-x.jsonl", *lines)
    notes = metrics_notes(tmp_path, 0, 20 * S)
    assert [one.startswith(note) for one in notes] == [True] if note else notes == []


def test_the_loaded_server_is_spoken_of_where_it_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics-api.jsonl"
    assert metrics_notes(tmp_path, 0, S) == [], "a server without metrics"
    scrapes(path, {"series": 7, "values": {}})
    assert metrics_notes(tmp_path, 0, S) == []
    scrapes(path, *refused(2))
    assert metrics_notes(tmp_path, 0, 2 * S) == ["metrics of api: no metrics in 2 scrapes (connection refused)"]


def test_below_the_table_and_in_the_summary(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.write_run_json({"load": {"name": "random"}, "measured_start_ns": 0})
    with run_dir.requests_writer() as writer:
        record = RequestRecord(index=0, outcome=Outcome.COMPLETED, sent_ns=0, first_ns=S, last_ns=S, end_ns=5 * S)
        writer.append_line(record.to_line())
    with run_dir.client_writer() as client:
        client.append({"kind": "measured_start", "t_ns": 0, "start_ns": 0})
        client.append({"kind": "measured_end", "t_ns": 5 * S, "sent": 1, "running_integral_ns": 5 * S})
    scrapes(run_dir.server / "metrics-dead.jsonl", *refused(5))
    summary = summed_up(run_dir)
    note = "metrics of dead: no metrics in 5 scrapes (connection refused)"
    assert note in summary["notes"]
    assert note in bench_tables(summary)[-1].notes
