"""The hand-over from the output thread to the loop, driven by real cores (`fake_core.py`) and a real loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from atom.engine import streaming
from atom.engine.config import EngineConfig
from atom.engine.core_manager import CoreManager
from atom.engine.errors import EngineDeadError
from atom.engine.loading.byte_tokenizer import EOS_ID, ByteTokenizer
from atom.engine.output_processor import TextOutput
from atom.engine.sampling_params import SamplingParams
from atom.engine.streaming import EventStream, PendingEvent, Stream, StreamDispatcher, TokenEvent

FAKE_CORE = Path(__file__).with_name("fake_core.py")
DIE, FAIL, GARBAGE, REFUSE, PAUSE = range(1_000, 1_005)
PARAMS = SamplingParams(max_tokens=None)
WAIT_S = 30.0


@contextlib.asynccontextmanager
async def dispatching(*arguments: str) -> AsyncIterator[StreamDispatcher]:
    manager = CoreManager(EngineConfig(), core_command=(sys.executable, str(FAKE_CORE), *arguments))
    await asyncio.to_thread(manager.start)
    try:
        yield StreamDispatcher(manager, ByteTokenizer(), asyncio.get_running_loop())
    finally:
        await asyncio.to_thread(manager.shutdown, False, 5.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (much of it happens in the core)
            await asyncio.sleep(0.002)


async def stream(dispatcher: StreamDispatcher, prompt: list[int], params: SamplingParams = PARAMS) -> list[TokenEvent]:
    """All events of one sequence."""
    events: list[TokenEvent] = []
    dispatcher.submit("r", prompt, params, events.append)
    await until(lambda: bool(events) and events[-1].finish_reason is not None)
    return events


async def test_one_event_per_token_with_text_and_counts() -> None:
    prompt = list("aé!".encode())
    async with dispatching() as dispatcher:
        assert not dispatcher.manager.consumes_outputs_queue
        events = await stream(dispatcher, prompt)
    assert [event.text for event in events] == ["a", "", "é", "!"]
    assert [list(event.token_ids) for event in events] == [[token] for token in prompt]
    assert [event.num_output_tokens for event in events] == [1, 2, 3, 4]
    assert [event.finish_reason for event in events] == [None, None, None, "length"]
    assert {event.num_cached_tokens for event in events} == {2}
    assert all(event.received_ns > 0 for event in events)


async def test_events_are_not_the_garbage_collectors_business() -> None:
    async with dispatching() as dispatcher:
        events = await stream(dispatcher, [97, 98])
        assert not any(gc.is_tracked(event) for event in events)


async def test_sinks_run_on_the_loop_and_a_step_is_one_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    batches: list[int] = []
    deliver = StreamDispatcher._deliver

    def counting(self: StreamDispatcher, streams: list[Stream], events: list[TokenEvent]) -> None:
        batches.append(len(events))
        deliver(self, streams, events)

    monkeypatch.setattr(StreamDispatcher, "_deliver", counting)
    events: list[TokenEvent] = []

    def sink(event: TokenEvent) -> None:
        threads.add(threading.get_ident())
        events.append(event)

    steps: list[int] = []
    async with dispatching() as dispatcher:
        dispatcher.manager.on_step = lambda step: steps.append(len(step.seq_ids))
        for _ in range(8):
            dispatcher.submit("r", [97] * 100, PARAMS, sink)
        await until(lambda: sum(event.finish_reason is not None for event in events) == 8)
    assert threads == {threading.get_ident()}
    assert len(events) == 800
    assert batches == steps


async def test_stop_string_across_chunks_aborts_in_the_core() -> None:
    params = SamplingParams(max_tokens=None, stop=("END",))
    async with dispatching() as dispatcher:
        events = await stream(dispatcher, [*b"say END", 120, PAUSE], params)
        assert "".join(event.text for event in events) == "say "
        assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "END")
        assert events[-1].num_output_tokens == 7
        assert dispatcher.manager.call("running") == []
        assert dispatcher.manager.num_open_sequences == 0


async def test_stop_string_in_the_middle_of_a_step_drops_the_rest() -> None:
    params = SamplingParams(max_tokens=None, stop=("END",), logprobs=0)
    async with dispatching("serves", "--tokens-per-step", "16") as dispatcher:
        (event,) = await stream(dispatcher, list(b"say END and so on"), params)
    assert (event.text, event.num_output_tokens, event.finish_reason) == ("say ", 7, "stop")
    assert bytes(event.token_ids) == b"say END"
    assert event.logprobs is not None
    assert len(event.logprobs) == 7


async def test_stop_string_completed_by_the_last_token_wins_over_length() -> None:
    async with dispatching() as dispatcher:
        events = await stream(dispatcher, list(b"END"), SamplingParams(max_tokens=3, stop=("END",)))
        assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "END")
        assert "".join(event.text for event in events) == ""
        assert dispatcher.manager.call("aborted") == []  # it had ended there by itself


async def test_stop_token_logprobs_and_special_tokens() -> None:
    params = SamplingParams(max_tokens=None, stop_token_ids=(EOS_ID,), logprobs=1, prompt_logprobs=1)
    async with dispatching() as dispatcher:
        events = await stream(dispatcher, [97, 256, EOS_ID, 98], params)
    assert [event.text for event in events] == ["a", "", ""]
    assert (events[-1].finish_reason, events[-1].stop_reason, events[-1].num_output_tokens) == ("stop", EOS_ID, 3)
    assert [event.prompt_logprobs is not None for event in events] == [True, False, False]
    assert [[entry.token_ids[0] for entry in event.logprobs or []] for event in events] == [[97], [256], [EOS_ID]]


async def test_abort_delivers_nothing_more() -> None:
    events: list[TokenEvent] = []
    async with dispatching() as dispatcher:
        handle = dispatcher.submit("r", [97, 98, PAUSE], PARAMS, events.append)
        await until(lambda: len(events) == 2)
        handle.abort()
        assert dispatcher.manager.num_open_sequences == 0
        assert dispatcher.manager.call("running") == []
        await asyncio.sleep(0)
        assert len(events) == 2

        def abort_at_once(event: TokenEvent) -> None:
            events.append(event)
            handle.abort()

        handle = dispatcher.submit("r", [97] * 1000, PARAMS, abort_at_once)
        await until(lambda: len(events) == 3)
        await until(lambda: dispatcher.manager.call("running") == [])
        assert len(events) == 3


async def test_a_sink_that_raises_ends_its_own_stream_only(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: TokenEvent) -> None:
        raise ValueError("boom")

    async with dispatching() as dispatcher:
        dispatcher.submit("bad", [97, PAUSE], PARAMS, broken)
        assert len(await stream(dispatcher, [97, 98])) == 2
        await until(lambda: dispatcher.manager.num_open_sequences == 0)
        assert dispatcher.manager.call("running") == []
    assert "the sink of request bad failed" in caplog.text


async def test_what_cannot_be_handled_ends_the_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: Any, **__: Any) -> str:
        raise ValueError("boom")

    monkeypatch.setattr(TextOutput, "append", explode)
    async with dispatching() as dispatcher:
        (event,) = await stream(dispatcher, [97, 98, PAUSE], SamplingParams(max_tokens=None, stop=("x",)))
        assert event.finish_reason == "error"
        assert "boom" in (event.error or "")


async def test_streams_end_with_an_error_when_the_core_dies() -> None:
    events: list[TokenEvent] = []
    async with dispatching() as dispatcher:
        dispatcher.submit("r", [97, PAUSE], PARAMS, events.append)
        await until(lambda: len(events) == 1)
        other = await stream(dispatcher, [97, DIE])
        await until(lambda: len(events) == 2)
        assert events[-1].finish_reason == other[-1].finish_reason == "error"
        assert "SIGKILL" in (events[-1].error or "")
        with pytest.raises(EngineDeadError):
            dispatcher.submit("r", [1], PARAMS, events.append)


async def test_a_stalled_loop_makes_the_output_thread_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MAX_STEPS_HANDED_OVER", 4)
    events: list[TokenEvent] = []
    async with dispatching() as dispatcher:
        dispatcher.submit("r", [97] * 3000, PARAMS, events.append)
        await until(lambda: bool(events))
        time.sleep(0.3)  # noqa: ASYNC251 (the stall)
        assert dispatcher._handed_over - dispatcher._delivered <= 4
        await until(lambda: bool(events) and events[-1].finish_reason is not None)
    assert [event.num_output_tokens for event in events] == list(range(1, 3001))


def test_a_closed_loop_does_not_disturb_the_output_thread() -> None:
    manager = CoreManager(EngineConfig(), core_command=(sys.executable, str(FAKE_CORE)))
    manager.start()

    async def leave_behind() -> None:
        dispatcher = StreamDispatcher(manager, ByteTokenizer(), asyncio.get_running_loop())
        dispatcher.submit("r", [97] * 500, PARAMS, lambda event: None)

    asyncio.run(leave_behind())
    deadline = time.monotonic() + WAIT_S
    while manager.num_open_sequences and time.monotonic() < deadline:
        time.sleep(0.002)
    assert manager.call("ping")
    manager.shutdown()


def event(text: str, *token_ids: int, total: int, **details: Any) -> TokenEvent:
    return TokenEvent(text, token_ids, total, 5, **details)


def test_pending_events_merge_into_one_that_says_how_many_tokens_it_carries() -> None:
    pending = PendingEvent()
    assert pending.pop() is None
    first = event("a", 1, total=1, prompt_logprobs=[None])
    pending.push(first)
    assert pending
    assert pending.pop() is first
    for number in range(2, 5):
        pending.push(event(str(number), number, total=number))
    pending.push(event("!", 5, total=5, finish_reason="stop", stop_reason="x"))
    merged = pending.pop()
    assert merged == TokenEvent("234!", [2, 3, 4, 5], 5, 5, finish_reason="stop", stop_reason="x")
    assert not pending


async def test_a_slow_consumer_gets_merged_events_and_loses_nothing() -> None:
    text = "".join(chr(97 + number % 26) for number in range(400))
    async with dispatching() as dispatcher:
        events = EventStream()
        dispatcher.submit("r", list(text.encode()), PARAMS, events)
        seen: list[TokenEvent] = []
        async with asyncio.timeout(WAIT_S):
            async for one in events:
                seen.append(one)
                await asyncio.sleep(0.01)
    assert "".join(one.text for one in seen) == text
    assert sum(len(one.token_ids) for one in seen) == 400
    assert max(len(one.token_ids) for one in seen) > 1
    assert seen[-1].finish_reason == "length"


async def test_thousands_of_streams_leave_nothing() -> None:
    done = 0

    def sink(one: TokenEvent) -> None:
        nonlocal done
        done += one.finish_reason is not None

    async with dispatching() as dispatcher:
        for number in range(2000):
            handle = dispatcher.submit("r", [97, 98], PARAMS, sink)
            if number % 4 == 0:
                handle.abort()
        del handle
        await until(lambda: dispatcher.manager.num_open_sequences == 0)
        await until(lambda: done >= 1500)
        await until(lambda: dispatcher._handed_over == dispatcher._delivered)
        gc.collect()
        assert [thing for thing in gc.get_objects() if isinstance(thing, Stream)] == []
        assert (dispatcher.streams, dispatcher.events) == ([], [])
