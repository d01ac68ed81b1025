"""The window that is scored, of records written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.records import Outcome, RequestRecord
from atom.diag.compare.window import Window, common_windows, steady_window

S = 1_000_000_000
MS = 1_000_000
CLOSED = {"max_concurrency": 4, "num_prompts": 40}


def record(index: int, sent_s: float, first_s: float, last_s: float, **more: Any) -> RequestRecord:
    sent, first, last = (round(moment * S) for moment in (sent_s, first_s, last_s))
    fields = {"sent_ns": sent, "first_ns": first, "last_ns": last, "end_ns": last, "chunk_ns": [first, last], **more}
    return RequestRecord(index=index, outcome=Outcome.COMPLETED, output_tokens=2, **fields)


def closed_loop(shift_s: float = 0.0, waves: int = 10, seconds: float = 1.0) -> list[RequestRecord]:
    """Four lanes; the first four requests wait for each other: first tokens after 0.1, 0.2, 0.3 and 0.4 s."""
    return [
        record(
            4 * wave + lane,
            shift_s + wave * seconds,
            shift_s + wave * seconds + (0.1 * (lane + 1) if wave == 0 else 0.05),
            shift_s + (wave + 1) * seconds,
        )
        for wave in range(waves)
        for lane in range(4)
    ]


def bounds(window: Window) -> tuple[float, float]:
    return window.start_ns / S, window.end_ns / S


def test_closed_loop_from_the_end_of_the_burst_to_the_last_request() -> None:
    window = steady_window(closed_loop(), CLOSED, 0, 10 * S)
    assert window.steady
    assert window.note is None
    assert bounds(window) == (0.4, 9.0)


def test_a_request_of_the_burst_that_fails_is_not_waited_for() -> None:
    records = closed_loop()
    records[3].first_ns, records[3].outcome = None, Outcome.FAILED
    assert bounds(steady_window(records, CLOSED, 0, 10 * S))[0] == 1.0  # when it ended


@pytest.mark.parametrize(
    ("records", "load", "note"),
    [
        ([], CLOSED, "no request was sent"),
        (closed_loop(), {**CLOSED, "max_concurrency": None}, "all requests are sent at once"),
        (closed_loop(), {**CLOSED, "concurrency": 5}, "the concurrency of the load was never reached"),
        (closed_loop(waves=2), CLOSED, "steady in 6% of the measured phase, in which 0 requests were sent"),
        (closed_loop(), {**CLOSED, "ramp": {"start_rps": 1, "end_rps": 9}}, "the request rate changes throughout"),
    ],
)
def test_a_run_hardly_in_steady_state_is_scored_as_a_whole(
    records: list[RequestRecord], load: dict[str, Any], note: str
) -> None:
    window = steady_window(records, load, 0, 10 * S)
    assert not window.steady
    assert note in (window.note or "")
    assert (window.start_ns, window.end_ns) == (0, 10 * S + 1)


def test_open_loop_from_when_requests_end_to_the_last_one_sent() -> None:
    records = [record(i, i / 4, i / 4 + 0.1, i / 4 + 1, scheduled_ns=i * S // 4) for i in range(41)]
    window = steady_window(records, {"request_rate": 4.0, "num_prompts": 41}, 0, 11 * S)
    assert window.steady
    assert bounds(window) == (1.0, 10.0)


def test_two_runs_at_the_same_time_share_their_window() -> None:
    runs = closed_loop(), closed_loop(seconds=1.3)
    steady = steady_window(runs[0], CLOSED, 0, 10 * S), steady_window(runs[1], CLOSED, 0, 13 * S)
    whole = Window(0, 10 * S, False), Window(0, 13 * S, False)
    first, second = common_windows(steady, whole)
    assert first == second
    assert bounds(first) == (0.4, 9.0)


@pytest.mark.parametrize("after_s", [9.5, 8.0])
def test_runs_that_were_hardly_at_the_same_time_are_scored_as_wholes(after_s: float) -> None:
    shift = round(after_s * S)
    first = steady_window(closed_loop(), CLOSED, 0, 10 * S)
    second = steady_window(closed_loop(after_s), CLOSED, shift, shift + 10 * S)
    whole = Window(0, 10 * S, False), Window(shift, shift + 10 * S, False)
    windows = common_windows((first, second), whole)
    assert [(one.start_ns, one.end_ns, one.steady) for one in windows] == [
        (one.start_ns, one.end_ns, False) for one in whole
    ]
    assert windows[0].note == windows[1].note == "the two were hardly in steady state at the same time"


def test_one_run_that_is_not_steady_makes_both_whole() -> None:
    first = steady_window(closed_loop(), CLOSED, 0, 10 * S)
    second = steady_window(closed_loop(waves=2), CLOSED, 0, 2 * S)
    windows = common_windows((first, second), (Window(0, 10 * S, False), Window(0, 2 * S, False)))
    assert not windows[0].steady
    assert windows[0].note == second.note


@given(st.integers(0, 1 << 55), st.integers(1, 6), st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_the_window_moves_with_the_clock_and_lies_in_the_phase(shift: int, slots: int, times: list[int]) -> None:
    """Whatever the records are: lanes that send one request after the other."""
    free, records = [0] * slots, []
    for index, time in enumerate(times):
        lane = free.index(min(free))
        sent, first, last = free[lane], free[lane] + time * MS // 3, free[lane] + time * MS
        records.append((index, sent, first, last))
        free[lane] = last
    load = {"max_concurrency": slots, "num_prompts": len(times)}
    end = max(free)

    def at(offset: int) -> Window:
        moved = [
            RequestRecord(
                index=i, outcome=Outcome.COMPLETED, sent_ns=s + offset, first_ns=f + offset, end_ns=e + offset
            )
            for i, s, f, e in records
        ]
        return steady_window(moved, load, offset, end + offset)

    here, there = at(0), at(shift)
    assert (there.start_ns - shift, there.end_ns - shift) == (here.start_ns, here.end_ns)
    assert (there.steady, there.note) == (here.steady, here.note)
    assert 0 <= here.start_ns < here.end_ns <= end + 1
