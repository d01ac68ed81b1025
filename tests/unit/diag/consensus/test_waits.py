"""Waits and late arrivers, from made-up entries of which the answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.diag.consensus.model import Call, End, RankTrace, Recording, Work
from atom.diag.consensus.sources import find_recordings
from atom.diag.consensus.stages import own_offsets, stage_offsets, structure
from atom.diag.consensus.waits import group_waits, quantiles
from tests.unit.diag.consensus.traces import MS, Pipeline, totals


def recording(
    entries: Sequence[Sequence[int]],
    *,
    mode: str = "blocking",
    offsets: Sequence[int] | None = None,
    group: str = "pp",
    tp: int = 1,
) -> Recording:
    """`entries[call][rank]` in ms; a call ends for all when the last one enters. `offsets`: of each rank's clock."""
    size = len(entries[0])
    ranks = []
    for rank in range(size):
        shift = 0 if offsets is None else offsets[rank]
        trace = RankTrace(source=Path("x"), format="f", rank=rank, size=size, mode=mode, tp=tp)
        for number, some in enumerate(entries):
            enter, over = (some[rank] + shift) * MS, (max(some) + shift) * MS
            trace.calls.append(Call(group, "", "outcome", number, enter, over))
        trace.start, trace.stop = shift * MS, (max(entries[-1]) + shift) * MS
        ranks.append(trace)
    return Recording("arm", ranks, Path("x"))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(2, 5).flatmap(
        lambda size: st.tuples(
            st.lists(st.lists(st.integers(0, 50), min_size=size, max_size=size, unique=True), min_size=1, max_size=8),
            st.lists(st.integers(0, 10**6), min_size=size, max_size=size),
        )
    )
)
def test_any_entries_on_any_clocks(drawn: tuple[list[list[int]], list[int]]) -> None:
    steps, offsets = drawn
    entries = [[100 * number + one for one in some] for number, some in enumerate(steps)]
    size = len(entries[0])
    waits = group_waits(recording(entries, offsets=offsets))["pp"]
    expected = np.zeros((size, size))
    for some in entries:
        late = int(np.argmax(some))
        for rank in range(size):
            expected[rank][late] += (max(some) - some[rank]) / 1e3
    assert np.allclose(waits.late, expected)
    assert [one.total_s for one in waits.ranks] == pytest.approx(expected.sum(axis=1))
    assert [one.skew_s for one in waits.ranks] == pytest.approx(expected.sum(axis=1))
    assert [one.last for one in waits.ranks] == [
        sum(int(np.argmax(some)) == rank for some in entries) for rank in range(size)
    ]
    assert waits.late_rank == int(np.argmax(expected.sum(axis=0)))
    assert waits.matched == len(entries)


def test_the_documents_totals_without_any_call(tmp_path: Path) -> None:
    found = find_recordings([totals(tmp_path / "run", [4240, 3204, 2126, 0.082], 4807, 5e-6)])[0]
    waits = group_waits(found)
    assert list(waits) == ["pp", "tp"]
    assert waits["pp"].late_rank == 3
    assert waits["pp"].late_from == "totals"
    assert [row[3] for row in waits["pp"].late] == pytest.approx([4239.918, 3203.918, 2125.918, 0])
    assert waits["pp"].ranks[0].share == pytest.approx(0.882, abs=1e-3)


def test_what_a_rank_says_at_its_end_goes_before_the_sum_of_its_events() -> None:
    one = recording([[0, 10]])
    one.ranks[0].end = End(t=10, wait_s={"pp": 5.0}, wall_s=10.0)
    waits = group_waits(one)["pp"]
    assert waits.ranks[0].total_s == 5.0
    assert waits.ranks[0].recorded.total == pytest.approx(0.010)
    assert waits.ranks[0].share == 0.5


def test_polls_of_an_asynchronous_agreement_are_no_meetings() -> None:
    waits = group_waits(recording([[0, 10], [20, 30]], mode="async"))["pp"]
    assert not waits.meets
    assert waits.late_rank is None
    assert waits.ranks[0].total_s == pytest.approx(0.020)


def test_a_call_that_one_rank_did_not_record() -> None:
    one = recording([[0, 10], [20, 30]])
    del one.ranks[1].calls[0]
    waits = group_waits(one)["pp"]
    assert (waits.matched, waits.unmatched) == (1, 1)
    assert waits.late[0][1] == pytest.approx(0.010)


def test_communicators_of_one_group_are_kept_apart() -> None:
    """Two pipelines, of shards 0 and 1: calls of one number are different ones."""
    one = recording([[0, 1, 10, 12]], tp=2)
    for trace in one.ranks:
        trace.calls = [call._replace(domain=f"shard {trace.rank % 2}") for call in trace.calls]
    one.ranks[0].calls[0] = one.ranks[0].calls[0]._replace(exit=10 * MS)
    one.ranks[2].calls[0] = one.ranks[2].calls[0]._replace(exit=10 * MS)
    waits = group_waits(one)["pp"]
    assert waits.matched == 2
    assert waits.late[0] == pytest.approx([0, 0, 0.010, 0])
    assert waits.late[1] == pytest.approx([0, 0, 0, 0.011])


def test_a_call_that_was_never_left() -> None:
    one = recording([[0, 10, 5], [20, 30, 25]])
    one.ranks[0].calls[1] = one.ranks[0].calls[1]._replace(exit=None)
    one.ranks[2].calls[1] = one.ranks[2].calls[1]._replace(exit=None)
    del one.ranks[1].calls[1]
    call = group_waits(one)["pp"].open[0]
    assert (call.number, call.inside, call.missing) == (1, (0, 2), (1,))


def test_what_the_late_rank_did_before() -> None:
    one = recording([[0, 10], [20, 30]])
    one.ranks[1].work = [Work("forward", 0, 8 * MS), Work("forward", 11 * MS, 29 * MS), Work("other", 29 * MS, 35 * MS)]
    phases = group_waits(one)["pp"].phases
    assert phases == pytest.approx({"forward": 0.026, "other": 0.001, "unrecorded": 0.003})


def test_quantiles_and_their_support() -> None:
    found = quantiles([x / 1000 for x in range(1, 1001)])
    assert found.p50 == pytest.approx(0.5005)
    assert found.p99 == pytest.approx(0.99001)
    assert found.supports(99)
    assert not quantiles([1.0] * 10).supports(99)
    assert quantiles([]).p50 is None


# ---- structure


def test_a_pipelines_own_offsets_explain_its_waits(tmp_path: Path) -> None:
    control = find_recordings([Pipeline([4, 4, 4, 8], "none", "control").write(tmp_path / "control")])[0]
    offsets = stage_offsets(control)
    assert offsets is not None
    assert [offsets.seconds[rank, 3] for rank in range(3)] == pytest.approx([0.016, 0.012, 0.008])
    waits = group_waits(find_recordings([Pipeline([4, 4, 4, 8]).write(tmp_path / "blocking")])[0])["pp"]
    split = structure(waits, offsets, controlled=True)
    assert sum(split.changed_s) < 0.01 * sum(split.structural_s)


def test_offsets_are_the_stages_between(tmp_path: Path) -> None:
    """Not how far a late stage lags behind in a control whose queue is before it."""
    control = find_recordings([Pipeline([4, 5, 6, 8], "none", "control").write(tmp_path / "control")])[0]
    offsets = stage_offsets(control)
    assert offsets is not None
    assert [offsets.seconds[rank, 3] for rank in range(3)] == pytest.approx([0.019, 0.014, 0.008])
    assert offsets.seconds[3, 0] == 0


def test_what_came_with_an_arm(tmp_path: Path) -> None:
    """Stage 3 is 20 ms slower than in the control: that much of each wait is new."""
    control = find_recordings([Pipeline([4, 4, 4, 4], "none", "control").write(tmp_path / "control")])[0]
    waits = group_waits(find_recordings([Pipeline([4, 4, 4, 24]).write(tmp_path / "blocking")])[0])["pp"]
    offsets = stage_offsets(control)
    assert offsets is not None
    split = structure(waits, offsets, controlled=True)
    assert split.structural_s[0] == pytest.approx(40 * 0.012, rel=1e-6)
    assert split.changed_s[0] == pytest.approx(40 * 0.020, rel=1e-6)
    assert split.changed_s[2] == pytest.approx(40 * 0.020, rel=1e-6)


def test_without_a_control_what_every_call_has() -> None:
    waits = group_waits(recording([[0, 10], [20, 30], [40, 80]]))["pp"]
    offsets = own_offsets(waits)
    assert offsets is not None
    split = structure(waits, offsets, controlled=False)
    assert split.structural_s[0] == pytest.approx(0.030)
    assert split.changed_s[0] == pytest.approx(0.030)
