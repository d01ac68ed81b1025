"""The engine without its process: an executor, a scheduler and the loop that keeps both busy.
Sockets, signals and the process: `engine/core_process.py`. The decisions: `engine/scheduler.py`.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from atom.engine.config import EngineConfig
from atom.engine.errors import AtomEngineError, ConfigError, RequestError
from atom.engine.executors.base import Executor, StepHandle
from atom.engine.executors.factory import create_executor
from atom.engine.kv_cache_manager import KVCacheManager
from atom.engine.messages import AddRequest, StepOutputs
from atom.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    """`add_request` and `abort` at any time; `step` as long as there is work. Not thread-safe: one thread owns it."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None, engine_index: int = 0) -> None:
        """Start the executor, which loads the model. Raises `ConfigError` when the configuration does not fit it."""
        started = time.monotonic()
        self.config = config
        self.engine_index = engine_index
        self.executor = executor if executor is not None else create_executor(config)
        try:
            num_blocks = self.executor.start()
            facts = self.executor.info()
            max_model_len = _fit_context(config, num_blocks, facts["max_model_len"])
        except BaseException:
            self.executor.shutdown()
            raise
        cache = config.cache
        self.scheduler = Scheduler(
            config.scheduler,
            KVCacheManager(num_blocks, cache.block_size, enable_prefix_caching=cache.enable_prefix_caching),
            max_model_len=max_model_len,
            eos_token_ids=facts["eos_token_ids"],
            vocab_size=facts["vocab_size"],
        )
        self.info: dict[str, Any] = {
            **facts,
            "max_model_len": max_model_len,
            "num_kv_blocks": num_blocks,
            "block_size": cache.block_size,
            "load_seconds": round(time.monotonic() - started, 3),
        }
        self._depth = self.executor.max_in_flight if config.scheduler.overlap else 1
        self._in_flight: deque[StepHandle] = deque()
        self._draining = False
        self._utilities: dict[str, Callable[..., Any]] = {
            "ping": self.ping,
            "stats": self.stats,
            "check_integrity": self.check_integrity,
            "reset_prefix_cache": self.reset_prefix_cache,
            "start_profile": self.start_profile,
            "stop_profile": self.stop_profile,
        }

    # Requests ----------------------------------------------------------------------------------------------------

    def add_request(self, request: AddRequest) -> None:
        """Queue a request. Refusals come back as finished sequences with an error."""
        if self._draining:
            self.scheduler.refuse(request.seq_id, "the engine is shutting down")
        else:
            self.scheduler.add(request)

    def abort(self, seq_ids: Iterable[int]) -> None:
        """End sequences wherever they are; unknown ids are ignored."""
        self.scheduler.abort(seq_ids)

    def stop_admission(self, *, abort: bool) -> None:
        """Take no further request; finish those there are, or abort them."""
        self._draining = True
        if abort:
            self.scheduler.abort_all()

    # Steps -------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> StepOutputs | None:
        """Keep the executor supplied, wait for its oldest step and report it. None when there is nothing to report.

        While `collect` waits for step n, step n+1 is already queued behind it.
        """
        scheduler, executor, in_flight = self.scheduler, self.executor, self._in_flight
        while len(in_flight) < self._depth:
            output = scheduler.schedule()
            if output is None:
                break
            in_flight.append(executor.submit(output))
        if not in_flight:
            return self._report_without_step()
        result = executor.collect(in_flight.popleft())
        update = scheduler.update(result)
        stats = scheduler.stats()
        if result.device_times is not None:
            stats = msgspec.structs.replace(stats, device_times=result.device_times)
        outputs = StepOutputs(
            engine_index=self.engine_index,
            step=update.step,
            sent_ns=time.monotonic_ns(),
            seq_ids=update.seq_ids,
            token_ids=update.token_ids,
            finished=update.finished,
            first_scheduled=update.first_scheduled,
            logprobs=update.logprobs,
            prompt_logprobs=update.prompt_logprobs,
            stats=stats,
        )
        if not scheduler.has_work:
            self._check_idle()
        return outputs

    def _report_without_step(self) -> StepOutputs | None:
        """Refusals and aborts, when no step is there to carry them."""
        scheduler = self.scheduler
        finished = scheduler.take_finished()
        if scheduler.has_unfinished:
            if not finished:
                raise AtomEngineError(f"the scheduler has sequences but nothing to do: {scheduler.stats()}")
        else:
            self._check_idle()
        if not finished:
            return None
        return StepOutputs(
            engine_index=self.engine_index,
            step=-1,
            sent_ns=time.monotonic_ns(),
            seq_ids=[],
            token_ids=[],
            finished=finished,
            stats=scheduler.stats(),
        )

    def _check_idle(self) -> None:
        """Free + cached + used == total, and without sequences none is used."""
        counts = self.scheduler.kv.pool.check_counts()
        if counts.used:
            raise AssertionError(f"no sequence is left, but KV blocks are in use: {counts}")

    # Utilities ---------------------------------------------------------------------------------------------------

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """Run the utility `method`. Raises `RequestError` for one that does not exist or arguments it does not take."""
        utility = self._utilities.get(method)
        if utility is None:
            raise RequestError(f"the engine has no operation {method!r}; it has {', '.join(sorted(self._utilities))}")
        try:
            inspect.signature(utility).bind(**args)
        except TypeError as exc:
            raise RequestError(f"{method}: {exc}") from exc
        return utility(**args)

    def ping(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "engine_index": self.engine_index}

    def stats(self) -> dict[str, Any]:
        """`SchedulerStats` by field name."""
        return msgspec.structs.asdict(self.scheduler.stats())

    def check_integrity(self) -> dict[str, int]:
        """Check every block of the pool and return the counts `total, used, cached, vacant, free`."""
        counts = self.scheduler.kv.pool.check_integrity()
        return {**counts._asdict(), "free": counts.cached + counts.vacant}

    def reset_prefix_cache(self) -> dict[str, int]:
        return {"forgotten_blocks": self.scheduler.kv.reset_prefix_cache()}

    def start_profile(self, directory: str) -> dict[str, str]:
        self.executor.start_profile(directory)
        return {"directory": directory}

    def stop_profile(self) -> dict[str, str]:
        return {"trace": self.executor.stop_profile()}

    def shutdown(self) -> None:
        """Stop the executor. Safe to call twice."""
        self._in_flight.clear()
        self.executor.shutdown()


def _fit_context(config: EngineConfig, num_blocks: int, model_len: int) -> int:
    """The context length served: the model's, or less where the whole cache holds less than one such sequence."""
    capacity = num_blocks * config.cache.block_size
    wanted = config.model.max_model_len
    if wanted is not None and wanted > capacity:
        raise ConfigError(
            f"--max-model-len {wanted} does not fit the KV cache of {num_blocks} blocks of {config.cache.block_size} "
            f"tokens; lower it to {capacity} or enlarge the cache (--num-gpu-blocks-override, --kv-cache-memory)"
        )
    if model_len > capacity:
        logger.warning("the KV cache holds %d tokens: context length reduced from %d to that", capacity, model_len)
    return min(model_len, capacity)
