"""Slices of a run: what falls where, nothing lost or doubled, bounded however long the run is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.metrics import collect
from atom.bench.records import Outcome, RequestRecord
from atom.bench.slices import DEFAULT_SLICE_S, MAX_SLICES, Slices, slice_width_s, slices_of

MS = 1_000_000
START = 5_000 * MS


def request(sent_ms: float, chunks_ms: list[float], outcome: Outcome = Outcome.COMPLETED) -> RequestRecord:
    """Sent and answered at these times from the start, a token in each chunk."""
    chunks = [START + round(at * MS) for at in chunks_ms]
    return RequestRecord(
        index=0,
        outcome=outcome,
        sent_ns=START + round(sent_ms * MS),
        first_ns=chunks[0] if chunks else None,
        last_ns=chunks[-1] if chunks else None,
        end_ns=chunks[-1] if chunks else START + round(sent_ms * MS) + MS,
        chunk_ns=chunks,
        output_tokens=len(chunks),
    )


def cut(records: list[RequestRecord], wall_ms: float, width_s: float = 1.0) -> Slices:
    return slices_of(records, collect(records, {}), START, START + round(wall_ms * MS), width_s)


def test_what_falls_where() -> None:
    records = [
        request(0, [500, 900, 1100, 2100]),
        request(1500, [2400, 2500]),
        request(100, [], Outcome.FAILED),
        request(2200, [2300], Outcome.CANCELLED),
    ]
    assert cut(records, 2500).as_dict() == {
        "width_s": 1.0,
        "start_s": [0.0, 1.0, 2.0],
        "started": [2, 1, 1],
        "completed": [0, 0, 2],
        "failed": [1, 0, 0],
        "running": [1.001, 1.5, 1.4],  # the last is half a second: 0.1 + 0.5 + 0.1 s in it
        "output_tokens_per_s": [2.0, 1.0, 6.0],
        "ttft_p50_ms": [500.0, 900.0, None],
        "itl_p50_ms": [400.0, 200.0, 550.0],  # 400; 200; 1000 and 100
    }


def test_a_request_that_never_got_a_connection_has_failed_in_its_slice() -> None:
    refused = RequestRecord(index=0, outcome=Outcome.FAILED, end_ns=START + 1200 * MS)
    found = cut([request(0, [500]), refused], 2000)
    assert (found.started.tolist(), found.failed.tolist(), found.completed.tolist()) == ([1, 0], [0, 1], [1, 0])


def test_a_phase_without_length_or_requests() -> None:
    assert len(cut([], 0)) == 0
    nothing = cut([], 1500).as_dict()
    assert nothing["started"] == [0, 0]
    assert nothing["ttft_p50_ms"] == [None, None]


def test_a_long_run_is_cut_into_wider_slices() -> None:
    slices = cut([request(0, [10])], 1000.0 * (MAX_SLICES * 2 + 1))
    assert len(slices) <= MAX_SLICES
    assert slices.as_dict()["width_s"] == 3.0


@pytest.mark.parametrize("said", [None, True, "1", 0, -1, float("nan"), float("inf"), 1e-9, [1]])
def test_a_width_that_is_none(said: Any) -> None:
    assert slice_width_s(said) == DEFAULT_SLICE_S
    assert slice_width_s(0.5) == 0.5


times = st.floats(0, 9_999, allow_nan=False)


@given(
    st.lists(st.tuples(times, st.lists(times, max_size=6), st.sampled_from(list(Outcome))), max_size=20),
    st.sampled_from([0.1, 0.7, 1.0, 3.0, 20.0]),
)
def test_nothing_is_lost_or_doubled(given_: list[tuple[float, list[float], Outcome]], width_s: float) -> None:
    records = []
    for sent, chunks, outcome in given_:
        after = sorted(max(sent, chunk) for chunk in chunks)
        if outcome == Outcome.COMPLETED and not after:
            outcome = Outcome.FAILED
        records.append(request(sent, after, outcome))
    slices = cut(records, 10_000, width_s)
    samples = collect(records, {})
    good = [one for one in records if one.outcome == Outcome.COMPLETED]
    assert slices.started.sum() == len(records)
    assert slices.completed.sum() == len(good)
    tokens = sum(one.output_tokens or 0 for one in good)
    assert (slices.output_tokens_per_s * slices.seconds).sum() == pytest.approx(tokens)
    busy = sum((one.end_ns or 0) - (one.sent_ns or 0) for one in records)
    assert (slices.running * slices.seconds).sum() == pytest.approx(busy / 1e9, abs=1e-2)
    assert len(slices.itl_ms.values) == len(samples.itl)
    assert np.sort(slices.itl_ms.values) == pytest.approx(np.sort(np.asarray(samples.itl)), abs=1e-5)
    assert len(slices.ttft_ms.values) == len(good)
