"""Runs one step of a model on the CPU: batch, forward pass, sampling, prompt log probabilities.

Three ways to compute, best first: the fused decoder in C; the torch model with paged attention in C; torch alone.
Which one serves, and why, is decided once (`choose_backend`) and said in `/server_info`. Threads, queues and loading
belong to `cpu.py`. Shape legend: t tokens of the step, n sampled rows, d hidden size, v vocabulary.
"""

from __future__ import annotations

import time
from typing import Literal, Protocol

import torch

from atom.engine.executors.attention import (
    KernelPagedAttention,
    TorchPagedAttention,
    attention_struct,
    kernel_batch,
)
from atom.engine.executors.base import SchedulerOutput, StepResult
from atom.engine.executors.kv_cache import KVCache
from atom.engine.executors.prompt_logprobs import extend_prompt_logprobs
from atom.engine.executors.sampler import Sampler
from atom.engine.executors.sequence_table import SequenceTable
from atom.engine.executors.step_batch import StepBatch, build_batch
from atom.engine.kernels.bindings import DTYPES, MAX_GROUP, MAX_HEAD_DIM, CPUKernels
from atom.engine.kernels.decoder import FusedDecoder, why_not_fused
from atom.engine.messages import DeviceTimes, TokenLogprobs
from atom.engine.models.config import TransformerConfig
from atom.engine.models.decoder import DecoderLM

__all__ = ["Backend", "ModelRunner", "choose_backend", "create_backend"]

BackendKind = Literal["fused", "attention", "torch"]


class Backend(Protocol):
    """Computes the logits of a batch."""

    def forward(self, batch: StepBatch, want_hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `[n, v]` of the sampled rows, valid until the next call, and hidden states `[t, d]` if wanted."""
        ...

    def compute_logits(self, hidden_nd: torch.Tensor) -> torch.Tensor:
        """Logits `[n, v]`, float32."""
        ...


class FusedBackend:
    """The whole step in one call of the compiled kernels."""

    def __init__(self, model: DecoderLM, cache: KVCache, kernels: CPUKernels, max_model_len: int) -> None:
        config = model.config
        attention = attention_struct(cache, config.num_heads, config.head_dim**-0.5)
        self._decoder = FusedDecoder(model, cache, kernels, attention, max_model_len)
        self._logits = torch.empty(0)

    def forward(self, batch: StepBatch, want_hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        n, vocab = len(batch.sample_rows_n), self._decoder.vocab_size
        if n * vocab > self._logits.numel():
            self._logits = torch.empty(n * vocab)
        logits_nv = self._logits[: n * vocab].view(n, vocab)
        hidden_td = torch.empty(batch.num_tokens, self._decoder.hidden_size) if want_hidden else None
        self._decoder.step(kernel_batch(batch), logits_nv, hidden_td)
        return logits_nv, hidden_td

    def compute_logits(self, hidden_nd: torch.Tensor) -> torch.Tensor:
        return self._decoder.compute_logits(hidden_nd)


class TorchBackend:
    """The model as written, with attention over the paged cache in C or in torch."""

    def __init__(self, model: DecoderLM, cache: KVCache, kernels: CPUKernels | None) -> None:
        self._model = model
        heads, scale = model.config.num_heads, model.config.head_dim**-0.5
        self._attention = (
            TorchPagedAttention(cache, heads, scale)
            if kernels is None
            else KernelPagedAttention(cache, heads, scale, kernels)
        )

    def forward(self, batch: StepBatch, want_hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._attention.begin(batch)
        token_ids_t, positions_t = (
            torch.from_numpy(batch.token_ids_t).long(),
            torch.from_numpy(batch.positions_t).long(),
        )
        hidden_td = self._model.forward(token_ids_t, positions_t, self._attention)
        logits_nv = self.compute_logits(hidden_td[torch.from_numpy(batch.sample_rows_n).long()])
        return logits_nv, hidden_td if want_hidden else None

    def compute_logits(self, hidden_nd: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden_nd)


def choose_backend(
    config: TransformerConfig,
    dtype: torch.dtype,
    kernels: CPUKernels | None,
    wanted: Literal["auto", "attention", "torch"],
) -> tuple[BackendKind, str]:
    """The best backend that can run the model, and a sentence why it is not a better one ("" for the best)."""
    if wanted == "torch" or kernels is None:
        return "torch", "compiled kernels are off" if wanted == "torch" else "compiled kernels are unavailable"
    reason = why_not_fused(config, dtype) if wanted == "auto" else "asked for"
    if reason is None:
        return "fused", ""
    group = config.num_heads // config.num_kv_heads
    if dtype in DTYPES and config.head_dim <= MAX_HEAD_DIM and group <= MAX_GROUP:
        return "attention", f"no fused decoder: {reason}"
    return "torch", f"no compiled kernels: {reason}"


def create_backend(
    kind: BackendKind, model: DecoderLM, cache: KVCache, kernels: CPUKernels | None, max_model_len: int
) -> Backend:
    if kind == "fused":
        assert kernels is not None
        return FusedBackend(model, cache, kernels, max_model_len)
    return TorchBackend(model, cache, kernels if kind == "attention" else None)


class ModelRunner:
    """State of all sequences and the steps over them. One thread owns it."""

    def __init__(
        self,
        backend: Backend,
        table: SequenceTable,
        block_size: int,
        kernels: CPUKernels | None,
        *,
        report_device_times: bool = False,
    ) -> None:
        self._backend = backend
        self._table = table
        self._block_size = block_size
        self._sampler = Sampler(kernels)
        self._report_device_times = report_device_times
        self.phase_seconds = {"batch": 0.0, "forward": 0.0, "sample": 0.0}
        """Where the time went since the start, for measurements."""

    def run(self, output: SchedulerOutput) -> StepResult:
        """Execute one step."""
        t0 = time.perf_counter()
        self._table.take_changes(output)
        if not output.seq_ids:
            return StepResult(output.step, [], [])
        batch = build_batch(output, self._table, self._block_size)
        t1 = time.perf_counter()
        want_hidden = any(state.wants_prompt_logprobs for state in batch.states)
        logits_nv, hidden_td = self._backend.forward(batch, want_hidden)
        t2 = time.perf_counter()
        tokens, logprobs = self._sampler.sample(logits_nv, batch.sampling) if batch.sampling else ([], {})
        prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        if hidden_td is not None:
            prompt_logprobs = extend_prompt_logprobs(
                output, batch, self._table, hidden_td, self._backend.compute_logits
            )
        for state, token in zip(batch.sampling, tokens, strict=True):
            self._table.append_token(state, token)
        t3 = time.perf_counter()
        device_times = None
        if self._report_device_times:  # the CPU is the device: its clock has been read anyway
            device_times = [DeviceTimes(t2 - t1, t3 - t2 if batch.sampling else None)]
        for phase, seconds in (("batch", t1 - t0), ("forward", t2 - t1), ("sample", t3 - t2)):
            self.phase_seconds[phase] += seconds
        return StepResult(
            step=output.step,
            seq_ids=[state.seq_id for state in batch.sampling],
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            seconds=t3 - t0,
            device_times=device_times,
        )
