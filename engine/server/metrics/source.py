"""What a scrape reads beside the recorder: the cores' last statistics, the processes and the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from atom.engine.config import CacheConfig
from atom.engine.messages import SchedulerStats
from atom.engine.server.metrics.recorder import Recorder


class CoreView(Protocol):
    """The part of `CoreHandle` that a scrape looks at."""

    @property
    def info(self) -> dict[str, Any]: ...


class EngineView(Protocol):
    """The part of `CoreManager` that a scrape looks at."""

    @property
    def latest_stats(self) -> Sequence[SchedulerStats]: ...

    @property
    def engines(self) -> Sequence[CoreView]: ...

    @property
    def num_held_back(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Of one process of the server, as the kernel counts."""

    role: str
    """`api`, `core-0`, …"""
    user_seconds: float
    system_seconds: float
    threads: int
    rss_bytes: int


class MetricsSource:
    """Everything that a family may read. Used on the rendering thread."""

    def __init__(
        self, recorder: Recorder, engine: EngineView, pids: dict[str, int], model_name: str, cache: CacheConfig
    ) -> None:
        self.recorder = recorder
        self.engine = engine
        self.model_name = model_name
        self._cache = cache
        self._processes = {role: psutil.Process(pid) for role, pid in pids.items()}
        self.process_figures: list[ProcessFigures] = []
        self.frozen_objects = 0
        """What the server froze. Set once: the collector counts them one by one, 20 ms for 200,000, and lets nobody
        else run meanwhile."""

    @property
    def stats(self) -> Sequence[SchedulerStats]:
        """By engine. Before its first step an engine has said nothing but how many blocks it has."""
        return [
            stats if stats.kv_blocks_total else SchedulerStats(kv_blocks_total=core.info["num_kv_blocks"])
            for stats, core in zip(self.engine.latest_stats, self.engine.engines, strict=True)
        ]

    @property
    def waiting(self) -> Sequence[int]:
        """By engine, what waits in it and an equal share of what is held back for whichever has room first."""
        engines = self.engine.latest_stats
        share, rest = divmod(self.engine.num_held_back, len(engines))
        return [stats.num_waiting + share + (index < rest) for index, stats in enumerate(engines)]

    @property
    def cache_info(self) -> Sequence[tuple[str, str, str]]:
        """Block size, whether prefixes are cached, and blocks, by engine."""
        shared = (str(self._cache.block_size), str(self._cache.enable_prefix_caching))
        return [(*shared, str(core.info["num_kv_blocks"])) for core in self.engine.engines]

    def refresh(self) -> None:
        """Read once per scrape what several families show."""
        self.process_figures = list(self._read_processes())
        if self.recorder.contexts is not None:
            self.recorder.contexts.refresh()

    def _read_processes(self) -> Iterator[ProcessFigures]:
        for role, process in self._processes.items():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    yield ProcessFigures(
                        role, times.user, times.system, process.num_threads(), process.memory_info().rss
                    )
            except psutil.Error:
                continue  # it is gone: no sample

    def collections(self, key: str) -> list[tuple[int, float]]:
        """`gc.get_stats()` by generation."""
        return [(generation, float(row[key])) for generation, row in enumerate(gc.get_stats())]

    def gc_thresholds(self) -> list[tuple[int, float]]:
        return [(generation, float(value)) for generation, value in enumerate(gc.get_threshold())]
