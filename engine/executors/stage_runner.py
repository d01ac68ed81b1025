"""Runs micro-batches on one rank: its part of the model, with what other ranks compute before, beside and after it.

The first stage embeds and needs the tokens that the last one sampled; every stage hands on hidden states; in the last
one all tensor-parallel ranks sample, from the same logits and so the same tokens, and the first of them reports. The
counterpart for one process is `model_runner.py`. Shape legend: t tokens of the micro-batch, d hidden size, n sampled
rows, w the rank's part of the vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from atom.engine.executors.attention import KernelPagedAttention, TorchPagedAttention, attention_struct, kernel_batch
from atom.engine.executors.base import SchedulerOutput, StepResult
from atom.engine.executors.kv_cache import KVCache
from atom.engine.executors.model_runner import BackendKind
from atom.engine.executors.penalties import needs_adjustment
from atom.engine.executors.prompt_logprobs import extend_prompt_logprobs
from atom.engine.executors.ranks import Ranks
from atom.engine.executors.sampler import Sampler
from atom.engine.executors.sequence_table import SequenceState, SequenceTable
from atom.engine.executors.step_batch import StepBatch, build_batch
from atom.engine.kernels.bindings import CPUKernels
from atom.engine.kernels.stage import FusedStage
from atom.engine.messages import DeviceTimes, TokenLogprobs
from atom.engine.models.config import TransformerConfig
from atom.engine.models.shard import Shard
from atom.engine.models.stage import DecoderStage

__all__ = ["MAX_IN_FLIGHT", "StageBackend", "StageRunner", "create_stage_backend"]

MAX_IN_FLIGHT: Final = 2
"""Steps that may be submitted and not collected. Each is as many micro-batches as there are stages."""


class StageBackend(Protocol):
    """Computes a rank's part of a micro-batch."""

    activation_dtype: torch.dtype

    def embed(self, batch: StepBatch) -> torch.Tensor: ...

    def run_layers(self, x_td: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """May overwrite `x_td`."""
        ...

    def final_norm(self, x_td: torch.Tensor) -> torch.Tensor: ...

    def compute_logits(self, hidden_nd: torch.Tensor) -> torch.Tensor: ...


class TorchStageBackend:
    """The stage as written, with attention over the paged cache in C or in torch."""

    def __init__(self, stage: DecoderStage, cache: KVCache, kernels: CPUKernels | None) -> None:
        heads, scale = stage.local.num_heads, stage.local.head_dim**-0.5
        self._stage = stage
        self._attention = (
            TorchPagedAttention(cache, heads, scale)
            if kernels is None
            else KernelPagedAttention(cache, heads, scale, kernels)
        )
        self.activation_dtype = stage.dtype
        self.final_norm = stage.final_norm
        self.compute_logits = stage.compute_logits

    def embed(self, batch: StepBatch) -> torch.Tensor:
        return self._stage.embed(torch.from_numpy(batch.token_ids_t).long())

    def run_layers(self, x_td: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        self._attention.begin(batch)
        return self._stage.run_layers(x_td, torch.from_numpy(batch.positions_t).long(), self._attention)


class FusedStageBackend:
    """The stage in the compiled kernels."""

    activation_dtype = torch.float32

    def __init__(
        self, stage: DecoderStage, cache: KVCache, kernels: CPUKernels, max_model_len: int, ranks: Ranks
    ) -> None:
        attention = attention_struct(cache, stage.local.num_heads, stage.local.head_dim**-0.5)
        self._fused = FusedStage(stage, cache, kernels, attention, max_model_len, ranks.reduce)
        self.final_norm = self._fused.final_norm
        self.compute_logits = self._fused.compute_logits

    def embed(self, batch: StepBatch) -> torch.Tensor:
        return self._fused.embed(torch.from_numpy(batch.token_ids_t))

    def run_layers(self, x_td: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        return self._fused.run_layers(x_td, kernel_batch(batch))


def create_stage_backend(
    kind: BackendKind,
    stage: DecoderStage,
    cache: KVCache,
    kernels: CPUKernels | None,
    max_model_len: int,
    ranks: Ranks,
) -> StageBackend:
    if kind == "fused":
        assert kernels is not None
        return FusedStageBackend(stage, cache, kernels, max_model_len, ranks)
    return TorchStageBackend(stage, cache, kernels if kind == "attention" else None)


@dataclass(slots=True)
class _Awaited:
    """Tokens of a micro-batch that the last stage will send to the first."""

    states: list[SequenceState]
    seq_ids: frozenset[int]
    tokens_n: torch.Tensor
    wait: Callable[[], None]


class StageRunner:
    """State of all sequences on this rank and the micro-batches over them. One thread owns it."""

    def __init__(
        self,
        backend: StageBackend,
        table: SequenceTable,
        block_size: int,
        kernels: CPUKernels | None,
        ranks: Ranks,
        shard: Shard,
        config: TransformerConfig,
        *,
        report_device_times: bool = False,
    ) -> None:
        """`config`: of the whole model."""
        self._backend = backend
        self._table = table
        self._block_size = block_size
        self._sampler = Sampler(kernels)
        self._ranks = ranks
        self._shard = shard
        self._config = config
        self._awaited: deque[_Awaited] = deque()
        self._report_device_times = report_device_times

    def run(self, output: SchedulerOutput) -> StepResult | None:
        """Execute one micro-batch; the result in the last stage, None in others."""
        shard = self._shard
        self._take_tokens(output.seq_ids)
        self._table.take_changes(output)
        if not output.seq_ids:
            return StepResult(output.step, [], []) if shard.is_last else None
        batch = build_batch(output, self._table, self._block_size)
        x_td = self._backend.embed(batch) if shard.is_first else self._receive_hidden(batch.num_tokens)
        started = time.perf_counter()
        x_td = self._backend.run_layers(x_td, batch)
        if shard.is_last:
            return self._finish(output, batch, x_td, started)
        self._ranks.send_to_stage(shard.pp_rank + 1, x_td)
        if shard.is_first:
            self._await_tokens(batch.sampling)
        else:
            for state in batch.sampling:
                self._table.append_token(state, 0)  # no stage between first and last ever looks at a token
        return None

    def _finish(self, output: SchedulerOutput, batch: StepBatch, x_td: torch.Tensor, started: float) -> StepResult:
        table, shard = self._table, self._shard
        prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        rows_n = torch.from_numpy(batch.sample_rows_n).long()
        tokens: list[int] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        logits_nw = self._backend.compute_logits(self._backend.final_norm(x_td[rows_n])) if len(rows_n) else None
        forwarded = time.perf_counter()
        if logits_nw is not None:
            tokens, logprobs = self._sample(logits_nw, batch.sampling)
            if not shard.is_first:
                self._ranks.send_to_stage(0, torch.tensor(tokens))
        if any(state.wants_prompt_logprobs for state in batch.states):
            hidden_td = self._backend.final_norm(x_td)
            prompt_logprobs = extend_prompt_logprobs(output, batch, table, hidden_td, self._all_logits)
        for state, token in zip(batch.sampling, tokens, strict=True):
            table.append_token(state, token)
        times = None
        if self._report_device_times:
            sampled = time.perf_counter() - forwarded
            times = [DeviceTimes(forwarded - started, sampled if batch.sampling else None)]
        return StepResult(
            step=output.step,
            seq_ids=[state.seq_id for state in batch.sampling],
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            device_times=times,
        )

    def _sample(
        self, logits_nw: torch.Tensor, states: list[SequenceState]
    ) -> tuple[list[int], dict[int, list[TokenLogprobs]]]:
        if self._shard.tp_size > 1 and all(_is_argmax(state) for state in states):
            tokens: list[int] = self._ranks.argmax(logits_nw, self._config).tolist()
            return tokens, {}
        return self._sampler.sample(self._ranks.gather_logits(logits_nw, self._config), states)

    def _all_logits(self, hidden_nd: torch.Tensor) -> torch.Tensor:
        return self._ranks.gather_logits(self._backend.compute_logits(hidden_nd), self._config)

    def _receive_hidden(self, num_tokens: int) -> torch.Tensor:
        x_td = torch.empty(num_tokens, self._config.hidden_size, dtype=self._backend.activation_dtype)
        self._ranks.receive_from_stage(self._shard.pp_rank - 1, x_td)()
        return x_td

    def _await_tokens(self, states: list[SequenceState]) -> None:
        if states:
            # A sequence that has ended is never scheduled again, so nobody asks for its last token. What is older than
            # the steps in flight has been sampled long ago.
            while len(self._awaited) >= MAX_IN_FLIGHT * self._shard.pp_size:
                self._take_oldest()
            tokens_n = torch.empty(len(states), dtype=torch.int64)
            wait = self._ranks.receive_from_stage(self._shard.pp_size - 1, tokens_n)
            self._awaited.append(_Awaited(states, frozenset(state.seq_id for state in states), tokens_n, wait))

    def _take_tokens(self, seq_ids: list[int]) -> None:
        """Wait for the tokens that sequences of this micro-batch need, and for what comes before them."""
        wanted = frozenset(seq_ids)
        while any(not wanted.isdisjoint(awaited.seq_ids) for awaited in self._awaited):
            self._take_oldest()

    def _take_oldest(self) -> None:
        awaited = self._awaited.popleft()
        awaited.wait()
        for state, token in zip(awaited.states, awaited.tokens_n.tolist(), strict=True):
            # The row of a sequence that has ended since may have another one's tokens by now.
            if self._table.get(state.seq_id) is state:
                self._table.append_token(state, token)


def _is_argmax(state: SequenceState) -> bool:
    """Whether the token is the largest logit and nothing else is asked."""
    return state.params.greedy and state.params.logprobs is None and not needs_adjustment(state)
