"""`AsyncLLMEngine`: the engine inside somebody's asyncio program. `generate` streams events, `complete` waits for the
whole. The HTTP server does not use it: it wires `StreamDispatcher` itself (`engine/server/`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Final

from atom.engine.api_sequence import ApiSequence
from atom.engine.config import EngineConfig
from atom.engine.core_manager import CoreManager
from atom.engine.errors import AtomEngineError, EngineDeadError, RequestError
from atom.engine.llm_engine import load_engine_tokenizer, validate_request
from atom.engine.loading.tokenizer import Tokenizer
from atom.engine.messages import FINISH_ERROR
from atom.engine.request_output import PendingRequest, RequestOutput
from atom.engine.sampling_params import SamplingParams
from atom.engine.streaming import EventStream, StreamDispatcher, TokenEvent

LONG_TEXT_CHARS: Final = 16_384
"""Longer prompts are tokenized in a thread, so that they do not stop the loop."""


class AsyncLLMEngine:
    """`async with AsyncLLMEngine(config) as engine: …`. Belongs to the loop that it was started on."""

    def __init__(
        self, config: EngineConfig, *, manager: CoreManager | None = None, tokenizer: Tokenizer | None = None
    ) -> None:
        """`manager`: one in asyncio mode that is not started yet; `tokenizer`: in place of the model's."""
        self.config = config
        self.manager = manager or CoreManager(config, asyncio_mode=True)
        self._given_tokenizer = tokenizer
        self._numbers = itertools.count()
        self._waiting: dict[PendingRequest, asyncio.Future[RequestOutput]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the core and load the tokenizer. Raises `EngineDeadError` with the reason."""
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(self.manager.start, loop=loop)
        try:
            if self._given_tokenizer is None:
                self._given_tokenizer = await asyncio.to_thread(load_engine_tokenizer, self.config, self.manager)
            self.tokenizer = self._given_tokenizer
            self._dispatcher = StreamDispatcher(self.manager, self.tokenizer, loop, callback_only=False)
        except BaseException:
            await asyncio.to_thread(self.manager.shutdown)
            raise
        self._reader = asyncio.create_task(self._read_finished())

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """Stream one sequence. What a slow consumer has not taken yet comes as one event. Leaving the loop early
        (closing the generator) aborts it. Raises `RequestError`, `EngineDeadError`."""
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError("generate() streams one sequence: n must be 1 (or use complete())", "n")
        prompt_token_ids = await self._prepare(prompt, params)
        events = EventStream()
        stream = self._dispatcher.submit(self._name(request_id), prompt_token_ids, params, events)
        try:
            async for event in events:
                if event.finish_reason == FINISH_ERROR:
                    raise self._error(event.error)
                yield event
        finally:
            stream.abort()

    async def complete(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestOutput:
        """Wait for a whole request of `n` sequences. Cancelling aborts it."""
        params = params or SamplingParams()
        prompt_token_ids = await self._prepare(prompt, params)
        text = prompt if isinstance(prompt, str) else None
        request = PendingRequest(self._name(request_id), text, prompt_token_ids)
        future: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        try:
            request.submit(self.manager, self._dispatcher.detokenizers, params)
            output = await future
        except asyncio.CancelledError:
            request.abandoned = True
            self.manager.abort(request.seq_ids, discard=True)
            raise
        finally:
            del self._waiting[request]
        lost = next((one for one in output.outputs if one.finish_reason == FINISH_ERROR), None)
        if lost is not None:
            raise self._error(lost.error)
        return output

    async def close(self, drain: bool = False, timeout: float = 10.0) -> None:
        """Stop the core, finishing what runs when `drain`. Safe to call twice."""
        await asyncio.to_thread(self.manager.shutdown, drain, timeout)
        if self._reader is not None:
            await self._reader
            self._reader = None

    async def __aenter__(self) -> AsyncLLMEngine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _prepare(self, prompt: str | Sequence[int], params: SamplingParams) -> Sequence[int]:
        if not isinstance(prompt, str):
            prompt_token_ids = prompt
        elif len(prompt) > LONG_TEXT_CHARS:
            prompt_token_ids = await asyncio.to_thread(self.tokenizer.encode, prompt)
        else:
            prompt_token_ids = self.tokenizer.encode(prompt)
        validate_request(self.manager, self.tokenizer, prompt_token_ids, params)
        return prompt_token_ids

    def _name(self, request_id: str | None) -> str:
        return request_id if request_id is not None else f"request-{next(self._numbers)}"

    def _error(self, message: str | None) -> AtomEngineError:
        kind = EngineDeadError if self.manager.failure is not None else AtomEngineError
        return kind(message or "the request failed in the engine")

    async def _read_finished(self) -> None:
        """Until the engine is gone; by then every open sequence has come through here."""
        while True:
            try:
                batch = await self.manager.get_output_async()
            except EngineDeadError:
                return
            for seq in batch:
                self._collect(seq)

    def _collect(self, seq: ApiSequence) -> None:
        request = seq.owner
        if not isinstance(request, PendingRequest):
            return  # a stream's: its events have said all
        output = request.collect(seq, self.tokenizer)
        future = self._waiting.get(request)
        if output is not None and future is not None and not future.done():
            future.set_result(output)
