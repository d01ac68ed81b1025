"""Runs a context pipeline under each way of agreeing, one MPI job after the other, and leaves a run directory that
`atom trace-consensus report` reads: `arms/<arm>/run-N/trace/rank-*.jsonl`.

Arms alternate within a repeat and every repeat begins with another one, so that a machine that drifts favours none; all
arms of a repeat have the same seed. What a rank does is `engine/probes/agreement_arms.py`'s; one job is `mpi_job.py`'s.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from atom.bench.rundir import RunDirectory, Validity, write_json
from atom.diag.consensus.launcher import Launcher
from atom.diag.consensus.mpi_job import run_job
from atom.recipes.errors import RunError, UsageError

__all__ = ["ARMS", "MOST_RANKS", "ArmsPlan", "run_arms"]

ARMS: Final[Mapping[str, str]] = {
    "control": "none",
    "blocking": "blocking",
    "local-only": "local-only",
    "async": "async",
}
"""Arm → mode of the agreement. The control has no agreement, as before there was one."""
MOST_REQUESTS: Final = 1_000_000
MOST_RANKS: Final = 64
"""Of one arm: each is a process of this machine, or of what the launcher has."""
_PROBE: Final = "atom.engine.probes.agreement_arms"
_START_S: Final = 60.0
"""Beyond what an arm computes: interpreters start, and MPI finds its ranks."""
_PATIENCE: Final = 5.0
"""Times what an arm should last, after which it is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmsPlan:
    """What is run. UsageError names the option that is wrong."""

    arms: Sequence[str]
    pp: int
    tp: int
    requests: int
    stage_ms: Sequence[float]
    """Forward time of a request, by stage."""
    jitter: float
    transfer_ms: float
    failures: float
    timeouts: float
    timeout_ms: float
    micro_batches: int
    """On their way through the pipeline at a time."""
    depth: int
    """In flight: admitted and not released."""
    blocks: int
    seed: int
    repeats: int
    deadline_s: float
    """How long a rank may make no progress."""

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms or len(set(self.arms)) != len(self.arms):
            raise UsageError(f"--arms takes names of {', '.join(ARMS)}, each once; got {','.join(self.arms) or 'none'}")
        for flag, right, what in self._checks():
            if not right:
                raise UsageError(f"{flag} must be {what}")
        if self.pp * self.tp > MOST_RANKS:
            asked = f"--pp {self.pp} × --tp {self.tp} are {self.pp * self.tp:,} ranks"
            raise UsageError(f"{asked}; at most {MOST_RANKS} are run")
        if len(self.stage_ms) != self.pp:
            raise UsageError(f"--stage-ms has {len(self.stage_ms)} times for {self.pp} stages (--pp)")
        if self.failures + self.timeouts > 1:
            both = f"--failures {self.failures:g} and --timeouts {self.timeouts:g}"
            raise UsageError(f"{both} are more than all transfers together: at most 1")

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        yield "--pp", self.pp >= 2, "at least 2: one stage waits for nobody"
        for name in ("tp", "requests", "repeats", "micro_batches", "depth", "blocks"):
            yield f"--{name.replace('_', '-')}", getattr(self, name) >= 1, "at least 1"
        yield "--requests", self.requests <= MOST_REQUESTS, f"at most {MOST_REQUESTS:,}"
        yield "--deadline", self.deadline_s > 0, "more than nothing"
        yield "--stage-ms", all(0 <= one < 1e6 for one in self.stage_ms), "milliseconds, below a million"
        for name in ("transfer_ms", "timeout_ms"):
            yield f"--{name.replace('_', '-')}", 0 <= getattr(self, name) < 1e6, "milliseconds, below a million"
        for name in ("jitter", "failures", "timeouts"):
            yield f"--{name}", 0 <= getattr(self, name) <= 1, "a fraction from 0 to 1"

    def order(self) -> Iterator[tuple[int, str]]:
        """(repeat from 1, arm), as they are run."""
        for repeat in range(self.repeats):
            first = repeat % len(self.arms)
            for arm in (*self.arms[first:], *self.arms[:first]):
                yield repeat + 1, arm

    def arm_seconds(self, arm: str) -> float:
        """What an arm should last without its start. A blocking agreement lets one request through at a time."""
        each = sum(self.stage_ms) if ARMS[arm] == "blocking" else max(self.stage_ms)
        stuck = self.timeout_ms if self.timeouts else 0.0
        return (self.requests * each + sum(self.stage_ms) + self.transfer_ms + stuck) / 1e3

    def seconds(self) -> float:
        """What everything should last."""
        return sum(self.arm_seconds(arm) + 2 for _, arm in self.order())

    def config(self, run: str, arm: str, repeat: int, trace_dir: Path) -> dict[str, Any]:
        """The fields of the probe's `ArmConfig`."""
        return {
            "run": run,
            "arm": arm,
            "mode": ARMS[arm],
            "trace_dir": str(trace_dir),
            "pp": self.pp,
            "tp": self.tp,
            "stage_ms": list(self.stage_ms),
            "requests": self.requests,
            "seed": self.seed + repeat - 1,
            "jitter": self.jitter,
            "transfer_ms": self.transfer_ms,
            "failures": self.failures,
            "timeouts": self.timeouts,
            "timeout_ms": self.timeout_ms,
            "micro_batches": self.micro_batches,
            "depth": self.depth,
            "blocks": self.blocks,
            "unsafe": True,  # no block here is real
            "deadline_s": self.deadline_s,
        }


def run_arms(plan: ArmsPlan, run_dir: RunDirectory, launcher: Launcher, say: Callable[[str], None]) -> None:
    """RunError that names arm, rank and what ended it, as soon as one job fails; what was recorded stays readable."""
    run_dir.write_run_json({"arms": [{"label": arm, "mode": ARMS[arm]} for arm in plan.arms]})
    try:
        for repeat, arm in plan.order():
            say(f"run {repeat} of {plan.repeats}, {arm}: about {plan.arm_seconds(arm):.0f} s")
            _run_one(plan, run_dir, launcher, repeat, arm)
    except (RunError, OSError) as error:
        run_dir.seal(Validity.FAILED, [str(error)])
        raise
    except (KeyboardInterrupt, SystemExit):
        run_dir.seal(Validity.INTERRUPTED, ["interrupted"])
        raise
    run_dir.seal(Validity.VALID)


def _run_one(plan: ArmsPlan, run_dir: RunDirectory, launcher: Launcher, repeat: int, arm: str) -> None:
    place = run_dir.arm(arm, repeat)
    config = plan.config(run_dir.path.name, arm, repeat, place.trace.absolute())
    path = place.path / "arm.json"
    write_json(path, config)
    place.write_run_json({"label": arm, "mode": ARMS[arm], "repeat": repeat, "seed": config["seed"]})
    try:
        program = [sys.executable, "-m", _PROBE, str(path.absolute())]
        result = run_job(
            launcher.ranks(plan.pp * plan.tp, program),
            trace_dir=place.trace,
            log=place.path / "ranks.log",
            timeout_s=_START_S + _PATIENCE * plan.arm_seconds(arm) + plan.deadline_s,
        )
        try:
            facts = json.loads(result)
            place.write_run_json({"requests_per_s": float(facts["requests_per_s"])})
        except (ValueError, KeyError, TypeError):
            raise RunError(f"the ranks ended without a result: {result[:200]!r}") from None
    except RunError as error:
        place.seal(Validity.FAILED, [str(error)])
        raise RunError(f"arm {arm}, run {repeat}: {error}") from None
    except (KeyboardInterrupt, SystemExit):
        place.seal(Validity.INTERRUPTED, ["interrupted"])
        raise
    place.seal(Validity.VALID)
