"""Metric definitions on records whose figures can be worked out by hand, and against brute force."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.metrics import DISTRIBUTIONS, RATES, collect, distribution, is_supported
from atom.bench.records import Outcome, RequestRecord

MS = 1_000_000


def record(
    chunks_ms: list[float],
    *,
    sent_ms: float = 0.0,
    tokens: int | None = None,
    chunk_tokens: list[int] | None = None,
    scheduled_ms: float | None = None,
    outcome: str = Outcome.COMPLETED,
) -> RequestRecord:
    times = [int(t * MS) for t in chunks_ms]
    return RequestRecord(
        index=0,
        outcome=outcome,
        sent_ns=int(sent_ms * MS),
        scheduled_ns=None if scheduled_ms is None else int(scheduled_ms * MS),
        first_ns=times[0] if times else None,
        last_ns=times[-1] if times else None,
        end_ns=times[-1] if times else None,
        chunk_ns=times,
        chunk_tokens=chunk_tokens,
        prompt_tokens=10,
        output_tokens=len(times) if tokens is None else tokens,
    )


def test_latencies_of_one_request() -> None:
    samples = collect([record([50, 60, 75, 100], sent_ms=20, scheduled_ms=5)], {})
    assert list(samples.ttft) == [30]
    assert list(samples.ttft_scheduled) == [45]
    assert list(samples.itl) == [10, 15, 25]
    assert list(samples.per_token_itl) == [10, 15, 25]
    assert list(samples.tpot) == pytest.approx([50 / 3])
    assert list(samples.e2el) == [80]


def test_coalesced_chunks_are_counted_and_never_a_zero_gap() -> None:
    samples = collect([record([10, 20, 20, 20, 40])], {})
    assert list(samples.itl) == [10, 20]
    assert (samples.coalesced, samples.chunks) == (2, 5)
    assert list(samples.per_token_itl) == pytest.approx([10 / 3, 20])


def test_itl_never_contains_ttft_and_single_token_requests_have_none() -> None:
    samples = collect([record([500])], {})
    assert (list(samples.itl), list(samples.tpot), list(samples.ttft)) == ([], [], [500])


def test_tokens_per_chunk() -> None:
    samples = collect([record([10, 40, 70], tokens=9, chunk_tokens=[3, 3, 3])], {})
    assert list(samples.per_token_itl) == [10, 10]
    assert (samples.merged, samples.counted_chunks) == (3, 3)
    assert list(samples.tpot) == [60 / 8]


def test_tokens_per_chunk_unknown_gives_no_per_token_itl() -> None:
    """Speculative decoding without counts: dividing by a guess would print a decode step that never was."""
    samples = collect([record([10, 40, 70], tokens=9)], {})
    assert list(samples.per_token_itl) == []
    assert list(samples.itl) == [30, 30]


def test_failed_and_cancelled_requests_are_not_pooled() -> None:
    samples = collect([record([1, 2], outcome=Outcome.FAILED), record([1, 2], outcome=Outcome.CANCELLED)], {})
    assert (list(samples.ttft), samples.output_tokens, samples.chunks) == ([], 0, 0)


def test_goodput_counts_requests_that_meet_every_slo() -> None:
    fast, slow = record([100, 110, 120]), record([300, 310, 320])
    assert collect([fast, slow], {"ttft": 200}).good == 1
    assert collect([fast, slow], {"ttft": 200, "tpot": 5}).good == 0
    assert collect([fast, slow], {"e2el": 500}).good == 2
    assert collect([record([100])], {"tpot": 5}).good == 1
    assert collect([record([], tokens=0)], {"ttft": 200}).good == 0


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=12), max_size=8))
def test_itl_and_coalescing_against_brute_force(gaps: list[list[int]]) -> None:
    records, expected, same = [], [], 0
    for steps in gaps:
        times = np.cumsum(steps).astype(float).tolist()
        records.append(record(times))
        expected += [b - a for a, b in pairwise(times) if b > a]
        same += sum(a == b for a, b in pairwise(times))
    samples = collect(records, {})
    assert list(samples.itl) == pytest.approx(expected)
    assert samples.coalesced == same
    assert sum(counts.sum() for _, counts in samples.tokens_at) == pytest.approx(samples.output_tokens)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([50.0, 90.0, 99.0, 99.9]))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    figures = distribution("ttft", values, [q])
    assert figures[f"p{q:g}_ttft_ms"].value == pytest.approx(np.percentile(values, q))
    assert figures["mean_ttft_ms"].value == pytest.approx(np.mean(values))
    assert figures["median_ttft_ms"].value == pytest.approx(np.median(values))


def test_quantile_support_needs_ten_samples_beyond() -> None:
    assert is_supported(1000, 99)
    assert not is_supported(999, 99)
    assert is_supported(20, 50)
    assert not is_supported(19, 50)
    assert is_supported(10_000, 99.9)


def test_nothing_measured_is_null_not_zero() -> None:
    for figure in distribution("itl", [], [99]).values():
        assert (figure.value, figure.n) == (None, 0)


def test_every_figure_has_a_definition_and_a_unit() -> None:
    assert all(DISTRIBUTIONS.values())
    assert all(unit and definition for unit, definition in RATES.values())
