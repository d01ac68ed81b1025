"""Profiles of several arms: which arms there are, where each is recorded, and what one changed against another.

An arm is one server of its own, loaded as every other arm of the run is, and different in one stated thing: a fault
that its environment switches on, or something done to its collector. Arms run one after the other, each recorded in
`arms/<label>/run-1` of one run directory, so a run that is killed keeps what it finished. How one arm is run, and what
is printed, is `cli/gc_profile_run.py`; what a profile says is `model.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atom.bench.rundir import RunDirectory, Validity
from atom.diag.gc_profile.model import Profile
from atom.recipes.errors import UsageError

__all__ = [
    "FAULTS",
    "REPLAY_ARMS",
    "Arm",
    "ArmEnd",
    "Change",
    "RecordedRun",
    "ReplayLoad",
    "StepTime",
    "changes",
    "faulty_arm",
    "recorded_runs",
    "run_arms",
    "select_arms",
    "what_if_arms",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One server of a run of several."""

    label: str
    """Letters, digits, `-`, `.`: also the name of its folder."""
    description: str
    """What is different about it, in one clause."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the server's environment."""
    gc_action: str | None = None
    """Carried out by the GC hook in every process of the server when the load begins."""

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[A-Za-z0-9.-]+", self.label), self.label

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "description": self.description,
            "env": dict(self.env),
            "gc_action": self.gc_action,
        }


FAULTS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "retention": ("finished sequences stay on a queue that nobody reads", {"ATOM_FAULTS": "retain-finished"}),
    "gauges": ("one metric series per request, never removed", {"ATOM_METRICS_PER_REQUEST_CONTEXT": "1"}),
}
"""Fault → what it is, and the environment that switches it on."""


def _faulty(label: str, faults: Sequence[str]) -> Arm:
    descriptions: list[str] = []
    env: dict[str, str] = {}
    for fault in faults:
        description, variables = FAULTS[fault]
        descriptions.append(description)
        env.update(variables)
    return Arm(label=label, description="; ".join(descriptions), env=env)


REPLAY_ARMS: Final[Mapping[str, Arm]] = {
    "clean": Arm(label="clean", description="no fault"),
    "retention": _faulty("retention", ["retention"]),
    "gauges": _faulty("gauges", ["gauges"]),
    "both": _faulty("both", ["retention", "gauges"]),
}
"""The arms of `atom gc-profile replay` by name, in the order of its tables."""


def select_arms(names: Sequence[str]) -> list[Arm]:
    """Arms by name, each once; UsageError names one that is unknown."""
    unknown = [name for name in names if name not in REPLAY_ARMS]
    if unknown or not names:
        got = f"got {unknown[0]!r}" if unknown else "got none"
        raise UsageError(f"--arms takes names of {', '.join(REPLAY_ARMS)}, separated by commas; {got}")
    return [REPLAY_ARMS[name] for name in dict.fromkeys(names)]


def faulty_arm(faults: Sequence[str]) -> str:
    """The name of the arm that has these faults and no other."""
    unknown = [fault for fault in faults if fault not in FAULTS]
    if unknown or not faults:
        got = f"got {unknown[0]!r}" if unknown else "got none"
        raise UsageError(f"--faults takes {' and '.join(FAULTS)}, separated by commas; {got}")
    return "both" if len(set(faults)) == len(FAULTS) else faults[0]


def what_if_arms(action: str) -> list[Arm]:
    """As is, and with `action` (a checked action of the GC hook)."""
    label = re.sub(r"[^A-Za-z0-9.]+", "-", action).strip("-")
    return [
        Arm(label="as-is", description="the server as it is"),
        Arm(label=label, description=f"the same with {action} in every process once the load begins", gc_action=action),
    ]


# ---- the document's experiment -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The simulated executor's model: base + prefill · prompt tokens + decode · decoding sequences, per step."""

    base_ms: float = 4.8
    prefill_us_per_token: float = 2.0
    decode_us_per_seq: float = 50.0

    def scaled(self, factor: float) -> StepTime:
        return StepTime(
            base_ms=self.base_ms * factor,
            prefill_us_per_token=self.prefill_us_per_token * factor,
            decode_us_per_seq=self.decode_us_per_seq * factor,
        )

    def arguments(self) -> list[str]:
        """Flags of the server."""
        return [
            *("--sim-base-ms", f"{self.base_ms:g}"),
            *("--sim-prefill-us-per-token", f"{self.prefill_us_per_token:g}"),
            *("--sim-decode-us-per-seq", f"{self.decode_us_per_seq:g}"),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayLoad:
    """A closed loop of equal requests; the defaults are the document's 20,000 of 2,048/64 at concurrency 64."""

    num_prompts: int = 20_000
    input_len: int = 2048
    output_len: int = 64
    concurrency: int = 64
    step_time: StepTime = field(default_factory=StepTime)

    @property
    def step_ms(self) -> float:
        """Mean step in the steady state: each sequence takes part in `output_len` steps, one of which computes its
        prompt."""
        step = self.step_time
        prompts_per_step = self.concurrency / self.output_len
        decoding = self.concurrency - prompts_per_step
        prefill_us = step.prefill_us_per_token * self.input_len * prompts_per_step
        return step.base_ms + (prefill_us + step.decode_us_per_seq * decoding) / 1e3

    @property
    def seconds(self) -> float:
        """What an arm lasts if nothing but the simulated device limits it."""
        return self.num_prompts * self.output_len / self.concurrency * self.step_ms / 1e3

    def server_arguments(self) -> list[str]:
        """The same in every arm. No request is refused, whatever an arm does to the API process, and a step has room
        for eight prompts, as where the experiment was first made."""
        return [
            *self.step_time.arguments(),
            *("--max-num-batched-tokens", str(max(16_384, 8 * self.input_len))),
            *("--max-num-seqs", str(max(256, self.concurrency))),
            *("--max-waiting", str(max(65_536, self.num_prompts))),
        ]


# ---- running and finding arms ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmEnd:
    """How one arm ended."""

    validity: Validity
    reasons: Sequence[str]
    stop: bool = False
    """Whether the arms after it are left out: someone asked to end."""


def run_arms(
    arms: Sequence[Arm], run_dir: RunDirectory, facts: Mapping[str, Any], run_one: Callable[[Arm, RunDirectory], ArmEnd]
) -> list[ArmEnd]:
    """Run each arm in a directory of its own and seal `run_dir` with what they are worth together.

    `facts` go into run.json before anything starts, with the arms that are planned. Whatever `run_one` raises ends the
    run and is raised again after sealing; the reasons then name the arms that were not run.
    """
    run_dir.write_run_json({**facts, "arms": [arm.as_dict() for arm in arms]})
    ends: list[ArmEnd] = []
    try:
        for arm in arms:
            ends.append(run_one(arm, run_dir.arm(arm.label, 1)))
            if ends[-1].stop:
                break
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        reason = "interrupted" if interrupted else str(error).partition("\n")[0] or type(error).__name__
        validity = Validity.INTERRUPTED if interrupted else Validity.FAILED
        run_dir.seal(validity, [f"{arm.label}: {reason}", *_not_run(arms, len(ends) + 1)])
        raise
    run_dir.seal(*_together(arms, ends))
    return ends


_WORST_LAST: Final = (Validity.VALID, Validity.NOT_VALID, Validity.INTERRUPTED, Validity.FAILED)


def _together(arms: Sequence[Arm], ends: Sequence[ArmEnd]) -> tuple[Validity, list[str]]:
    reasons = [f"{arm.label}: {reason}" for arm, end in zip(arms, ends, strict=False) for reason in end.reasons]
    return max((end.validity for end in ends), key=_WORST_LAST.index), [*reasons, *_not_run(arms, len(ends))]


def _not_run(arms: Sequence[Arm], begun: int) -> list[str]:
    left = [arm.label for arm in arms[begun:]]
    return [f"arms not run: {', '.join(left)}"] if left else []


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A directory to make a profile of."""

    path: Path
    label: str | None
    """Its arm's name; None for a run by itself."""


def recorded_runs(path: Path) -> list[RecordedRun]:
    """The run in `path`, or those of its arms, in the order in which they were planned.

    UsageError if `path` is no run directory, or none of its arms was begun.
    """
    run_dir = RunDirectory.open(path)
    if not run_dir.arms.is_dir():
        return [RecordedRun(path, None)]
    planned = run_dir.read_run_json().get("arms")
    order = (
        [arm["label"] for arm in planned if isinstance(arm, dict) and isinstance(arm.get("label"), str)]
        if (isinstance(planned, list))
        else []
    )
    folders = sorted(
        (folder for folder in run_dir.arms.iterdir() if folder.is_dir()),
        key=lambda folder: (order.index(folder.name) if folder.name in order else len(order), folder.name),
    )
    found: list[RecordedRun] = []
    for folder in folders:
        runs = sorted((run for run in folder.glob("run-*") if (run / "run.json").is_file()), key=_run_number)
        found += [RecordedRun(run, folder.name if len(runs) == 1 else f"{folder.name} {run.name}") for run in runs]
    if not found:
        raise UsageError(f"{path} has no arm that was begun: {run_dir.arms} holds no run directory")
    return found


def _run_number(run: Path) -> tuple[int, str]:
    number = run.name.removeprefix("run-")
    return (int(number) if number.isascii() and number.isdigit() else 1 << 30, run.name)


# ---- one arm against another -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One figure of two arms."""

    key: str
    label: str
    unit: str
    before: float | None
    after: float | None

    @property
    def relative(self) -> float | None:
        """(after − before) ÷ before; None where it cannot be said."""
        if self.before is None or self.after is None or self.before == 0:
            return None
        return self.after / self.before - 1


_COMPARED: Final = (
    ("requests_per_s", "throughput", "req/s"),
    ("output_tok_per_s", "output", "tok/s"),
    ("ttft_mean_ms", "TTFT mean", "ms"),
    ("ttft_p99_ms", "TTFT p99", "ms"),
    ("itl_p50_ms", "ITL p50", "ms"),
    ("itl_p99_ms", "ITL p99", "ms"),
    ("metrics_p50_ms", "/metrics p50", "ms"),
    ("gen2_seconds", "gen-2 time", "s"),
    ("rss_mb", "API RSS at the end", "MB"),
)


def changes(before: Profile, after: Profile) -> list[Change]:
    """What is different in `after`, figure by figure; figures that neither arm has are left out."""
    found = [
        Change(key=key, label=label, unit=unit, before=getattr(before.totals, key), after=getattr(after.totals, key))
        for key, label, unit in _COMPARED
    ]
    return [change for change in found if change.before is not None or change.after is not None]
