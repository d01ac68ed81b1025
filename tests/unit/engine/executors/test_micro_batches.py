"""Steps divided into micro-batches and put together again: nothing is lost, a sequence stays in its group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atom.engine.executors.base import NewSequence, SchedulerOutput, StepResult
from atom.engine.executors.micro_batches import MicroBatches, PendingStep
from atom.engine.messages import DeviceTimes
from atom.engine.sampling_params import SamplingParams


def new(seq_id: int) -> NewSequence:
    return NewSequence(seq_id, [1, 2], 2, SamplingParams(), [seq_id], 0)


@given(num_groups=st.integers(1, 4), steps=st.lists(st.lists(st.integers(0, 9), unique=True), max_size=12))
def test_nothing_is_lost(num_groups: int, steps: list[list[int]]) -> None:
    batches = MicroBatches(num_groups)
    known: list[int] = []
    for number, wanted in enumerate(steps):
        released = [seq_id for seq_id in known if seq_id not in wanted][:2]
        fresh = [seq_id for seq_id in wanted if seq_id not in known]
        known = [seq_id for seq_id in known if seq_id not in released] + fresh
        samples = [seq_id % 3 != 0 for seq_id in wanted]
        output = SchedulerOutput(
            number,
            wanted,
            [1 + seq_id for seq_id in wanted],
            [10 * seq_id for seq_id in wanted],
            samples,
            [new(seq_id) for seq_id in fresh],
            {seq_id: [7] for seq_id in wanted if seq_id not in fresh},
            released,
        )
        parts = batches.divide(output)
        assert 1 <= len(parts) <= num_groups
        assert sorted(seq_id for part in parts for seq_id in part.seq_ids) == sorted(wanted)
        assert [part.released for part in parts] == [released] + [[] for _ in parts[1:]]
        for part in parts:
            assert part.num_new_tokens == [1 + seq_id for seq_id in part.seq_ids]
            assert part.num_computed_tokens == [10 * seq_id for seq_id in part.seq_ids]
            assert {one.seq_id for one in part.new_sequences} == set(part.seq_ids) & set(fresh)
            assert set(part.new_block_ids) == set(part.seq_ids) - set(fresh)
        pending = PendingStep(output, len(parts))
        results = [
            StepResult(
                number,
                [s for s, w in zip(part.seq_ids, part.samples, strict=True) if w],
                [100 + s for s, w in zip(part.seq_ids, part.samples, strict=True) if w],
                device_times=[DeviceTimes(1.0)],
            )
            for part in parts
        ]
        assert [pending.add(result) for result in results] == [False] * (len(parts) - 1) + [True]
        merged = pending.merge(0.5)
        assert merged.seq_ids == [s for s, w in zip(wanted, samples, strict=True) if w]
        assert merged.token_ids == [100 + s for s in merged.seq_ids]
        assert merged.seconds == 0.5
        assert merged.device_times == [DeviceTimes(float(len(parts)))]


def test_groups_are_of_like_size_and_sequences_stay() -> None:
    batches = MicroBatches(2)
    first = batches.divide(
        SchedulerOutput(0, [1, 2, 3, 4], [1] * 4, [0] * 4, [True] * 4, [new(seq_id) for seq_id in (1, 2, 3, 4)])
    )
    assert [part.seq_ids for part in first] == [[1, 3], [2, 4]]
    second = batches.divide(SchedulerOutput(1, [2, 3, 4, 5], [1] * 4, [0] * 4, [True] * 4, [new(5)], released=[1]))
    assert [part.seq_ids for part in second] == [[3, 5], [2, 4]]
    lone = batches.divide(SchedulerOutput(2, [4], [1], [0], [True], released=[2, 3, 5]))
    assert [part.seq_ids for part in lone] == [[4]]
    nothing = batches.divide(SchedulerOutput(3, [], [], [], [], released=[4]))
    assert [(part.seq_ids, part.released) for part in nothing] == [([], [4])]
