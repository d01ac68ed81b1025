"""The interface between the scheduler and whatever runs the steps: `cpu`, `cuda` or `simulated`.

`submit(SchedulerOutput) → StepHandle`, `collect(handle) → StepResult`, with several steps in flight. A step may be
submitted before the one before it was collected; then the input token of a decoding sequence is the one that the
executor itself sampled last (the scheduler does not know it yet). So an executor keeps, per sequence, its token
history, block table and sampling state from `NewSequence` until the id appears in `SchedulerOutput.released`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from atom.engine.errors import AtomEngineError, RequestError
from atom.engine.messages import DeviceTimes, TokenLogprobs
from atom.engine.sampling_params import SamplingParams


@dataclass(slots=True)
class NewSequence:
    """All an executor needs to know of a sequence when it is first scheduled, or again after a preemption."""

    seq_id: int
    token_ids: list[int]
    """Everything known: the prompt, and after a preemption also what was generated."""
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: list[int]
    """Blocks held so far, in order; the first `num_computed_tokens` positions already have their KV there."""
    num_computed_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the sequence (EOS ids unless ignored, and stop_token_ids): masked until `min_tokens`."""


@dataclass(slots=True)
class SchedulerOutput:
    """One step. The parallel lists describe the batch; a sequence appears at most once."""

    step: int
    seq_ids: list[int]
    num_new_tokens: list[int]
    """Tokens to compute in this step per sequence: 1 when decoding, more for a prefill chunk."""
    num_computed_tokens: list[int]
    """Tokens whose KV is there before this step."""
    samples: list[bool]
    """Whether the last computed position predicts an unknown token (the final prefill chunk and every decode step)."""
    new_sequences: list[NewSequence] = field(default_factory=list)
    new_block_ids: dict[int, list[int]] = field(default_factory=dict)
    """Blocks appended in this step to sequences that the executor already knows."""
    released: list[int] = field(default_factory=list)
    """Ids to forget before this step runs: finished, aborted or preempted. A preempted one returns as new."""
    num_prefill_tokens: int = 0
    num_decode_seqs: int = 0


@dataclass(slots=True)
class StepResult:
    """What a step produced, for the sequences of the step with `samples` set, in the order of the batch."""

    step: int
    seq_ids: list[int]
    token_ids: list[int]
    """Concatenated; one each unless `counts` says otherwise."""
    counts: list[int] | None = None
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    """Complete lists for prompts whose last chunk was in this step."""
    seconds: float = 0.0
    """Execution time of the step."""
    device_times: list[DeviceTimes] | None = None
    """With `envs.METRICS_DEVICE_TIMER`: of every step whose times have become known since the result before. An
    executor that reads its device's event pairs only once they have passed, so as not to wait for them, reports a step
    some results late; each step once."""


@dataclass(slots=True)
class StepHandle:
    """A submitted step. Executors put what they need to collect it into `state`."""

    step: int
    state: Any = None


class Executor(abc.ABC):
    """Runs steps in the order of submission."""

    #: How many steps may be in flight; the scheduler never submits more.
    max_in_flight: int = 2
    #: Called from any thread when the executor breaks down, also between steps, so that nobody waits for a next one.
    on_failure: Callable[[], None] | None = None
    #: What has broken it down.
    failure: AtomEngineError | None = None
    #: Shown in tables and in /server_info; a simulated run says so everywhere.
    kind: str = "abstract"

    @abc.abstractmethod
    def start(self) -> int:
        """Load weights and allocate the KV pool. Returns the number of KV blocks. From then on `info` is complete."""

    @abc.abstractmethod
    def submit(self, output: SchedulerOutput) -> StepHandle:
        """Queue a step and return at once."""

    @abc.abstractmethod
    def collect(self, handle: StepHandle) -> StepResult:
        """Wait for a step. Raises whatever the step raised."""

    def is_done(self, handle: StepHandle) -> bool:
        """Whether `collect` would return without waiting."""
        return True

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Stop threads and free memory. Safe to call twice."""

    def info(self) -> dict[str, Any]:
        """Facts for /server_info: dtype, kernels, memory. JSON-safe.

        The engine itself relies on `vocab_size` (int), `max_model_len` (int, before the cache's size limits it) and
        `eos_token_ids` (list of int, may be empty).
        """
        return {"executor": self.kind}

    def start_profile(self, directory: str) -> None:
        """Begin to record what the steps do; the trace will be written into `directory`. Raises `RequestError` where
        there is nothing to record, or a recording is running."""
        raise RequestError(f"the {self.kind} executor has no profiler")

    def stop_profile(self) -> str:
        """End the recording and return the path of the trace."""
        raise RequestError(f"the {self.kind} executor has no profiler")


class FutureExecutor(Executor):
    """One whose handles hold a `Future` of the step's result in `state`."""

    def collect(self, handle: StepHandle) -> StepResult:
        future: Future[StepResult] = handle.state
        return future.result()

    def is_done(self, handle: StepHandle) -> bool:
        future: Future[StepResult] = handle.state
        return future.done()
