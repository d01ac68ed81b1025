"""From the output thread to one event loop: per engine step, one hand-over of one event per sequence.

The output thread detokenizes a step's tokens into `TokenEvent`s and passes all of them with a single
`call_soon_threadsafe`; the loop calls each stream's sink. No queue, task or future per token. What a sink does with an
event (an SSE chunk, a reply) is `engine/server/`'s; `EventStream` is a ready-made sink with an async iterator.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from atom.engine.api_sequence import ApiSequence
from atom.engine.core_manager import CoreManager
from atom.engine.detokenizer import ByteDetokenizer, DetokenizerFactory, SupportsDecode
from atom.engine.messages import FINISH_ERROR, TokenLogprobs
from atom.engine.output_processor import TextOutput
from atom.engine.sampling_params import SamplingParams

log = logging.getLogger(__name__)

MAX_STEPS_HANDED_OVER: Final = 64
"""Steps that may wait for the loop. Beyond it the output thread waits, and in the end the core."""
ROOM_POLL_S: Final = 0.1
"""How often a waiting output thread looks whether the loop was closed."""


class TokenEvent(msgspec.Struct, gc=False):
    """What one step added to one sequence. Not tracked by the garbage collector: 40,000 a second come and go, and
    none refers back to anything that refers to it."""

    text: str
    """May be empty: half a character, a held-back start of a stop string, a token that is not shown."""
    token_ids: Sequence[int]
    """The tokens behind this event, the invisible ones included; more than one after a merge."""
    num_output_tokens: int
    """Of the sequence so far, this event included."""
    received_ns: int
    """When the step arrived in the API process; of a merged event, the first step's."""
    finish_reason: str | None = None
    """On the last event only: one of `messages.FINISH_*`."""
    stop_reason: str | int | None = None
    """The stop string or the stop token id that ended it."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token of `token_ids`, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """On the first event, when asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    error: str | None = None
    """With finish reason error."""


class EventMaker:
    """Makes one sequence's events out of what its callback is given, on the output thread. A stop string that the text
    has reached ends the sequence there."""

    __slots__ = ("_manager", "_owes_prompt_logprobs", "output")

    def __init__(self, manager: CoreManager, detokenizers: DetokenizerFactory, params: SamplingParams) -> None:
        self._manager = manager
        self._owes_prompt_logprobs = params.prompt_logprobs is not None
        self.output = TextOutput(detokenizers, params)

    def make(self, seq: ApiSequence, token_ids: Sequence[int]) -> TokenEvent:
        before = seq.num_output_tokens - len(token_ids)
        text = ""
        if seq.finish_reason != FINISH_ERROR:
            output = self.output
            output.num_tokens = before
            text = output.append(
                token_ids, finished=seq.finish_reason is not None, ends_with_stop_token=seq.stop_token_id is not None
            )
            if output.stop is not None:
                self._manager.stop_sequence(seq, output.stop, output.num_tokens)
                token_ids = token_ids[: output.num_tokens - before]
        prompt_logprobs = None
        if self._owes_prompt_logprobs and seq.prompt_logprobs is not None:
            prompt_logprobs = seq.prompt_logprobs
            self._owes_prompt_logprobs = False
        return TokenEvent(
            text,
            token_ids,
            seq.num_output_tokens,
            seq.received_ns,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=seq.logprobs[before:] if seq.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=seq.num_cached_tokens,
            error=seq.error,
        )


Sink: TypeAlias = Callable[[TokenEvent], None]


def _discard(event: TokenEvent) -> None:
    """The sink of an aborted stream."""


class Stream:
    """One sequence being streamed: the handle that `StreamDispatcher.submit` returns."""

    __slots__ = ("_dispatcher", "_fast", "_maker", "sequence", "sink")

    sequence: ApiSequence
    """Timings, prompt and totals; complete once the last event came."""

    def __init__(self, dispatcher: StreamDispatcher, params: SamplingParams, sink: Sink) -> None:
        self._dispatcher = dispatcher
        self._maker = EventMaker(dispatcher.manager, dispatcher.detokenizers, params)
        output = self._maker.output
        plain = output.matcher is None and params.logprobs is None and params.prompt_logprobs is None
        self._fast = output.detokenizer if plain and isinstance(output.detokenizer, ByteDetokenizer) else None
        self.sink = sink
        """Called on the loop. May be replaced there at any time."""

    @property
    def seq_id(self) -> int:
        return self.sequence.seq_id

    def abort(self) -> None:
        """Stop generating and deliver nothing more, not even what is already on its way. On the loop."""
        self.sink = _discard
        self._dispatcher.manager.abort((self.sequence.seq_id,))

    def on_tokens(self, seq: ApiSequence, token_ids: Sequence[int]) -> None:
        """The sequence's callback, on the output thread."""
        fast = self._fast
        dispatcher = self._dispatcher
        if fast is None or seq.finish_reason is not None:
            event = self._maker.make(seq, token_ids)
            dispatcher.streams.append(self)
            dispatcher.events.append(event)
            return
        dispatcher.streams.append(self)
        dispatcher.events.append(
            TokenEvent(
                fast.append(token_ids),
                token_ids,
                len(seq.output_token_ids),
                seq.received_ns,
                None,
                None,
                None,
                None,
                seq.num_cached_tokens,
            )
        )


class StreamDispatcher:
    """Streams of one manager to one event loop.

    `callback_only`: this is how the entrypoint gets all its results, so the manager stops queueing finished sequences
    (see `CoreManager.deliver_through_callbacks`).
    """

    def __init__(
        self,
        manager: CoreManager,
        tokenizer: SupportsDecode,
        loop: asyncio.AbstractEventLoop,
        *,
        callback_only: bool = True,
    ) -> None:
        self.manager = manager
        self.detokenizers = DetokenizerFactory(tokenizer)
        self.streams: list[Stream] = []
        self.events: list[TokenEvent] = []
        """Of the current step, filled and taken on the output thread alone."""
        self._loop = loop
        self._handed_over = 0
        """Written by the output thread alone, as `_delivered` is by the loop."""
        self._delivered = 0
        self._room = threading.Event()
        if callback_only:
            manager.deliver_through_callbacks(self.flush)
        else:
            manager.set_flush(self.flush)

    def submit(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, sink: Sink) -> Stream:
        """Start one sequence (`params.n` is 1: see `api_sequence.fan_out`). On the loop.

        `sink(event)` is called on the loop, once per step that concerned the sequence; the last event has a
        `finish_reason`. Raises what `CoreManager.add_request` raises.
        """
        stream = Stream(self, params, sink)
        stream.sequence = self.manager.add_sequence(request_id, prompt_token_ids, params, stream.on_tokens)
        return stream

    def flush(self) -> None:
        """Hand the step's events to the loop. On the output thread."""
        if not self.events:
            return
        streams, self.streams = self.streams, []
        events, self.events = self.events, []
        while self._handed_over - self._delivered >= MAX_STEPS_HANDED_OVER and not self.manager.closing:
            if self._loop.is_closed():
                return
            self._room.clear()
            if self._handed_over - self._delivered >= MAX_STEPS_HANDED_OVER:
                self._room.wait(ROOM_POLL_S)
        try:
            self._loop.call_soon_threadsafe(self._deliver, streams, events)
        except RuntimeError:
            return  # the loop is closed: nobody is left to tell
        self._handed_over += 1

    def _deliver(self, streams: list[Stream], events: list[TokenEvent]) -> None:
        for stream, event in zip(streams, events, strict=True):
            try:
                stream.sink(event)
            except Exception:
                log.exception("the sink of request %s failed", stream.sequence.request_id)
                stream.abort()
        self._delivered += 1
        if not self._room.is_set():
            self._room.set()


class PendingEvent:
    """Events that a slow reader has not taken yet, as at most one; its `token_ids` say how many tokens it carries."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[TokenEvent] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def push(self, event: TokenEvent) -> None:
        self._parts.append(event)

    def pop(self) -> TokenEvent | None:
        """Everything pushed since the last call as one event, or None."""
        if not self._parts:
            return None
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else merge_events(parts)


def merge_events(parts: Sequence[TokenEvent]) -> TokenEvent:
    """Consecutive events of one sequence as one."""
    first, last = parts[0], parts[-1]
    logprobs = None
    if any(part.logprobs is not None for part in parts):
        logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return TokenEvent(
        "".join([part.text for part in parts]),
        [token for part in parts for token in part.token_ids],
        last.num_output_tokens,
        first.received_ns,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs,
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        num_cached_tokens=last.num_cached_tokens,
        error=last.error,
    )


class EventStream:
    """A sink with an async iterator: `async for event in stream`. A consumer slower than the engine finds what came
    meanwhile merged into one event. Ends after the event with a finish reason."""

    def __init__(self) -> None:
        self._pending = PendingEvent()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    def __call__(self, event: TokenEvent) -> None:
        self._pending.push(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        while not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._pending.pop()
        assert event is not None
        self._ended = event.finish_reason is not None
        return event
