"""Decides what each step computes. Blocks: `engine/kv_cache_manager.py`. Who runs the steps and when:
`engine/engine_core.py`.

There is no prefill and no decode phase. Every sequence has `num_computed` tokens behind it and known tokens ahead;
a step moves each running sequence forward within the token budget, decodes one token where nothing is ahead, and
admits waiting sequences, first come first served, with what is left. When blocks run out, the sequence that was
admitted last gives up its own and is recomputed later.

Step n+1 is scheduled while step n runs, before the tokens of n are known: a decoding sequence simply moves on, and
the executor feeds it what it sampled. What that means for a sequence that turns out to have ended in step n: its
place in n+1 is wasted, what it samples there is dropped, and its blocks are free at once. That is safe because steps
execute in the order of their submission. A block freed while step n+1 may still write it can be handed out in
n+2 at the earliest, and whoever gets it writes each position before reading it. It is safe for prefix hits
too: contents are published only after the step that completed them was collected, and the late write
lands at the position of the last known token or behind it, never in a block that was published by then.

A steady decode batch costs two short loops per step, one here and one in `update`: two integers per sequence say
up to where nothing can happen (`Sequence.decode_limit`, `Sequence.next_event`), everything else is off that path.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from atom.engine.config import SchedulerConfig
from atom.engine.errors import AtomEngineError, ContextLengthError, QueueFullError, RequestError
from atom.engine.executors.base import NewSequence, SchedulerOutput, StepResult
from atom.engine.kv_cache_manager import KVCacheManager
from atom.engine.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    AddRequest,
    FinishedSequence,
    FirstSchedule,
    SchedulerStats,
    TokenLogprobs,
)
from atom.engine.sequence import NOT_DECODING, Sequence, Status, decode_prompt


@dataclass(slots=True)
class Chunk:
    """A piece of a sequence's known tokens, to be computed in one step."""

    seq: Sequence
    start: int
    size: int
    samples: bool
    """Whether it reaches the last known token."""


@dataclass(slots=True)
class StepPlan:
    """A step being put together, and what `update` needs of it later. Decoding sequences come first in the batch."""

    decodes: list[Sequence] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Of the decoding sequences' input tokens."""
    chunks: list[Chunk] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    new_block_ids: dict[int, list[int]] = field(default_factory=dict)
    first_scheduled: list[FirstSchedule] = field(default_factory=list)
    step: int = -1
    sampled: list[Sequence] = field(default_factory=list)
    sampled_ids: list[int] = field(default_factory=list)
    num_prefill_tokens: int = 0


@dataclass(slots=True)
class StepUpdate:
    """What a collected step brought, without the tokens of sequences that had already ended."""

    step: int
    seq_ids: list[int]
    token_ids: list[int]
    finished: list[FinishedSequence]
    first_scheduled: list[FirstSchedule]
    logprobs: dict[int, list[TokenLogprobs]]
    prompt_logprobs: dict[int, list[TokenLogprobs | None]]


class Scheduler:
    """`add` and `abort` at any time; then `schedule` and `update` in turn, with any number of steps between them."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.config = config
        self.kv = kv
        # No sequence may need more blocks than there are, or it would preempt all others and then itself for ever.
        self.max_model_len = min(max_model_len, kv.pool.num_blocks * kv.block_size)
        self.vocab_size = vocab_size
        self._eos_ids = frozenset(eos_token_ids)
        self._clock = clock
        self.sequences: dict[int, Sequence] = {}
        """Everything that is not finished."""
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: list[Sequence] = []
        """In the order of admission."""
        self._plans: deque[StepPlan] = deque()
        self._num_steps = 0
        self._last_collected = -1
        self._finished: list[FinishedSequence] = []
        self._released: list[int] = []
        self._num_preemptions = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._cache_queries = 0
        self._cache_hits = 0
        self._last_result = (0, 0, 0.0)
        # A small share of blocks stays free at admission, or a full pool would preempt each newcomer at once.
        self._reserve = kv.pool.num_blocks // 100

    # Admission ---------------------------------------------------------------------------------------------------

    def add(self, request: AddRequest) -> None:
        """Queue a request. A request that cannot be served is answered as finished with reason `error`."""
        assert request.seq_id not in self.sequences, f"sequence id {request.seq_id} is used twice"
        try:
            seq = self._admit_request(request)
        except (RequestError, QueueFullError) as exc:
            self.refuse(request.seq_id, str(exc))
            return
        self.sequences[seq.seq_id] = seq
        self.waiting[seq.seq_id] = seq

    def refuse(self, seq_id: int, error: str) -> None:
        self._finished.append(FinishedSequence(seq_id, FINISH_ERROR, error=error))

    def _admit_request(self, request: AddRequest) -> Sequence:
        # A burst comes in before the next step is scheduled: what that may start does not wait.
        free_places = max(0, self.config.max_num_seqs - len(self.running))
        if len(self.waiting) >= self.config.max_waiting + free_places:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, the limit of --max-waiting; try again later"
            )
        tokens = decode_prompt(request.prompt)
        self._check_length(len(tokens))
        self._check_vocabulary(request.prompt)
        params = request.params
        stop_ids = frozenset() if params.ignore_eos else self._eos_ids
        if params.stop_token_ids:
            stop_ids = stop_ids.union(params.stop_token_ids)
        max_total = self.max_model_len
        if params.max_tokens is not None:
            max_total = min(max_total, len(tokens) + params.max_tokens)
        return Sequence(
            request.seq_id,
            request.request_id,
            tokens,
            params,
            request.arrival_ns,
            stop_ids=stop_ids,
            max_total=max_total,
        )

    def _check_length(self, count: int) -> None:
        if count == 0:
            raise RequestError("the prompt has no tokens", "prompt")
        if count >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {count} tokens; the context length is {self.max_model_len} and must leave room for "
                f"at least one generated token",
                "prompt",
            )
        config = self.config
        if not config.enable_chunked_prefill and count > config.max_num_batched_tokens:
            raise ContextLengthError(
                f"the prompt has {count} tokens, more than --max-num-batched-tokens {config.max_num_batched_tokens}, "
                f"and chunked prefill is off",
                "prompt",
            )

    def _check_vocabulary(self, prompt: bytes) -> None:
        """An id that is no row of the embedding would take the executor down, and every other request with it."""
        ids = np.frombuffer(prompt, dtype="<i4")
        size = self.vocab_size
        if ids.min() < 0 or (size is not None and ids.max() >= size):
            raise RequestError(f"the prompt has a token id outside the vocabulary of {size} ids", "prompt")

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences wherever they are. Their blocks are free when this returns; unknown ids are ignored."""
        for seq_id in seq_ids:
            seq = self.sequences.get(seq_id)
            if seq is not None:
                self._finish(seq, FINISH_ABORT)
        self._drop_finished()

    def abort_all(self) -> None:
        self.abort(list(self.sequences))

    # Scheduling --------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can be computed before a step in flight is collected."""
        plan = StepPlan()
        preemptions = self._num_preemptions
        self._schedule_running(plan)
        if self.waiting and preemptions == self._num_preemptions:
            self._schedule_waiting(plan)
        if not plan.decodes and not plan.chunks:
            return None
        return self._submit(plan)

    def _schedule_running(self, plan: StepPlan) -> None:
        add_sequence = plan.decodes.append
        add_position = plan.positions.append
        # A failed allocation pops victims from the tail while this walks the list, which a list iterator allows.
        for seq in self.running:
            position = seq.num_computed
            if position < seq.decode_limit:
                add_sequence(seq)
                add_position(position)
                seq.num_computed = position + 1
            elif seq.decode_limit == NOT_DECODING:
                self._schedule_chunk(seq, plan)
            elif position < seq.max_total - 1:
                # Decoding has reached the end of its last block.
                blocks = self._allocate_or_preempt(seq, position + 1)
                if blocks is not None:
                    plan.new_block_ids[seq.seq_id] = blocks
                    self._set_decode_limit(seq)
                    add_sequence(seq)
                    add_position(position)
                    seq.num_computed = position + 1
            # else: the token that reaches its length limit is in flight, there is nothing to compute.

    def _set_decode_limit(self, seq: Sequence) -> None:
        seq.decode_limit = min(len(seq.block_ids) * self.kv.block_size, seq.max_total - 1)

    def _schedule_chunk(self, seq: Sequence, plan: StepPlan) -> None:
        """Continue a running sequence's known tokens, leaving one token of the budget to each running sequence."""
        taken = sum(chunk.size - 1 for chunk in plan.chunks)
        room = self.config.max_num_batched_tokens - (len(self.running) - 1) - taken
        start = seq.num_computed
        size = min(len(seq.tokens) - start, room)
        blocks = self._allocate_or_preempt(seq, start + size)
        if blocks is None:
            return
        if blocks:
            plan.new_block_ids[seq.seq_id] = blocks
        self._plan_chunk(seq, start, size, plan)

    def _plan_chunk(self, seq: Sequence, start: int, size: int, plan: StepPlan) -> None:
        seq.num_computed = start + size
        samples = seq.num_computed == len(seq.tokens)
        if samples:
            self._set_decode_limit(seq)
        plan.chunks.append(Chunk(seq, start, size, samples))

    def _allocate_or_preempt(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Blocks for a running sequence, if need be from those admitted after it; None when it had to yield itself.

        A victim is never part of the step being planned: the walk over `running` has not come to it yet.
        """
        while (blocks := self.kv.allocate_slots(seq, num_tokens)) is None:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is seq:
                return None
        return blocks

    def _preempt(self, seq: Sequence) -> None:
        self.kv.free(seq)
        seq.status = Status.WAITING
        seq.num_computed = 0
        seq.decode_limit = NOT_DECODING
        seq.next_event = 0
        seq.resume_after = self._num_steps - 1
        self.waiting[seq.seq_id] = seq
        self.waiting.move_to_end(seq.seq_id, last=False)
        self._released.append(seq.seq_id)
        self._num_preemptions += 1

    def _schedule_waiting(self, plan: StepPlan) -> None:
        config = self.config
        budget = config.max_num_batched_tokens - len(plan.decodes) - sum(chunk.size for chunk in plan.chunks)
        while budget > 0 and self.waiting and len(self.running) < config.max_num_seqs and self.kv.pool.num_free:
            seq = next(iter(self.waiting.values()))
            if seq.resume_after > self._last_collected:
                break
            hits = self.kv.get_computed_blocks(seq)
            start = len(hits) * self.kv.block_size
            size = min(len(seq.tokens) - start, budget)
            if start + size < len(seq.tokens) and not self._may_split(seq):
                break
            if not self.kv.admit(seq, hits, start + size, self._reserve if self.running else 0):
                break
            self._start(seq, start, size, plan)
            budget -= size

    def _may_split(self, seq: Sequence) -> bool:
        """Without chunked prefill only what cannot be computed in one step may be split: a sequence that was admitted
        whole, then grew beyond the budget and was preempted."""
        return self.config.enable_chunked_prefill or len(seq.tokens) > self.config.max_num_batched_tokens

    def _start(self, seq: Sequence, start: int, size: int, plan: StepPlan) -> None:
        del self.waiting[seq.seq_id]
        self.running.append(seq)
        seq.status = Status.RUNNING
        plan.new_sequences.append(
            NewSequence(
                seq_id=seq.seq_id,
                token_ids=seq.tokens.tolist(),
                num_prompt_tokens=seq.num_prompt_tokens,
                params=seq.params,
                block_ids=list(seq.block_ids),
                num_computed_tokens=start,
                stop_token_ids=tuple(seq.stop_ids),
            )
        )
        if not seq.started:
            seq.started = True
            plan.first_scheduled.append(FirstSchedule(seq.seq_id, seq.arrival_ns, self._clock(), start))
            if self.kv.enable_prefix_caching:
                self._cache_queries += len(seq.tokens)
                self._cache_hits += start
        self._plan_chunk(seq, start, size, plan)

    def _submit(self, plan: StepPlan) -> SchedulerOutput:
        plan.step = self._num_steps
        self._num_steps += 1
        decodes, chunks = plan.decodes, plan.chunks
        seq_ids = [seq.seq_id for seq in decodes]
        num_new = [1] * len(decodes)
        samples = [True] * len(decodes)
        positions = plan.positions
        plan.sampled, plan.sampled_ids = decodes, seq_ids
        if chunks:
            plan.sampled = decodes + [chunk.seq for chunk in chunks if chunk.samples]
            plan.sampled_ids = [seq.seq_id for seq in plan.sampled]
            seq_ids += [chunk.seq.seq_id for chunk in chunks]
            num_new += [chunk.size for chunk in chunks]
            positions += [chunk.start for chunk in chunks]
            samples += [chunk.samples for chunk in chunks]
            plan.num_prefill_tokens = sum(chunk.size for chunk in chunks)
        self._plans.append(plan)
        released, self._released = self._released, []
        return SchedulerOutput(
            step=plan.step,
            seq_ids=seq_ids,
            num_new_tokens=num_new,
            num_computed_tokens=positions,
            samples=samples,
            new_sequences=plan.new_sequences,
            new_block_ids=plan.new_block_ids,
            released=released,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decode_seqs=len(decodes),
        )

    # Collecting --------------------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> StepUpdate:
        """Take in the result of the oldest step in flight."""
        plan = self._plans.popleft()
        token_ids = result.token_ids
        if result.step != plan.step or result.seq_ids != plan.sampled_ids or len(token_ids) != len(plan.sampled_ids):
            raise AtomEngineError(
                f"the executor answered step {result.step} with {len(token_ids)} tokens for {len(result.seq_ids)} "
                f"sequences where step {plan.step} has {len(plan.sampled_ids)}, or in another order"
            )
        self._last_collected = plan.step
        if plan.chunks:
            self._collect_chunks(plan)
        dropped: set[int] = set()
        for seq, token in zip(plan.sampled, token_ids, strict=True):
            known = seq.tokens
            known.append(token)
            if len(known) >= seq.next_event or token in seq.stop_ids:
                self._collect_event(seq, token, dropped)
        self._last_result = (plan.num_prefill_tokens, len(plan.decodes), result.seconds)
        return self._deliver(plan, result, dropped)

    def _collect_chunks(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            seq = chunk.seq
            # A preempted sequence is not running again before this step is collected, so these are the blocks
            # that the chunk was written to.
            if seq.status is Status.RUNNING:
                self._publish(seq, chunk.start + chunk.size)
                if chunk.samples and len(seq.tokens) == seq.num_prompt_tokens:
                    self._prompt_tokens += seq.num_prompt_tokens

    def _collect_event(self, seq: Sequence, token: int, dropped: set[int]) -> None:
        """A token after which something may be due: an end, a full block, or neither."""
        if seq.status is Status.FINISHED:
            seq.tokens.pop()
            dropped.add(seq.seq_id)
            return
        num_known = len(seq.tokens)
        if seq.status is Status.RUNNING:
            self._publish(seq, num_known - 1)
        if token in seq.stop_ids and seq.num_output_tokens > seq.params.min_tokens:
            self._finish(seq, FINISH_STOP, token)
        elif num_known >= seq.max_total:
            self._finish(seq, FINISH_LENGTH)

    def _publish(self, seq: Sequence, num_computed: int) -> None:
        # The last known token is not computed yet, hence one more than the next publication needs.
        next_event = self.kv.publish(seq, num_computed) + 1
        seq.next_event = next_event if next_event < seq.max_total else seq.max_total

    def _finish(self, seq: Sequence, reason: str, stop_token_id: int | None = None) -> None:
        """Report a sequence and free its blocks. The caller drops it from `running` with `_drop_finished`."""
        if seq.status is Status.RUNNING:
            self.kv.free(seq)
            self._released.append(seq.seq_id)
        else:
            del self.waiting[seq.seq_id]
        seq.status = Status.FINISHED
        seq.next_event = 0
        del self.sequences[seq.seq_id]
        self._finished.append(FinishedSequence(seq.seq_id, reason, stop_token_id))

    def _drop_finished(self) -> None:
        if self._finished:
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]

    def _deliver(self, plan: StepPlan, result: StepResult, dropped: set[int]) -> StepUpdate:
        seq_ids, token_ids = result.seq_ids, result.token_ids
        if dropped:
            kept = [(seq_id, token) for seq_id, token in zip(seq_ids, token_ids, strict=True) if seq_id not in dropped]
            seq_ids, token_ids = [seq_id for seq_id, _ in kept], [token for _, token in kept]
        self._generation_tokens += len(token_ids)
        self._drop_finished()
        return StepUpdate(
            step=plan.step,
            seq_ids=seq_ids,
            token_ids=token_ids,
            finished=self.take_finished(),
            first_scheduled=plan.first_scheduled,
            logprobs={key: value for key, value in result.logprobs.items() if key not in dropped},
            prompt_logprobs=self._prompt_logprobs(plan, result, dropped),
        )

    def _prompt_logprobs(
        self, plan: StepPlan, result: StepResult, dropped: set[int]
    ) -> dict[int, list[TokenLogprobs | None]]:
        """Once per sequence: a prompt that is recomputed after a preemption brings them again."""
        wanted: dict[int, list[TokenLogprobs | None]] = {}
        if result.prompt_logprobs:
            for chunk in plan.chunks:
                seq = chunk.seq
                if seq.seq_id in result.prompt_logprobs and seq.seq_id not in dropped and not seq.prompt_logprobs_sent:
                    seq.prompt_logprobs_sent = True
                    wanted[seq.seq_id] = result.prompt_logprobs[seq.seq_id]
        return wanted

    # State -------------------------------------------------------------------------------------------------------

    def take_finished(self) -> list[FinishedSequence]:
        """What ended since the last call, also outside of steps: refusals and aborts."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    @property
    def num_in_flight(self) -> int:
        return len(self._plans)

    @property
    def has_work(self) -> bool:
        """Whether there is something to schedule, to collect or to report."""
        return bool(self.sequences or self._plans or self._finished)

    def stats(self) -> SchedulerStats:
        pool = self.kv.pool
        prefill_tokens, decode_seqs, seconds = self._last_result
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_used,
            kv_blocks_cached=pool.num_cached,
            num_steps_total=self._num_steps,
            num_preemptions_total=self._num_preemptions,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            prefix_cache_queries_total=self._cache_queries,
            prefix_cache_hits_total=self._cache_hits,
            step_prefill_tokens=prefill_tokens,
            step_decode_seqs=decode_seqs,
            step_seconds=seconds,
        )
