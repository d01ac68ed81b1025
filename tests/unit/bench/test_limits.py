"""Limits of a load: cancellation on purpose, ramps of concurrency, warm-up and grace by time, rates held or not."""

from __future__ import annotations

import errno
import json
import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench import connection, server_gone
from atom.bench.arrivals import Arrivals, Ramp
from atom.bench.cancellation import is_cancelled
from atom.bench.records import MEASURED, Outcome, RequestRecord, read_records
from atom.bench.schedule import kept
from atom.bench.summary import summarize


@given(st.floats(0.05, 0.95), st.integers(0, 2**63 - 1))
def test_the_share_of_cancelled_requests_is_the_one_asked_for(rate: float, seed: int) -> None:
    chosen = [is_cancelled(rate, seed, index) for index in range(4000)]
    assert sum(chosen) / len(chosen) == pytest.approx(rate, abs=0.05)
    assert chosen == [is_cancelled(rate, seed, index) for index in range(4000)]


def test_none_and_all_are_exact() -> None:
    assert not any(is_cancelled(0.0, 7, index) for index in range(1000))
    assert all(is_cancelled(1.0, 7, index) for index in range(1000))


async def test_cancelled_on_purpose_is_no_failure_and_keeps_what_came(serve: Any, load: Any, wire: Any) -> None:
    token = wire.http_chunk(wire.event(wire.text_chunk("a")))
    server = serve(lambda number, body: [wire.SSE_HEAD, token, wire.HANG])
    loaded = await load(server.url, 4, max_concurrency=4, cancellation_rate=1.0, cancellation_delay=0.2)
    assert [(r.outcome, r.error_class, len(r.chunk_ns)) for r in loaded.records] == [
        (Outcome.CANCELLED, "cancelled", 1)
    ] * 4
    assert {r.error_message for r in loaded.records} == {"cancelled on purpose 0.2 s after it was sent"}
    assert (loaded.outcome.cancelled, loaded.outcome.failed, loaded.outcome.interrupted) == (4, 0, False)
    assert not any(r.anomalies for r in loaded.records)


async def test_a_request_that_ends_before_its_cancellation_is_complete(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    loaded = await load(server.url, 3, cancellation_rate=1.0, cancellation_delay=30.0)
    assert [r.outcome for r in loaded.records] == [Outcome.COMPLETED] * 3
    assert summarize(loaded.run_dir)["validity"] == "valid"


async def test_grace_ends_what_outlasts_the_duration(serve: Any, load: Any, wire: Any) -> None:
    token = wire.http_chunk(wire.event(wire.text_chunk("a")))
    server = serve(lambda number, body: [wire.SSE_HEAD, token, wire.HANG])
    start = time.monotonic()
    loaded = await load(server.url, 50, max_concurrency=2, duration=0.1, grace_period=0.2)
    assert 0.3 <= time.monotonic() - start < 30
    assert [r.outcome for r in loaded.records] == [Outcome.CANCELLED] * 2
    assert not loaded.outcome.interrupted
    assert {len(r.chunk_ns) for r in loaded.records} == {1}


async def test_a_server_that_never_answers_is_a_failed_run_whoever_ended_the_waiting(
    serve: Any, load: Any, wire: Any
) -> None:
    server = serve(lambda number, body: [wire.HANG])
    loaded = await load(server.url, 50, max_concurrency=2, duration=0.1, grace_period=0.1)
    summary = summarize(loaded.run_dir)
    assert (summary["validity"], summary["reasons"]) == ("failed", ["no request completed: 2 were cancelled, 0 failed"])


async def test_a_hung_replica_is_no_valid_run_and_is_named(serve: Any, load: Any, wire: Any) -> None:
    """Its requests are cut by the grace period: without a token they count like failed ones."""
    well, hung = serve(lambda number, body: wire.good_answer()), serve(lambda number, body: [wire.HANG])
    loaded = await load(well.url, 1000, more_urls=(hung.url,), max_concurrency=4, duration=0.3, grace_period=0.2)
    summary = summarize(loaded.run_dir)
    cut = [r for r in loaded.records if r.outcome == Outcome.CANCELLED]
    assert {r.error_class for r in cut} == {"unfinished"}
    assert summary["validity"] == "not valid"
    assert "had no token when --grace-period was over" in summary["reasons"][0]
    assert any(f"{hung.url}: 0 of {len(cut)} requests completed" in note for note in summary["notes"])
    assert any(note.startswith(f"{well.url}: ") and "TTFT p50" in note for note in summary["notes"])


async def test_what_is_cut_as_in_every_run_is_not_held_against_it(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: [0.1, *wire.good_answer()])
    loaded = await load(server.url, 1000, max_concurrency=4, duration=0.55, grace_period=0.0)
    assert any(record.error_class == "unfinished" for record in loaded.records)
    assert not any("grace-period" in reason for reason in summarize(loaded.run_dir)["reasons"])


@pytest.mark.parametrize("trace", [True, False])
async def test_the_duration_ends_a_pause_of_the_schedule(serve: Any, load: Any, wire: Any, trace: bool) -> None:
    """Whatever is due in minutes or hours: nothing is started after the duration, so there is nothing to wait for."""

    class Rare(wire.FixedSource):  # type: ignore[misc, name-defined]
        def offsets_ns(self) -> npt.NDArray[np.int64]:
            return np.arange(1, len(self) + 1) * 10**12

    more = {"source": Rare(3)} if trace else {"concurrency_ramp_s": 600.0, "max_concurrency": 2}
    server = serve(lambda number, body: wire.good_answer())
    start = time.monotonic()
    loaded = await load(server.url, 3, duration=0.3, **{"max_concurrency": None, **more})
    assert time.monotonic() - start < 60
    assert not loaded.outcome.interrupted
    if not loaded.records:
        assert summarize(loaded.run_dir)["reasons"] == ["no request was started"]


async def test_warm_up_by_time_is_no_part_of_the_measured_phase(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: [0.01, *wire.good_answer()])
    loaded = await load(server.url, 3, max_concurrency=2, warmup_duration=0.2)
    warm = [r for r in read_records(loaded.run_dir, None) if r.phase != MEASURED]
    assert len(loaded.records) == 3
    assert len(warm) >= 2
    assert all("warmup" in json.loads(body) for body in server.requests[: len(warm)])
    assert max(r.end_ns for r in warm if r.end_ns) <= min(r.sent_ns for r in loaded.records if r.sent_ns)


async def test_a_concurrency_ramp_starts_one_lane_after_the_other(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: [0.3, *wire.good_answer()])
    loaded = await load(server.url, 4, max_concurrency=4, concurrency_ramp_s=0.4)
    first = {r.lane: r.sent_ns - loaded.outcome.started_ns for r in loaded.records}
    for lane, offset in first.items():
        assert offset >= 100_000_000 * lane


def _record(index: int, due_ns: int, sent_ns: int, ready_ns: int | None = None) -> RequestRecord:
    return RequestRecord(index=index, scheduled_ns=due_ns, ready_ns=ready_ns or due_ns, sent_ns=sent_ns)


@given(st.integers(10, 200), st.floats(-0.2, 0.2))
def test_a_rate_that_was_not_held_is_told_from_one_that_was(count: int, slower: float) -> None:
    """Ten seconds of a schedule, sent over a time that is `slower` longer."""
    step = 10_000_000_000 // (count - 1)
    result = kept([_record(i, i * step, round(i * step * (1 + slower))) for i in range(count)])
    assert result is not None
    assert result.achieved / result.requested == pytest.approx(1 / (1 + slower), rel=1e-6)
    if abs(slower) < 0.0049 or abs(slower) > 0.0051:
        assert result.ok == (abs(slower) < 0.005)


def test_the_time_to_connect_is_no_other_rate() -> None:
    """The first requests open connections, the later ones use them again."""
    records = [_record(i, i * 500_000_000, i * 500_000_000 + (150_000_000 if i < 30 else 0)) for i in range(60)]
    for record in records[:30]:
        record.connect_ns = 150_000_000
    result = kept(records)
    assert result is not None
    assert result.ok, result.detail()


def test_one_late_connection_is_no_other_rate() -> None:
    step = 10_000_000
    for odd in (0, 399, 200):
        records = [_record(i, i * step, i * step + (60_000_000 if i == odd else 200_000)) for i in range(400)]
        result = kept(records)
        assert result is not None
        assert result.ok, (odd, result.detail())
        assert result.achieved == pytest.approx(100, rel=0.005)


@given(st.floats(0.5, 500), st.floats(0.5, 50), st.sampled_from((None, "linear", "exponential")))
def test_a_rate_and_a_duration_say_how_many_requests_there_are(rate: float, duration: float, ramp: str | None) -> None:
    """Whatever the number of prompts: the schedule of the duration has the rate that was asked for."""
    arrivals = Arrivals(request_rate=rate) if ramp is None else Arrivals(ramp=Ramp(ramp, rate, 2 * rate))
    due = arrivals.due_within(duration)
    mean = rate if ramp is None else 1.5 * rate if ramp == "linear" else rate / math.log(2)
    assert due is not None
    assert due == pytest.approx(mean * duration, abs=1 + 1e-6)
    if due >= 1:
        offsets = arrivals.offsets_ns(due, 3)
        assert offsets is not None
        assert offsets[-1] / 1e9 == pytest.approx(due / mean, rel=1e-6)
        assert offsets[-1] / 1e9 <= duration * (1 + 1e-9)


async def test_a_load_is_cut_to_its_duration_with_its_rate_kept(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    loaded = await load(server.url, 1000, max_concurrency=None, request_rate=40.0, burstiness=0.3, duration=1.0)
    figures = summarize(loaded.run_dir)["figures"]
    assert len(loaded.records) == 39  # the fortieth is due when the second is over
    assert figures["completed"]["value"] == 39
    assert figures["requested_rate"]["value"] == pytest.approx(40, rel=0.2)


async def test_a_server_that_goes_away_ends_the_load(
    serve: Any, load: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are not burnt through: after a few seconds without a connection the run has failed, and says so."""
    monkeypatch.setattr(server_gone, "PATIENCE_S", 0.5)

    def answer(number: int, body: bytes) -> list[Any]:
        if number < 5:
            return [0.02, *wire.good_answer()]
        server.stop_listening()
        return [wire.CLOSE]

    server = serve(answer)
    loaded = await load(server.url, 100_000, max_concurrency=2)
    summary = summarize(loaded.run_dir)
    assert summary["validity"] == "failed"
    assert summary["reasons"][0] == "the server is gone: no connection to be had for 0.5 s"
    assert 5 <= len(loaded.records) < 1000
    assert not loaded.outcome.interrupted


async def test_refusals_beside_requests_that_run_are_no_server_that_is_gone(
    serve: Any, load: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas, one down: its share fails, however long the other one's answers take."""
    monkeypatch.setattr(server_gone, "PATIENCE_S", 0.2)
    server = serve(lambda number, body: [0.5, *wire.good_answer()])
    loaded = await load(server.url, 12, more_urls=("http://127.0.0.1:1",), max_concurrency=4)
    assert len(loaded.records) == 12
    assert summarize(loaded.run_dir)["server_gone"] is None


async def test_what_this_machine_lacks_is_no_server_that_is_gone(
    serve: Any, load: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_gone, "PATIENCE_S", 0.2)

    async def no_descriptor(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(connection.ConnectionPool, "_connect", no_descriptor)
    loaded = await load(serve(lambda number, body: wire.good_answer()).url, 5)
    summary = summarize(loaded.run_dir)
    assert (summary["server_gone"], len(loaded.records)) == (None, 5)
    assert "Too many open files" in summary["reasons"][0]


async def test_prompts_that_are_at_their_end_before_the_duration_are_noted(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    loaded = await load(server.url, 3, duration=600.0)
    assert any("more need --num-prompts" in note for note in summarize(loaded.run_dir)["notes"])


async def test_a_rate_beyond_the_client_is_said(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: wire.good_answer())
    loaded = await load(server.url, 3000, max_concurrency=None, request_rate=1e6)
    summary = summarize(loaded.run_dir)
    check = next(check for check in summary["checks"] if check["name"] == "request_rate")
    assert summary["figures"]["requested_rate"]["value"] > summary["figures"]["achieved_rate"]["value"]
    assert check["ok"] is False
    assert any("the requested rate was not held" in reason for reason in summary["reasons"])
    assert summary["validity"] == "not valid"


async def test_a_limit_that_holds_requests_back_is_named_not_blamed(serve: Any, load: Any, wire: Any) -> None:
    server = serve(lambda number, body: [0.02, *wire.good_answer()])
    loaded = await load(server.url, 30, max_concurrency=1, request_rate=1000.0)
    check = next(check for check in summarize(loaded.run_dir)["checks"] if check["name"] == "request_rate")
    assert check["ok"] is None
    assert "--max-concurrency held" in check["detail"]
