"""The scheduler's decisions, one by one. Random sequences of events: `test_scheduler_properties.py`."""

from __future__ import annotations

from array import array
from collections import deque

import pytest

from atom.engine.config import SchedulerConfig
from atom.engine.errors import AtomEngineError
from atom.engine.executors.base import SchedulerOutput, StepResult
from atom.engine.kv_cache_manager import KVCacheManager
from atom.engine.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    AddRequest,
    FinishedSequence,
    TokenLogprobs,
)
from atom.engine.sampling_params import SamplingParams
from atom.engine.scheduler import Scheduler, StepUpdate

BLOCK = 4
EOS = 2


class Rig:
    """A scheduler with steps in flight; the test says which tokens the executor samples."""

    def __init__(self, *, blocks: int = 64, max_model_len: int = 200, caching: bool = True, **config: object) -> None:
        settings: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **config}
        self.scheduler = Scheduler(
            SchedulerConfig(**settings),  # type: ignore[arg-type]
            KVCacheManager(blocks, BLOCK, enable_prefix_caching=caching),
            max_model_len=max_model_len,
            eos_token_ids=[EOS],
            vocab_size=1000,
            clock=lambda: 77,
        )
        self.in_flight: deque[SchedulerOutput] = deque()

    def add(self, seq_id: int, prompt: list[int] | int, **params: object) -> None:
        tokens = list(range(10 + 100 * seq_id, 10 + 100 * seq_id + prompt)) if isinstance(prompt, int) else prompt
        sampling = SamplingParams(**{"max_tokens": 10, **params})  # type: ignore[arg-type]
        self.scheduler.add(AddRequest(seq_id, f"r{seq_id}", array("i", tokens).tobytes(), sampling, 5))

    def submit(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        assert output is not None
        self.in_flight.append(output)
        return output

    def collect(self, **fields: object) -> StepUpdate:
        """Answer the oldest step: token 9 for everybody, unless `tokens` maps a sequence id to another."""
        output = self.in_flight.popleft()
        tokens = fields.pop("tokens", {})
        assert isinstance(tokens, dict)
        seq_ids = [seq_id for seq_id, samples in zip(output.seq_ids, output.samples, strict=True) if samples]
        result = StepResult(output.step, seq_ids, [tokens.get(seq_id, 9) for seq_id in seq_ids])
        for name, value in fields.items():
            setattr(result, name, value)
        return self.scheduler.update(result)

    def step(self, **fields: object) -> StepUpdate:
        self.submit()
        return self.collect(**fields)

    def refusal(self) -> FinishedSequence:
        (finished,) = self.scheduler.take_finished()
        assert finished.reason == FINISH_ERROR
        assert not self.scheduler.has_work
        return finished

    @property
    def used(self) -> int:
        return self.scheduler.kv.pool.check_integrity().used


def batch(output: SchedulerOutput) -> dict[int, tuple[int, int, bool]]:
    """seq_id → computed before, new, samples."""
    rows = zip(output.seq_ids, output.num_computed_tokens, output.num_new_tokens, output.samples, strict=True)
    return {seq_id: (start, size, samples) for seq_id, start, size, samples in rows}


# Batching --------------------------------------------------------------------------------------------------------


def test_a_prompt_then_one_token_per_step_with_blocks_at_their_boundaries() -> None:
    rig = Rig()
    rig.add(1, 6, max_tokens=4)
    first = rig.submit()
    assert batch(first) == {1: (0, 6, True)}
    (new,) = first.new_sequences
    assert (new.block_ids, new.num_prompt_tokens, new.token_ids) == ([0, 1], 6, list(range(110, 116)))
    assert rig.collect().token_ids == [9]
    grown = []
    for position in (6, 7):
        output = rig.submit()
        assert batch(output) == {1: (position, 1, True)}
        grown.append(output.new_block_ids)
        assert rig.collect().finished == []
    output = rig.submit()
    assert output.new_block_ids == {1: [2]}
    assert grown == [{}, {}]
    assert rig.collect().finished == [FinishedSequence(1, FINISH_LENGTH)]
    assert rig.scheduler.schedule() is None
    assert not rig.scheduler.has_work


def test_a_long_prompt_is_chunked_and_mixed_with_decoding_under_the_budget() -> None:
    rig = Rig(max_num_seqs=4, max_num_batched_tokens=10)
    rig.add(1, 4)
    rig.step()
    rig.add(2, 20)
    rig.add(3, 3)
    sizes = []
    for _ in range(3):
        output = rig.submit()
        assert batch(output)[1][1:] == (1, True)
        assert sum(output.num_new_tokens) <= 10
        sizes.append(batch(output)[2])
        assert (3 in batch(output)) == (len(sizes) == 3)
        rig.collect()
    assert sizes == [(0, 9, False), (9, 9, False), (18, 2, True)]


def test_first_come_first_served_up_to_max_num_seqs() -> None:
    rig = Rig(max_num_seqs=2)
    for seq_id in range(4):
        rig.add(seq_id, 3, max_tokens=2)
    assert list(batch(rig.submit())) == [0, 1]
    rig.collect()
    rig.step()
    assert list(batch(rig.submit())) == [2, 3]


def test_without_chunked_prefill_a_prompt_goes_whole_or_waits() -> None:
    rig = Rig(max_num_seqs=4, max_num_batched_tokens=10, enable_chunked_prefill=False)
    rig.add(1, 6, max_tokens=2)
    rig.add(2, 6)
    assert batch(rig.submit()) == {1: (0, 6, True)}
    rig.collect()
    assert batch(rig.submit()) == {1: (6, 1, True), 2: (0, 6, True)}


def test_without_chunked_prefill_what_outgrew_the_budget_is_recomputed_in_pieces() -> None:
    rig = Rig(blocks=6, max_num_seqs=2, max_num_batched_tokens=8, enable_chunked_prefill=False, caching=False)
    rig.add(1, 8, max_tokens=15)
    rig.add(2, 4, max_tokens=15)
    ended: dict[int, str] = {}
    for _ in range(60):
        if not rig.scheduler.has_work:
            break
        ended |= {end.seq_id: end.reason for end in rig.step().finished}
    assert ended == {1: FINISH_LENGTH, 2: FINISH_LENGTH}
    assert rig.scheduler.stats().num_preemptions_total > 0


# Overlap ---------------------------------------------------------------------------------------------------------


def test_the_next_step_is_scheduled_before_the_token_is_known() -> None:
    rig = Rig()
    rig.add(1, 4)
    assert batch(rig.submit()) == {1: (0, 4, True)}
    assert batch(rig.submit()) == {1: (4, 1, True)}
    assert batch(rig.submit()) == {1: (5, 1, True)}
    assert [rig.collect().token_ids for _ in range(3)] == [[9], [9], [9]]


def test_a_sequence_that_ended_in_a_step_is_dropped_from_the_one_in_flight() -> None:
    rig = Rig()
    rig.add(1, 4)
    rig.add(2, 4)
    rig.submit()
    rig.submit()
    update = rig.collect(tokens={1: EOS})
    assert (update.seq_ids, update.token_ids) == ([1, 2], [EOS, 9])
    assert update.finished == [FinishedSequence(1, FINISH_STOP, EOS)]
    third = rig.submit()
    assert third.released == [1]
    update = rig.collect(tokens={1: 5, 2: 6}, logprobs={1: [TokenLogprobs([5], [-1.0], 1)]})
    assert (update.seq_ids, update.token_ids, update.finished, update.logprobs) == ([2], [6], [], {})
    assert list(batch(third)) == [2]


def test_no_step_is_wasted_on_a_sequence_whose_last_token_is_in_flight() -> None:
    rig = Rig()
    rig.add(1, 4, max_tokens=2)
    rig.submit()
    rig.submit()
    assert rig.scheduler.schedule() is None
    assert rig.collect().finished == []
    assert rig.scheduler.schedule() is None
    assert rig.collect().finished == [FinishedSequence(1, FINISH_LENGTH)]


def test_contents_can_be_found_only_once_the_step_that_computed_them_was_collected() -> None:
    rig = Rig(max_num_seqs=4)
    prompt = list(range(100, 109))
    rig.add(1, prompt)
    rig.submit()
    rig.add(2, prompt)
    assert batch(rig.submit())[2] == (0, 9, True)
    rig.collect()
    rig.add(3, prompt)
    assert batch(rig.submit())[3] == (8, 1, True)


# Ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop"),
    [
        ({}, [5, EOS], FINISH_STOP, EOS),
        ({"ignore_eos": True, "max_tokens": 3}, [5, EOS, 5], FINISH_LENGTH, None),
        ({"ignore_eos": True, "stop_token_ids": (6,)}, [EOS, 6], FINISH_STOP, 6),
        ({"stop_token_ids": (6,)}, [EOS], FINISH_STOP, EOS),
        ({"min_tokens": 2}, [EOS, EOS, EOS], FINISH_STOP, EOS),
        ({"max_tokens": 1}, [5], FINISH_LENGTH, None),
        ({"max_tokens": 2}, [5, EOS], FINISH_STOP, EOS),
        ({"max_tokens": None}, [5] * 6, FINISH_LENGTH, None),
    ],
)
def test_what_ends_a_sequence(params: dict[str, object], tokens: list[int], reason: str, stop: int | None) -> None:
    rig = Rig(max_model_len=10)
    rig.add(1, 4, **params)
    for token in tokens[:-1]:
        assert rig.step(tokens={1: token}).finished == []
    assert rig.step(tokens={1: tokens[-1]}).finished == [FinishedSequence(1, reason, stop)]
    assert rig.used == 0


def test_prompt_logprobs_are_passed_on_once_and_first_scheduling_is_told() -> None:
    rig = Rig()
    rig.add(1, 3, prompt_logprobs=0)
    entries = [None, TokenLogprobs([1], [-1.0], 1), TokenLogprobs([1], [-1.0], 1)]
    update = rig.step(prompt_logprobs={1: entries})
    assert update.prompt_logprobs == {1: entries}
    assert [(first.seq_id, first.queued_ns, first.scheduled_ns) for first in update.first_scheduled] == [(1, 5, 77)]
    assert rig.step().first_scheduled == []


# Admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "config", "message"),
    [
        ([], {}, "the prompt has no tokens"),
        (10, {"max_model_len": 10}, "10 tokens; the context length is 10"),
        (8, {"blocks": 2}, "8 tokens; the context length is 8"),
        (33, {"enable_chunked_prefill": False}, "more than --max-num-batched-tokens 32"),
        ([1, 1000], {}, "outside the vocabulary of 1000 ids"),
        ([-1, 5], {}, "outside the vocabulary of 1000 ids"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    prompt: list[int] | int, config: dict[str, int], message: str
) -> None:
    rig = Rig(**config)  # type: ignore[arg-type]
    rig.add(1, prompt)
    assert message in (rig.refusal().error or "")


def test_a_full_queue_refuses() -> None:
    rig = Rig(max_waiting=2, max_num_seqs=3)
    for seq_id in range(6):  # one step may start 3 of them, however many come before it is scheduled
        rig.add(seq_id, 4)
    (refused,) = rig.scheduler.take_finished()
    assert refused.seq_id == 5
    assert "--max-waiting" in (refused.error or "")
    rig.step()
    assert (rig.scheduler.stats().num_running, rig.scheduler.stats().num_waiting) == (3, 2)
    rig.add(6, 4)
    (refused,) = rig.scheduler.take_finished()
    assert refused.seq_id == 6


def test_a_sequence_may_fill_the_whole_pool_alone() -> None:
    rig = Rig(blocks=3, max_num_seqs=2)
    rig.add(1, 5, max_tokens=None)
    rig.add(2, 5, max_tokens=None)
    ended: dict[int, str] = {}
    for _ in range(40):
        if rig.scheduler.has_work:
            ended |= {end.seq_id: end.reason for end in rig.step().finished}
    assert ended == {1: FINISH_LENGTH, 2: FINISH_LENGTH}
    assert rig.used == 0


# Preemption ------------------------------------------------------------------------------------------------------


def test_the_last_admitted_yields_and_is_recomputed_with_what_it_generated() -> None:
    rig = Rig(blocks=4, caching=False)
    rig.add(1, 7)
    rig.add(2, 7)
    rig.step()
    rig.step(tokens={1: 21, 2: 22})
    output = rig.submit()
    assert list(batch(output)) == [1]
    assert output.released == [2]
    assert rig.scheduler.stats().num_preemptions_total == 1
    rig.collect()
    while 1 in rig.scheduler.sequences:
        rig.step()
    output = rig.submit()
    (new,) = output.new_sequences
    assert (new.seq_id, new.token_ids[7:], new.num_computed_tokens) == (2, [9, 22], 0)
    assert batch(output) == {2: (0, 9, True)}


def test_a_preempted_sequence_waits_for_its_token_in_flight() -> None:
    rig = Rig(blocks=4, caching=False)
    rig.add(1, 8)
    rig.add(2, 8)
    rig.submit()
    assert rig.submit().released == [2]
    rig.scheduler.abort([1])
    assert rig.scheduler.schedule() is None, "its first token is not known yet"
    assert rig.collect(tokens={2: 33}).token_ids == [33]
    (new,) = rig.submit().new_sequences
    assert new.token_ids[8:] == [33]


def test_a_preempted_sequence_can_end_by_its_token_in_flight() -> None:
    rig = Rig(blocks=4, caching=False)
    rig.add(1, 8)
    rig.add(2, 8)
    rig.submit()
    rig.submit()
    update = rig.collect(tokens={2: EOS})
    assert update.finished == [FinishedSequence(2, FINISH_STOP, EOS)]
    assert not rig.scheduler.waiting


def test_a_preempted_sequence_comes_back_over_its_own_cached_blocks() -> None:
    rig = Rig(blocks=6)
    rig.add(1, 8)
    rig.add(2, 9)
    rig.step()
    for _ in range(3):
        rig.step()
    output = rig.submit()
    assert output.released == [2]
    rig.collect()
    rig.scheduler.abort([1])
    output = rig.submit()
    (new,) = output.new_sequences
    assert (new.num_computed_tokens, len(new.token_ids)) == (12, 13)
    assert batch(output) == {2: (12, 1, True)}
    assert rig.scheduler.stats().prefix_cache_hits_total == 0, "only a first lookup counts"


@pytest.mark.parametrize("length", [4, 8, 16])
def test_a_prompt_whose_every_block_is_cached_still_computes(length: int) -> None:
    rig = Rig()
    rig.add(1, list(range(100, 100 + length)), max_tokens=6)
    while rig.scheduler.has_work:
        rig.step()
    rig.add(2, list(range(100, 100 + length)), max_tokens=1)
    assert batch(rig.submit()) == {2: (length - BLOCK, BLOCK, True)}
    assert rig.collect().finished == [FinishedSequence(2, FINISH_LENGTH)]


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    rig = Rig()
    rig.add(1, 6, max_tokens=7)
    tokens = list(range(110, 116))
    while rig.scheduler.has_work:
        tokens += rig.step(tokens={1: 300 + len(tokens)}).token_ids
    rig.add(2, [*tokens, 50, 51])
    (new,) = rig.submit().new_sequences
    assert new.num_computed_tokens == 12


# Aborts ----------------------------------------------------------------------------------------------------------


def test_an_abort_frees_at_once_wherever_the_sequence_is() -> None:
    rig = Rig(max_num_seqs=2)
    for seq_id in (1, 2, 3):
        rig.add(seq_id, 5)
    rig.submit()
    rig.scheduler.abort([1, 3, 99])
    assert [end.seq_id for end in rig.scheduler.take_finished()] == [1, 3]
    assert rig.used == 2
    update = rig.collect()
    assert (update.seq_ids, update.finished) == ([2], [])
    rig.scheduler.abort([2])
    assert rig.used == 0
    assert rig.scheduler.take_finished() == [FinishedSequence(2, FINISH_ABORT)]
    assert not rig.scheduler.has_work


def test_an_aborted_prefill_is_not_published() -> None:
    rig = Rig()
    prompt = list(range(100, 109))
    rig.add(1, prompt)
    rig.submit()
    rig.scheduler.abort([1])
    rig.collect()
    rig.add(2, prompt)
    assert batch(rig.submit())[2] == (0, 9, True)


# Contract --------------------------------------------------------------------------------------------------------


def test_an_answer_that_does_not_fit_its_step_is_an_error() -> None:
    rig = Rig()
    rig.add(1, 4)
    output = rig.submit()
    with pytest.raises(AtomEngineError, match="the executor answered step 0"):
        rig.scheduler.update(StepResult(output.step, [1, 2], [5, 5]))


def test_stats_count_what_happened() -> None:
    rig = Rig()
    rig.add(1, 8, max_tokens=3)
    rig.add(2, 8, max_tokens=3)
    rig.step(seconds=0.5)
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps_total) == (2, 0, 1)
    assert (stats.step_prefill_tokens, stats.step_decode_seqs, stats.step_seconds) == (16, 0, 0.5)
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (16, 2)
    assert (stats.kv_blocks_total, stats.kv_blocks_used) == (64, 4)
    rig.step()
    stats = rig.scheduler.stats()
    assert (stats.step_prefill_tokens, stats.step_decode_seqs) == (0, 2)
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (16, 0)
