"""From the configured executor kind to an executor. Modules are imported when wanted: simulated runs need no torch."""

from __future__ import annotations

from atom.engine.config import EngineConfig
from atom.engine.errors import ConfigError
from atom.engine.executors.base import Executor


def create_executor(config: EngineConfig) -> Executor:
    """The executor that `config` names, not started yet. Raises `ConfigError` for one that this version lacks."""
    if config.executor == "simulated":
        from atom.engine.executors.simulated import SimulatedExecutor

        return SimulatedExecutor(config)
    if config.executor in ("auto", "cpu"):
        if config.parallel.num_ranks > 1:
            from atom.engine.executors.parallel import ParallelExecutor

            return ParallelExecutor(config)
        from atom.engine.executors.cpu import CPUExecutor

        return CPUExecutor(config)
    raise ConfigError(f"--executor {config.executor} is not in this version; use cpu or simulated")
