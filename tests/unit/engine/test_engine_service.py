"""EngineService with real cores (`fake_core.py`) and a real output thread, and who queues finished sequences."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.engine.config import EngineConfig, ParallelConfig, SchedulerConfig
from atom.engine.core_manager import CoreManager
from atom.engine.engine_service import EngineService
from atom.engine.errors import (
    AtomEngineError,
    ConfigError,
    EngineDeadError,
    OutputsNotConsumedError,
    QueueFullError,
    RequestError,
)
from atom.engine.llm_engine import LLMEngine
from atom.engine.loading.byte_tokenizer import ByteTokenizer
from atom.engine.sampling_params import SamplingParams
from atom.engine.streaming import StreamDispatcher, TokenEvent
from tests.waiting import until

FAKE_CORE = Path(__file__).with_name("fake_core.py")
PAUSE = 1_004
PARAMS = SamplingParams(max_tokens=None)
WAIT_S = 30.0
CONFIG = EngineConfig(scheduler=SchedulerConfig(max_waiting=8, max_num_seqs=16))


class FakeTokenizer(ByteTokenizer):
    """Has the fake core's commands in its vocabulary, so that they pass validation."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = 2_000


def manager_of(config: EngineConfig = CONFIG, *arguments: str) -> CoreManager:
    return CoreManager(config, core_command=(sys.executable, str(FAKE_CORE), *arguments))


@contextlib.contextmanager
def service(config: EngineConfig = CONFIG) -> Iterator[EngineService]:
    with EngineService(config, manager=manager_of(config), tokenizer=FakeTokenizer()) as running:
        yield running


class Log:
    """A callback that keeps the events of each request."""

    def __init__(self) -> None:
        self.events: dict[str, list[TokenEvent]] = {}

    def __call__(self, request_id: str, event: TokenEvent) -> None:
        self.events.setdefault(request_id, []).append(event)

    def text(self, request_id: str) -> str:
        return "".join(event.text for event in self.events[request_id])

    def reasons(self, request_id: str) -> list[str | None]:
        return [event.finish_reason for event in self.events[request_id] if event.finish_reason is not None]


def test_text_comes_in_pieces_through_the_callback() -> None:
    log = Log()
    with service() as engine:
        engine.add("a", "héllo", PARAMS, log)
        engine.add("b", list(b"say END and more"), SamplingParams(max_tokens=None, stop=("END",)), log)
        assert engine.drain(WAIT_S)
        assert engine.num_open == 0
    assert (log.text("a"), log.reasons("a")) == ("héllo", ["length"])
    assert [event.num_output_tokens for event in log.events["a"]] == [1, 2, 3, 4, 5, 6]
    assert (log.text("b"), log.reasons("b")) == ("say ", ["stop"])


def test_draining_takes_nothing_new_and_says_whether_all_ended() -> None:
    log = Log()
    with service() as engine:
        engine.add("a", [97, PAUSE], PARAMS, log)
        until(lambda: "a" in log.events)
        assert not engine.drain(0.05)
        with pytest.raises(AtomEngineError, match="draining"):
            engine.add("b", "x", PARAMS, log)
        assert engine.abort("a")
        assert engine.drain(WAIT_S)
    assert log.reasons("a") == []


def test_abort_ends_a_request_and_frees_its_id() -> None:
    log = Log()
    with service() as engine:
        engine.add("a", [97, PAUSE], PARAMS, log)
        until(lambda: "a" in log.events)
        with pytest.raises(RequestError, match="in use"):
            engine.add("a", "x", PARAMS, log)
        assert engine.abort("a")
        assert not engine.abort("a")
        assert not engine.abort("never there")
        assert engine.manager.call("running") == []
        engine.add("a", "xy", PARAMS, log)
        until(lambda: log.reasons("a") == ["length"])
    assert log.text("a") == "axy"


def test_callbacks_may_add_and_abort() -> None:
    log = Log()
    with service() as engine:

        def chain(request_id: str, event: TokenEvent) -> None:
            log(request_id, event)
            if event.finish_reason is not None and len(log.events[request_id]) < 20:
                engine.add(request_id, "xy", PARAMS, chain)

        def once(request_id: str, event: TokenEvent) -> None:
            log(request_id, event)
            assert engine.abort(request_id)

        engine.add("again", "xy", PARAMS, chain)
        engine.add("once", "xyz", PARAMS, once)
        until(lambda: len(log.events.get("again", ())) == 20)
        assert engine.drain(WAIT_S)
    assert len(log.events["once"]) == 1


def test_waiting_in_a_callback_is_refused() -> None:
    errors: list[Exception] = []

    with service() as engine:

        def callback(request_id: str, event: TokenEvent) -> None:
            for wait in (lambda: engine.drain(), lambda: engine.close()):
                try:
                    wait()
                except RuntimeError as error:
                    errors.append(error)

        engine.add("a", "x", PARAMS, callback)
        until(lambda: len(errors) == 2)
        engine.add("b", "x", PARAMS, Log())  # what was refused changed nothing


def test_requests_before_it_has_started_are_refused() -> None:
    engine = EngineService(CONFIG, manager=manager_of(), tokenizer=FakeTokenizer())
    with pytest.raises(EngineDeadError, match="not started"):
        engine.add("a", "x", PARAMS, Log())
    engine.manager.start()  # `start` goes on with the tokenizer
    try:
        with pytest.raises(EngineDeadError, match="not started"):
            engine.add("a", "x", PARAMS, Log())
    finally:
        engine.close()


def test_a_callback_that_raises_gets_its_error_and_disturbs_nobody() -> None:
    log = Log()

    def broken(request_id: str, event: TokenEvent) -> None:
        log(request_id, event)
        raise ValueError("boom")

    with service() as engine:
        engine.add("bad", [97, 98, PAUSE], PARAMS, broken)
        engine.add("bad at the end", "x", PARAMS, broken)
        engine.add("good", "xy", PARAMS, log)
        assert engine.drain(WAIT_S)
        assert engine.manager.call("running") == []
    assert [event.finish_reason for event in log.events["bad"]] == [None, "error"]
    assert "boom" in (log.events["bad"][-1].error or "")
    assert log.reasons("bad at the end") == ["length"]
    assert log.text("good") == "xy"


def test_wrong_requests_are_refused_and_leave_nothing() -> None:
    log = Log()
    with service() as engine:
        wrong: list[tuple[str | list[int], SamplingParams]] = [
            ("", PARAMS),
            ([5_000], PARAMS),
            ("x", SamplingParams(n=2)),
            ("x", SamplingParams(temperature=-1.0)),
        ]
        for prompt, params in wrong:
            with pytest.raises(RequestError):
                engine.add("a", prompt, params, log)
        assert engine.num_open == 0
        for number in range(24):
            engine.add(str(number), [97, PAUSE], PARAMS, log)
        with pytest.raises(QueueFullError):
            engine.add("one too many", "x", PARAMS, log)
    assert "a" not in log.events


def test_the_death_of_a_core_reaches_every_open_callback() -> None:
    log = Log()
    config = EngineConfig(parallel=ParallelConfig(data_parallel_size=2, dispatch_limit=2))
    with service(config) as engine:
        for number in range(10):
            engine.add(str(number), [97, PAUSE], PARAMS, log)
        until(lambda: len(log.events) == 4)
        os.kill(engine.manager.engines[0].pid, signal.SIGKILL)
        until(lambda: all(log.reasons(str(number)) == ["error"] for number in range(10) if str(number) in log.events))
        assert engine.drain(WAIT_S), "nothing is open any more"
        assert len(log.events) == 10
        assert all("SIGKILL" in (events[-1].error or "") for events in log.events.values())
        assert "SIGKILL" in str(engine.failure)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine.add("late", "x", PARAMS, log)


def test_close_ends_what_is_open_with_abort() -> None:
    log = Log()
    with service() as engine:
        engine.add("a", [97, PAUSE], PARAMS, log)
        until(lambda: "a" in log.events)
        engine.close(timeout=1.0)
        engine.close()
        with pytest.raises(EngineDeadError):
            engine.add("late", "x", PARAMS, log)
    assert log.reasons("a") == ["abort"]


def test_many_threads_lose_nothing() -> None:
    log = Log()
    config = EngineConfig(parallel=ParallelConfig(data_parallel_size=2, dispatch_limit=4))
    aborted: set[str] = set()

    with service(config) as engine:

        def work(name: str) -> None:
            for number in range(50):
                request_id = f"{name}-{number}"
                engine.add(request_id, "abc", PARAMS, log)
                if number % 5 == 0 and engine.abort(request_id):
                    aborted.add(request_id)

        threads = [threading.Thread(target=work, args=(str(index),)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.drain(WAIT_S)
        until(lambda: engine.manager.call_all("running") == [[], []])
        assert engine.manager._dispatcher.num_in_hand == engine.manager.num_held_back == 0
    finished = {request_id for request_id in log.events if log.reasons(request_id) == ["length"]}
    assert finished | aborted == {f"{index}-{number}" for index in range(4) for number in range(50)}
    assert not finished & aborted


# ---- who reads finished sequences ------------------------------------------------------------------------------------


def test_llm_engine_reads_the_queue() -> None:
    with LLMEngine(CONFIG, manager=manager_of(), tokenizer=FakeTokenizer()) as engine:
        assert engine.manager.consumes_outputs_queue
        engine.add_request("xy", PARAMS, "a")
        (output,) = engine.step(WAIT_S)
        assert output.outputs[0].text == "xy"
        assert engine.manager._num_unread == 0


def test_the_service_queues_nothing() -> None:
    log = Log()
    with service() as engine:
        assert not engine.manager.consumes_outputs_queue
        for number in range(20):
            engine.add(str(number), "xy", PARAMS, log)
        assert engine.drain(WAIT_S)
        assert engine.manager.call("ping")  # the last step has been handled completely
        assert engine.manager._num_unread == 0
        assert engine.manager.outputs_queue.qsize() <= 1  # what wakes a reader
        with pytest.raises(OutputsNotConsumedError):
            engine.manager.get_output()


async def test_the_servers_wiring_queues_nothing() -> None:
    manager = manager_of()
    await asyncio.to_thread(manager.start)
    try:
        dispatcher = StreamDispatcher(manager, FakeTokenizer(), asyncio.get_running_loop())
        ended = asyncio.Event()
        dispatcher.submit("a", [97, 98], PARAMS, lambda event: ended.set() if event.finish_reason else None)
        await asyncio.wait_for(ended.wait(), WAIT_S)
        assert await manager.call_async("ping")
        assert manager._num_unread == 0
        with pytest.raises(OutputsNotConsumedError):
            manager.get_output()
        with pytest.raises(OutputsNotConsumedError):
            await manager.get_output_async()
    finally:
        await asyncio.to_thread(manager.shutdown)


def test_the_fault_keeps_finished_sequences_until_admission_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ATOM_FAULTS", "retain-finished")
    log = Log()
    with service() as engine:
        assert "ATOM_FAULTS=retain-finished" in caplog.text
        assert engine.manager.consumes_outputs_queue
        for number in range(8 + 16):  # --max-waiting and --max-num-seqs
            engine.add(str(number), "xy", PARAMS, log)
        until(lambda: engine.num_open == 0)
        until(lambda: engine.manager._num_unread == 24)
        with pytest.raises(QueueFullError):
            engine.add("one too many", "x", PARAMS, log)
    assert len(log.events) == 24


def test_an_unknown_fault_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_FAULTS", "retain-everything")
    with pytest.raises(ConfigError, match="ATOM_FAULTS"):
        CoreManager(CONFIG)
