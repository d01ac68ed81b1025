"""Divergence, order, early releases; throughput, censoring, the causal table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.diag.consensus.document import arms_of, consensus_document, exit_status
from atom.diag.consensus.lifecycle import blocks_held, lifecycle, rounds_of, vote_spread
from atom.diag.consensus.model import RankTrace, Recording, RequestEvent, Round
from atom.diag.consensus.outcome import run_outcome
from atom.diag.consensus.safety import check_safety
from atom.diag.consensus.sources import find_recordings
from atom.engine.transfer.divergence import divergence
from atom.engine.transfer.ledger import Ledger
from atom.engine.transfer.outcome import Commit, Outcome
from atom.engine.transfer.outcome import Round as EngineRound
from atom.recipes.errors import ExitStatus, UsageError
from tests.unit.diag.consensus.traces import Pipeline, Writer

NAMES = ("completed", "failed", "cancelled")


def read(path: Path) -> Recording:
    return find_recordings([path])[0]


def of_logs(logs: list[list[tuple[int, int]]], mode: str = "async") -> Recording:
    """`logs[rank]`: (request, outcome) as committed, in order."""
    ranks = []
    for rank, log in enumerate(logs):
        trace = RankTrace(source=Path("x"), format="f", rank=rank, size=len(logs), mode=mode)
        for sequence, (request, outcome) in enumerate(log):
            trace.requests.append(RequestEvent(sequence, "commit", Round(request, 0), NAMES[outcome - 1], sequence))
        ranks.append(trace)
    return Recording("arm", ranks, Path("x"))


logs = st.lists(
    st.dictionaries(st.integers(0, 5), st.integers(1, 3), max_size=6).flatmap(
        lambda one: st.permutations(list(one.items()))
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(logs)
def test_divergence_is_counted_as_the_engine_counts_it(some: list[list[tuple[int, int]]]) -> None:
    expected = divergence(
        [[Commit(at, EngineRound(r, 0), Outcome(o)) for at, (r, o) in enumerate(log)] for log in some if log]
    )
    found = check_safety(of_logs(some))
    assert {one.request for one in found.divergent} == {one.request for one in expected.unequal}
    if sum(map(bool, some)) > 1:
        assert found.same_order is expected.same_order


def test_digest_is_the_engines() -> None:
    ledger = Ledger(10, 10)
    for at, (request, outcome) in enumerate(((5, Outcome.COMPLETED), (3, Outcome.FAILED))):
        ledger.vote(EngineRound(request, 0), Outcome.COMPLETED, 0)
        ledger.apply(Commit(at, EngineRound(request, 0), outcome))
    assert check_safety(of_logs([[(5, 1), (3, 2)], []])).digests == {0: ledger.digest()}


def test_divergence_of_the_unsafe_arm(tmp_path: Path) -> None:
    Pipeline([4, 4, 8], "local-only", differing=(3, 5)).write(tmp_path)
    document = consensus_document(arms_of([read(tmp_path)]))
    arm = document["arms"][0]
    assert arm["divergences"] == 2
    assert arm["divergent"] == ["request 3", "request 5"]
    assert exit_status(document) is ExitStatus.GATE


def test_an_agreement_over_the_same_failures_does_not_diverge(tmp_path: Path) -> None:
    Pipeline([4, 4, 8], "async", differing=(3, 5), facts={"failures": 0.1}).write(tmp_path)
    document = consensus_document(arms_of([read(tmp_path)]))
    arm = document["arms"][0]
    assert (arm["divergences"], arm["completed"], arm["failed"], arm["total"]) == (0, 38, 2, 40)
    assert not arm["censored"]
    assert exit_status(document) is ExitStatus.OK


@pytest.mark.parametrize(("mode", "status"), [("async", ExitStatus.GATE), ("local-only", ExitStatus.OK)])
def test_another_order_is_a_divergence_of_what_agrees_on_one(mode: str, status: ExitStatus) -> None:
    document = consensus_document(arms_of([of_logs([[(1, 1), (2, 1)], [(2, 1), (1, 1)]], mode)]))
    assert document["arms"][0]["same_order"] is False
    assert exit_status(document) is status


def test_a_killed_rank_has_applied_less_and_nothing_else() -> None:
    """Its log is a prefix of the others': neither another order nor incomplete."""
    found = check_safety(of_logs([[(1, 1), (2, 1)], [(1, 1)]]))
    assert found.same_order is True
    assert not found.incomplete


def test_releases_before_everybody_voted(tmp_path: Path) -> None:
    safe, unsafe = tmp_path / "async", tmp_path / "local-only"
    assert check_safety(read(Pipeline([4, 4, 8], "async").write(safe))).released_before_commit == 0
    assert check_safety(read(Pipeline([4, 4, 8], "local-only").write(unsafe))).released_before_commit == 40


def test_releases_without_a_commit(tmp_path: Path) -> None:
    writer = Writer(0, 1, "async")
    writer.emit(1, "release", r=1, p=0, b=3)
    writer.emit(2, "commit", r=1, p=0, q=0, o="completed")
    writer.emit(3, "release", r=2, p=0, b=3)
    assert check_safety(read(writer.write(tmp_path, {}).parent)).released_before_commit == 2


# ---- outcome


def test_a_rank_that_was_killed_censors_its_arm(tmp_path: Path) -> None:
    path = Pipeline([4, 4]).write(tmp_path) / "rank-1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    found = run_outcome(read(tmp_path))
    assert found.completed is not None
    assert 0 < found.completed < 40
    assert found.total == 40
    assert any("were not decided" in reason for reason in found.censored)
    assert "rank 1 did not come to its end" in found.censored
    (tmp_path / "rank-1.exit.json").write_text('{"rank": 1, "signal": "SIGKILL", "status": null, "t": 1}')
    assert "rank 1 was killed by SIGKILL" in run_outcome(read(tmp_path)).censored
    (tmp_path / "rank-1.exit.json").write_text("[" * 3000)
    assert "rank 1 did not come to its end" in run_outcome(read(tmp_path)).censored


def test_requests_that_never_began_are_missing(tmp_path: Path) -> None:
    found = run_outcome(read(Pipeline([4, 4], facts={"requests": 512}).write(tmp_path)))
    assert (found.completed, found.total, found.undecided) == (40, 512, 472)
    assert found.censored == ("472 of 512 requests were not decided",)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (Pipeline([4, 4, 4]).write(tmp_path) / "rank-1.jsonl").unlink()
    assert "no trace of rank 1" in run_outcome(read(tmp_path)).censored


def test_throughput_is_from_the_first_request_to_the_last(tmp_path: Path) -> None:
    """The first rank sees the first, the last one the last."""
    for rank in range(2):
        writer = Writer(rank, 2, "local-only")
        writer.emit(100 * rank, "enqueue", r=1, p=0)
        writer.emit(100 * rank + 50, "commit", r=1, p=0, q=0, o="completed")
        writer.write(tmp_path, {})
    recording = read(tmp_path)
    assert run_outcome(recording).seconds == pytest.approx(0.150)
    recording.ranks[0].clock = None
    assert run_outcome(recording).seconds == pytest.approx(0.050)


def test_causal_table(tmp_path: Path) -> None:
    for mode, label in (
        ("none", "control"),
        ("blocking", "blocking"),
        ("local-only", "local-only"),
        ("async", "async"),
    ):
        for run in range(3):
            Pipeline([4, 4, 4, 8 + run], mode, label).write(tmp_path / "arms" / label / f"run-{run}" / "trace")
    document = consensus_document(arms_of(find_recordings([tmp_path])))
    assert [arm["label"] for arm in document["arms"]] == ["control", "blocking", "local-only", "async"]
    rows = {row["arm"]: row for row in document["causal"]["arms"]}
    assert rows["control"]["interpretation"] == "valid matched control"
    assert rows["blocking"]["interpretation"].startswith("the change costs 5")
    assert rows["local-only"]["interpretation"].startswith("causal upper bound")
    assert rows["async"]["interpretation"].startswith("repair: completes the load at 100.00%")
    assert document["arms"][1]["pct_of_control"] == pytest.approx(rows["blocking"]["pct_of_control"]["value"])
    json.dumps(document, allow_nan=False)


def test_another_control(tmp_path: Path) -> None:
    Pipeline([4, 4], "async", "before").write(tmp_path / "a")
    Pipeline([4, 9], "async", "after").write(tmp_path / "b")
    recordings = find_recordings([tmp_path / "a", tmp_path / "b"])
    document = consensus_document(arms_of(recordings, "before"))
    assert document["verdict"]["sentence"].endswith("context forward on rank 1")
    assert document["arms"][1]["pct_of_control"] < 60
    with pytest.raises(UsageError, match="there are before, after"):
        arms_of(recordings, "main")


# ---- lifecycle


def test_steps_of_a_request(tmp_path: Path) -> None:
    steps = lifecycle(read(Pipeline([4, 6], "async", transfer_ms=3).write(tmp_path)))
    assert steps["context forward"][1].p50 == pytest.approx(0.006)
    assert steps["transfer"][0].p50 == pytest.approx(0.003)
    assert steps["commit to apply"][0].p50 == pytest.approx(0.00001)


def test_a_prompt_in_chunks(tmp_path: Path) -> None:
    writer = Writer(0, 1)
    for at in (0, 10, 20):
        writer.emit(at, "forward_start", r=1, p=0)
        writer.emit(at + 4, "forward_end", r=1, p=0)
    writer.emit(30, "send_submit", r=1, p=0)
    trace = read(writer.write(tmp_path, None).parent)
    assert lifecycle(trace)["context forward"][0].total == pytest.approx(0.012)
    assert lifecycle(trace)["sender submission"][0].total == pytest.approx(0.006)
    assert rounds_of(trace.ranks[0])[Round(1, 0)]["forward_start"] == 0


def test_votes_where_the_clock_is_shared(tmp_path: Path) -> None:
    recording = read(Pipeline([4, 6], "async").write(tmp_path))
    votes = vote_spread(recording)
    assert votes is not None
    assert votes.last == {1: 40}
    assert votes.decision.p50 == pytest.approx(0.0001)
    recording.ranks[0].clock = "another"
    assert vote_spread(recording) is None


def test_blocks_held(tmp_path: Path) -> None:
    writer = Writer(0, 1)
    for at, blocks in ((0, 0), (10, 8), (30, 4), (40, 0)):
        writer.emit(at, "held", b=blocks)
    writer.emit(15, "transfer_done", r=1, p=0)
    writer.emit(30, "release", r=1, p=0, b=4)
    held = blocks_held(read(writer.write(tmp_path, None).parent))[0]
    assert held.block_s == pytest.approx(0.020 * 8 + 0.010 * 4)
    assert held.after_transfer_block_s == pytest.approx(0.015 * 4)
    assert held.most == 8
