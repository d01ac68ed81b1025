"""The load of one point of a sweep."""

from __future__ import annotations

from typing import Any

import pytest

from atom.bench.sweep import MOST_SECONDS_OF_ARRIVALS, SECONDS_OF_ARRIVALS, Swept
from atom.cli.bench_checks import MAX_PROMPT_TOKENS, MAX_REQUESTS, check_numbers, check_prompt_tokens
from atom.cli.bench_sweep import _point_options
from atom.recipes.errors import UsageError


def point(rate: float, seconds: float, **more: Any) -> dict[str, Any]:
    given = {"random_input_len": 32768, "random_prefix_len": 0, "num_warmups": 1, "max_concurrency": None}
    options = _point_options({**given, "duration": None, "num_prompts": None, **more}, Swept.RATE, rate, 0, seconds)
    check_numbers(options)
    check_prompt_tokens(options)
    return options


def test_longer_schedule_is_cut_to_what_a_load_may_have() -> None:
    """Requests that take long must not make a point impossible that was possible before."""
    assert point(100, MOST_SECONDS_OF_ARRIVALS)["num_prompts"] == 60_000
    assert point(300, MOST_SECONDS_OF_ARRIVALS)["num_prompts"] == MAX_PROMPT_TOKENS // 32768 - 1
    assert point(100_000, MOST_SECONDS_OF_ARRIVALS, random_input_len=8)["num_prompts"] == MAX_REQUESTS


def test_point_that_is_too_much_at_its_usual_length_is_refused() -> None:
    with pytest.raises(UsageError, match="prompt tokens"):
        point(10_000, SECONDS_OF_ARRIVALS)
