"""The scheduler against an executor whose memory is checked: every position that a step reads must hold the KV of the
very prefix that its sequence has, whatever was preempted, aborted, shared, freed or handed on in between."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atom.engine.config import SchedulerConfig
from atom.engine.executors.base import NewSequence, SchedulerOutput, StepResult
from atom.engine.kv_cache_manager import KVCacheManager
from atom.engine.messages import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, AddRequest, FinishedSequence
from atom.engine.sampling_params import SamplingParams
from atom.engine.scheduler import Scheduler, StepUpdate
from atom.engine.sequence import Status

EOS = 7
VOCAB = 8


def next_token(seed: int, position: int) -> int:
    """A small vocabulary, so that the end-of-sequence id 7 and other stop ids come up often."""
    return (seed * 31 + position * position * 5 + position // 3) % VOCAB


@dataclass
class Known:
    """What the executor keeps of a sequence."""

    new: NewSequence
    tokens: list[int]
    blocks: list[int]
    computed: int


class CheckedExecutor:
    """Executes steps in the order of submission, when they are collected."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.memory: dict[tuple[int, int], int] = {}
        """(block, slot) → hash of the token prefix up to and including the token there."""
        self.known: dict[int, Known] = {}
        self.queue: deque[SchedulerOutput] = deque()

    def submit(self, output: SchedulerOutput) -> None:
        self.queue.append(output)

    def collect(self) -> StepResult:
        output = self.queue.popleft()
        for seq_id in output.released:
            del self.known[seq_id]
        for new in output.new_sequences:
            assert new.seq_id not in self.known
            self.known[new.seq_id] = Known(new, list(new.token_ids), list(new.block_ids), new.num_computed_tokens)
        for seq_id, blocks in output.new_block_ids.items():
            self.known[seq_id].blocks += blocks
        rows = list(zip(output.seq_ids, output.num_computed_tokens, output.num_new_tokens, output.samples, strict=True))
        assert len({row[0] for row in rows}) == len(rows), "a sequence appears twice"
        self.write(rows)
        seq_ids, token_ids = [], []
        for seq_id, start, size, samples in rows:
            state = self.known[seq_id]
            self.check_reads(state, start + size)
            state.computed = start + size
            assert samples == (state.computed == len(state.tokens))
            if samples:
                state.tokens.append(next_token(state.new.params.seed or 0, state.computed))
                seq_ids.append(seq_id)
                token_ids.append(state.tokens[-1])
        return StepResult(output.step, seq_ids, token_ids)

    def write(self, rows: list[tuple[int, int, int, bool]]) -> None:
        writers: dict[int, int] = {}
        for seq_id, start, size, _ in rows:
            state = self.known[seq_id]
            assert start == state.computed, "a gap, or computed twice"
            assert size > 0
            assert start + size <= len(state.tokens)
            for position in range(start, start + size):
                block = state.blocks[position // self.block_size]
                assert writers.setdefault(block, seq_id) == seq_id, "two sequences write one block"
                self.memory[block, position % self.block_size] = hash(tuple(state.tokens[: position + 1]))

    def check_reads(self, state: Known, end: int) -> None:
        for position in range(end):
            cell = (state.blocks[position // self.block_size], position % self.block_size)
            assert self.memory.get(cell) == hash(tuple(state.tokens[: position + 1])), f"wrong KV at {position}"


PREFIX = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0]
"""Prompts start with pieces of this, so that they share blocks."""

prompts = st.builds(
    lambda shared, own: PREFIX[:shared] + own,
    st.one_of(st.integers(0, len(PREFIX)), st.sampled_from([4, 8, 12])),
    st.one_of(st.just([]), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)),
)


def expected_output(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """What the sequence generates when it runs alone."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    output: list[int] = []
    limit = max_model_len - len(prompt)
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    while True:
        output.append(next_token(params.seed or 0, len(prompt) + len(output)))
        if output[-1] in stops and len(output) > params.min_tokens:
            return output, FINISH_STOP
        if len(output) >= limit:
            return output, FINISH_LENGTH


class SchedulerMachine(RuleBasedStateMachine):
    """Random adds, aborts and resets between steps, with up to three steps in flight and far too few blocks."""

    @initialize(
        pool_tokens=st.integers(16, 64),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(0, 12),
        chunked=st.booleans(),
        caching=st.sampled_from([True, True, True, False]),
        depth=st.integers(1, 3),
        max_waiting=st.sampled_from([4, 100, 100]),
    )
    def start(
        self,
        pool_tokens: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        chunked: bool,
        caching: bool,
        depth: int,
        max_waiting: int,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget,
            enable_chunked_prefill=chunked,
            max_waiting=max_waiting,
        )
        self.kv = KVCacheManager(pool_tokens // block_size, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            self.config, self.kv, max_model_len=40, eos_token_ids=[EOS], vocab_size=VOCAB, clock=lambda: 1
        )
        self.executor = CheckedExecutor(block_size)
        self.depth = depth
        self.requests: dict[int, tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, FinishedSequence] = {}
        self.first_scheduled: set[int] = set()

    @rule(
        prompt=prompts,
        seed=st.integers(0, 50),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        stop=st.lists(st.integers(0, VOCAB - 1), max_size=1),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self,
        prompt: list[int],
        seed: int,
        max_tokens: int | None,
        min_tokens: int,
        ignore_eos: bool,
        stop: list[int],
        prompt_logprobs: int | None,
    ) -> None:
        params = SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=tuple(stop),
            prompt_logprobs=prompt_logprobs,
        )
        seq_id = len(self.requests)
        self.requests[seq_id] = (prompt, params)
        self.outputs[seq_id] = []
        self.scheduler.add(AddRequest(seq_id, f"r{seq_id}", array("i", prompt).tobytes(), params, 0))
        if seq_id not in self.scheduler.sequences:
            self.record_finished(self.scheduler.take_finished())
            assert self.finished[seq_id].reason == FINISH_ERROR
            assert self.finished[seq_id].error

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted(self.scheduler.sequences)
        seq_ids = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=3))
        self.scheduler.abort([*seq_ids, 10**9])
        self.record_finished(self.scheduler.take_finished())
        for seq_id in seq_ids:
            assert self.finished[seq_id].reason == FINISH_ABORT

    @precondition(lambda self: self.scheduler.num_in_flight < self.depth)
    @rule()
    def submit(self) -> None:
        self.try_submit()

    @precondition(lambda self: self.scheduler.num_in_flight > 0)
    @rule()
    def collect(self) -> None:
        self.record(self.scheduler.update(self.executor.collect()))

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.advance()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()

    def advance(self) -> None:
        while self.scheduler.num_in_flight < self.depth and self.try_submit():
            pass
        if self.scheduler.num_in_flight:
            self.record(self.scheduler.update(self.executor.collect()))
        else:
            assert not self.scheduler.has_unfinished, "sequences, but nothing to do: a livelock"

    def try_submit(self) -> bool:
        output = self.scheduler.schedule()
        if output is None:
            return False
        assert output.seq_ids
        assert len(output.seq_ids) <= self.config.max_num_seqs
        assert sum(output.num_new_tokens) <= self.config.max_num_batched_tokens
        assert output.num_decode_seqs + output.num_prefill_tokens == sum(output.num_new_tokens)
        for seq_id, start, size in zip(output.seq_ids, output.num_computed_tokens, output.num_new_tokens, strict=True):
            assert start + size < self.scheduler.sequences[seq_id].max_total, "a step that can only be thrown away"
        if not self.config.enable_chunked_prefill:
            for new in output.new_sequences:
                size = output.num_new_tokens[output.seq_ids.index(new.seq_id)]
                whole = new.num_computed_tokens + size == len(new.token_ids)
                assert whole or len(new.token_ids) > self.config.max_num_batched_tokens
        for new in output.new_sequences:
            assert new.num_computed_tokens < len(new.token_ids)
            if new.params.prompt_logprobs is not None:
                assert new.num_computed_tokens == 0
        self.executor.submit(output)
        return True

    def record(self, update: StepUpdate) -> None:
        assert len(update.seq_ids) == len(update.token_ids)
        for seq_id, token in zip(update.seq_ids, update.token_ids, strict=True):
            assert seq_id not in self.finished, "a token after the end"
            self.outputs[seq_id].append(token)
        for first in update.first_scheduled:
            assert first.seq_id not in self.first_scheduled
            self.first_scheduled.add(first.seq_id)
        self.record_finished(update.finished)

    def record_finished(self, finished: list[FinishedSequence]) -> None:
        for end in finished:
            assert end.seq_id not in self.finished, "finished twice"
            self.finished[end.seq_id] = end
            prompt, params = self.requests[end.seq_id]
            output = self.outputs[end.seq_id]
            if end.reason == FINISH_ERROR:
                assert output == []
                continue
            wanted, reason = expected_output(prompt, params, self.scheduler.max_model_len)
            if end.reason == FINISH_ABORT:
                assert output == wanted[: len(output)]
            else:
                assert (output, end.reason) == (wanted, reason)
                assert end.stop_token_id == (wanted[-1] if reason == FINISH_STOP else None)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if not hasattr(self, "kv"):
            return
        pool = self.kv.pool
        pool.check_integrity()
        references: dict[int, int] = {}
        for seq in self.scheduler.running:
            assert seq.status is Status.RUNNING
            assert seq.num_computed <= len(seq.block_ids) * self.kv.block_size
            assert len(set(seq.block_ids)) == len(seq.block_ids)
            for block in seq.block_ids:
                references[block] = references.get(block, 0) + 1
        for block in range(pool.num_blocks):
            assert pool.ref_count(block) == references.get(block, 0)

    @invariant()
    def no_sequence_is_lost(self) -> None:
        if not hasattr(self, "kv"):
            return
        scheduler = self.scheduler
        running = [seq.seq_id for seq in scheduler.running]
        assert len(running) <= self.config.max_num_seqs
        assert sorted([*running, *scheduler.waiting]) == sorted(scheduler.sequences)
        assert set(scheduler.sequences) | set(self.finished) == set(self.requests)
        assert not set(scheduler.sequences) & set(self.finished)
        for seq in scheduler.waiting.values():
            assert seq.block_ids == []
            assert seq.num_computed == 0

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.advance()
        assert not self.scheduler.has_work
        assert set(self.finished) == set(self.requests)
        counts = self.kv.pool.check_integrity()
        assert counts.used == 0
        stats = self.scheduler.stats()
        assert stats.generation_tokens_total == sum(len(output) for output in self.outputs.values())
        assert stats.prefix_cache_hits_total <= stats.prefix_cache_queries_total


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
