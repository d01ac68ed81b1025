"""What one of several cores takes of a machine that they share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atom.engine.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from atom.engine.executors import cpu
from atom.engine.executors.cpu import CPUExecutor


@pytest.mark.parametrize(
    ("cores", "num_threads", "expected"), [(1, None, 6), (2, None, 3), (4, None, 1), (16, None, 1), (2, 5, 5)]
)
def test_cpus_and_memory_are_divided_among_the_cores(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, cores: int, num_threads: int | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(cpu, "available_memory", lambda: 1 << 20)
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_llama)),
        scheduler=SchedulerConfig(max_num_seqs=64),
        parallel=ParallelConfig(data_parallel_size=cores),
        executor="cpu",
        num_threads=num_threads,
    )
    executor = CPUExecutor(config)
    try:
        executor.start()
        assert executor.info()["threads"] == expected
        assert executor.info()["kv_cache_bytes"] <= (1 << 20) // cores
    finally:
        executor.shutdown()
