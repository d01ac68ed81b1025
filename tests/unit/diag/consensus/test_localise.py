"""The verdict, over runs whose fault is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atom.diag.consensus.document import arms_of, consensus_document
from atom.diag.consensus.sources import find_recordings
from tests.unit.diag.consensus.traces import Pipeline, Writer, totals


def verdict(*paths: Path) -> dict[str, Any]:
    document = consensus_document(arms_of(find_recordings(list(paths))))
    found: dict[str, Any] = document["verdict"]
    return found


def arms(place: Path, stages: Sequence[float], *modes: str, slow: Sequence[float] | None = None) -> Path:
    """Arms under one model; with `slow` all but the control have these stages."""
    for mode in modes:
        label = "control" if mode == "none" else mode
        times = stages if mode == "none" or slow is None else slow
        for run in range(2):
            Pipeline(times, mode, label).write(place / "arms" / label / f"run-{run}" / "trace")
    return place


def test_the_documents_numbers(tmp_path: Path) -> None:
    found = verdict(totals(tmp_path / "run", [4240, 3204, 2126, 0.082], 4807, 5e-6))
    assert found["sentence"] == "PP agreement, entered last by rank 3; TP negligible"
    assert (found["group"], found["late_rank"]) == ("PP", 3)


@pytest.mark.parametrize("wall_s", [0.0, 100.0, 5400.0, 80_000.0])
def test_the_documents_numbers_in_a_run_of_any_length(tmp_path: Path, wall_s: float) -> None:
    assert verdict(totals(tmp_path / "run", [4240, 3204, 2126, 0.082], wall_s))["group"] == "PP"


def test_a_bypass_shows_what_removing_it_recovers(tmp_path: Path) -> None:
    found = verdict(arms(tmp_path, [4, 4, 4, 8], "none", "blocking", "local-only", "async"))
    assert found["sentence"].startswith("PP agreement, entered last by rank 3; TP negligible; throughput is 4")
    assert "removing it recovers 100.0% of control; the asynchronous agreement keeps" in found["sentence"]
    assert "forward" in found["details"][0]


def test_a_slow_forward_under_an_agreement_that_waits_for_nobody(tmp_path: Path) -> None:
    found = verdict(arms(tmp_path, [4, 4, 4, 4], "none", "async", slow=[4, 12, 4, 4]))
    assert found["sentence"] == "the wait is not here: first inflated interval is context forward on rank 1"
    assert found["group"] is None
    assert found["inflated"]["rank"] == 1
    assert found["inflated"]["factor"] == pytest.approx(3.0)


def test_a_slow_forward_without_a_control(tmp_path: Path) -> None:
    found = verdict(Pipeline([4, 12, 4, 4], "async").write(tmp_path / "run"))
    assert found["sentence"] == "the wait is not here: first interval that stands out is context forward on rank 1"


def test_a_wait_that_is_the_symptom_of_a_slow_forward(tmp_path: Path) -> None:
    """The ranks do wait, and for the slow one; without a bypass the growth against the control decides."""
    place = arms(tmp_path, [1, 1, 1, 1], "none", "blocking", slow=[1, 1, 40, 1])
    found = verdict(place)
    assert found["sentence"].startswith("the wait is not here: first inflated interval is context forward on rank 2")
    assert found["group"] is None


def test_a_wait_and_a_slow_forward(tmp_path: Path) -> None:
    """Without a bypass, and with a pipeline whose offsets explain most of the wait, both are named."""
    found = verdict(arms(tmp_path, [20, 20, 20, 20], "none", "blocking", slow=[20, 20, 30, 20]))
    assert found["sentence"].startswith("PP agreement, entered last by rank 3")
    assert found["sentence"].endswith("besides, context forward on rank 2 takes 1.5 times as long as in control")


def test_shards_of_the_last_stage(tmp_path: Path) -> None:
    """Two pipelines, of shards 0 and 1, whose ranks 2 and 3 come last."""
    for rank in range(4):
        writer = Writer(rank, 4, tp=2)
        for number in range(20):
            writer.emit(100 * number + 40 * (rank // 2), "agree_enter", g="pp", k="outcome", q=number)
            writer.emit(100 * number + 40, "agree_exit", g="pp", k="outcome", q=number, n=0, d=0)
        writer.write(tmp_path, {"wall_s": 2.0, "wait_s": {"tp": 0.0001}})
    assert verdict(tmp_path)["sentence"] == "PP agreement, entered last by stage 1 (ranks 2 and 3); TP negligible"


def test_a_bypass_that_recovers_nothing_acquits_the_agreement(tmp_path: Path) -> None:
    found = verdict(arms(tmp_path, [4, 4, 4, 4], "none", "blocking", "local-only", slow=[4, 4, 40, 4]))
    assert "the wait is not here" in found["sentence"]
    assert found["inflated"]["rank"] == 2


def test_a_transfer_that_grew(tmp_path: Path) -> None:
    Pipeline([4, 4], "none", "control").write(tmp_path / "arms/control/run-0/trace")
    Pipeline([4, 4], "async", transfer_ms=30).write(tmp_path / "arms/async/run-0/trace")
    assert verdict(tmp_path)["sentence"].endswith("first inflated interval is transfer on rank 0")


def test_nothing_is_wrong(tmp_path: Path) -> None:
    found = verdict(arms(tmp_path, [4, 4, 4, 4], "none", "async"))
    assert found["sentence"].startswith("the wait is not here: no rank waits for a late one")
    assert found["rule"] == "nothing"


def test_the_tensor_group_can_be_the_place(tmp_path: Path) -> None:
    for rank, (pp, tp) in enumerate(((0.001, 50.0), (0.001, 0.01), (0.001, 48.0), (0.001, 0.01))):
        end = {"wall_s": 100.0, "wait_s": {"pp": pp, "tp": tp}}
        Writer(rank, 4, tp=2).write(tmp_path, end)
    found = verdict(tmp_path)
    assert found["sentence"].startswith("TP agreement, entered last by rank ")
    assert "PP negligible" in found["sentence"]


def test_late_ranks_that_take_turns(tmp_path: Path) -> None:
    writers = [Writer(rank, 3) for rank in range(3)]
    for number in range(30):
        at = number * 100
        for writer in writers:
            late = number % 3 == writer.rank
            writer.emit(at + (50 if late else 0), "agree_enter", g="pp", k="outcome", q=number)
            writer.emit(at + 50, "agree_exit", g="pp", k="outcome", q=number, n=0, d=0)
    for writer in writers:
        writer.write(tmp_path, {"wall_s": 3.0})
    assert "entered last by one rank after the other" in verdict(tmp_path)["sentence"]


def test_calls_that_cost_without_a_late_rank(tmp_path: Path) -> None:
    for rank in range(2):
        Writer(rank, 2, "async", "async").write(tmp_path, {"wall_s": 10.0, "wait_s": {"pp": 3.0 - rank}})
    found = verdict(tmp_path)
    assert (
        found["sentence"] == "PP agreement waits for no late rank, but publish and poll cost rank 0 30.0% of its time"
    )


@pytest.mark.parametrize("end", [None, {"error": "request 3 is open for over 60 s"}], ids=["killed", "failed"])
def test_ranks_that_hang_in_a_call(tmp_path: Path, end: dict[str, Any] | None) -> None:
    for rank in range(4):
        writer = Writer(rank, 4)
        for number in range(3):
            writer.emit(number * 10 + rank, "agree_enter", g="pp", k="outcome", q=number)
            writer.emit(number * 10 + 5, "agree_exit", g="pp", k="outcome", q=number, n=0, d=0)
        if rank != 2:
            writer.emit(40, "agree_enter", g="pp", k="outcome", q=3)
        writer.write(tmp_path, None if rank == 2 else end)
    found = verdict(tmp_path)
    assert found["sentence"] == "ranks 0, 1 and 3 are in PP agreement call 3 (outcome), which rank 2 never entered"
    assert found["late_rank"] == 2


def test_nothing_but_a_control(tmp_path: Path) -> None:
    found = verdict(Pipeline([4, 4], "none", "control").write(tmp_path))
    assert found["details"] == ["nothing is agreed on in this arm"]


@pytest.mark.parametrize("wall_s", [0.0, 4807.0])
def test_the_late_rank_has_no_trace(tmp_path: Path, wall_s: float) -> None:
    place = totals(tmp_path / "run", [4240, 3204, 2126, 0.082], wall_s, 5e-6)
    (place / "rank-3.jsonl").unlink()
    found = verdict(place)
    assert found["sentence"].startswith("PP agreement, but the late rank is not among the traces (rank 3 has none)")
    assert (found["rule"], found["group"], found["late_rank"]) == ("absent", "PP", None)


@pytest.mark.parametrize(
    ("gone", "rule"), [((3,), "absent"), ((2, 3), "absent"), ((0,), "agreement"), ((1, 2), "agreement")]
)
def test_calls_of_which_ranks_have_no_trace(tmp_path: Path, gone: Sequence[int], rule: str) -> None:
    place = Pipeline([4, 4, 4, 8]).write(tmp_path / "run")
    for rank in gone:
        (place / f"rank-{rank}.jsonl").unlink()
    found = verdict(place)
    assert (found["rule"], found["late_rank"]) == (rule, 3 if rule == "agreement" else None)


def test_ranks_that_waited_alike_for_one_without_a_trace(tmp_path: Path) -> None:
    place = totals(tmp_path / "run", [50.0, 50.0, 0.0], 100.0)
    (place / "rank-2.jsonl").unlink()
    assert "the late rank is not among the traces (rank 2 has none)" in verdict(place)["sentence"]


def test_one_rank_alone_says_nothing_of_waits(tmp_path: Path) -> None:
    place = totals(tmp_path / "run", [1.0, 2.0], 100.0)
    (place / "rank-1.jsonl").unlink()
    found = verdict(place)
    assert found["sentence"] == "not known: rank 0 of 2 ranks is the only one with a trace"
    assert (found["rule"], found["group"]) == ("unknown", None)


def test_without_calls_nothing_is_known_of_waits(tmp_path: Path) -> None:
    for rank in range(2):
        Writer(rank, 2).write(tmp_path, {"wall_s": 10.0})
    assert verdict(tmp_path)["sentence"] == "not known: no calls in which ranks agree or meet were recorded"


def test_a_group_that_was_never_recorded_is_not_called_negligible(tmp_path: Path) -> None:
    for rank, wait in enumerate((50.0, 0.1)):
        Writer(rank, 2).write(tmp_path, {"wall_s": 100.0, "wait_s": {"pp": wait}})
    assert verdict(tmp_path)["sentence"] == "PP agreement, entered last by rank 1"
