"""Every metric family: its name, type, labels, meaning, when it has samples, and where its values come from.

One row is one family; adding a metric is adding a row here and one in docs/metrics_guide.md (a test compares them).
What exists only on request (`engine/envs.py`) has a row too, which says so. Names without `_total`: counters get it
from the exposition format. `vllm:` rows carry vLLM's names, labels and buckets, so that dashboards made for it work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Final, Literal, TypeAlias

import psutil

from atom.engine import envs
from atom.engine.messages import SchedulerStats
from atom.engine.server.metrics import request_context
from atom.engine.server.metrics.histogram import ITL_BUCKETS, Histogram
from atom.engine.server.metrics.recorder import FINISH_REASONS, EngineRecorder, Recorder, SequenceRecorder
from atom.engine.server.metrics.source import MetricsSource, ProcessFigures

Kind = Literal["counter", "gauge", "histogram"]
Sample: TypeAlias = "tuple[tuple[str, ...], float | Histogram]"
Read: TypeAlias = Callable[[MetricsSource], Iterable[Sample]]

ALWAYS: Final = "always"
TRAFFIC: Final = "always; zero until the first request"
STREAMED: Final = "always; zero until the second token of a sequence"
TICKS: Final = "always; 20 observations a second"
PREFIX: Final = "always; zero with --no-enable-prefix-caching"


def _opt_in(variable: envs.Variable[bool], then: str) -> str:
    return f"Opt-in: requires {variable.name}=1; no samples by default; then {then}"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    has_samples: str
    read: Read | None
    """None: where it is switched on, a prometheus-client metric of its own is in the registry."""

    @property
    def dialect(self) -> str:
        return self.name.partition(":")[0]

    @property
    def exposed_name(self) -> str:
        """As it appears in /metrics."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


# ---- readers -------------------------------------------------------------------------------------------------------


def _once(get: Callable[[Recorder], float | Histogram]) -> Read:
    """A value of the recorder without labels."""
    return lambda source: [((), get(source.recorder))]


def _total(get: Callable[[SequenceRecorder], Histogram]) -> Read:
    """A histogram of the sequences of all engines."""
    return lambda source: [((), reduce(Histogram.plus, map(get, source.recorder.sequences)))]


def _per_engine(get: Callable[[EngineRecorder], float | Histogram | None]) -> Read:
    """dp_rank → a value of that engine's recorder; no sample where it has none."""

    def read(source: MetricsSource) -> Iterable[Sample]:
        for index, engine in enumerate(source.recorder.engines):
            value = get(engine)
            if value is not None:
                yield (str(index),), value

    return read


def _per_sequences(get: Callable[[SequenceRecorder], float | Histogram]) -> Read:
    """engine → a value of its sequences."""
    return lambda source: [((str(index),), get(row)) for index, row in enumerate(source.recorder.sequences)]


def _per_stats(get: Callable[[SchedulerStats], float]) -> Read:
    """dp_rank → a value of that engine's last statistics."""
    return lambda source: [((str(index),), get(stats)) for index, stats in enumerate(source.stats)]


def _states(*states: tuple[str, Callable[[SchedulerStats], float]]) -> Read:
    """dp_rank, state → value."""
    return lambda source: [
        ((str(index), state), get(stats)) for index, stats in enumerate(source.stats) for state, get in states
    ]


def _summed(get: Callable[[SchedulerStats], float]) -> Read:
    return lambda source: [((), sum(get(stats) for stats in source.stats))]


def _per_process(*values: tuple[tuple[str, ...], Callable[[ProcessFigures], float]]) -> Read:
    """process, … → value."""
    return lambda source: [((row.role, *labels), get(row)) for row in source.process_figures for labels, get in values]


def _collections(key: str) -> Read:
    return lambda source: [((str(generation),), value) for generation, value in source.collections(key)]


def _model(read: Read) -> Read:
    """A reader by engine, as vLLM labels it: model_name, engine."""
    return lambda source: [((source.model_name, *labels), value) for labels, value in read(source)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _usage(stats: SchedulerStats) -> float:
    return _ratio(stats.kv_blocks_used, stats.kv_blocks_total)


def _free(stats: SchedulerStats) -> int:
    return stats.kv_blocks_total - stats.kv_blocks_used


def _hit_ratio(source: MetricsSource) -> Iterable[Sample]:
    hits = sum(stats.prefix_cache_hits_total for stats in source.stats)
    queries = sum(stats.prefix_cache_queries_total for stats in source.stats)
    return [((), _ratio(hits, queries))]


def _ttft(source: MetricsSource) -> Iterable[Sample]:
    for streaming in (True, False):
        rows = [row.ttft[streaming] for row in source.recorder.sequences]
        yield (str(streaming).lower(),), reduce(Histogram.plus, rows)


def _finished(source: MetricsSource) -> Iterable[Sample]:
    sequences = source.recorder.sequences
    return [((reason,), sum(row.finished[reason] for row in sequences)) for reason in FINISH_REASONS]


def _success(source: MetricsSource) -> Iterable[Sample]:
    for index, row in enumerate(source.recorder.sequences):
        for reason in FINISH_REASONS:
            yield (source.model_name, str(index), reason), row.finished[reason]


def _http(source: MetricsSource) -> Iterable[Sample]:
    counts = list(source.recorder.http_requests.items())
    return [((route, str(status)), count) for (route, status), count in counts]


def _cache_info(source: MetricsSource) -> Iterable[Sample]:
    return [((str(index), *values), 1.0) for index, values in enumerate(source.cache_info)]


CACHE_INFO_LABELS: Final = ("block_size", "enable_prefix_caching", "num_gpu_blocks")
_DP: Final = ("dp_rank",)
_VLLM: Final = ("model_name", "engine")


def _atom() -> Iterable[Family]:
    yield from _atom_api()
    yield from _atom_engine()
    yield from _atom_process()


def _atom_api() -> Iterable[Family]:
    yield Family(
        "atom:time_to_first_token_seconds", "histogram", ("streaming",),
        "HTTP request received to its first token in this process, by whether the client streams",
        TRAFFIC, _ttft,
    )  # fmt: skip
    yield Family(
        "atom:inter_token_latency_seconds", "histogram", (),
        "gap between the events of a sequence divided by the tokens of the later one, counted once per token",
        STREAMED, _total(lambda sequences: sequences.inter_token),
    )  # fmt: skip
    yield Family(
        "atom:e2e_request_latency_seconds", "histogram", (),
        "HTTP request received to the last token, of sequences that ended by stop or length",
        TRAFFIC, _total(lambda sequences: sequences.e2e),
    )  # fmt: skip
    yield Family(
        "atom:ttft_api_preprocess_seconds", "histogram", (),
        "HTTP request received to handed to the engine: body, template, tokenizing",
        TRAFFIC, _once(lambda recorder: recorder.preprocess),
    )  # fmt: skip
    yield Family(
        "atom:requests_finished", "counter", ("reason",),
        "sequences that ended, by stop, length, abort or error", ALWAYS, _finished,
    )  # fmt: skip
    yield Family(
        "atom:stream_events", "counter", (),
        "SSE events that carried tokens", TRAFFIC, _once(lambda recorder: recorder.stream_events),
    )  # fmt: skip
    yield Family(
        "atom:stream_events_merged", "counter", (),
        "of these, events that carry several steps because their reader was slow",
        TRAFFIC, _once(lambda recorder: recorder.merged_events),
    )  # fmt: skip
    yield Family(
        "atom:http_requests", "counter", ("route", "status"),
        "HTTP responses begun, by route and status", "once a route has answered", _http,
    )  # fmt: skip
    yield Family(
        "atom:event_loop_lag_seconds", "histogram", (),
        "by how much a timer on the server's event loop was late: its stalls", TICKS,
        _once(lambda recorder: recorder.loop_lag),
    )  # fmt: skip
    for name, meaning in (
        (request_context.PREFILL_NAME, request_context.PREFILL_MEANING),
        (request_context.DECODE_NAME, request_context.DECODE_MEANING),
    ):
        has_samples = _opt_in(envs.METRICS_PER_REQUEST_CONTEXT, "one series per request, for ever")
        yield Family(name, "gauge", request_context.LABELS, meaning, has_samples, None)


def _atom_engine() -> Iterable[Family]:
    yield Family(
        "atom:request_queue_time_seconds", "histogram", _DP,
        "time from a sequence's admission to its first step: it waits for a core, then in one", TRAFFIC,
        _per_engine(lambda engine: engine.queue_time),
    )  # fmt: skip
    yield Family(
        "atom:engine_step_seconds", "histogram", _DP,
        "execution time of a step as the executor measured it", TRAFFIC,
        _per_engine(lambda engine: engine.step_seconds),
    )  # fmt: skip
    yield Family(
        "atom:decode_batch_size", "histogram", _DP,
        "decoding sequences of steps that had any", TRAFFIC, _per_engine(lambda engine: engine.decode_batch_size),
    )  # fmt: skip
    yield Family(
        "atom:prefill_batch_tokens", "histogram", _DP,
        "prompt tokens of steps that had any", TRAFFIC, _per_engine(lambda engine: engine.prefill_batch_tokens),
    )  # fmt: skip
    yield Family(
        "atom:device_forward_seconds", "histogram", _DP,
        "forward pass of a step on its device; in a simulated run the time that its model says",
        _opt_in(envs.METRICS_DEVICE_TIMER, "zero until the first request"),
        _per_engine(lambda engine: engine.device_forward),
    )  # fmt: skip
    yield Family(
        "atom:device_sample_seconds", "histogram", _DP,
        "sampling, with log probabilities, of steps that sampled anything; zero in a simulated run",
        _opt_in(envs.METRICS_DEVICE_TIMER, "zero until the first request"),
        _per_engine(lambda engine: engine.device_sample),
    )  # fmt: skip
    yield Family(
        "atom:scheduler_requests", "gauge", ("dp_rank", "state"),
        "sequences in the core, running or waiting, after its last step", ALWAYS,
        _states(("running", lambda stats: stats.num_running), ("waiting", lambda stats: stats.num_waiting)),
    )  # fmt: skip
    yield Family(
        "atom:scheduler_kv_cache_blocks", "gauge", ("dp_rank", "state"),
        "KV blocks: used by sequences, evictable (free, holding a reusable prefix), vacant, and in total", TRAFFIC,
        _states(
            ("used", lambda stats: stats.kv_blocks_used),
            ("evictable", lambda stats: stats.kv_blocks_cached),
            ("vacant", lambda stats: _free(stats) - stats.kv_blocks_cached),
            ("total", lambda stats: stats.kv_blocks_total),
        ),
    )  # fmt: skip
    totals: tuple[tuple[str, Kind, str, Callable[[SchedulerStats], float]], ...] = (
        ("requests_running", "gauge", "running sequences of all engines", lambda stats: stats.num_running),
        ("kv_cache_blocks_used", "gauge", "KV blocks in use", lambda stats: stats.kv_blocks_used),
        ("kv_cache_blocks_free", "gauge", "KV blocks that can be taken", _free),
        ("kv_cache_blocks_total", "gauge", "KV blocks", lambda stats: stats.kv_blocks_total),
        ("prompt_tokens", "counter", "prompt tokens computed or found cached", lambda stats: stats.prompt_tokens_total),
        ("generation_tokens", "counter", "tokens generated", lambda stats: stats.generation_tokens_total),
        ("engine_steps", "counter", "steps run", lambda stats: stats.num_steps_total),
        ("preemptions", "counter", "sequences preempted", lambda stats: stats.num_preemptions_total),
    )
    for name, kind, meaning, get in totals:
        yield Family(f"atom:{name}", kind, (), meaning, TRAFFIC, _summed(get))
    yield Family(
        "atom:requests_waiting", "gauge", (), "waiting sequences, in all engines and held back", ALWAYS,
        lambda source: [((), sum(source.waiting))],
    )  # fmt: skip
    yield Family(
        "atom:requests_held_back", "gauge", (),
        "of these, those that no engine has yet: with several they wait in the API process until one has room",
        ALWAYS, lambda source: [((), source.engine.num_held_back)],
    )  # fmt: skip
    yield Family(
        "atom:kv_cache_usage_ratio", "gauge", _DP, "share of KV blocks in use, 0 to 1", TRAFFIC, _per_stats(_usage)
    )
    yield Family(
        "atom:prefix_cache_full_tokens", "counter", (), "prompt tokens looked up in the prefix cache", PREFIX,
        _summed(lambda stats: stats.prefix_cache_queries_total),
    )  # fmt: skip
    yield Family(
        "atom:prefix_cache_cached_tokens", "counter", (), "prompt tokens found there", PREFIX,
        _summed(lambda stats: stats.prefix_cache_hits_total),
    )  # fmt: skip
    yield Family(
        "atom:prefix_cache_hit_ratio", "gauge", (), "found ÷ looked up since the start, 0 to 1", PREFIX, _hit_ratio
    )


def _atom_process() -> Iterable[Family]:
    yield Family(
        "atom:process_cpu_seconds", "counter", ("process", "mode"),
        "CPU time of the API process (api) and of each core (core-0), in user or system mode", ALWAYS,
        _per_process((("user",), lambda row: row.user_seconds), (("system",), lambda row: row.system_seconds)),
    )  # fmt: skip
    yield Family(
        "atom:process_threads", "gauge", ("process",), "threads", ALWAYS, _per_process(((), lambda row: row.threads))
    )
    yield Family(
        "atom:process_resident_memory_bytes", "gauge", ("process",), "resident memory", ALWAYS,
        _per_process(((), lambda row: row.rss_bytes)),
    )  # fmt: skip
    yield Family(
        "atom:process_cpus", "gauge", (), "CPUs that this process may run on", ALWAYS,
        lambda _source: [((), len(psutil.Process().cpu_affinity()))],
    )  # fmt: skip
    for key in ("collections", "collected", "uncollectable"):
        meaning = {
            "collections": "passes of the API process's garbage collector",
            "collected": "objects these collected",
            "uncollectable": "objects these could not collect",
        }[key]
        name = "gc_collections" if key == "collections" else f"gc_{key}"
        yield Family(f"atom:{name}", "counter", ("generation",), meaning, ALWAYS, _collections(key))
    yield Family(
        "atom:gc_threshold", "gauge", ("generation",), "its thresholds", ALWAYS,
        lambda source: [((str(generation),), value) for generation, value in source.gc_thresholds()],
    )  # fmt: skip
    yield Family(
        "atom:gc_frozen_objects", "gauge", (),
        "objects that the server itself froze (gc.freeze), so that no pass walks them, before it began to listen",
        ALWAYS, lambda source: [((), source.frozen_objects)],
    )  # fmt: skip


def _vllm() -> Iterable[Family]:
    gauges: tuple[tuple[str, str, Callable[[SchedulerStats], float]], ...] = (
        ("num_requests_running", "running sequences", lambda stats: stats.num_running),
        ("kv_cache_usage_perc", "share of KV blocks in use, 0 to 1", _usage),
        ("gpu_cache_usage_perc", "the same under its older name", _usage),
    )
    for name, meaning, get in gauges:
        yield Family(f"vllm:{name}", "gauge", _VLLM, meaning, ALWAYS, _model(_per_stats(get)))
    yield Family(
        "vllm:num_requests_waiting", "gauge", _VLLM,
        "waiting sequences, with an equal share of those that no engine has yet", ALWAYS,
        _model(lambda source: [((str(index),), count) for index, count in enumerate(source.waiting)]),
    )  # fmt: skip
    counters: tuple[tuple[str, str, Callable[[SchedulerStats], float]], ...] = (
        ("prompt_tokens", "prompt tokens computed or found cached", lambda stats: stats.prompt_tokens_total),
        ("generation_tokens", "tokens generated", lambda stats: stats.generation_tokens_total),
        ("num_preemptions", "sequences preempted", lambda stats: stats.num_preemptions_total),
        ("prefix_cache_queries", "prompt tokens looked up", lambda stats: stats.prefix_cache_queries_total),
        ("prefix_cache_hits", "prompt tokens found", lambda stats: stats.prefix_cache_hits_total),
        ("gpu_prefix_cache_queries", "older name of prefix_cache_queries", lambda s: s.prefix_cache_queries_total),
        ("gpu_prefix_cache_hits", "older name of prefix_cache_hits", lambda stats: stats.prefix_cache_hits_total),
    )
    for name, meaning, get in counters:
        yield Family(f"vllm:{name}", "counter", _VLLM, meaning, ALWAYS, _model(_per_stats(get)))
    yield Family(
        "vllm:prompt_tokens_cached", "counter", _VLLM, "prompt tokens of finished sequences found cached", ALWAYS,
        _model(_per_sequences(lambda sequences: sequences.cached_tokens)),
    )  # fmt: skip
    yield Family(
        "vllm:request_success", "counter", (*_VLLM, "finished_reason"),
        "sequences that ended, by stop, length, abort or error", ALWAYS, _success,
    )  # fmt: skip
    yield Family(
        "vllm:cache_config_info", "gauge", ("engine", *CACHE_INFO_LABELS), "the cache's configuration; always 1",
        ALWAYS, _cache_info,
    )  # fmt: skip
    yield from _vllm_histograms()


def _vllm_histograms() -> Iterable[Family]:
    latencies: tuple[tuple[str, str, Callable[[SequenceRecorder], Histogram]], ...] = (
        ("time_to_first_token_seconds", "as atom:, streamed or not in one", _vllm_ttft),
        ("inter_token_latency_seconds", "as atom:, in vLLM's buckets", _inter_token),
        ("time_per_output_token_seconds", "the same under its older name", _inter_token),
        (
            "request_time_per_output_token_seconds",
            "first to last token ÷ (tokens - 1), of sequences with two or more",
            lambda sequences: sequences.time_per_output_token,
        ),
        ("e2e_request_latency_seconds", "as atom:", lambda sequences: sequences.e2e),
        ("request_inference_time_seconds", "first scheduled to last token", lambda sequences: sequences.inference),
        ("request_prefill_time_seconds", "first scheduled to first token", lambda sequences: sequences.prefill),
        ("request_decode_time_seconds", "first to last token", lambda sequences: sequences.decode),
        ("request_prompt_tokens", "prompt tokens of finished sequences", lambda sequences: sequences.prompt_tokens),
        ("request_generation_tokens", "tokens generated by them", lambda sequences: sequences.generation_tokens),
        (
            "request_max_num_generation_tokens",
            "the longest of the n sequences of a prompt",
            lambda sequences: sequences.max_generation_tokens,
        ),
        ("request_params_n", "n of the requests that are over", lambda sequences: sequences.params_n),
        ("request_params_max_tokens", "max_tokens of those that set it", lambda row: row.params_max_tokens),
    )
    for name, meaning, get in latencies:
        yield Family(f"vllm:{name}", "histogram", _VLLM, meaning, TRAFFIC, _model(_per_sequences(get)))
    yield Family(
        "vllm:request_queue_time_seconds", "histogram", _VLLM, "as atom:", TRAFFIC,
        _model(_per_engine(lambda engine: engine.queue_time)),
    )  # fmt: skip
    yield Family(
        "vllm:iteration_tokens_total", "histogram", _VLLM, "tokens per step; a histogram in spite of its name", TRAFFIC,
        _model(_per_engine(lambda engine: engine.iteration_tokens)),
    )  # fmt: skip


def _inter_token(sequences: SequenceRecorder) -> Histogram:
    return sequences.inter_token.rebinned(ITL_BUCKETS)


def _vllm_ttft(sequences: SequenceRecorder) -> Histogram:
    return sequences.ttft[True].plus(sequences.ttft[False])


FAMILIES: Final[tuple[Family, ...]] = (*_atom(), *_vllm())
