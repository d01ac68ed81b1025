"""The timeline: what its viewer needs to draw it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from atom.diag.consensus.perfetto import perfetto_trace
from atom.diag.consensus.sources import find_recordings
from tests.unit.diag.consensus.traces import Pipeline, Writer


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps(perfetto_trace(find_recordings([path])[0])))["traceEvents"]
    return found


def assert_nested(some: list[dict[str, Any]]) -> None:
    """On one lane, a slice ends before the one around it does."""
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for one in some:
        if one["ph"] == "X":
            lanes[one["pid"], one["tid"]].append((one["ts"], -one["dur"]))
    for slices in lanes.values():
        ends: list[float] = []
        for start, minus in sorted(slices):
            while ends and ends[-1] <= start + 1e-6:
                ends.pop()
            assert not ends or start - minus <= ends[-1] + 1e-6
            ends.append(start - minus)


@pytest.mark.parametrize("mode", ["blocking", "async", "local-only", "none"])
def test_any_mode(tmp_path: Path, mode: str) -> None:
    some = events(Pipeline([4, 4, 8], mode, requests=5).write(tmp_path))
    names = {one["args"]["name"] for one in some if one["name"] == "process_name"}
    assert names == {"rank 0, stage 0", "rank 1, stage 1", "rank 2, stage 2"}
    if mode != "local-only":  # whose marks may be at one time
        assert_nested([one for one in some if "vote" not in one["name"] and "commit" not in one["name"]])
    begun, ended = (sum(one["ph"] == phase for one in some) for phase in "be")
    assert begun == ended


def test_arrows_lead_over_the_coordinator(tmp_path: Path) -> None:
    some = events(Pipeline([4, 4, 8], "async", requests=5).write(tmp_path))
    arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for one in some:
        if one["ph"] in "stf":
            arrows[one["id"]][one["ph"]] = one
    assert len(arrows) == 15
    for arrow in arrows.values():
        assert arrow["s"]["pid"] == arrow["f"]["pid"]
        assert arrow["s"]["ts"] < arrow["f"]["ts"]
        assert ("t" in arrow) is (arrow["s"]["pid"] != 2)
        if "t" in arrow:
            assert arrow["t"]["pid"] == 2
    slices = {(one["pid"], one["tid"], one["ts"]) for one in some if one["ph"] == "X"}
    assert {(one["pid"], one["tid"], one["ts"]) for one in some if one["ph"] in "stf"} <= slices


def test_work_that_overlaps_is_cut(tmp_path: Path) -> None:
    writer = Writer(0, 1)
    writer.emit(0, "work_start", w="forward")
    writer.emit(5, "work_start", w="schedule")
    writer.emit(8, "work_end", w="forward")
    writer.emit(9, "work_end", w="schedule")
    assert_nested(events(writer.write(tmp_path, {}).parent))


def test_ranks_without_a_common_clock(tmp_path: Path) -> None:
    for rank in range(2):
        Writer(rank, 2, boot_id=f"host {rank}").write(tmp_path, {})
    trace = perfetto_trace(find_recordings([tmp_path])[0])
    assert "not shared" in trace["metadata"]["clocks"]
