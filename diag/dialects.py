"""What servers call things in their Prometheus text: one table, our words to their metric names.

How the series of a metric make one value (data-parallel engines, one series per request) is `COMBINED`: most are
summed, a fraction is averaged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final

from atom.recipes.recipe import MetricsDialect

__all__ = ["COMBINED", "TOTALS", "VALUE_NAMES", "Combine", "guess_dialect", "names_for"]


class Combine(StrEnum):
    """One value from a metric's series."""

    SUM = "sum"
    MEAN = "mean"
    MOST = "most"
    COUNT = "count"


VALUE_NAMES: Final = (
    "running",
    "waiting",
    "kv_usage",
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "requests_finished",
    "ttft_sum_s",
    "ttft_count",
    "prefix_queries",
    "prefix_hits",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "acceptance_length",
    "steps",
    "step_tokens",
    "timed_steps",
    "step_sum_s",
    "prefill_context_mean",
    "prefill_context_max",
    "prefill_context_series",
    "decode_context_mean",
    "decode_context_max",
    "decode_context_series",
)
"""running, waiting: requests now; kv_usage: 0..1; acceptance_length: tokens per verification now, as the server
averages it; *_context_*: over the series of the requests, one each, tokens. The others are totals since the server's
start. ttft_sum_s: seconds that ttft_count requests waited for their first token, as the server sees it;
prefix_queries, prefix_hits: prompt tokens looked up and found in the prefix cache; drafts: verifications of drafted
tokens, one per sequence and step; steps, step_tokens: engine steps and their tokens; step_sum_s: seconds that
timed_steps took."""

COMBINED: Final[Mapping[str, Combine]] = {
    "kv_usage": Combine.MEAN,
    "acceptance_length": Combine.MEAN,
    **{f"{kind}_context_mean": Combine.MEAN for kind in ("prefill", "decode")},
    **{f"{kind}_context_max": Combine.MOST for kind in ("prefill", "decode")},
    **{f"{kind}_context_series": Combine.COUNT for kind in ("prefill", "decode")},
}
"""Of the words that are not summed."""

TOTALS: Final = frozenset(VALUE_NAMES) - {"running", "waiting", *COMBINED}
"""The words that only grow, until the server starts again."""

_ATOM: Final[dict[str, tuple[str, ...]]] = {
    "running": ("atom:requests_running",),
    "waiting": ("atom:requests_waiting",),
    "kv_usage": ("atom:kv_cache_usage_ratio",),
    "preemptions": ("atom:preemptions_total",),
    "prompt_tokens": ("atom:prompt_tokens_total",),
    "generation_tokens": ("atom:generation_tokens_total",),
    "requests_finished": ("atom:requests_finished_total",),
    "ttft_sum_s": ("atom:time_to_first_token_seconds_sum",),
    "ttft_count": ("atom:time_to_first_token_seconds_count",),
    "prefix_queries": ("atom:prefix_cache_full_tokens_total",),
    "prefix_hits": ("atom:prefix_cache_cached_tokens_total",),
    "steps": ("atom:engine_steps_total",),
    "timed_steps": ("atom:engine_step_seconds_count",),
    "step_sum_s": ("atom:engine_step_seconds_sum",),
    **{
        f"{kind}_context_{what}": (f"atom:{kind}_request_context_tokens",)
        for kind in ("prefill", "decode")
        for what in ("mean", "max", "series")
    },
}
_VLLM: Final[dict[str, tuple[str, ...]]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "requests_finished": ("vllm:request_success_total",),
    "ttft_sum_s": ("vllm:time_to_first_token_seconds_sum",),
    "ttft_count": ("vllm:time_to_first_token_seconds_count",),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
    # A histogram in spite of its name: one observation per engine step.
    "steps": ("vllm:iteration_tokens_total_count",),
    "step_tokens": ("vllm:iteration_tokens_total_sum",),
}
_SGLANG: Final[dict[str, tuple[str, ...]]] = {
    "running": ("sglang:num_running_reqs",),
    "waiting": ("sglang:num_queue_reqs",),
    "kv_usage": ("sglang:token_usage",),
    # Not sglang:num_retracted_reqs: that is a gauge of the moment, no total.
    "preemptions": ("sglang:num_retracted_requests_total",),
    "prompt_tokens": ("sglang:prompt_tokens_total",),
    "generation_tokens": ("sglang:generation_tokens_total",),
    "requests_finished": ("sglang:num_requests_total",),
    "ttft_sum_s": ("sglang:time_to_first_token_seconds_sum",),
    "ttft_count": ("sglang:time_to_first_token_seconds_count",),
    "prefix_queries": ("sglang:prompt_tokens_total",),
    "prefix_hits": ("sglang:cached_tokens_total",),
    "drafts": ("sglang:spec_verify_calls_total",),
    "acceptance_length": ("sglang:spec_accept_length",),
}
_TRTLLM: Final[dict[str, tuple[str, ...]]] = {
    "running": ("trtllm_num_requests_running",),
    "waiting": ("trtllm_num_requests_waiting",),
    "kv_usage": ("trtllm_kv_cache_utilization",),
    "prompt_tokens": ("trtllm_prompt_tokens_total",),
    "generation_tokens": ("trtllm_generation_tokens_total",),
    "requests_finished": ("trtllm_request_success_total",),
    "ttft_sum_s": ("trtllm_time_to_first_token_seconds_sum",),
    "ttft_count": ("trtllm_time_to_first_token_seconds_count",),
}

_PREFIXES: Final[Mapping[str, MetricsDialect]] = {
    # The order matters: our server speaks vLLM's names too.
    "atom:": "atom",
    "vllm:": "vllm",
    "sglang:": "sglang",
    "trtllm_": "trtllm",
}


def _complete(*tables: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Every value has its place in a scrape's record, also one that these servers do not tell."""
    return {value: tuple(name for table in tables for name in table.get(value, ())) for value in VALUE_NAMES}


_TABLES: Final[dict[str, Mapping[str, tuple[str, ...]]]] = {
    # Our server speaks either set of names, by a flag.
    "atom": _complete(_ATOM, _VLLM),
    "vllm": _complete(_VLLM),
    "sglang": _complete(_SGLANG),
    "trtllm": _complete(_TRTLLM),
    "auto": _complete(_ATOM, _VLLM, _SGLANG, _TRTLLM),
}


def names_for(dialect: MetricsDialect) -> Mapping[str, tuple[str, ...]]:
    """Our word to the metric names that may carry it; the first that has samples counts."""
    return _TABLES[dialect]


def guess_dialect(families: Collection[str]) -> MetricsDialect:
    """Whose names these metric families are; `auto` where none is known (yet: some servers have no engine metric
    before their first request)."""
    for prefix, dialect in _PREFIXES.items():
        if any(name.startswith(prefix) for name in families):
            return dialect
    return "auto"
