"""What servers call things in their Prometheus text: one table, our words to their metric names.

Values are summed over a metric's series (data-parallel engines), except the KV usage, which is a fraction and averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from atom.recipes.recipe import MetricsDialect

__all__ = ["AVERAGED", "VALUE_NAMES", "names_for"]

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
)
"""running, waiting: requests now; kv_usage: 0..1; the others are totals since the server's start (ttft_sum_s: seconds
that ttft_count requests waited for their first token, as the server sees it)."""

AVERAGED: Final = frozenset({"kv_usage"})

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
}
_SGLANG: Final[dict[str, tuple[str, ...]]] = {
    "running": ("sglang:num_running_reqs",),
    "waiting": ("sglang:num_queue_reqs",),
    "kv_usage": ("sglang:token_usage",),
    "preemptions": ("sglang:num_retracted_reqs",),
    "prompt_tokens": ("sglang:prompt_tokens_total",),
    "generation_tokens": ("sglang:generation_tokens_total",),
    "requests_finished": ("sglang:num_requests_total",),
    "ttft_sum_s": ("sglang:time_to_first_token_seconds_sum",),
    "ttft_count": ("sglang:time_to_first_token_seconds_count",),
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


def _all() -> dict[str, tuple[str, ...]]:
    tables = (_ATOM, _VLLM, _SGLANG, _TRTLLM)
    return {value: tuple(name for table in tables for name in table.get(value, ())) for value in VALUE_NAMES}


def _complete(table: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Every value has its place in a scrape's record, also one that these servers do not tell."""
    return {value: table.get(value, ()) for value in VALUE_NAMES}


_TABLES: Final[dict[str, Mapping[str, tuple[str, ...]]]] = {
    # Our server speaks either set of names, by a flag.
    "atom": {value: _ATOM[value] + _VLLM[value] for value in VALUE_NAMES},
    "vllm": _complete(_VLLM),
    "sglang": _complete(_SGLANG),
    "trtllm": _complete(_TRTLLM),
    "auto": _all(),
}


def names_for(dialect: MetricsDialect) -> Mapping[str, tuple[str, ...]]:
    """Our word to the metric names that may carry it; the first that has samples counts."""
    return _TABLES[dialect]
