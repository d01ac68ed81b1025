"""The stated model of a context pipeline that `agreement_arms.py` runs: how long each stage computes, how long its
transfers take, and which of them fail or get stuck. Everything follows from the seed, so all arms get the same."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, get_args

from atom.engine.errors import ConfigError
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.trace import TraceMode

__all__ = ["ArmConfig", "Transfer"]

_MOST_REQUESTS: Final = 1_000_000
_NEVER: Final = math.inf


class Transfer(NamedTuple):
    """What becomes of one stage's part of a request's blocks."""

    seconds: float
    """Until it has ended; infinite for one that is stuck until it is cancelled."""
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmConfig:
    """One arm: what is agreed how, over which pipeline. ConfigError names the field that is wrong."""

    run: str
    arm: str
    mode: TraceMode
    trace_dir: str
    pp: int
    stage_ms: tuple[float, ...]
    """Forward time of one request, by stage."""
    requests: int
    tp: int = 1
    seed: int = 0
    jitter: float = 0.05
    """Forward and transfer times are spread evenly over ± this fraction."""
    transfer_ms: float = 60.0
    """From the end of a stage's forward until its blocks are over there."""
    failures: float = 0.0
    """Fraction of (request, stage) whose transfer fails."""
    timeouts: float = 0.0
    """Fraction of (request, stage) whose transfer gets stuck."""
    timeout_ms: float = 500.0
    """When a transfer is overdue."""
    quiesce_ms: float = 20.0
    """From the first attempt to cancel a transfer until it is quiet, and its outcome known."""
    micro_batches: int = 0
    """Requests on their way from the first stage to the end of the last one at a time; 0: as many as stages."""
    depth: int = 16
    """Requests in flight: admitted and not released by the first stage."""
    blocks: int = 128
    """KV blocks that a request holds on each rank until it is released."""
    ids: int = 0
    """Distinct request ids, which are then used again with the next epoch; 0: one per request."""
    unsafe: bool = False
    """Needed by the mode `local-only`."""
    deadline_s: float = 120.0
    """How long anything may make no progress."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ArmConfig:
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigError(f"unknown field {', '.join(sorted(unknown))}")
        try:
            return cls(**{**values, "stage_ms": tuple(float(one) for one in values.get("stage_ms", ()))})
        except TypeError as error:
            raise ConfigError(f"the configuration of an arm: {error}") from None

    def __post_init__(self) -> None:
        self._check("mode", self.mode in get_args(TraceMode), f"one of {', '.join(get_args(TraceMode))}")
        self._check("pp", self.pp >= 1, "at least 1")
        self._check("tp", self.tp >= 1, "at least 1")
        self._check("stage_ms", len(self.stage_ms) == self.pp, f"one time for each of {self.pp} stages")
        self._check("stage_ms", all(0 <= one < 1e6 for one in self.stage_ms), "milliseconds")
        self._check("requests", 1 <= self.requests <= _MOST_REQUESTS, f"1 to {_MOST_REQUESTS}")
        for name in ("jitter", "failures", "timeouts"):
            self._check(name, 0 <= getattr(self, name) <= 1, "a fraction from 0 to 1")
        for name in ("transfer_ms", "timeout_ms", "quiesce_ms"):
            self._check(name, 0 <= getattr(self, name) < 1e7, "milliseconds")
        self._check("micro_batches", self.micro_batches >= 0, "0 or more")
        self._check("depth", self.depth >= 1, "at least 1")
        self._check("blocks", self.blocks >= 1, "at least 1")
        self._check("ids", self.ids == 0 or self.ids >= self.depth, f"0, or at least the depth {self.depth}")
        self._check("deadline_s", 0 < self.deadline_s < 1e6, "seconds")

    def _check(self, name: str, right: bool, what: str) -> None:
        if not right:
            raise ConfigError(f"{name} must be {what}, got {getattr(self, name)!r}")

    @property
    def size(self) -> int:
        return self.pp * self.tp

    def round(self, number: int) -> Round:
        """The request of this number, counted from 0 in the order of arrival."""
        epoch, request = divmod(number, self.ids or self.requests)
        return Round(request, epoch)

    def forward_s(self, number: int, stage: int) -> float:
        """The shards of a stage compute in lock step, so they take the same time."""
        return self.stage_ms[stage] / 1e3 * self._spread(f"forward {number} {stage}")

    def transfer(self, number: int, rank: int) -> Transfer:
        chance = random.Random(f"{self.seed} end {number} {rank}").random()
        if chance < self.timeouts:
            return Transfer(_NEVER, Outcome.FAILED)
        outcome = Outcome.FAILED if chance < self.timeouts + self.failures else Outcome.COMPLETED
        return Transfer(self.transfer_ms / 1e3 * self._spread(f"transfer {number} {rank}"), outcome)

    def _spread(self, what: str) -> float:
        return 1 + self.jitter * (2 * random.Random(f"{self.seed} {what}").random() - 1)
