"""What the server counts while it serves. Plain numbers and `Histogram`s, of a size that does not depend on how many
requests were served. Which of them is shown under which name: `engine/server/metrics/catalog.py`.

`on_step` runs on the manager's output thread and owns what is in `EngineRecorder`; everything else is the event
loop's. "Request" means a sequence here, each of n is one, except where n itself is counted.
"""

from __future__ import annotations

from typing import Final

from atom.engine.api_sequence import ApiSequence
from atom.engine.messages import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, DeviceTimes, StepOutputs
from atom.engine.server.metrics.histogram import (
    FINE_ITL_BUCKETS,
    ITERATION_BUCKETS,
    ITL_BUCKETS,
    LAG_BUCKETS,
    N_BUCKETS,
    OVERHEAD_BUCKETS,
    REQUEST_BUCKETS,
    STEP_BUCKETS,
    TTFT_BUCKETS,
    Histogram,
    token_buckets,
)
from atom.engine.server.metrics.request_context import RequestContextGauges

FINISH_REASONS: Final = (FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR)
_SECONDS_PER_NS: Final = 1e-9


class EngineRecorder:
    """The steps of one EngineCore."""

    def __init__(self, *, device_timer: bool) -> None:
        self.queue_time = Histogram(REQUEST_BUCKETS)
        self.iteration_tokens = Histogram(ITERATION_BUCKETS)
        self.step_seconds = Histogram(STEP_BUCKETS)
        self.decode_batch_size = Histogram(ITERATION_BUCKETS)
        self.prefill_batch_tokens = Histogram(ITERATION_BUCKETS)
        self.device_forward = Histogram(STEP_BUCKETS) if device_timer else None
        self.device_sample = Histogram(STEP_BUCKETS) if device_timer else None

    def on_device_times(self, rows: list[DeviceTimes]) -> None:
        """Count the steps that a core reports; without the timer on this side there is nowhere to put them."""
        if self.device_forward is None or self.device_sample is None:
            return
        for row in rows:
            self.device_forward.observe(row.forward_seconds)
            if row.sample_seconds is not None:
                self.device_sample.observe(row.sample_seconds)


class SequenceRecorder:
    """The sequences that one EngineCore served, as the API process saw them."""

    def __init__(self, max_model_len: int) -> None:
        self.ttft = {True: Histogram(TTFT_BUCKETS), False: Histogram(TTFT_BUCKETS)}
        """By whether the client streams."""
        self.inter_token = Histogram(FINE_ITL_BUCKETS)
        self.e2e = Histogram(REQUEST_BUCKETS)
        self.inference = Histogram(REQUEST_BUCKETS)
        self.prefill = Histogram(REQUEST_BUCKETS)
        self.decode = Histogram(REQUEST_BUCKETS)
        self.time_per_output_token = Histogram(ITL_BUCKETS)
        tokens = token_buckets(max_model_len)
        self.prompt_tokens = Histogram(tokens)
        self.generation_tokens = Histogram(tokens)
        self.max_generation_tokens = Histogram(tokens)
        self.params_n = Histogram(N_BUCKETS)
        self.params_max_tokens = Histogram(tokens)
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.cached_tokens = 0

    def finished_sequence(self, seq: ApiSequence, reason: str, received_ns: int, now_ns: int) -> None:
        """A sequence ended. Latencies are those of sequences that ran to their end; aborts are only counted."""
        self.finished[reason] += 1
        if reason not in (FINISH_STOP, FINISH_LENGTH):
            return
        tokens = seq.num_output_tokens
        self.e2e.observe((now_ns - received_ns) * _SECONDS_PER_NS)
        self.prompt_tokens.observe(len(seq.prompt_token_ids))
        self.generation_tokens.observe(tokens)
        self.cached_tokens += seq.num_cached_tokens
        if seq.scheduled_ns and seq.first_token_ns:
            self.prefill.observe(max(0, seq.first_token_ns - seq.scheduled_ns) * _SECONDS_PER_NS)
            self.decode.observe(max(0, seq.finish_ns - seq.first_token_ns) * _SECONDS_PER_NS)
            self.inference.observe(max(0, seq.finish_ns - seq.scheduled_ns) * _SECONDS_PER_NS)
            if tokens > 1:
                self.time_per_output_token.observe(
                    (seq.finish_ns - seq.first_token_ns) * _SECONDS_PER_NS / (tokens - 1)
                )

    def ended_request(self, n: int, max_tokens: int | None) -> None:
        """A request that had gone to the engine is over, however it ended. Counted now because which core a sequence
        goes to may be decided long after it was submitted."""
        self.params_n.observe(n)
        if max_tokens is not None:
            self.params_max_tokens.observe(max_tokens)


class Recorder:
    """Of one API process."""

    def __init__(
        self,
        max_model_len: int,
        num_engines: int = 1,
        *,
        device_timer: bool = False,
        contexts: RequestContextGauges | None = None,
    ) -> None:
        self.engines = [EngineRecorder(device_timer=device_timer) for _ in range(num_engines)]
        self.sequences = [SequenceRecorder(max_model_len) for _ in range(num_engines)]
        """By engine."""
        self.preprocess = Histogram(OVERHEAD_BUCKETS)
        self.stream_events = 0
        self.merged_events = 0
        self.http_requests: dict[tuple[str, int], int] = {}
        """By route and status; both come from small fixed sets."""
        self.loop_lag = Histogram(LAG_BUCKETS)
        self.contexts = contexts
        """The one thing here that does grow with the requests served; None unless it was asked for."""

    def on_step(self, step: StepOutputs) -> None:
        engine = self.engines[step.engine_index]
        for first in step.first_scheduled:
            engine.queue_time.observe(max(0, first.scheduled_ns - first.queued_ns) * _SECONDS_PER_NS)
        stats = step.stats
        if stats is None or step.step < 0:
            return
        engine.iteration_tokens.observe(stats.step_prefill_tokens + stats.step_decode_seqs)
        engine.step_seconds.observe(stats.step_seconds)
        if stats.step_decode_seqs:
            engine.decode_batch_size.observe(stats.step_decode_seqs)
        if stats.step_prefill_tokens:
            engine.prefill_batch_tokens.observe(stats.step_prefill_tokens)
        if stats.device_times is not None:
            engine.on_device_times(stats.device_times)

    def submitted(self, received_ns: int, now_ns: int) -> None:
        """A request went to the engine. `received_ns` is when its HTTP request began."""
        self.preprocess.observe((now_ns - received_ns) * _SECONDS_PER_NS)

    def responded(self, route: str, status: int) -> None:
        key = (route, status)
        self.http_requests[key] = self.http_requests.get(key, 0) + 1
