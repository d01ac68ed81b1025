"""`atom trace-consensus report` as a person and a script use it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from atom.cli.consensus_tables import consensus_tables
from atom.cli.dispatch import main
from atom.cli.render import markdown, print_tables
from atom.diag.consensus.document import arms_of, consensus_document
from atom.diag.consensus.sources import find_recordings
from tests.unit.diag.consensus.traces import Pipeline, totals


@pytest.fixture
def arms(tmp_path: Path) -> Path:
    for mode in ("none", "blocking", "local-only", "async"):
        label = "control" if mode == "none" else mode
        for run in range(2):
            Pipeline([4, 4, 4, 8], mode, label).write(tmp_path / "run/arms" / label / f"run-{run}" / "trace")
    return tmp_path / "run"


def test_the_verdict_is_the_first_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = totals(tmp_path / "run", [4240, 3204, 2126, 0.082], 4807, 5e-6)
    assert main(["trace-consensus", "report", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PP agreement, entered last by rank 3; TP negligible\n")
    assert re.search(r"rank 0 +4,240\b", out)
    assert re.search(r"rank 3 +0 *\n", out)


def test_json_has_the_documented_keys(arms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace-consensus", "report", str(arms), "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["mode"] for one in document["arms"]] == ["none", "blocking", "local-only", "async"]
    for arm in document["arms"]:
        assert len(arm["wait_s"]) == len(arm["tp_wait_s"]) == len(arm["cpu_s"]) == 4
        assert arm["completed"] == arm["total"] == 80
        assert arm["censored"] is False
        assert {"requests_per_s", "pct_of_control", "divergences", "abandoned", "pending_sends"} <= set(arm)
        assert arm["released_before_commit"] == (80 if arm["mode"] == "local-only" else 0)
    assert len(document["late_arriver"]) == 4
    assert document["late_arriver"][0][3] == pytest.approx(0.64)
    assert document["verdict"]["group"] == "PP"
    assert document["verdict"]["late_rank"] == 3


def test_divergence_is_exit_status_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Pipeline([4, 8], "local-only", differing=(1,)).write(tmp_path)
    assert main(["trace-consensus", "report", str(path), "--quiet"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "diverged: local-only: 1 requests ended differently\n"


@pytest.mark.parametrize("arguments", [["/nowhere"], [], ["."]])
def test_wrong_usage(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace-consensus", "report", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_files_are_written(arms: Path, tmp_path: Path) -> None:
    timeline, table = tmp_path / "timeline.json", tmp_path / "table.md"
    command = ["trace-consensus", "report", str(arms), "--perfetto", str(timeline), "--markdown", str(table), "-q"]
    assert main(command) == 0
    assert json.loads(timeline.read_text())["metadata"]["arm"] == "blocking"
    assert "| rank 0 | 0.0001 | 0.64 | 0.0001 | 0.0001 |" in table.read_text()


def test_one_file_for_two_outputs(arms: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace-consensus", "report", str(arms), "--json", "-", "--perfetto", "-"]) == 2
    assert "both want standard output" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_tables_fit(arms: Path, width: int) -> None:
    tables = consensus_tables(consensus_document(arms_of(find_recordings([arms]))))
    out = io.StringIO()
    print_tables(tables, Console(file=out, width=width))
    assert max(map(cell_len, out.getvalue().splitlines())) <= width


def test_names_from_a_trace_are_no_markup(tmp_path: Path) -> None:
    path = Pipeline([4, 8], "async", "[red]<b>|`x`").write(tmp_path)
    text = markdown(consensus_tables(consensus_document(arms_of(find_recordings([path])))))
    assert "<b>" not in text
    assert "\\[red\\]" in text


def test_many_ranks(tmp_path: Path) -> None:
    path = totals(tmp_path, [float(64 - rank) for rank in range(64)], 100.0)
    tables = consensus_tables(consensus_document(arms_of(find_recordings([path]))))
    assert max(len(table.rows) for table in tables) <= 17
    assert any("48 more ranks" in note for table in tables for note in table.notes)


def test_what_a_trace_says_of_itself_moves_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    escape = "\x1b[31m\x07"
    scope = [{"dimension": escape, "qualified": escape, "value": escape}]
    facts = {"simulated": escape, "fell_back": escape, "scope": scope, "asked_mode": "async"}
    path = Pipeline([4, 8], "async", escape, facts=facts).write(tmp_path / "run")
    table = tmp_path / "table.md"
    assert main(["trace-consensus", "report", str(path), "--markdown", str(table)]) == 0
    for text in (capsys.readouterr().out, table.read_text()):
        assert "SIMULATED: " in text
        assert "\x1b" not in text
        assert "\x07" not in text


def test_safety_that_was_not_recorded_is_no_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = totals(tmp_path / "run", [50, 0.1], 100.0)
    assert main(["trace-consensus", "report", str(path), "--json", "-"]) == 0
    arm = json.loads(capsys.readouterr().out)["arms"][0]
    unknown = ("divergences", "incomplete", "same_order", "released_before_commit", "abandoned", "pending_sends")
    assert [arm[name] for name in unknown] == [None] * len(unknown)
    tables = consensus_tables(consensus_document(arms_of(find_recordings([path]))))
    safety = next(one for one in tables if one.title == "safety")
    assert safety.rows == [["blocking", *["–"] * len(unknown)]]


def test_what_ranks_say_of_early_releases_is_known_without_events(tmp_path: Path) -> None:
    path = totals(tmp_path / "run", [50, 0.1], 100.0, released_before_commit=0)
    arm = consensus_document(arms_of(find_recordings([path])))["arms"][0]
    assert (arm["released_before_commit"], arm["divergences"]) == (0, None)
