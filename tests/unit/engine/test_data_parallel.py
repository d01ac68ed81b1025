"""CoreManager with several cores (`fake_core.py`), real processes, sockets and a real output thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from atom.engine.api_sequence import ApiSequence
from atom.engine.config import EngineConfig, LoadBalance, ParallelConfig, SchedulerConfig
from atom.engine.core_handle import CoreHandle
from atom.engine.core_manager import CoreManager
from atom.engine.errors import AtomEngineError, EngineDeadError, QueueFullError
from atom.engine.messages import AddRequest, CoreInput
from atom.engine.sampling_params import SamplingParams
from tests.waiting import until

FAKE_CORE = Path(__file__).with_name("fake_core.py")
DIE, FAIL, GARBAGE, REFUSE, PAUSE = range(1_000, 1_005)
PARAMS = SamplingParams(max_tokens=None)
WAIT_S = 30.0
ENGINES = 2
LIMIT = 3


def make(
    *arguments: str,
    asyncio_mode: bool = False,
    max_waiting: int = 4096,
    load_balance: LoadBalance = "least_requests",
    limit: int | None = LIMIT,
) -> CoreManager:
    config = EngineConfig(
        scheduler=SchedulerConfig(max_waiting=max_waiting, max_num_seqs=16),
        parallel=ParallelConfig(data_parallel_size=ENGINES, load_balance=load_balance, dispatch_limit=limit),
    )
    command = (sys.executable, str(FAKE_CORE), *arguments)
    return CoreManager(config, asyncio_mode=asyncio_mode, core_command=command)


@contextlib.contextmanager
def running(*arguments: str, **options: Any) -> Iterator[CoreManager]:
    manager = make(*arguments, **options)
    manager.start()
    try:
        yield manager
    finally:
        manager.shutdown(timeout=5.0)


class Ends:
    """A callback that notes tokens and ends by request id."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.reasons: dict[str, str | None] = {}
        self.order: list[str] = []

    def __call__(self, seq: ApiSequence, token_ids: Sequence[int]) -> None:
        if seq.request_id not in self.tokens:
            self.order.append(seq.request_id)
        self.tokens[seq.request_id] = self.tokens.get(seq.request_id, 0) + len(token_ids)
        if seq.finish_reason is not None:
            assert seq.request_id not in self.reasons, "ended twice"
            self.reasons[seq.request_id] = seq.finish_reason


def idle(manager: CoreManager) -> bool:
    loads = manager._dispatcher.loads
    return (
        manager.num_open_sequences == manager.num_held_back == manager._dispatcher.num_in_hand == 0
        and all((load.requests, load.tokens) == (0, 0) for load in loads)
        and manager.call_all("running") == [[]] * ENGINES
    )


def test_every_core_starts_answers_and_ends() -> None:
    with running() as manager:
        pids = [engine.pid for engine in manager.engines]
        assert len(set(pids)) == ENGINES
        assert manager.call_all("ping") == [{"pid": pid} for pid in pids]
        assert manager.call("ping", engine_index=1) == {"pid": pids[1]}
        assert manager.info["max_model_len"] == 100_000, "the smallest that a core can serve"
        assert len(manager.latest_stats) == ENGINES
        with pytest.raises(AtomEngineError, match="no operation 'dance'"):
            manager.call_all("dance")
        with pytest.raises(TimeoutError, match="silence"):
            manager.call_all("silence", timeout=0.05)
        assert len(manager._calls) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_calls_on_all_cores_from_a_loop() -> None:
    with running() as manager:
        assert len(await manager.call_all_async("ping")) == ENGINES
        with pytest.raises(AtomEngineError, match="dance"):
            await manager.call_all_async("dance")
        with pytest.raises(TimeoutError, match="silence"):
            await manager.call_all_async("silence", timeout=0.05)
        assert len(manager._calls) == 0


@pytest.mark.parametrize("callback_only", [True, False])
def test_what_is_held_back_leaves_after_finished_batches_queued_or_not(callback_only: bool) -> None:
    ends = Ends()
    with running() as manager:
        if callback_only:
            manager.deliver_through_callbacks()
        for number in range(200):
            manager.add_request(str(number), [1, 2, 3], PARAMS, ends)
        until(lambda: len(ends.reasons) == 200)
        assert set(ends.reasons.values()) == {"length"}
        assert set(ends.tokens.values()) == {3}
        until(lambda: idle(manager))
        assert all(0 < most <= LIMIT for most in manager.call_all("most"))
        if callback_only:
            assert manager._num_unread == 0
        else:
            read = 0
            while read < 200:
                read += len(manager.get_output(timeout=WAIT_S))
            assert manager._num_unread == 0


async def test_asyncio_mode_refills_too() -> None:
    manager = make(asyncio_mode=True)
    await asyncio.to_thread(manager.start, loop=asyncio.get_running_loop())
    try:
        for number in range(50):
            manager.add_request(str(number), [1, 2], PARAMS)
        read = 0
        async with asyncio.timeout(WAIT_S):
            while read < 50:
                read += len(await manager.get_output_async())
        assert manager.num_held_back == 0
    finally:
        await asyncio.to_thread(manager.shutdown)


def test_no_more_than_the_limit_is_in_hand_and_the_rest_is_served_in_order() -> None:
    ends = Ends()
    with running() as manager:
        manager.deliver_through_callbacks()
        blocked = [manager.add_request(f"blocked {number}", [1, PAUSE], PARAMS, ends) for number in range(2 * LIMIT)]
        later = [manager.add_request(f"later {number}", [1, 2], PARAMS, ends) for number in range(4)]
        until(lambda: len(ends.tokens) == 2 * LIMIT)
        assert [len(seq_ids) for seq_ids in manager.call_all("running")] == [LIMIT] * ENGINES
        assert (manager.num_held_back, manager.num_open_sequences) == (4, 2 * LIMIT + 4)
        assert not any(request_id.startswith("later") for request_id in ends.tokens)
        manager.abort(later[1:2])  # still held back: no core has heard of it
        assert manager.num_held_back == 3
        manager.abort(blocked[:1])  # makes room for one at a time
        until(lambda: len(ends.reasons) == 3)
        assert [name for name in ends.order if name.startswith("later")] == ["later 0", "later 2", "later 3"]
        assert sorted(seq_id for aborted in manager.call_all("aborted") for seq_id in aborted) == blocked[:1]
        manager.abort(blocked)
        until(lambda: idle(manager))


def test_refused_requests_and_failing_callbacks_make_room() -> None:
    ends = Ends()

    def broken(seq: ApiSequence, token_ids: Sequence[int]) -> None:
        raise ValueError("boom")

    with running(limit=1) as manager:
        manager.deliver_through_callbacks()
        for number in range(20):
            manager.add_request(f"refused {number}", [1, REFUSE], PARAMS, ends)
            manager.add_request(f"broken {number}", [1, 2, PAUSE], PARAMS, broken)
        manager.add_request("last", [1, 2], PARAMS, ends)
        until(lambda: ends.reasons.get("last") == "length")
        assert list(ends.reasons.values()).count("error") == 20
        until(lambda: idle(manager))


def test_a_callback_may_add_the_next_request() -> None:
    ends = Ends()
    with running(limit=1) as manager:
        manager.deliver_through_callbacks()
        added = 0

        def chain(seq: ApiSequence, token_ids: Sequence[int]) -> None:
            nonlocal added
            ends(seq, token_ids)
            if seq.finish_reason is not None and added < 50:
                added += 1
                manager.add_request(f"next {added}", [1, 2], PARAMS, chain)

        for number in range(4):
            manager.add_request(f"first {number}", [1, 2], PARAMS, chain)
        until(lambda: len(ends.reasons) == 54)
        until(lambda: idle(manager))


@pytest.mark.parametrize("load_balance", ["round_robin", "least_requests", "least_tokens"])
def test_load_is_spread(load_balance: LoadBalance) -> None:
    with running(load_balance=load_balance, limit=None) as manager:
        manager.deliver_through_callbacks()
        for number in range(10):
            manager.add_request(str(number), [1, PAUSE], PARAMS)
        until(lambda: [len(seq_ids) for seq_ids in manager.call_all("running")] == [5, 5])


def test_admission_counts_what_all_cores_can_run() -> None:
    with running(max_waiting=8) as manager:
        for _ in range(8 + ENGINES * 16):
            manager.add_request("a", [1, PAUSE], PARAMS)
        with pytest.raises(QueueFullError, match="40 sequences"):
            manager.add_request("a", [1], PARAMS)


def test_the_death_of_one_core_ends_everything_with_one_error() -> None:
    ends = Ends()
    failures: list[EngineDeadError] = []
    with running() as manager:
        manager.deliver_through_callbacks()
        manager.on_failure = failures.append
        for number in range(20):
            manager.add_request(str(number), [1, PAUSE], PARAMS, ends)
        until(lambda: len(ends.tokens) == 2 * LIMIT)
        victim = manager.engines[1]
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: bool(failures))
        assert f"EngineCore 1 (pid {victim.pid}) was killed by SIGKILL" in str(failures[0])
        assert len(failures) == 1
        assert list(ends.reasons.values()) == ["error"] * 20
        assert not manager.is_alive
        assert (manager.num_open_sequences, manager.num_held_back, manager._dispatcher.num_in_hand) == (0, 0, 0)
        for attempt in (lambda: manager.add_request("b", [1], PARAMS), lambda: manager.call_all("ping")):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                attempt()
    assert all(engine.returncode is not None for engine in manager.engines)


def test_a_core_that_goes_on_does_not_hide_the_death_of_another() -> None:
    """One sends steps without a pause while the last words of the other are awaited."""
    ends = Ends()
    failed = threading.Event()
    with running("--step-ms", "5", load_balance="round_robin") as manager:
        manager.deliver_through_callbacks()
        manager.on_failure = lambda error: failed.set()
        for name in ("busy", "idle"):
            manager.add_request(name, [1] * 5_000 if name == "busy" else [1, PAUSE], PARAMS, ends)
        until(lambda: len(ends.tokens) == 2)
        os.kill(manager.engines[1].pid, signal.SIGKILL)
        assert failed.wait(WAIT_S)
        assert ends.reasons == {"busy": "error", "idle": "error"}
        assert ends.tokens["busy"] < 5_000


def test_one_core_that_cannot_start_is_one_clear_error() -> None:
    manager = make("exits-early")
    with pytest.raises(EngineDeadError, match="exited with status 42"):
        manager.start()
    assert all(engine.returncode is not None for engine in manager.engines)


def test_a_core_that_says_nothing_while_it_has_requests_is_told_from_an_idle_one() -> None:
    ends = Ends()
    with running(load_balance="round_robin") as manager:
        for _ in range(2):
            manager.add_request("a", [1, 2], PARAMS, lambda seq, token_ids: None)
        until(lambda: manager.num_open_sequences == 0)
        assert manager.silence == [0.0, 0.0]
        manager.add_request("quick", [1], PARAMS, ends)
        stuck = manager.add_request("stuck", [1, PAUSE], PARAMS, ends)
        until(lambda: len(ends.tokens) == 2)
        index = next(i for i, seq_ids in enumerate(manager.call_all("running")) if seq_ids)
        before = manager.silence[index]
        until(lambda: manager.silence[index] > before + 0.05)
        assert manager.silence[1 - index] == 0.0
        manager.abort([stuck])
        assert manager.silence == [0.0, 0.0]


def test_shutdown_with_drain_finishes_what_is_held_back() -> None:
    ends = Ends()
    manager = make(limit=1)
    manager.deliver_through_callbacks()
    manager.start()
    for number in range(40):
        manager.add_request(str(number), [1, 2, 3, 4], PARAMS, ends)
    manager.shutdown(drain=True, timeout=WAIT_S)
    assert list(ends.reasons.values()) == ["length"] * 40


def test_a_drained_core_does_not_end_the_work_of_another() -> None:
    ends = Ends()
    manager = make("--step-ms", "5", load_balance="round_robin")
    manager.deliver_through_callbacks()
    manager.start()
    for number in range(ENGINES):
        manager.add_request(str(number), [1] * (1 + 60 * number), PARAMS, ends)
    manager.shutdown(drain=True, timeout=WAIT_S)
    assert ends.reasons == {"0": "length", "1": "length"}
    assert ends.tokens == {"0": 1, "1": 61}


def test_a_core_that_dies_while_all_drain_ends_the_shutdown() -> None:
    ends = Ends()
    manager = make(load_balance="round_robin")
    manager.deliver_through_callbacks()
    manager.start()
    for number in range(ENGINES):
        manager.add_request(str(number), [1, PAUSE], PARAMS, ends)
    until(lambda: len(ends.tokens) == ENGINES)
    shutdown = threading.Thread(target=manager.shutdown, kwargs={"drain": True, "timeout": 10 * WAIT_S})
    shutdown.start()
    until(lambda: manager.closing)
    os.kill(manager.engines[0].pid, signal.SIGKILL)
    shutdown.join(WAIT_S)
    assert not shutdown.is_alive()
    assert ends.reasons == {"0": "abort", "1": "abort"}
    assert all(engine.returncode is not None for engine in manager.engines)


def test_cores_that_ignore_their_end_are_given_one_grace_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[signal.Signals, int]] = []
    send = CoreHandle.send_signal

    def record(core: CoreHandle, number: signal.Signals) -> None:
        sent.append((number, core.index))
        send(core, number)

    monkeypatch.setattr(CoreHandle, "send_signal", record)
    manager = make("ignores-shutdown")
    manager.start()
    manager.shutdown(timeout=0.0)
    assert sent == [(number, index) for number in (signal.SIGTERM, signal.SIGKILL) for index in range(ENGINES)]
    assert [engine.returncode for engine in manager.engines] == [-signal.SIGKILL] * ENGINES


def test_a_sequence_knows_its_core_before_the_core_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[tuple[int, int]] = []
    with running(load_balance="round_robin") as manager:
        send = manager._send

        def record(engine_index: int, message: CoreInput) -> None:
            if isinstance(message, AddRequest):
                known.append((engine_index, manager._delivery.sequences[message.seq_id].engine_index))
            send(engine_index, message)

        monkeypatch.setattr(manager, "_send", record)
        for number in range(4):
            manager.add_request(str(number), [1], PARAMS)
    assert known == [(0, 0), (1, 1), (0, 0), (1, 1)]


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_aborts_what_is_left(drain: bool) -> None:
    ends = Ends()
    manager = make(limit=1)
    manager.deliver_through_callbacks()
    manager.start()
    for number in range(6):
        manager.add_request(str(number), [1, PAUSE], PARAMS, ends)
    until(lambda: len(ends.tokens) == ENGINES)
    manager.shutdown(drain=drain, timeout=0.1)
    assert list(ends.reasons.values()) == ["abort"] * 6
    assert (manager.num_held_back, manager._dispatcher.num_in_hand) == (0, 0)


def test_a_callback_cannot_shut_down() -> None:
    errors: list[Exception] = []
    with running() as manager:

        def callback(seq: ApiSequence, token_ids: Sequence[int]) -> None:
            try:
                manager.shutdown()
            except RuntimeError as error:
                errors.append(error)

        manager.add_request("a", [1], PARAMS, callback)
        until(lambda: bool(errors))
        assert manager.is_alive
