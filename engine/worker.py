"""A worker process: `python -m atom.engine.worker --rank R --control FD --store FD`, one rank of an EngineCore's model.

The core (`engine/executors/worker_group.py`) starts it with its end of a socket pair and a file in memory over which
the ranks find each other; the `EngineConfig` is in ATOM_ENGINE_CONFIG. What it computes is
`engine/executors/stage_runner.py`; this file is its start, its loop and its end:

    SIGINT, SIGTERM  ignored, the core coordinates
    end of the core  exit within a second or two, whatever was running
    any exception    one `Failed` message, a traceback on stderr where it is unexpected, exit 1
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Final

import torch

from atom.engine import envs
from atom.engine.config import EngineConfig
from atom.engine.errors import ConfigError, RequestError
from atom.engine.executors.base import SchedulerOutput
from atom.engine.executors.cpu_choices import choose_dtype, compute_threads, context_length
from atom.engine.executors.kv_cache import KVCache, KVCacheShape
from atom.engine.executors.model_runner import choose_backend
from atom.engine.executors.ranks import PeerLostError, Ranks
from atom.engine.executors.sequence_table import SequenceTable
from atom.engine.executors.stage_runner import StageRunner, create_stage_backend
from atom.engine.executors.torch_profile import TorchProfile
from atom.engine.executors.worker_messages import (
    Allocate,
    CoreMessage,
    Failed,
    Loaded,
    MessageSocket,
    MicroBatch,
    Profile,
    Profiled,
    Ready,
    Sampled,
)
from atom.engine.kernels.bindings import CPUKernels, KernelsUnavailableError
from atom.engine.loading.weights import load_stage
from atom.engine.models.shard import Shard

END_S: Final = 1.0
"""From the end of the core, or of this rank's work, to that of the process."""

logger = logging.getLogger("atom.engine.worker")


class Worker:
    """One rank: loads its part of the model, then runs micro-batches until the core is gone."""

    def __init__(self, config: EngineConfig, shard: Shard, core: MessageSocket[CoreMessage], store_path: str) -> None:
        self._config = config
        self._shard = shard
        self._core = core
        self._store_path = store_path
        self._inbox: queue.SimpleQueue[CoreMessage | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._profile = TorchProfile()
        self._reports = shard.is_last and shard.tp_rank == 0
        threading.Thread(target=self._receive, name="WorkerInbox", daemon=True).start()

    def _receive(self) -> None:
        """Takes in what the core sends while this rank computes, and ends the process with the core, also one that
        waits for another rank."""
        with contextlib.suppress(Exception):
            while (message := self._core.receive()) is not None:
                self._inbox.put(message)
        self._inbox.put(None)
        if not self._ended.wait(END_S):
            os._exit(1)

    @torch.inference_mode()
    def run(self) -> None:
        """Returns when the core closes its end."""
        try:
            self._serve()
        finally:
            self._ended.set()

    def _serve(self) -> None:
        runner = self._load()
        if runner is None:
            return
        gc.collect()
        gc.freeze()
        while True:
            match self._inbox.get():
                case MicroBatch(output=output):
                    self._run(runner, output)
                case Profile(directory=directory):
                    self._core.send(self._record(directory))
                case Allocate():
                    raise AssertionError("the cache was allocated before")
                case None:
                    return

    def _load(self) -> StageRunner | None:
        """None when the core is gone meanwhile."""
        config, shard = self._config, self._shard
        kernels, why_torch = _open_kernels(compute_threads(config))
        torch.set_num_threads(compute_threads(config) if kernels is None else 1)
        ranks = Ranks(shard, self._store_path)
        dtype, _ = choose_dtype(config)
        stage = load_stage(config.model, dtype, shard, ranks.reduce)
        weight_bytes = sum(view.numel() for _, _, view in stage.checkpoint_parts()) * dtype.itemsize
        self._core.send(Loaded())
        allocate = self._inbox.get()
        if allocate is None:
            return None
        assert isinstance(allocate, Allocate)
        local, block_size = stage.local, config.cache.block_size
        shape = KVCacheShape(local.num_layers, local.num_kv_heads, local.head_dim, block_size, dtype)
        cache = KVCache(shape, allocate.num_blocks)
        kind, reason = choose_backend(local, dtype, kernels, envs.CPU_KERNELS.read())
        max_model_len = context_length(config, stage.config)
        backend = create_stage_backend(kind, stage, cache, kernels, max_model_len, ranks)
        runner = StageRunner(
            backend,
            SequenceTable(config.scheduler.max_num_seqs, max_model_len, block_size, config.model.seed),
            block_size,
            kernels,
            ranks,
            shard,
            stage.config,
            report_device_times=envs.METRICS_DEVICE_TIMER.read(),
        )
        info = {
            "threads": compute_threads(config),
            "kernels": kind if kernels is None else f"{kind} ({kernels.isa})",
            "kernels_reason": why_torch or reason,
            "activations": str(backend.activation_dtype).removeprefix("torch."),
            "weight_bytes": weight_bytes,
        }
        self._core.send(Ready(info))
        return runner

    def _run(self, runner: StageRunner, output: SchedulerOutput) -> None:
        name = f"step {output.step}: {sum(output.num_new_tokens)} tokens of {len(output.seq_ids)} sequences"
        with self._profile.span(name):
            result = runner.run(output)
        if self._reports:
            assert result is not None
            self._core.send(Sampled(result))

    def _record(self, directory: str | None) -> Profiled:
        try:
            if directory is not None:
                self._profile.start(directory)
                return Profiled(None, None)
            return Profiled(self._profile.stop(), None)
        except RequestError as error:
            return Profiled(None, str(error))


def _open_kernels(threads: int) -> tuple[CPUKernels | None, str]:
    """Compile or load the kernels, or the reason why there are none."""
    if envs.CPU_KERNELS.read() == "torch":
        return None, f"{envs.CPU_KERNELS.name}=torch"
    try:
        return CPUKernels(threads), ""
    except KernelsUnavailableError as error:
        logger.warning("computing in plain torch, many times slower: %s", error)
        return None, str(error)


def _failure(error: Exception) -> Failed:
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, ConfigError):
        return Failed("config", text)
    if isinstance(error, PeerLostError):
        return Failed("peer", text)
    return Failed("error", f"{type(error).__name__}: {text}")


def main(argv: list[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="atom.engine.worker", description="One rank of an EngineCore's model.")
    parser.add_argument("--rank", type=int, required=True, help="number of this rank, stage by stage")
    parser.add_argument("--control", type=int, required=True, help="descriptor of a socket to the core")
    parser.add_argument("--store", type=int, required=True, help="descriptor of a file in which ranks find each other")
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(levelname)s worker-{args.rank} %(asctime)s %(message)s"
    )
    core: MessageSocket[CoreMessage] = MessageSocket(socket.socket(fileno=args.control), CoreMessage)
    try:
        config = EngineConfig.from_json(envs.ENGINE_CONFIG.read() or "{}")
        size = config.parallel.tensor_parallel_size
        stage, place = divmod(args.rank, size)
        shard = Shard(place, size, stage, config.parallel.pipeline_parallel_size)
        Worker(config, shard, core, f"/proc/self/fd/{args.store}").run()
        return 0
    except Exception as error:
        failure = _failure(error)
        if failure.kind == "error":
            traceback.print_exc()
        with contextlib.suppress(OSError):
            core.send(failure)
        return 1


def _end(status: int) -> None:
    """Exit without taking the interpreter, torch and gloo apart, which takes a second or waits for ranks that are gone;
    but recordings are completed, by what is registered for the end."""
    signal.setitimer(signal.ITIMER_REAL, END_S)  # SIGALRM ends a process whose exit functions hang
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _end(main())
