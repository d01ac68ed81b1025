"""The CPU executor over several workers, tensor and pipeline parallel: one scheduler and one pool of block numbers,
whose tensors are divided among the ranks.

A step goes to every worker, in micro-batches (`micro_batches.py`); the first rank of the last stage answers. Processes
and their ends: `worker_group.py`. What a rank computes: `stage_runner.py`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from atom.engine.config import EngineConfig
from atom.engine.errors import AtomEngineError, RequestError
from atom.engine.executors.base import FutureExecutor, SchedulerOutput, StepHandle, StepResult
from atom.engine.executors.cpu_choices import choose_dtype, context_length
from atom.engine.executors.kv_cache import KVCacheShape, available_memory, choose_num_blocks
from atom.engine.executors.micro_batches import MicroBatches, PendingStep
from atom.engine.executors.stage_runner import MAX_IN_FLIGHT
from atom.engine.executors.worker_group import WorkerGroup
from atom.engine.executors.worker_messages import (
    Allocate,
    Loaded,
    MicroBatch,
    Profile,
    Profiled,
    Ready,
    Sampled,
    WorkerMessage,
)
from atom.engine.loading.describe import ModelDescription, describe_model
from atom.engine.models.shard import Shard, check_division

__all__ = ["ParallelExecutor"]

Reply = TypeVar("Reply", Loaded, Ready, Profiled)


class ParallelExecutor(FutureExecutor):
    """`tensor_parallel_size` × `pipeline_parallel_size` workers. `step seconds` are from the end of the step before, or
    the submission if that was later, to the end of the step: stages overlap, so a step has no time of its own."""

    max_in_flight = MAX_IN_FLIGHT
    kind = "cpu"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._micro_batches = MicroBatches(config.parallel.pipeline_parallel_size)
        self._workers: WorkerGroup | None = None
        self._changed = threading.Condition()
        """Guards what follows; notified whenever it changes."""
        self._replies: dict[int, WorkerMessage] = {}
        self._pending: deque[tuple[PendingStep, Future[StepResult], float]] = deque()
        self._last_end = 0.0
        self._info: dict[str, Any] = {}

    def start(self) -> int:
        assert self._workers is None, "started twice"
        try:
            return self._start()
        except BaseException:
            self.shutdown()
            raise

    def _start(self) -> int:
        config = self._config
        description = describe_model(config.model.model, config.model.load_format)
        parallel = config.parallel
        check_division(description.config, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        dtype, dtype_reason = choose_dtype(config)
        max_model_len = context_length(config, description.config)
        self._workers = WorkerGroup(config, self._take_message, self._take_failure)
        self._await_replies(Loaded)
        shape = self._cache_shape(description, dtype)
        max_tokens = max_model_len * config.scheduler.max_num_seqs
        available = available_memory() // parallel.data_parallel_size
        num_blocks = choose_num_blocks(config.cache, shape, max_tokens, available)
        self._workers.broadcast(Allocate(num_blocks))
        infos = [ready.info for ready in self._await_replies(Ready)]
        name = str(dtype).removeprefix("torch.")
        self._info = {
            **infos[0],
            "executor": self.kind,
            "dtype": name,
            "dtype_reason": dtype_reason,
            "threads": sum(info["threads"] for info in infos),
            "weight_bytes": sum(info["weight_bytes"] for info in infos),
            "vocab_size": description.vocab_size,
            "max_model_len": max_model_len,
            "eos_token_ids": list(description.eos_token_ids),
            "architecture": description.config.architecture,
            "num_blocks": num_blocks,
            "kv_cache_dtype": name,
            "kv_cache_bytes": num_blocks * shape.block_bytes,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "worker_pids": self._workers.pids,
        }
        return num_blocks

    def _cache_shape(self, description: ModelDescription, dtype: torch.dtype) -> KVCacheShape:
        """A block over all ranks: copies of a kv head count as often as they are held."""
        size, architecture = self._config.parallel.tensor_parallel_size, description.config
        num_kv_heads = Shard(tp_size=size).local_config(architecture).num_kv_heads * size
        block_size = self._config.cache.block_size
        return KVCacheShape(architecture.num_layers, num_kv_heads, architecture.head_dim, block_size, dtype)

    def submit(self, output: SchedulerOutput) -> StepHandle:
        assert self._workers is not None, "not started"
        future: Future[StepResult] = Future()
        parts = self._micro_batches.divide(output)
        with self._changed:
            if self.failure is not None:
                future.set_exception(self.failure)
                return StepHandle(output.step, future)
            self._pending.append((PendingStep(output, len(parts)), future, time.perf_counter()))
        for part in parts:
            self._workers.broadcast(MicroBatch(part))
        return StepHandle(output.step, future)

    def shutdown(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown()

    def info(self) -> dict[str, Any]:
        return dict(self._info) if self._info else super().info()

    def start_profile(self, directory: str) -> None:
        """Every worker records, each a trace of its own."""
        self._profile(directory)

    def stop_profile(self) -> str:
        """The path of the first worker's trace; those of the others are beside it."""
        path = self._profile(None)[0].path
        assert path is not None
        return path

    def _profile(self, directory: str | None) -> list[Profiled]:
        assert self._workers is not None, "not started"
        self._workers.broadcast(Profile(directory))
        replies = self._await_replies(Profiled)
        for reply in replies:
            if reply.error is not None:
                raise RequestError(reply.error)
        return replies

    def _await_replies(self, kind: type[Reply]) -> list[Reply]:
        """One message of `kind` from each worker, by rank. Raises what ended the workers."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure is not None or len(self._replies) == self._config.parallel.num_ranks
            )
            if self.failure is not None:
                raise self.failure
            replies, self._replies = self._replies, {}
        ordered = [reply for _, reply in sorted(replies.items()) if isinstance(reply, kind)]
        assert len(ordered) == len(replies), replies
        return ordered

    def _take_message(self, rank: int, message: WorkerMessage) -> None:
        if not isinstance(message, Sampled):
            with self._changed:
                self._replies[rank] = message
                self._changed.notify_all()
            return
        with self._changed:
            step, future, submitted = self._pending[0]
            if not step.add(message.result):
                return
            self._pending.popleft()
        end = time.perf_counter()
        result = step.merge(end - max(submitted, self._last_end))
        self._last_end = end
        future.set_result(result)

    def _take_failure(self, failure: AtomEngineError) -> None:
        with self._changed:
            self.failure = failure
            pending = [future for _, future, _ in self._pending]
            self._pending.clear()
            self._changed.notify_all()
        for future in pending:
            future.set_exception(failure)
        if self.on_failure is not None:
            self.on_failure()
