"""When a run was measured, of runs that ended, were killed, or never began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.bench.rundir import RunDirectory
from atom.diag.measured_phase import MeasuredPhase

START, END = {"kind": "measured_start", "t_ns": 100}, {"kind": "measured_end", "t_ns": 900}


@pytest.mark.parametrize(
    ("noted", "lines", "expected"),
    [
        (100, [START, END], MeasuredPhase(100, 900, 900)),
        (90, [START, {"t_ns": 950}, END], MeasuredPhase(90, 900, 950)),
        (None, [START, {"t_ns": 500}], MeasuredPhase(100, None, 500)),
        (100, [], MeasuredPhase(100, None, None)),
        (None, [{"kind": "measured_end"}, {"kind": "measured_start", "t_ns": "x"}], MeasuredPhase(None, None, None)),
    ],
)
def test_start_end_and_last_sign(tmp_path: Path, noted: int | None, lines: list[Any], expected: MeasuredPhase) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema_version": "1.0", "measured_start_ns": noted}))
    (tmp_path / "client").mkdir()
    (tmp_path / "client/0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    (tmp_path / "client/1.jsonl").mkdir()
    assert MeasuredPhase.read(RunDirectory.open(tmp_path)) == expected
