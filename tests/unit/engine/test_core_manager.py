"""CoreManager with real processes, sockets and threads; the core is `fake_core.py` beside this file."""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import contextlib
import gc
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from atom.engine import core_manager
from atom.engine.api_sequence import ApiSequence
from atom.engine.config import EngineConfig, SchedulerConfig
from atom.engine.core_channel import CoreChannel
from atom.engine.core_manager import CoreManager
from atom.engine.errors import (
    AtomEngineError,
    EngineDeadError,
    OutputsNotConsumedError,
    QueueFullError,
    RequestError,
)
from atom.engine.messages import CoreInput
from atom.engine.sampling_params import SamplingParams
from tests.waiting import until

FAKE_CORE = Path(__file__).with_name("fake_core.py")
DIE, FAIL, GARBAGE, REFUSE, PAUSE = range(1_000, 1_005)
PARAMS = SamplingParams(max_tokens=None)
WAIT_S = 30.0


def make(*arguments: str, asyncio_mode: bool = False, max_waiting: int = 4096) -> CoreManager:
    config = EngineConfig(scheduler=SchedulerConfig(max_waiting=max_waiting, max_num_seqs=16))
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


def collect(manager: CoreManager, count: int) -> list[ApiSequence]:
    found: list[ApiSequence] = []
    while len(found) < count:
        batch = manager.get_output(timeout=WAIT_S)
        assert batch, "nothing finished"
        found.extend(batch)
    return found


class Recorder:
    """Callbacks and flushes in the order in which they happened."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, ...], str | None]] = []
        self.flushes: list[int] = []

    def callback(self, seq: ApiSequence, token_ids: Sequence[int]) -> None:
        self.calls.append((seq.seq_id, tuple(token_ids), seq.finish_reason))

    def flush(self) -> None:
        self.flushes.append(len(self.calls))

    def finished(self) -> int:
        return sum(reason is not None for _, _, reason in self.calls)


# ---- life ------------------------------------------------------------------------------------------------------------


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_start_and_shutdown_leave_nothing_behind() -> None:
    threads, files = threading.active_count(), open_files()
    with running() as manager:
        assert manager.is_alive
        assert manager.info["max_model_len"] == 100_000
        pid = manager.engines[0].pid
        assert manager.call("ping") == {"pid": pid}
        manager.add_request("left open", [1, PAUSE], PARAMS)
    assert (manager.is_alive, manager.failure) == (False, None)
    assert manager.num_open_sequences == 0
    assert not Path(f"/proc/{pid}").exists()
    # Fewer is fine: threads of another test's event loop may have ended meanwhile.
    assert threading.active_count() <= threads
    assert open_files() <= files
    manager.shutdown()  # a second time changes nothing
    with pytest.raises(EngineDeadError, match="shut down"):
        manager.add_request("late", [1], PARAMS)


def test_no_socket_file_remains_while_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even a killed API process leaves no file: the names go once both ends are connected."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with running() as manager:
        assert list(tmp_path.iterdir()) == []
        manager.add_request("a", [1, 2], PARAMS)
        assert collect(manager, 1)[0].output_token_ids == [1, 2]


def test_a_long_temporary_directory_still_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Unix socket's path has at most 107 bytes."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with running() as manager:
        assert manager.is_alive


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("fails-to-load", "config.json: no such model"),
        ("exits-early", r"exited with status 42.*\n.*cannot find the answer"),
    ],
)
def test_a_core_that_cannot_start_is_one_clear_error(behaviour: str, message: str) -> None:
    threads, files = threading.active_count(), open_files()
    manager = make(behaviour)
    with pytest.raises(EngineDeadError, match=message):
        manager.start()
    assert manager.engines[0].returncode is not None
    assert (threading.active_count(), open_files()) == (threads, files)


def test_a_core_may_be_ready_before_its_input_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    send, refused = CoreChannel.send, 0

    def not_yet(self: CoreChannel, engine_index: int, message: CoreInput) -> None:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise zmq.Again
        send(self, engine_index, message)

    monkeypatch.setattr(CoreChannel, "send", not_yet)
    with running() as manager:
        assert refused == 3
        assert manager.call("ping")


def test_a_core_that_is_never_ready_is_given_up_and_ended() -> None:
    manager = make("never-ready")
    with pytest.raises(EngineDeadError, match="not ready within 1 s"):
        manager.start(timeout=1.0)
    assert manager.engines[0].returncode is not None


def test_a_core_that_ignores_shutdown_is_killed() -> None:
    manager = make("ignores-shutdown")
    manager.start()
    manager.shutdown(timeout=0.1)
    assert manager.engines[0].returncode == -signal.SIGKILL


def test_shutdown_ends_a_start_that_waits_on_another_thread() -> None:
    manager = make("never-ready")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        starting = pool.submit(manager.start)
        until(lambda: bool(manager.engines))
        manager.shutdown(timeout=0.0)
        with pytest.raises(EngineDeadError, match="shut down"):
            starting.result(WAIT_S)
    assert all(engine.returncode is not None for engine in manager.engines)


def test_shutdown_with_drain_finishes_what_runs() -> None:
    recorder = Recorder()
    manager = make()
    manager.deliver_through_callbacks(recorder.flush)
    manager.start()
    for _ in range(4):
        manager.add_request("a", list(range(50)), PARAMS, recorder.callback)
    manager.shutdown(drain=True, timeout=WAIT_S)
    assert [reason for _, _, reason in recorder.calls if reason] == ["length"] * 4
    assert sum(len(tokens) for _, tokens, _ in recorder.calls) == 200


def test_shutdown_without_drain_ends_the_rest_with_abort() -> None:
    recorder = Recorder()
    manager = make()
    manager.start()
    manager.add_request("a", [1, PAUSE], PARAMS, recorder.callback)
    until(lambda: len(recorder.calls) == 1)
    manager.shutdown()
    assert recorder.calls[-1][1:] == ((), "abort")


# ---- sequences -------------------------------------------------------------------------------------------------------


def test_tokens_finish_reasons_and_times() -> None:
    with running() as manager:
        seq_id = manager.add_request("a", [5, 6, 7, 8], SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=0))
        manager.add_request("b", [5, 6, 7, 8], SamplingParams(stop_token_ids=(6,)))
        by_id = {seq.request_id: seq for seq in collect(manager, 2)}
    a, b = by_id["a"], by_id["b"]
    assert a.seq_id == seq_id
    assert (a.output_token_ids, a.finish_reason, a.stop_reason) == ([5, 6, 7], "length", None)
    assert (b.output_token_ids, b.finish_reason, b.stop_reason, b.stop_token_id) == ([5, 6], "stop", 6, 6)
    assert a.arrival_ns <= a.queued_ns <= a.scheduled_ns <= a.first_token_ns < a.finish_ns
    assert a.num_cached_tokens == 2
    assert a.logprobs is not None
    assert [entry.token_ids[0] for entry in a.logprobs] == [5, 6, 7]
    assert a.prompt_logprobs is not None
    assert len(a.prompt_logprobs) == 4
    assert b.logprobs is None


def test_one_callback_per_sequence_and_step_then_one_flush() -> None:
    recorder = Recorder()
    with running() as manager:
        manager.set_flush(recorder.flush)
        first = manager.add_request("a", list(range(20)), PARAMS, recorder.callback)
        collect(manager, 1)
        assert [call for call in recorder.calls if call[0] == first] == [
            (first, (token,), "length" if token == 19 else None) for token in range(20)
        ]
        assert recorder.flushes == list(range(1, 21))


def test_several_tokens_per_step() -> None:
    recorder = Recorder()
    with running("serves", "--tokens-per-step", "3") as manager:
        manager.add_request("a", [1, 2, 3, 4, 5, 6, 7], PARAMS, recorder.callback)
        (seq,) = collect(manager, 1)
    assert [tokens for _, tokens, _ in recorder.calls] == [(1, 2, 3), (4, 5, 6), (7,)]
    assert seq.output_token_ids == [1, 2, 3, 4, 5, 6, 7]


def test_a_sequence_that_ends_without_a_token_is_called_back_once() -> None:
    recorder = Recorder()
    with running() as manager:
        manager.add_request("a", [1, REFUSE], PARAMS, recorder.callback)
        (seq,) = collect(manager, 1)
    assert [call[1:] for call in recorder.calls] == [((1,), None), ((), "error")]
    assert seq.error == "refused by the fake core"


def test_abort_frees_both_sides_and_calls_back_no_more() -> None:
    recorder = Recorder()
    with running() as manager:
        seq_id = manager.add_request("a", [1, PAUSE], PARAMS, recorder.callback)
        until(lambda: bool(recorder.calls))
        manager.abort([seq_id, 12345])
        assert manager.num_open_sequences == 0
        assert manager.call("running") == []
        assert manager.call("aborted") == [seq_id]
        (seq,) = collect(manager, 1)
        assert (seq.finish_reason, seq.output_token_ids) == ("abort", [1])
        assert len(recorder.calls) == 1


def test_a_callback_that_raises_ends_its_own_sequence_only(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()

    def broken(seq: ApiSequence, token_ids: Sequence[int]) -> None:
        raise ValueError("boom")

    with running() as manager:
        bad = manager.add_request("bad", [1, 2, PAUSE], PARAMS, broken)
        manager.add_request("good", [1, 2, 3], PARAMS, recorder.callback)
        by_id = {seq.request_id: seq for seq in collect(manager, 2)}
        assert by_id["bad"].finish_reason == "error"
        assert "boom" in (by_id["bad"].error or "")
        assert by_id["good"].output_token_ids == [1, 2, 3]
        assert manager.call("aborted") == [bad]
        assert manager.num_open_sequences == 0


def test_what_is_no_prompt_is_refused() -> None:
    with running() as manager:
        for prompt in ([2**31], ["a"], [None]):
            with pytest.raises(RequestError, match="token ids"):
                manager.add_request("a", prompt, PARAMS)  # type: ignore[arg-type]
        assert manager.num_open_sequences == 0


def test_admission_is_bounded_by_open_and_unread_sequences() -> None:
    with running(max_waiting=8) as manager:  # and 16 that may run
        for _ in range(24):
            manager.add_request("a", [1, 2], PARAMS)
        with pytest.raises(QueueFullError, match="--max-waiting"):
            manager.add_request("a", [1], PARAMS)
        until(lambda: manager.num_open_sequences == 0)
        with pytest.raises(QueueFullError):  # finished, but nobody has read them
            manager.add_request("a", [1], PARAMS)
        collect(manager, 24)
        manager.add_request("a", [1], PARAMS)


@pytest.mark.parametrize("callback_only", [True, False])
def test_nothing_grows_with_the_number_of_requests(callback_only: bool) -> None:
    recorder = Recorder()
    with running() as manager:
        if callback_only:
            manager.deliver_through_callbacks(recorder.flush)

        def serve(count: int) -> None:
            before = recorder.finished()
            for number in range(count):
                seq_id = manager.add_request(f"r{number}", [1, 2, 3], PARAMS, recorder.callback)
                if number % 5 == 0:
                    manager.abort([seq_id])
            if callback_only:
                until(lambda: manager.num_open_sequences == 0)
                assert recorder.finished() - before <= count
            else:
                collect(manager, count)

        serve(50)
        threads, files = threading.active_count(), open_files()
        serve(1000)
        until(lambda: manager.call("running") == [])
        assert manager.num_open_sequences == 0
        assert manager.outputs_queue.qsize() <= 1  # the wake-up of readers that there are none of
        parts = (manager, manager._delivery, manager._dispatcher)
        sized = {name: len(value) for part in parts for name, value in vars(part).items() if hasattr(value, "__len__")}
        assert sized.pop("engines") == sized.pop("latest_stats") == sized.pop("loads") == 1
        del sized["_core_command"], sized["_info"]
        assert all(size == 0 for size in sized.values()), sized
        assert (threading.active_count(), open_files()) == (threads, files)
        gc.collect()
        assert [thing for thing in gc.get_objects() if isinstance(thing, ApiSequence)] == []


# ---- who reads finished sequences ------------------------------------------------------------------------------------


def test_finished_sequences_are_queued_until_callbacks_are_declared_the_only_way() -> None:
    recorder = Recorder()
    with running() as manager:
        assert manager.consumes_outputs_queue
        manager.add_request("a", [1], PARAMS)
        assert len(collect(manager, 1)) == 1
        manager.deliver_through_callbacks(recorder.flush)
        assert [manager.consumes_outputs_queue] == [False]
        manager.add_request("b", [1], PARAMS, recorder.callback)
        until(lambda: recorder.flushes != [])
        until(lambda: manager.num_open_sequences == 0)
        assert manager.call("ping")  # the step has been handled completely
        assert manager._num_unread == 0
        with pytest.raises(OutputsNotConsumedError, match="callbacks"):
            manager.get_output()


async def test_asyncio_mode_queues_and_refuses_once_cleared() -> None:
    manager = make(asyncio_mode=True)
    await asyncio.to_thread(manager.start, loop=asyncio.get_running_loop())
    try:
        manager.add_request("a", [1, 2], PARAMS)
        (seq,) = await asyncio.wait_for(manager.get_output_async(), WAIT_S)
        assert seq.output_token_ids == [1, 2]
        with pytest.raises(OutputsNotConsumedError, match="get_output_async"):
            manager.get_output()
        waiting = asyncio.create_task(manager.get_output_async())
        await asyncio.sleep(0)
        manager.deliver_through_callbacks(lambda: None)
        with pytest.raises(OutputsNotConsumedError):
            await asyncio.wait_for(waiting, WAIT_S)
        with pytest.raises(OutputsNotConsumedError):
            await manager.get_output_async()
    finally:
        await asyncio.to_thread(manager.shutdown)


async def test_get_output_async_needs_asyncio_mode() -> None:
    with running() as manager:
        assert manager.async_output_queue is None
        with pytest.raises(OutputsNotConsumedError, match=r"get_output\(\)"):
            await manager.get_output_async()


def test_a_reader_that_waits_already_is_woken_when_callbacks_take_over() -> None:
    with running() as manager, concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(manager.get_output)
        time.sleep(0.05)
        manager.deliver_through_callbacks(lambda: None)
        with pytest.raises(OutputsNotConsumedError):
            waiting.result(WAIT_S)


def test_asyncio_mode_has_one_writer() -> None:
    writers = []
    for function in ast.walk(ast.parse(inspect.getsource(core_manager))):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    writers.append((function.name, node.attr))
    assert [name for name, attribute in writers if attribute in ("asyncio_mode", "async_output_queue")] == [
        "_init_shared_state"
    ] * 2


# ---- utilities -------------------------------------------------------------------------------------------------------


async def test_calls() -> None:
    with running() as manager:
        pid = manager.engines[0].pid
        assert await manager.call_async("ping") == {"pid": pid}
        with pytest.raises(AtomEngineError, match="no operation 'dance'"):
            manager.call("dance")
        with pytest.raises(AtomEngineError, match="no operation 'dance'"):
            await manager.call_async("dance")
        with pytest.raises(TimeoutError, match="silence"):
            manager.call("silence", timeout=0.05)
        with pytest.raises(TimeoutError, match="silence"):
            await manager.call_async("silence", timeout=0.05)
        assert len(manager._calls) == 0


# ---- a core that dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (DIE, "was killed by SIGKILL"),
        (FAIL, "the fake core gives up"),
        (GARBAGE, "no message"),
    ],
)
def test_every_open_sequence_gets_an_error_when_the_core_is_lost(command: int, message: str) -> None:
    recorder = Recorder()
    failures: list[EngineDeadError] = []
    with running() as manager:
        manager.on_failure = failures.append
        manager.set_flush(recorder.flush)
        open_ids = [manager.add_request("a", [1, PAUSE], PARAMS, recorder.callback) for _ in range(3)]
        until(lambda: len(recorder.calls) == 3)
        open_ids.append(manager.add_request("b", [1, command], PARAMS, recorder.callback))
        lost = collect(manager, 4)
        assert sorted(seq.seq_id for seq in lost) == open_ids
        assert {seq.finish_reason for seq in lost} == {"error"}
        assert all(message in (seq.error or "") for seq in lost)
        assert sorted(call[0] for call in recorder.calls if call[2] == "error") == open_ids
        until(lambda: bool(failures))
        assert len(failures) == 1
        assert message in str(failures[0])
        assert not manager.is_alive
        assert manager.num_open_sequences == 0
        for attempt in (
            lambda: manager.add_request("c", [1], PARAMS),
            lambda: manager.call("ping"),
            lambda: manager.get_output(timeout=1.0),
        ):
            with pytest.raises(EngineDeadError, match=message):
                attempt()


def test_a_reader_gets_what_was_open_even_when_it_looks_while_the_death_is_handled() -> None:
    looking = threading.Event()

    def slow(seq: ApiSequence, token_ids: Sequence[int]) -> None:
        if seq.finish_reason is not None:
            looking.set()
            time.sleep(0.2)

    with running() as manager:
        manager.add_request("a", [1, DIE], PARAMS, slow)
        assert looking.wait(WAIT_S)
        assert manager.failure is not None
        (seq,) = manager.get_output(timeout=WAIT_S)
        assert seq.finish_reason == "error"
        with pytest.raises(EngineDeadError):
            manager.get_output()


def test_a_core_killed_from_outside_while_idle_is_noticed() -> None:
    lost = threading.Event()
    with running() as manager:
        manager.on_failure = lambda error: lost.set()
        waiting = concurrent.futures.ThreadPoolExecutor(1).submit(manager.call, "silence", None, WAIT_S)
        reader = concurrent.futures.ThreadPoolExecutor(1).submit(manager.get_output)
        until(lambda: len(manager._calls) == 1)
        os.kill(manager.engines[0].pid, signal.SIGKILL)
        assert lost.wait(WAIT_S)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            waiting.result(WAIT_S)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            reader.result(WAIT_S)


def test_exits_are_noticed_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError("no such system call")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    lost = threading.Event()
    with running() as manager:
        manager.on_failure = lambda error: lost.set()
        assert manager.engines[0].exit_fd is None
        os.kill(manager.engines[0].pid, signal.SIGKILL)
        assert lost.wait(WAIT_S)
