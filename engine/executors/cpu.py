"""The CPU executor: loads the model, owns the worker thread that runs steps in order, and says what it runs on.

A step is queued by `submit` and computed by the worker while the scheduler plans the next one; `collect` waits for
it. What a step does: `model_runner.py`. Numeric contract: dtype float32 is float32 everywhere; bfloat16 means weights
and KV cache in bfloat16, with activations and sums in float32 where compiled kernels serve.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from atom.engine import envs
from atom.engine.config import EngineConfig
from atom.engine.executors.base import FutureExecutor, SchedulerOutput, StepHandle, StepResult
from atom.engine.executors.cpu_choices import choose_dtype, compute_threads, context_length
from atom.engine.executors.kv_cache import KVCache, KVCacheShape, available_memory, choose_num_blocks
from atom.engine.executors.model_runner import ModelRunner, choose_backend, create_backend
from atom.engine.executors.sequence_table import SequenceTable
from atom.engine.executors.torch_profile import TorchProfile
from atom.engine.kernels.bindings import CPUKernels, KernelsUnavailableError
from atom.engine.loading.weights import LoadedModel, load_model
from atom.engine.models.config import TransformerConfig

__all__ = ["CPUExecutor"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class CPUExecutor(FutureExecutor):
    """Real models in torch and C. `kernels`: "auto" the fastest, "attention" compiled attention alone, "torch" none;
    None: what `$ATOM_CPU_KERNELS` says, else "auto"."""

    max_in_flight = 2
    kind = "cpu"

    def __init__(self, config: EngineConfig, kernels: envs.KernelChoice | None = None) -> None:
        self._config = config
        self._choice = kernels or envs.CPU_KERNELS.read()
        self._report_device_times = envs.METRICS_DEVICE_TIMER.read()
        self._kernels: CPUKernels | None = None
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._info: dict[str, Any] = {}
        self._profile = TorchProfile()
        self._torch_threads: int | None = None
        self.runner: ModelRunner | None = None

    def start(self) -> int:
        assert self._worker is None, "started twice"
        try:
            return self._start()
        except BaseException:
            self.shutdown()
            raise

    def _start(self) -> int:
        threads = compute_threads(self._config)
        why_torch = self._open_kernels(threads)
        dtype, dtype_reason = choose_dtype(self._config)
        loaded = load_model(self._config.model, dtype=dtype)
        architecture = loaded.transformer_config
        max_model_len = context_length(self._config, architecture)
        # Compiled kernels have threads of their own; torch's would spin beside them after every small operation.
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(threads if self._kernels is None else 1)
        cache = self._allocate_cache(architecture, dtype, max_model_len)
        kind, reason = choose_backend(architecture, dtype, self._kernels, self._choice)
        parameters = architecture.num_parameters
        backend = create_backend(kind, loaded.model, cache, self._kernels, max_model_len)
        scheduler = self._config.scheduler
        table = SequenceTable(
            scheduler.max_num_seqs, max_model_len, self._config.cache.block_size, self._config.model.seed
        )
        self.runner = ModelRunner(
            backend, table, self._config.cache.block_size, self._kernels, report_device_times=self._report_device_times
        )
        self._info = _describe(loaded, cache, max_model_len) | {
            "executor": self.kind,
            "dtype_reason": dtype_reason,
            "threads": threads,
            "kernels": kind if self._kernels is None else f"{kind} ({self._kernels.isa})",
            "kernels_reason": why_torch or reason,
            "activations": "float32" if kind == "fused" else str(dtype).removeprefix("torch."),
            "weight_bytes": parameters * dtype.itemsize,
        }
        del loaded, backend
        self._worker = threading.Thread(target=self._run_steps, name="cpu-executor", daemon=True)
        self._worker.start()
        return cache.num_blocks

    def submit(self, output: SchedulerOutput) -> StepHandle:
        assert self._worker is not None, "not started"
        future: Future[StepResult] = Future()
        self._queue.put((lambda: self._run_step(output), future))
        return StepHandle(output.step, future)

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._queue.put(None)
            worker.join()
        self.runner = None
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
            self._torch_threads = None

    def start_profile(self, directory: str) -> None:
        self._on_worker(lambda: self._profile.start(directory))

    def stop_profile(self) -> str:
        return self._on_worker(self._profile.stop)

    def info(self) -> dict[str, Any]:
        return dict(self._info) if self._info else super().info()

    def _open_kernels(self, threads: int) -> str:
        """Compile or load the kernels; the reason why there are none, or ""."""
        if self._choice == "torch":
            return f"{envs.CPU_KERNELS.name}=torch"
        try:
            self._kernels = CPUKernels(threads)
        except KernelsUnavailableError as error:
            log.warning("computing in plain torch, many times slower: %s", error)
            return str(error)
        return ""

    def _allocate_cache(self, architecture: TransformerConfig, dtype: torch.dtype, max_model_len: int) -> KVCache:
        shape = KVCacheShape(
            architecture.num_layers,
            architecture.num_kv_heads,
            architecture.head_dim,
            self._config.cache.block_size,
            dtype,
        )
        max_tokens = max_model_len * self._config.scheduler.max_num_seqs
        available = available_memory() // self._config.parallel.data_parallel_size
        return KVCache(shape, choose_num_blocks(self._config.cache, shape, max_tokens, available))

    def _run_step(self, output: SchedulerOutput) -> StepResult:
        assert self.runner is not None
        name = f"step {output.step}: {output.num_prefill_tokens} prefill tokens, {output.num_decode_seqs} decoding"
        with self._profile.span(name):
            return self.runner.run(output)

    def _on_worker(self, function: Callable[[], T]) -> T:
        """Run `function` between steps. What it raises is its caller's alone and does not end the executor."""
        assert self._worker is not None, "not started"
        error: Exception | None = None

        def work() -> T | None:
            nonlocal error
            try:
                return function()
            except Exception as exc:
                error = exc
                return None

        future: Future[T] = Future()
        self._queue.put((work, future))
        value = future.result()
        if error is not None:
            raise error
        return value

    def _run_steps(self) -> None:
        """The worker. After a step has failed the state of its sequences is unknown, so every later one fails too."""
        failure: BaseException | None = None
        # Thread-local in torch: without it every operation records for autograd.
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                work, future = item
                if failure is None:
                    try:
                        future.set_result(work())
                    except BaseException as error:
                        failure = error
                if failure is not None:
                    future.set_exception(failure)


def _describe(loaded: LoadedModel, cache: KVCache, max_model_len: int) -> dict[str, Any]:
    architecture = loaded.transformer_config
    dtype = str(cache.shape.dtype).removeprefix("torch.")
    return {
        "dtype": dtype,
        "vocab_size": architecture.vocab_size,
        "max_model_len": max_model_len,
        "eos_token_ids": list(loaded.eos_token_ids),
        "architecture": architecture.architecture,
        "num_blocks": cache.num_blocks,
        "kv_cache_dtype": dtype,
        "kv_cache_bytes": cache.num_blocks * cache.shape.block_bytes,
    }
